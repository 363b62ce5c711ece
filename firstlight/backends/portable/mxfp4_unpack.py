"""MXFP4 to fp32 by whole bytes. Letters as in ops/mxfp4_unpack.py; P packed bytes."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from firstlight.ops.mxfp4_unpack import E2M1, GROUP_COLUMNS


def mxfp4_unpack(packed_OI2: Tensor, scale_OG: Tensor) -> Tensor:
    """Look up both codes of a byte at once, then multiply by the scale, whose bits are put together and not computed.

    Note: the product is computed, so a processor told to flush subnormals gives 0 below 2^-126, where the reference does not.
    """
    pair_P = _pairs().to(packed_OI2.device).index_select(0, packed_OI2.reshape(-1).int())
    pair_OI = pair_P.view(packed_OI2.shape).view(torch.float32)
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
    """Both fp32 values of every byte, low nibble first, as one int64: a lookup of single elements is ten times one of rows."""
    signed = (*E2M1, *(-value for value in E2M1))
    return torch.tensor([[signed[byte & 15], signed[byte >> 4]] for byte in range(256)]).view(torch.int64).flatten()
