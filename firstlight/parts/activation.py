"""The gated activation that a feed-forward uses, as facts."""

from __future__ import annotations

from dataclasses import dataclass

from firstlight.spec.model import OpUse


@dataclass(frozen=True, slots=True)
class Activation:
    """`silu`, or `situ` with the bounds of its two tanh (linear_beta None: the up branch is unbounded)."""

    kind: str = "silu"
    beta: float = 1.0
    linear_beta: float | None = None

    def use(self, width: int, dtype: str) -> OpUse:
        """The operator use over `width` channels."""
        return OpUse.of("activation", dtype, I=width, kind=self.kind)
