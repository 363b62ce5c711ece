"""A place beside the device where blocks can go and come back: host memory, a disk, another machine. It knows no tokens. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol


class BlockKey(NamedTuple):
    """Content of one group under the key of its prefix. The key holds the model's identity, so models may share a tier."""

    group: str
    key: bytes


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tier holds; `capacity_bytes` None: as much as fits."""

    num_blocks: int
    num_bytes: int
    capacity_bytes: int | None = None


class CacheTier(Protocol):
    """Four verbs. A tier may lose anything at any time, but never gives back what was not put; what it gives is checked by its reader."""

    @property
    def name(self) -> str:
        """For counters and reports."""

    def put(self, key: BlockKey, blob: bytes) -> bool:
        """Take a block as bytes; False: it is full or out of order, and what it held is as before."""

    def get(self, key: BlockKey) -> bytes | None:
        """The bytes of a block; None: they are not here."""

    def discard(self, key: BlockKey) -> None:
        """Forget a block; no-op for an unknown one."""

    def usage(self) -> Usage:
        """How full it is."""
