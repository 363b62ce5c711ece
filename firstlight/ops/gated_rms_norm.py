"""RMS norm of a head times an activated gate. Letters: T packed tokens, H heads, V value width."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.ops.case import DTYPES, Case, normal
from firstlight.spec.model import OpUse


def gated_rms_norm(x_THV: Tensor, gate_THV: Tensor, weight_V: Tensor, *, eps: float, activation: Literal["sigmoid", "silu"] = "sigmoid") -> Tensor:
    """Normalise per head, scale, gate: no rounding in between. KDA gates by sigmoid, Gated DeltaNet by SiLU."""
    assert activation in ("sigmoid", "silu"), activation
    x32_THV, gate32_THV = x_THV.float(), gate_THV.float()
    unit_THV = x32_THV * torch.rsqrt(x32_THV.square().mean(-1, keepdim=True) + eps)
    opened_THV = torch.sigmoid(gate32_THV) if activation == "sigmoid" else F.silu(gate32_THV)
    return (unit_THV * weight_V.float() * opened_THV).to(x_THV.dtype)


def cases(seed: int) -> Iterator[Case]:
    """Both gates, fp32 weight beside bf16 activations, odd heads and widths."""
    rng = torch.Generator().manual_seed(seed)
    for name, dtype in DTYPES:
        for T, H, V in ((0, 2, 8), (1, 1, 1), (7, 3, 16), (130, 2, 33)):
            x, gate, weight = normal(rng, T, H, V, dtype=dtype), normal(rng, T, H, V, dtype=dtype, spread=4.0), normal(rng, V)
            for kind in ("sigmoid", "silu"):
                use = OpUse.of("gated_rms_norm", name, H=H, V=V, activation=kind)
                yield Case(f"{name}-{T}x{H}x{V}-{kind}", use, (x, gate, weight), {"eps": 1e-5, "activation": kind})
        use = OpUse.of("gated_rms_norm", name, H=2, V=8, activation="sigmoid")
        gate = torch.tensor([-200.0, 200.0])[None, :, None].expand(3, 2, 8).to(dtype)
        yield Case(f"{name}-saturated", use, (torch.zeros(3, 2, 8, dtype=dtype), gate, normal(rng, 8)), {"eps": 1e-5})
