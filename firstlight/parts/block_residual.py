"""Block Attention Residuals: a learned softmax mix of block snapshots and the running prefix.

Source: Attention Residuals, arXiv 2603.15031; Kimi K3, arXiv 2607.24653.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from firstlight.spec.model import CacheSpec, OpUse, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockResidual:
    """`index` is the layer that it serves, None for the mix before the last norm; a block starts every `block_size` layers."""

    dim: int
    block_size: int
    index: int | None
    num_layers: int
    eps: float
    dtype: str
    kind: str = "block_residual"

    @property
    def seats(self) -> tuple[str, ...]:
        """Where a mix with its own score weights stands."""
        return ("output",) if self.index is None else ("mixer", "ffn")

    @property
    def starts_block(self) -> bool:
        """Whether this layer snapshots the prefix and starts a new one."""
        return self.index is not None and self.index % self.block_size == 0

    def weights(self) -> Sequence[TensorSpec]:
        """Norm weight and score weight of each seat; they are folded in fp32 when used."""
        found: list[TensorSpec] = []
        for seat in self.seats:
            found.append(TensorSpec(f"{seat}_norm.weight", (self.dim,), self.dtype))
            found.append(TensorSpec(f"{seat}_proj.weight", (1, self.dim), self.dtype))
        return found

    def cache(self) -> Sequence[CacheSpec]:
        """None: a mix over depth remembers nothing over time."""
        return ()

    def num_sources(self, seat: str) -> int:
        """Snapshots plus the running prefix that this seat mixes."""
        before = self.num_layers if self.index is None else self.index
        snapshots = -(-before // self.block_size)
        if seat == "ffn" and self.starts_block:
            snapshots += 1
        return snapshots + 1

    def ops(self) -> Sequence[OpUse]:
        """One mix per seat that has more than one source; a single source passes through."""
        counts = [self.num_sources(seat) for seat in self.seats]
        return tuple(OpUse.of("block_residual", self.dtype, D=self.dim, M=count) for count in counts if count > 1)

    def flops(self, num_tokens: int, context: int) -> int:
        """Norm, score and mix of every source."""
        return sum(6 * num_tokens * self.dim * self.num_sources(seat) for seat in self.seats)

    def active_params(self) -> int:
        """Norm and score weight of each seat."""
        return 2 * self.dim * len(self.seats)
