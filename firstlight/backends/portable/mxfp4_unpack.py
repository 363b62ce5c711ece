"""MXFP4 to fp32 by whole bytes. Letters as in ops/mxfp4_unpack.py."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from firstlight.ops.mxfp4_unpack import E2M1, GROUP_COLUMNS


def mxfp4_unpack(packed_OI2: Tensor, scale_OG: Tensor) -> Tensor:
    """Look up both codes of a byte at once, then multiply by the scale, whose bits are put together and not computed.

    Note: the product is computed, so a processor told to flush subnormals gives 0 below 2^-126, where the reference does not.
    """
    pair_OI: Tensor = _pairs().to(packed_OI2.device)[packed_OI2.int()].flatten(-2)
    factor_OG1 = _factor(scale_OG)[..., None]
    if pair_OI.shape[-1] == scale_OG.shape[-1] * GROUP_COLUMNS:
        pair_OI.view(*scale_OG.shape, GROUP_COLUMNS).mul_(factor_OG1)
        return pair_OI
    return pair_OI.mul_(factor_OG1.expand(*scale_OG.shape, GROUP_COLUMNS).flatten(-2)[..., : pair_OI.shape[-1]])


def _factor(scale: Tensor) -> Tensor:
    """2^(scale - 127) from its bits: the byte is the exponent, 0 is the subnormal 2^-127, 255 is NaN."""
    bits = scale.int() << 23
    return bits.masked_fill(scale == 0, 1 << 22).masked_fill(scale == 255, 0x7FC00000).view(torch.float32)


@cache
def _pairs() -> Tensor:
    """[256, 2]: low nibble first."""
    signed = (*E2M1, *(-value for value in E2M1))
    return torch.tensor([[signed[byte & 15], signed[byte >> 4]] for byte in range(256)])
