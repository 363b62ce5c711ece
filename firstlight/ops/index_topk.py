"""Which cached rows a token attends to. Letters: T packed tokens, M rows, U rows chosen at most."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from firstlight.ops.case import DTYPES, Case, normal
from firstlight.spec.model import OpUse


def index_topk(scores_TM: Tensor, visible_T: Tensor, *, top_k: int) -> Tensor:
    """Places of the min(top_k, visible) largest scores, ascending, int32; -1 fills the rest of min(top_k, M) columns.

    Only the first `visible` scores of a token count; of equal ones the first win; NaN counts as infinity.
    """
    rows_TM = torch.arange(scores_TM.shape[1], device=scores_TM.device).expand_as(scores_TM)
    hidden_TM = rows_TM >= visible_T[:, None]
    seen_TM = scores_TM.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).masked_fill(hidden_TM, -torch.inf)
    # a stable sort keeps the order of equal scores, and hidden rows stand behind all visible ones
    best_TU = seen_TM.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    beyond_TU = torch.arange(best_TU.shape[1], device=scores_TM.device) >= visible_T[:, None]
    last = scores_TM.shape[1]
    sorted_TU = best_TU.masked_fill(beyond_TU, last).sort(dim=-1).values
    return sorted_TU.masked_fill(sorted_TU == last, -1).to(torch.int32)


def cases(seed: int = 0) -> Iterator[Case]:
    """Fewer rows than top_k, just as many, one more, many; nothing visible; scores that tie, are infinite, or all the same."""
    rng = torch.Generator().manual_seed(seed)

    def case(name: str, scores_TM: Tensor, visible: list[int], top_k: int, *, has_nan: bool = False) -> Case:
        use = OpUse.of("index_topk", str(scores_TM.dtype).removeprefix("torch."), U=top_k)
        return Case(name, use, (scores_TM, torch.tensor(visible, dtype=torch.int64)), {"top_k": top_k}, has_nan)

    for name, dtype in DTYPES:
        for T, M in ((0, 8), (1, 9), (33, 7), (33, 8), (33, 9), (5, 32), (6, 301)):
            visible = torch.randint(1, M + 1, (T,), generator=rng).tolist()
            yield case(f"random-{T}x{M}-{name}", normal(rng, T, M, dtype=dtype), visible, 8)
            yield case(f"tied-{T}x{M}-{name}", torch.randint(-2, 3, (T, M), generator=rng).to(dtype), visible, 8)
    yield case("one", normal(rng, 5, 40), [1, 2, 3, 39, 40], 1)
    yield case("none-visible", normal(rng, 3, 6), [0, 6, 0], 4)
    yield case("no-rows", normal(rng, 2, 0), [0, 0], 4)
    yield case("all-equal", torch.zeros(4, 20), [20, 19, 8, 5], 8)
    yield case("hidden-largest", torch.arange(60.0).view(3, 20), [3, 10, 20], 4)
    odd = normal(rng, 4, 12)
    odd[0, 3:9], odd[1, 5], odd[2, :], odd[3, ::2] = -torch.inf, torch.inf, -torch.inf, -0.0
    yield case("infinite", odd, [12, 12, 12, 11], 5)
    broken = normal(rng, 4, 12)
    broken[0, 3], broken[1, :], broken[2, 9] = torch.nan, torch.nan, torch.nan
    yield case("nan", broken, [12, 12, 8, 12], 5, has_nan=True)
