"""Attention Residuals against the formula in float64, and the fold of the two weights."""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.ops.block_residual import block_residual


def mix(sources: Tensor, norm: Tensor, proj: Tensor, eps: float) -> Tensor:
    """One token, one source at a time."""
    out = torch.zeros(sources.shape[1:], dtype=torch.float64)
    for t in range(sources.shape[1]):
        scores = []
        for source in sources[:, t].double():
            key = source / (source.square().mean() + eps).sqrt()
            scores.append(float((key * norm.double() * proj.double()).sum()))
        shares = torch.tensor(scores, dtype=torch.float64).exp()
        out[t] = sum(share * source for share, source in zip(shares / shares.sum(), sources[:, t].double(), strict=True))
    return out


def test_formula_in_float64() -> None:
    rng = torch.Generator().manual_seed(0)
    sources, norm, proj = torch.randn(5, 7, 16, generator=rng) * 3, torch.randn(16, generator=rng), torch.randn(16, generator=rng)
    got = block_residual(sources, norm, proj, eps=1e-5)
    assert float((mix(sources, norm, proj, 1e-5) - got).abs().max()) < 1e-5


def test_one_source_is_the_identity() -> None:
    x = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(x[0], block_residual(x, torch.ones(8), torch.ones(8), eps=1e-5))


def test_raw_sources_are_mixed_not_normed_ones() -> None:
    sources = torch.stack([torch.full((1, 4), 2.0), torch.full((1, 4), 6.0)])
    got = block_residual(sources, torch.zeros(4), torch.ones(4), eps=1e-5)
    assert torch.equal(torch.full((1, 4), 4.0), got)


def test_bf16_weights_are_multiplied_in_fp32() -> None:
    """A product of the two weights rounded to bf16 is a thousand times further off, where scores are sharp."""
    rng = torch.Generator().manual_seed(2)
    sources = torch.randn(4, 50, 64, generator=rng)
    norm, proj = (torch.randn(64, generator=rng) * 2).bfloat16(), (torch.randn(64, generator=rng) * 2).bfloat16()
    want = mix(sources, norm, proj, 1e-5)
    assert float((want - block_residual(sources, norm, proj, eps=1e-5)).abs().max()) < 2e-5
    rounded = mix(sources, (norm * proj).float(), torch.ones(64), 1e-5)
    assert float((want - rounded).abs().max()) > 1e-2


def test_bf16_sources_are_rounded_once() -> None:
    rng = torch.Generator().manual_seed(3)
    sources = torch.randn(4, 50, 64, generator=rng).bfloat16()
    norm, proj = torch.randn(64, generator=rng).bfloat16(), torch.randn(64, generator=rng).bfloat16()
    want, got = mix(sources, norm, proj, 1e-5), block_residual(sources, norm, proj, eps=1e-5)
    assert torch.bfloat16 == got.dtype
    assert bool(((want - got.double()).abs() <= want.abs() * 2.0**-8 + 1e-6).all())
