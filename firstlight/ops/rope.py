"""Rotary positions. Letters: T packed tokens, H heads, R rotary width, F = R / 2 pairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from firstlight.ops.case import DTYPES, Case, normal
from firstlight.spec.model import OpUse


def rope(x_THR: Tensor, positions_T: Tensor, inv_freq: Tensor | Sequence[float], *, interleaved: bool, scale: float = 1.0) -> Tensor:
    """Rotate each pair of channels by position * inv_freq; the output keeps the channel order of the input.

    Interleaved pairs are (2i, 2i+1), half-split pairs are (i, i + R/2). `scale` multiplies the result (YaRN's factor on cos and sin).

    Note: the angle is an fp32 product, as in every trained model; an exact one would differ at positions near a million.
    """
    freq = torch.as_tensor(inv_freq, dtype=torch.float32, device=x_THR.device)
    assert x_THR.shape[-1] == 2 * len(freq), (tuple(x_THR.shape), len(freq))
    angle_T1F = positions_T.to(x_THR.device).float()[:, None, None] * freq
    cos_T1F, sin_T1F = angle_T1F.cos() * scale, angle_T1F.sin() * scale
    x32_THR = x_THR.float()
    if interleaved:
        a_THF, b_THF = x32_THR[..., 0::2], x32_THR[..., 1::2]
    else:
        a_THF, b_THF = x32_THR.chunk(2, dim=-1)
    turned = (a_THF * cos_T1F - b_THF * sin_T1F, b_THF * cos_T1F + a_THF * sin_T1F)
    y_THR = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return y_THR.to(x_THR.dtype)


def cases(seed: int) -> Iterator[Case]:
    """Both pairings, frequencies as tensor and list, positions at zero, out of order and near a million."""
    rng = torch.Generator().manual_seed(seed)
    for name, dtype in DTYPES:
        for T, H, R in ((0, 2, 8), (1, 1, 2), (9, 3, 16), (131, 2, 6)):
            inv_freq = [10000.0 ** (-2 * i / R) for i in range(R // 2)]
            positions = torch.randint(0, 5000, (T,), generator=rng)
            use = OpUse.of("rope", name, H=H, R=R)
            for pairing, interleaved in (("interleaved", True), ("halves", False)):
                x = normal(rng, T, H, R, dtype=dtype)
                yield Case(f"{name}-{T}x{H}x{R}-{pairing}", use, (x, positions, inv_freq), {"interleaved": interleaved})
                far = (x, positions + 1_000_000, torch.tensor(inv_freq))
                yield Case(f"{name}-{T}x{H}x{R}-{pairing}-far", use, far, {"interleaved": interleaved, "scale": 1.25})
