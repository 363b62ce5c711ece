"""Gated activations of a feed-forward. Letters: T packed tokens (any leading dims), I inner width."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.ops.case import DTYPES, Case, normal
from firstlight.spec.model import OpUse

Kind = Literal["silu", "situ"]


def activation(gate_TI: Tensor, up_TI: Tensor, *, kind: Kind, beta: float | None = 1.0, linear_beta: float | None = None) -> Tensor:
    """SiLU: silu(gate) up. SiTU: both factors are bounded by a tanh, the gate by `beta`, the up branch by `linear_beta`.

    Note: a beta of None or 0 means 1, and linear_beta None leaves the up branch unbounded, as in Kimi K3's configuration.
    """
    assert kind in ("silu", "situ"), kind
    gate32_TI, up32_TI = gate_TI.float(), up_TI.float()
    if kind == "silu":
        return (F.silu(gate32_TI) * up32_TI).to(gate_TI.dtype)
    bound = beta or 1.0
    opened_TI = bound * torch.tanh(gate32_TI / bound) * torch.sigmoid(gate32_TI)
    carried_TI = up32_TI if linear_beta is None else linear_beta * torch.tanh(up32_TI / linear_beta)
    return (opened_TI * carried_TI).to(gate_TI.dtype)


def cases(seed: int) -> Iterator[Case]:
    """Every kind and bound, in the linear, the curved and the saturated range."""
    rng = torch.Generator().manual_seed(seed)
    settings: dict[str, dict[str, Any]] = {
        "silu": {"kind": "silu"},
        "situ": {"kind": "situ", "beta": 4.0, "linear_beta": 25.0},
        "situ-unbounded_up": {"kind": "situ", "beta": 4.0},
        "situ-beta_none": {"kind": "situ", "beta": None, "linear_beta": 2.0},
        "situ-beta_zero": {"kind": "situ", "beta": 0.0},
    }
    for name, dtype in DTYPES:
        for label, kwargs in settings.items():
            for T, inner in ((0, 8), (1, 1), (5, 33), (70, 64)):
                use = OpUse.of("activation", name, I=inner, kind=kwargs["kind"])
                gate, up = normal(rng, T, inner, dtype=dtype, spread=6.0), normal(rng, T, inner, dtype=dtype, spread=20.0)
                yield Case(f"{name}-{label}-{T}x{inner}", use, (gate, up), kwargs)
            use = OpUse.of("activation", name, I=4, kind=kwargs["kind"])
            gate = torch.tensor([[-1e4, 1e4, -100.0, 0.0]], dtype=dtype)
            yield Case(f"{name}-{label}-saturated", use, (gate, torch.tensor([[1e3, -1e3, 1e4, 1e4]], dtype=dtype)), kwargs)
