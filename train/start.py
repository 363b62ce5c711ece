"""The weights before the first step."""

from __future__ import annotations

import torch
from torch import Tensor

from train.shape import Shape

SLOW_DECAY, FAST_DECAY = -9.5, -3.0
"""Bounds of dt_bias: with these a state halves after 2,000 to 3 tokens."""


def initial(shape: Shape, seed: int) -> dict[str, Tensor]:
    """Seeded masters in fp32; ways back into the residual stream begin small, mixes over depth begin even."""
    rng = torch.Generator().manual_seed(seed)
    found = {}
    for name, size in shape.weights():
        found[name] = _draw(name, size, rng)
    return found


def _draw(name: str, size: tuple[int, ...], rng: torch.Generator) -> Tensor:
    leaf = name.rsplit(".", 2)[-2] if name.endswith(".weight") else name.rsplit(".", 1)[-1]
    if leaf.endswith(("norm", "layernorm")):
        return torch.ones(size)
    if leaf.endswith("res_proj") or leaf in ("A_log", "e_score_correction_bias"):
        return torch.zeros(size)
    if leaf == "dt_bias":
        return SLOW_DECAY + (FAST_DECAY - SLOW_DECAY) * torch.rand(size, generator=rng)
    if leaf.endswith("conv1d"):
        weight = 0.2 * torch.randn(size, generator=rng)
        weight[:, -1] += 0.7
        return weight
    gain = {"embed_tokens": size[-1] ** 0.5 * 0.5, "lm_head": 0.3, "o_proj": 0.5, "down_proj": 0.5, "w2": 0.7, "routed_expert_up_proj": 0.3}
    return gain.get(leaf, 1.0) * size[-1] ** -0.5 * torch.randn(size, generator=rng)
