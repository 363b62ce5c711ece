"""Muon for matrices, AdamW for the rest.

Source: Muon, K. Jordan 2024, https://kellerjordan.github.io/posts/muon (public description): orthogonalised momentum by Newton-Schulz steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NUM_STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Step sizes at full rate."""

    matrix: float = 0.02
    table: float = 4e-3
    rest: float = 4e-3
    decay: float = 0.02
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.97)


def is_matrix(name: str) -> bool:
    """Whether Muon moves it: hidden matrices; not tables, routers, convolutions and single rows."""
    apart = ("embed_tokens", "lm_head", ".gate.", "conv1d", "res_proj", ".b_proj")
    return name.endswith((".w13", ".w2", "proj.weight", "with_mqa.weight")) and not any(part in name for part in apart)


def orthogonal(batch: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices of a batch, roughly, in bf16."""
    a, b, c = NEWTON_SCHULZ
    tall = batch.shape[-2] > batch.shape[-1]
    x = (batch.mT if tall else batch).bfloat16()
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).bfloat16()
    for _ in range(NUM_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


class Optimiser:
    """Holds moments by name; `step` moves the masters in place."""

    def __init__(self, weights: Mapping[str, Tensor], rates: Rates) -> None:
        self.weights = {name: weight for name, weight in weights.items() if "e_score_correction_bias" not in name}
        self.rates, self.count = rates, 0
        self.first = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self.second = {name: torch.zeros_like(weight) for name, weight in self.weights.items() if not is_matrix(name)}

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"count": self.count, "first": self.first, "second": self.second}

    def restore(self, state: Mapping[str, Any]) -> None:
        """From a checkpoint."""
        self.count = state["count"]
        for mine, theirs in ((self.first, state["first"]), (self.second, state["second"])):
            for name, moment in mine.items():
                moment.copy_(theirs[name])

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One step at `factor` of the full rates."""
        self.count += 1
        by_shape: dict[tuple[int, ...], list[str]] = {}
        for name, weight in self.weights.items():
            if name in self.second:
                self._adam(name, weight, factor)
            else:
                by_shape.setdefault(tuple(weight.shape), []).append(name)
        for shape, names in by_shape.items():
            self._muon(shape, names, factor)

    def _adam(self, name: str, weight: Tensor, factor: float) -> None:
        low, high = self.rates.betas
        grad, first, second = weight.grad, self.first[name], self.second[name]
        first.lerp_(grad, 1 - low)
        second.lerp_(grad * grad, 1 - high)
        rate = factor * (self.rates.table if weight.dim() == 2 else self.rates.rest)
        size = (second / (1 - high**self.count)).sqrt_().add_(1e-10)
        weight.addcdiv_(first, size, value=-rate / (1 - low**self.count))

    def _muon(self, shape: tuple[int, ...], names: list[str], factor: float) -> None:
        rates = self.rates
        for name in names:
            self.first[name].lerp_(self.weights[name].grad, 1 - rates.momentum)
        ahead = torch.stack([torch.lerp(self.weights[name].grad, self.first[name], rates.momentum) for name in names])
        # Experts stack gate over up; each is a matrix of its own.
        halves = 2 if names[0].endswith("w13") else 1
        rows, columns = shape[-2] // halves, shape[-1]
        moved = orthogonal(ahead.reshape(-1, rows, columns)).float().reshape(ahead.shape)
        rate = factor * rates.matrix * max(1.0, rows / columns) ** 0.5
        for name, move in zip(names, moved, strict=True):
            weight = self.weights[name]
            weight.mul_(1 - rate * rates.decay).add_(move, alpha=-rate)
