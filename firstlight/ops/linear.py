"""Matrix product in checkpoint layout. Letters: T packed tokens (any leading dims), I inputs, O outputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.ops.case import DTYPES, Case, normal
from firstlight.spec.model import OpUse


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """y = x W^T + b with one rounding, at the end.

    Note: 16-bit products with matrix tiles take inputs in pairs and read one beyond an odd row, times zero; a NaN there would spread.
    """
    if x_TI.shape[-1] % 2 and x_TI.dtype.itemsize == 2:
        x_TI, weight_OI = F.pad(x_TI, (0, 1)), F.pad(weight_OI, (0, 1))
    return F.linear(x_TI, weight_OI, bias_O)


def cases(seed: int) -> Iterator[Case]:
    """Single rows, odd sizes, with and without bias, values scaled as weights are."""
    rng = torch.Generator().manual_seed(seed)
    for name, dtype in DTYPES:
        for T, inner, outer in ((0, 8, 5), (1, 64, 32), (1, 1, 1), (5, 33, 17), (67, 129, 96)):
            use = OpUse.of("linear", name, I=inner, O=outer)
            x, weight = normal(rng, T, inner, dtype=dtype), normal(rng, outer, inner, dtype=dtype, spread=inner**-0.5)
            yield Case(f"{name}-{T}x{inner}x{outer}", use, (x, weight))
            yield Case(f"{name}-{T}x{inner}x{outer}-bias", use, (x, weight, normal(rng, outer, dtype=dtype)))
        x, weight = normal(rng, 2, 3, 16, dtype=dtype), normal(rng, 8, 16, dtype=dtype, spread=0.25)
        yield Case(f"{name}-leading", OpUse.of("linear", name, I=16, O=8), (x, weight))
