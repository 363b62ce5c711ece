"""A place below the cache that keeps blocks as bytes under their keys and knows no tokens. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Usage:
    """How full a tier is."""

    num_blocks: int
    used_bytes: int
    total_bytes: int | None


class CacheTier(Protocol):
    """Host memory, a disk, another machine. Keys come from the prefix index; one key and group name one content for ever."""

    name: str

    def put(self, key: bytes, group: str, block: bytes) -> None:
        """Keep a block, or not: a tier may forget at any time."""

    def get(self, key: bytes, group: str) -> bytes | None:
        """The bytes of a block; None: absent."""

    def discard(self, key: bytes, group: str) -> None:
        """Forget a block; unknown ones are fine."""

    def usage(self) -> Usage:
        """How much is kept."""
