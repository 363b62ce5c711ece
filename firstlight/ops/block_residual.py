"""Attention Residuals: a softmax over depth. Letters: M sources (block snapshots, then the running prefix), T packed tokens, D width."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from firstlight.ops.case import DTYPES, Case, normal
from firstlight.spec.model import OpUse


def block_residual(sources_MTD: Tensor, norm_D: Tensor, proj_D: Tensor, *, eps: float) -> Tensor:
    """Score every source by one learned direction after RMS norm, and mix the raw sources by the softmax of the scores.

    Note: norm and projection weight are multiplied in fp32 before they meet the source; rounding the normed source instead
    moves the scores by more than the margin between two tokens.

    Source: arXiv 2603.15031.
    """
    value_MTD = sources_MTD.float()
    unit_MTD = value_MTD * torch.rsqrt(value_MTD.square().mean(-1, keepdim=True) + eps)
    score_MT = unit_MTD @ (norm_D.float() * proj_D.float())
    share_MT = score_MT.softmax(dim=0)
    return (share_MT[..., None] * value_MTD).sum(0).to(sources_MTD.dtype)


def cases(seed: int) -> Iterator[Case]:
    """One source (the identity) to nine (the output of Kimi K3), sources of unlike sizes, sharp scores."""
    rng = torch.Generator().manual_seed(seed)
    for name, dtype in DTYPES:
        for M, T, D in ((1, 3, 8), (2, 0, 8), (2, 1, 1), (3, 7, 33), (9, 65, 64)):
            use = OpUse.of("block_residual", name, M=M, D=D)
            growth = torch.logspace(-1, 1, M)[:, None, None]
            sources = (normal(rng, M, T, D) * growth).to(dtype)
            args = (sources, normal(rng, D, dtype=dtype), normal(rng, D, dtype=dtype))
            yield Case(f"{name}-{M}x{T}x{D}", use, args, {"eps": 1e-5})
        use = OpUse.of("block_residual", name, M=4, D=16)
        args = (normal(rng, 4, 5, 16, dtype=dtype), normal(rng, 16, dtype=dtype), normal(rng, 16, dtype=dtype, spread=30.0))
        yield Case(f"{name}-sharp", use, args, {"eps": 1e-5})
