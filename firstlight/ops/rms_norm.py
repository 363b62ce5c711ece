"""Root-mean-square norm over the last dim. Letters: T packed tokens (any leading dims), D width."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from firstlight.ops.case import DTYPES, Case, normal
from firstlight.spec.model import OpUse


def rms_norm(x_TD: Tensor, weight_D: Tensor, *, eps: float, plus_one: bool = False) -> Tensor:
    """Normalise each row, round to the dtype of x, then scale: the order in which the official models round.

    Note: with `plus_one` (Qwen3-Next) the scale is 1 + weight and is applied in fp32, before the only rounding.
    """
    x32_TD = x_TD.float()
    unit_TD = x32_TD * torch.rsqrt(x32_TD.square().mean(-1, keepdim=True) + eps)
    if plus_one:
        return (unit_TD * (1.0 + weight_D.float())).to(x_TD.dtype)
    return (weight_D * unit_TD.to(x_TD.dtype)).to(x_TD.dtype)


def cases(seed: int) -> Iterator[Case]:
    """One row to several hundred, odd widths, rows of zeros and of extreme size."""
    rng = torch.Generator().manual_seed(seed)
    for name, dtype in DTYPES:
        for shape in ((0, 8), (1, 1), (5, 64), (257, 33), (3, 7, 16)):
            x, weight = normal(rng, *shape, dtype=dtype), normal(rng, shape[-1], dtype=dtype)
            label = "x".join(map(str, shape))
            use = OpUse.of("rms_norm", name, D=shape[-1])
            yield Case(f"{name}-{label}", use, (x, weight), {"eps": 1e-5})
            yield Case(f"{name}-{label}-plus_one", use, (x, weight), {"eps": 1e-6, "plus_one": True})
        use = OpUse.of("rms_norm", name, D=24)
        sizes = torch.tensor([0.0, 1e-12, 1e-4, 1.0, 1e4, 1e15])[:, None]
        x = (normal(rng, 6, 24) * sizes).to(dtype)
        yield Case(f"{name}-extreme", use, (x, normal(rng, 24, dtype=dtype)), {"eps": 1e-6})
        yield Case(f"{name}-weight32", use, (normal(rng, 6, 24, dtype=dtype), normal(rng, 24)), {"eps": 1e-6})
