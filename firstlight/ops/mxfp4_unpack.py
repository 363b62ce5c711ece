"""MXFP4 to fp32, exactly. Letters: O outputs, I2 half the inputs (two codes per byte), G groups of 32 inputs.

Source: OCP Microscaling Formats v1.0; nibble order as in compressed-tensors 0.20.1.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from firstlight.ops.case import Case
from firstlight.spec.model import OpUse

GROUP_COLUMNS = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of codes 0 to 7; bit 3 is the sign."""


def mxfp4_unpack(packed_OI2: Tensor, scale_OG: Tensor) -> Tensor:
    """Code value times 2^(scale - 127); scale 255 is NaN, products beyond fp32 are infinite. Any leading dims.

    Note: products are looked up as bit patterns, so that a processor that flushes subnormals (scale 0 is 2^-127) cannot change them.
    """
    codes_OI = torch.stack((packed_OI2 & 15, packed_OI2 >> 4), dim=-1).flatten(-2)
    scale_OI = scale_OG.repeat_interleave(GROUP_COLUMNS, dim=-1)[..., : codes_OI.shape[-1]]
    pattern_OI = _products().to(packed_OI2.device)[scale_OI.long() * 16 + codes_OI.long()]
    return pattern_OI.view(torch.float32)


@cache
def _products() -> Tensor:
    """Bit patterns of all 256 x 16 products, scale first."""
    return torch.tensor([_bits(code, scale) for scale in range(256) for code in range(16)], dtype=torch.int32)


def _bits(code: int, scale: int) -> int:
    value = float("nan") if scale == 255 else (-E2M1[code & 7] if code & 8 else E2M1[code & 7]) * 2.0 ** (scale - 127)
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        packed = struct.pack("<f", float("-inf") if value < 0 else float("inf"))
    return int(struct.unpack("<i", packed)[0])


def cases(seed: int) -> Iterator[Case]:
    """All codes under all scales, one group to several, rows and stacked experts, empty."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, generator=rng, dtype=torch.uint8)

    for lead, inner in (((0,), 32), ((1,), 32), ((5,), 96), ((2, 3), 64), ((3,), 0)):
        scale = 100 + draw(*lead, inner // GROUP_COLUMNS) % 50
        label = "x".join(map(str, (*lead, inner)))
        yield Case(label, OpUse.of("mxfp4_unpack", "float32", I=inner), (draw(*lead, inner // 2), scale))
    pairs = torch.arange(256, dtype=torch.uint8)
    every = (pairs.repeat(256, 1), pairs[:, None].repeat(1, 16))
    yield Case("every_code_and_scale", OpUse.of("mxfp4_unpack", "float32", I=512), every, has_nan=True)
