"""SiLU and SiTU against their formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch

from firstlight.ops.activation import activation

GATES = [-30.0, -2.0, 0.0, 0.7, 5.0, 80.0]
UPS = [3.0, -40.0, 5.0, 12.5, 60.0, -7.0]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_silu_in_float64() -> None:
    want = [g * sigmoid(g) * u for g, u in zip(GATES, UPS, strict=True)]
    assert torch.allclose(torch.tensor(want), activation(torch.tensor(GATES), torch.tensor(UPS), kind="silu"), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("beta", "linear_beta"), [(4.0, 25.0), (1.0, 2.0), (4.0, None), (None, 25.0), (0.0, 25.0)])
def test_situ_in_float64(beta: float | None, linear_beta: float | None) -> None:
    bound = beta or 1.0
    carried = [u if linear_beta is None else linear_beta * math.tanh(u / linear_beta) for u in UPS]
    want = [bound * math.tanh(g / bound) * sigmoid(g) * c for g, c in zip(GATES, carried, strict=True)]
    got = activation(torch.tensor(GATES), torch.tensor(UPS), kind="situ", beta=beta, linear_beta=linear_beta)
    assert torch.allclose(torch.tensor(want), got, rtol=2e-6, atol=1e-9)


def test_situ_is_bounded_and_silu_is_not() -> None:
    gate, up = torch.tensor([1e4]), torch.tensor([1e4])
    assert math.isclose(100.0, float(activation(gate, up, kind="situ", beta=4.0, linear_beta=25.0)), rel_tol=1e-6)
    assert math.isclose(1e8, float(activation(gate, up, kind="silu")), rel_tol=1e-6)


@pytest.mark.parametrize("kind", ["silu", "situ"])
def test_bf16_rounds_once(kind: str) -> None:
    rng = torch.Generator().manual_seed(0)
    gate, up = ((torch.randn(200, generator=rng) * 4).bfloat16() for _ in range(2))
    g, u = gate.double(), up.double()
    want = g * torch.sigmoid(g) * u if kind == "silu" else 4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25)
    assert torch.equal(want.bfloat16(), activation(gate, up, kind=kind, beta=4.0, linear_beta=25.0))
