"""Rotary positions of a head, as facts: which channels turn, how fast, and how a longer context slows them down."""

from __future__ import annotations

from dataclasses import dataclass

from firstlight.spec.model import OpUse


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """Llama 3.1's rule: waves longer than `context / low` turn `factor` times slower, those shorter than `context / high` as before.

    Source: meta-llama/Llama-3.1 config.json, `rope_scaling` of type llama3.
    """

    factor: float
    low: float
    high: float
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """Pairs that turn more than `fast` times within `context` stay, those below `slow` turns go `factor` times slower, a ramp between.

    Source: YaRN, arXiv 2309.00071 (s. 3.2); ends of the ramp rounded outwards as in DeepSeek-V3's own code.
    """

    factor: float
    fast: float
    slow: float
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """The first `width` channels of a head turn, in half-split or interleaved pairs; `factor` slows all of them (linear scaling).

    `magnitude` multiplies what was turned (YaRN's factor on sine and cosine). Source: RoFormer, arXiv 2104.09864.
    """

    width: int
    theta: float
    interleaved: bool = False
    factor: float = 1.0
    slowdown: Slowdown | None = None
    yarn: Yarn | None = None
    magnitude: float = 1.0

    def use(self, num_heads: int, dtype: str) -> OpUse:
        """The operator use over `num_heads` heads."""
        return OpUse.of("rope", dtype, H=num_heads, R=self.width)
