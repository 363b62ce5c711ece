"""Layer norm over the last dim. Letters: T packed tokens (any leading dims), D width."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from firstlight.ops.case import DTYPES, Case, normal
from firstlight.spec.model import OpUse


def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, *, eps: float) -> Tensor:
    """Centre and normalise each row, scale and shift in fp32, round once. Source: arXiv 1607.06450."""
    x32_TD = x_TD.float()
    centred_TD = x32_TD - x32_TD.mean(-1, keepdim=True)
    unit_TD = centred_TD * torch.rsqrt(centred_TD.square().mean(-1, keepdim=True) + eps)
    return (unit_TD * weight_D.float() + bias_D.float()).to(x_TD.dtype)


def cases(seed: int) -> Iterator[Case]:
    """One row to several hundred, odd widths, rows that are constant, and means far from zero."""
    rng = torch.Generator().manual_seed(seed)
    for name, dtype in DTYPES:
        for shape in ((0, 8), (1, 2), (5, 64), (257, 33), (3, 7, 16)):
            args = (normal(rng, *shape, dtype=dtype), normal(rng, shape[-1]), normal(rng, shape[-1]))
            yield Case(f"{name}-{'x'.join(map(str, shape))}", OpUse.of("layer_norm", name, D=shape[-1]), args, {"eps": 1e-6})
        use = OpUse.of("layer_norm", name, D=24)
        rows = torch.stack((torch.zeros(24), torch.full((24,), 3.0), normal(rng, 24) + 8.0, normal(rng, 24, spread=1e4)))
        yield Case(f"{name}-extreme", use, (rows.to(dtype), normal(rng, 24), normal(rng, 24)), {"eps": 1e-6})
        yield Case(f"{name}-weights_alike", use, (rows.to(dtype), normal(rng, 24, dtype=dtype), normal(rng, 24, dtype=dtype)), {"eps": 1e-5})
