"""Which experts a token goes to. Letters: T packed tokens, D width, E experts, X chosen experts, G groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from firstlight.ops.case import DTYPES, Case, normal
from firstlight.spec.model import OpUse

Score = Literal["sigmoid", "softmax"]


def route(
    x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None, *,
    top_k: int, score: Score, num_groups: int = 1, top_groups: int = 1, renormalize: bool = True, scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Weights (fp32) and ids (int64) of the chosen experts, best biased score first; of equal scores the lowest id first.

    The bias takes part in the choice only. With groups, only the experts of the best `top_groups` groups can be chosen;
    a group is as good as the sum of its two best biased scores.

    Source: arXiv 2412.19437 s. 2.1.2 for the bias and the groups.
    """
    assert score in ("sigmoid", "softmax"), score
    logits_TE = x_TD.float() @ weight_ED.float().T
    score_TE = torch.sigmoid(logits_TE) if score == "sigmoid" else logits_TE.softmax(-1)
    biased_TE = score_TE if bias_E is None else score_TE + bias_E.float()
    if num_groups > 1:
        biased_TE = _keep_groups(biased_TE, num_groups, top_groups)
    ids_TX = _best(biased_TE, top_k)
    weights_TX = score_TE.gather(1, ids_TX)
    if renormalize:
        weights_TX = weights_TX / (weights_TX.sum(-1, keepdim=True) + 1e-20)
    return weights_TX * scale, ids_TX


def _best(value_TE: Tensor, count: int) -> Tensor:
    """Ids of the largest values; unlike topk, a stable sort says who wins a tie."""
    return value_TE.sort(dim=-1, descending=True, stable=True).indices[:, :count].contiguous()


def _keep_groups(biased_TE: Tensor, num_groups: int, top_groups: int) -> Tensor:
    """Everything outside the best groups becomes -inf: zero would win over negative biased scores."""
    size = biased_TE.shape[1] // num_groups
    grouped_TGS: Tensor = biased_TE.unflatten(1, (num_groups, size))
    group_score_TG = grouped_TGS.topk(min(2, size), dim=-1).values.sum(-1)
    kept_TG = torch.zeros_like(group_score_TG, dtype=torch.bool).scatter(1, _best(group_score_TG, top_groups), True)
    return grouped_TGS.masked_fill(~kept_TG[..., None], -torch.inf).flatten(1)


def cases(seed: int) -> Iterator[Case]:
    """Both scores, with and without bias and groups, exact ties, one expert, every expert chosen."""
    rng = torch.Generator().manual_seed(seed)
    settings: dict[str, tuple[int, int, dict[str, Any]]] = {
        "sigmoid": (12, 4, {"score": "sigmoid"}),
        "sigmoid-scaled": (9, 3, {"score": "sigmoid", "scale": 2.5}),
        "sigmoid-groups": (32, 6, {"score": "sigmoid", "num_groups": 8, "top_groups": 4, "scale": 2.5}),
        "sigmoid-groups_of_one": (6, 2, {"score": "sigmoid", "num_groups": 6, "top_groups": 3}),
        "softmax": (16, 5, {"score": "softmax"}),
        "softmax-raw": (16, 5, {"score": "softmax", "renormalize": False}),
        "one": (1, 1, {"score": "sigmoid"}),
        "all": (7, 7, {"score": "softmax"}),
    }
    for name, dtype in DTYPES:
        for label, (E, X, kwargs) in settings.items():
            use = OpUse.of("route", name, D=24, E=E, X=X, score=kwargs["score"], groups=kwargs.get("num_groups", 1))
            weight = normal(rng, E, 24, dtype=dtype, spread=0.3)
            for T in (0, 1, 67):
                x, bias = normal(rng, T, 24, dtype=dtype), normal(rng, E, spread=0.3)
                yield Case(f"{name}-{label}-{T}", use, (x, weight), kwargs | {"top_k": X})
                yield Case(f"{name}-{label}-{T}-bias", use, (x, weight, bias), kwargs | {"top_k": X})
        use = OpUse.of("route", name, D=24, E=10, X=4, score="sigmoid", groups=1)
        x, rows = (torch.randint(-2, 3, (count, 24), generator=rng) for count in (5, 3))
        weight = rows[torch.arange(10) % 3] / 8  # small multiples of 1/8: sums are exact in any order, so equal rows tie exactly
        yield Case(f"{name}-ties", use, (x.to(dtype), weight.to(dtype)), {"top_k": 4, "score": "sigmoid"})
