"""The plain residual: stream + y."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from firstlight.spec.model import CacheSpec, OpUse, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Add:
    """Has no weights and no operator of its own."""

    dtype: str
    kind: str = "add"

    def weights(self) -> Sequence[TensorSpec]:
        """None."""
        return ()

    def cache(self) -> Sequence[CacheSpec]:
        """None."""
        return ()

    def ops(self) -> Sequence[OpUse]:
        """None: an addition is no operator."""
        return ()

    def flops(self, num_tokens: int, context: int) -> int:
        """Too few to count."""
        return 0

    def active_params(self) -> int:
        """None."""
        return 0
