"""The matrix product against sums in float64."""

from __future__ import annotations

import torch

from firstlight.ops.linear import linear


def test_small_product_by_hand() -> None:
    x, weight, bias = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 0.0, -1.0], [0.5, 0.5, 0.5]]), torch.tensor([10.0, 20.0])
    assert torch.equal(torch.tensor([[8.0, 23.0]]), linear(x, weight, bias))
    assert torch.equal(torch.tensor([[-2.0, 3.0]]), linear(x, weight))


def test_random_product_in_float64() -> None:
    rng = torch.Generator().manual_seed(0)
    x, weight, bias = torch.randn(7, 257, generator=rng), torch.randn(5, 257, generator=rng), torch.randn(5, generator=rng)
    want = torch.einsum("ti,oi->to", x.double(), weight.double()) + bias.double()
    assert float((linear(x, weight, bias) - want).abs().max()) < 1e-4
    got = linear(x.bfloat16(), weight.bfloat16(), bias.bfloat16())
    exact = torch.einsum("ti,oi->to", x.bfloat16().double(), weight.bfloat16().double()) + bias.bfloat16().double()
    assert torch.bfloat16 == got.dtype
    assert float(((got - exact).abs() / exact.abs().clamp(min=1.0)).max()) <= 2.0**-8 * 1.01  # one rounding to 8 bits
