"""RMS norm against the formula in float64, and the two places where it may round."""

from __future__ import annotations

import math

import pytest
import torch

from firstlight.ops.rms_norm import rms_norm


@pytest.mark.parametrize("plus_one", [False, True])
def test_formula_in_float64(plus_one: bool) -> None:
    x, weight, eps = [[3.0, -4.0, 12.0], [0.1, 0.0, -0.2]], [0.5, -1.25, 2.0], 0.01
    want = [[v / math.sqrt(sum(u * u for u in row) / 3 + eps) * (w + plus_one) for v, w in zip(row, weight, strict=True)] for row in x]
    got = rms_norm(torch.tensor(x), torch.tensor(weight), eps=eps, plus_one=plus_one)
    assert torch.allclose(torch.tensor(want), got, rtol=1e-6, atol=1e-7)


def test_bf16_is_rounded_before_the_weight_and_after_it() -> None:
    """Rounding once at the end would give other bits."""
    rng = torch.Generator().manual_seed(3)
    x, weight = torch.randn(64, 32, generator=rng).bfloat16(), torch.randn(32, generator=rng).bfloat16()
    unit = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    got = rms_norm(x, weight, eps=1e-5)
    assert torch.equal((unit.bfloat16().double() * weight.double()).bfloat16(), got)
    assert not torch.equal((unit * weight.double()).bfloat16(), got)


def test_plus_one_in_bf16_rounds_once() -> None:
    rng = torch.Generator().manual_seed(4)
    x, weight = torch.randn(64, 32, generator=rng).bfloat16(), torch.randn(32, generator=rng).bfloat16()
    unit = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.equal((unit * (1 + weight.double())).bfloat16(), rms_norm(x, weight, eps=1e-6, plus_one=True))


def test_sums_are_fp32_for_bf16_inputs() -> None:
    """4096 equal squares: a bf16 sum would stop growing at 256."""
    x = torch.ones(1, 4096, dtype=torch.bfloat16)
    assert 1.0 == rms_norm(x, torch.ones(4096, dtype=torch.bfloat16), eps=0.0).min()


def test_eps_matters_where_the_row_is_small() -> None:
    x, weight = torch.full((1, 4), 1e-3), torch.ones(4)
    assert math.isclose(1 / math.sqrt(2), float(rms_norm(x, weight, eps=1e-6)[0, 0]), rel_tol=1e-5)
    assert math.isclose(1 / math.sqrt(11), float(rms_norm(x, weight, eps=1e-5)[0, 0]), rel_tol=1e-5)
