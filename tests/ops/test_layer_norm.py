"""Layer norm against torch's own in float64."""

from __future__ import annotations

import torch

from firstlight.ops.layer_norm import layer_norm


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_torch_in_float64() -> None:
    x, weight, bias = drawn(7, 33) + 5.0, drawn(33, seed=1), drawn(33, seed=2)
    want = torch.nn.functional.layer_norm(x.double(), (33,), weight.double(), bias.double(), 1e-3)
    assert torch.allclose(want.float(), layer_norm(x, weight, bias, eps=1e-3), rtol=1e-5, atol=1e-5)


def test_bf16_rounds_once_behind_fp32_weights() -> None:
    x, weight, bias = drawn(64, 32).bfloat16(), drawn(32, seed=1), drawn(32, seed=2)
    want = torch.nn.functional.layer_norm(x.double(), (32,), weight.double(), bias.double(), 1e-6)
    got = layer_norm(x, weight, bias, eps=1e-6)
    assert torch.equal(want.bfloat16(), got)
    assert not torch.equal(torch.nn.functional.layer_norm(x, (32,), weight.bfloat16(), bias.bfloat16(), 1e-6), got)
