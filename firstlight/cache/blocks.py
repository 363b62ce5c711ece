"""Blocks of one group: who is free, how many hold each. No tensor, no torch."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Fill = Callable[[str, int], bool]
"""Puts content into a block of a group; False: it could not, or the content is not usable here."""


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share a cache layout. A block of a rows group holds `tokens_per_block` tokens; of a state group, one state.

    `num_kept` blocks of a state group at most hold snapshots.
    """

    name: str
    kind: Literal["rows", "state"]
    num_blocks: int
    tokens_per_block: int = 1
    num_kept: int = 0

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of this length holds."""
        return -(-num_tokens // self.tokens_per_block) if self.kind == "rows" else int(num_tokens > 0)


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence: for a rows group one id per `tokens_per_block` tokens, for a state group exactly one id.

    Ids are 64-bit and never change while the sequence holds them; a rows list only grows.
    """

    seq_id: int
    blocks: dict[str, array[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copy one block onto another inside a group."""

    group: str
    source: int
    target: int
    when: Literal["before", "after"] = "before"


class Blocks:
    """References of every block: those of tables, and those of tables and the prefix index together. Without any, it is free."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.free = array("q", range(group.num_blocks - 1, -1, -1))
        self.references = array("q", bytes(8 * group.num_blocks))
        self.readers = array("q", bytes(8 * group.num_blocks))
        self.num_cached = 0  # held by the index alone

    @property
    def num_used(self) -> int:
        """Blocks that some table holds."""
        return self.group.num_blocks - len(self.free) - self.num_cached

    def take(self, count: int) -> list[int]:
        """Free blocks for one table; the caller has seen to it that there are enough."""
        taken = list(self.free[: -count - 1 : -1])
        assert len(taken) == count, f"{self.group.name}: {count} blocks were promised, {len(taken)} are there"
        del self.free[-count:]
        for block in taken:
            self.readers[block] = self.references[block] = 1
        return taken

    def take_for_index(self) -> int:
        """A free block that only the index will hold."""
        block = self.free.pop()
        self.references[block] = 1
        self.num_cached += 1
        return block

    def share(self, block: int) -> None:
        """One more table holds a published block."""
        self.num_cached -= self.readers[block] == 0
        self.readers[block] += 1
        self.references[block] += 1

    def list(self, block: int) -> None:
        """The index holds a block, a table does too."""
        self.references[block] += 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """A table lets go of blocks."""
        for block in blocks:
            self.readers[block] -= 1
            self.num_cached += self.readers[block] == 0
            self.unlist(block)

    def unlist(self, block: int) -> None:
        """One reference less."""
        self.references[block] -= 1
        if not self.references[block]:
            self.num_cached -= 1
            self.free.append(block)

    def check(self, tables: Iterable[int], index: Iterable[int]) -> None:
        """Assert that counts are those of the given holders, and that free blocks have none."""
        name, readers, references = self.group.name, array("q", bytes(8 * self.group.num_blocks)), array("q", bytes(8 * self.group.num_blocks))
        for block in tables:
            readers[block] += 1
            references[block] += 1
        for block in index:
            references[block] += 1
        assert readers == self.readers, f"{name}: tables do not add up"
        assert references == self.references, f"{name}: references do not add up"
        assert [block for block, count in enumerate(references) if not count] == sorted(self.free), f"{name}: blocks are lost or doubled"
        cached = sum(1 for block, count in enumerate(references) if count and not readers[block])
        assert cached == self.num_cached, f"{name}: {self.num_cached} blocks count as cached, {cached} are"


def drain(lists: Mapping[str, dict[int, None]]) -> Mapping[str, tuple[int, ...]]:
    """What lies on these lists, which are empty afterwards."""
    taken = {name: tuple(ids) for name, ids in lists.items() if ids}
    for ids in lists.values():
        ids.clear()
    return taken
