"""Gated RMS norm against the formula in float64."""

from __future__ import annotations

import math

import pytest
import torch

from firstlight.ops.gated_rms_norm import gated_rms_norm


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
def test_formula_in_float64(activation: str) -> None:
    x, gate, weight, eps = [2.0, -1.0], [0.5, -3.0], [1.5, 0.25], 0.1
    opened = [sigmoid(z) * (z if activation == "silu" else 1.0) for z in gate]
    root = math.sqrt((4 + 1) / 2 + eps)
    want = [v / root * w * o for v, w, o in zip(x, weight, opened, strict=True)]
    got = gated_rms_norm(torch.tensor([[x]]), torch.tensor([[gate]]), torch.tensor(weight), eps=eps, activation=activation)
    assert torch.allclose(torch.tensor([[want]]), got, rtol=1e-6)


def test_heads_are_normed_apart() -> None:
    x = torch.tensor([[[1.0, 1.0], [100.0, 100.0]]])
    got = gated_rms_norm(x, torch.full_like(x, 200.0), torch.ones(2), eps=0.0)
    assert torch.allclose(torch.ones_like(x), got)


@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
def test_bf16_rounds_once(activation: str) -> None:
    rng = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(32, 3, 16, generator=rng).bfloat16() for _ in range(2))
    weight = torch.randn(16, generator=rng)
    x64, gate64 = x.double(), gate.double()
    opened = torch.sigmoid(gate64) * (gate64 if activation == "silu" else 1.0)
    want = x64 / (x64.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double() * opened
    assert torch.equal(want.bfloat16(), gated_rms_norm(x, gate, weight, eps=1e-5, activation=activation))
