"""FP8 to fp32 in place: one product per block of rows. Letters as in ops/fp8_unpack.py."""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.fp8_unpack import BLOCK


def fp8_unpack(codes_OI: Tensor, scale_FG: Tensor) -> Tensor:
    """Widen the codes, then multiply by scales that are repeated over columns only."""
    w_OI = codes_OI.contiguous().view(torch.float8_e4m3fn).float()
    scale_FI = scale_FG.float().repeat_interleave(BLOCK, 1)[:, : w_OI.shape[1]]
    whole = len(w_OI) // BLOCK
    w_OI[: whole * BLOCK].unflatten(0, (whole, BLOCK)).mul_(scale_FI[:whole, None])
    if len(w_OI) % BLOCK:
        w_OI[whole * BLOCK :].mul_(scale_FI[whole])
    return w_OI
