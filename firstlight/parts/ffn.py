"""Dense gated feed-forward: down(act(gate x, up x))."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from firstlight.parts.activation import Activation
from firstlight.spec.model import CacheSpec, OpUse, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Ffn:
    """`inner` is the width between up and down."""

    dim: int
    inner: int
    activation: Activation
    dtype: str
    kind: str = "ffn"

    def weights(self) -> Sequence[TensorSpec]:
        """gate, up and down projections."""
        wide = (self.inner, self.dim)
        return (
            TensorSpec("gate_proj.weight", wide, self.dtype),
            TensorSpec("up_proj.weight", wide, self.dtype),
            TensorSpec("down_proj.weight", (self.dim, self.inner), self.dtype),
        )

    def cache(self) -> Sequence[CacheSpec]:
        """Nothing is remembered."""
        return ()

    def ops(self) -> Sequence[OpUse]:
        """Three products and the activation."""
        wide = OpUse.of("linear", self.dtype, I=self.dim, O=self.inner)
        return (wide, wide, self.activation.use(self.inner, self.dtype), OpUse.of("linear", self.dtype, I=self.inner, O=self.dim))

    def flops(self, num_tokens: int, context: int) -> int:
        """Products only."""
        return 2 * num_tokens * self.active_params()

    def active_params(self) -> int:
        """All of them."""
        return 3 * self.dim * self.inner
