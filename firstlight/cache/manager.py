"""Which sequence owns which block. Bookkeeping only: no tensor is touched, no torch imported."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from firstlight.spec.errors import CapacityError

_NOTHING: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share a cache layout. A block of a rows group holds `tokens_per_block` tokens; of a state group, one state."""

    name: str
    kind: Literal["rows", "state"]
    num_blocks: int
    tokens_per_block: int = 1

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of this length owns: rows by its length, a state always one."""
        return -(-num_tokens // self.tokens_per_block) if self.kind == "rows" else 1


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence: for a rows group one id per `tokens_per_block` tokens, for a state group exactly one id.

    Ids are 64-bit and never change while the sequence owns them; a rows list only grows.
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


@dataclass(frozen=True, slots=True)
class Prefix:
    """The part of a prompt that need not be computed again, and where it lies."""

    num_tokens: int = 0
    blocks: Mapping[str, Sequence[int]] = field(default_factory=dict)


class CacheManager:
    """Hands blocks of all groups to sequences and takes them back; the lowest free ids go first, then the last returned.

    Raises: CapacityError when a group has no blocks at all.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = {group.name: group for group in groups}
        assert len(self._groups) == len(groups), "two cache groups of one name"
        for group in groups:
            if group.num_blocks < 1 or group.tokens_per_block < 1:
                fact = f"cache group {group.name} has {group.num_blocks} blocks of {group.tokens_per_block} tokens"
                raise CapacityError(fact, "Raise cache_bytes, or lower tokens_per_block.")
        self._free = {name: array("q", range(group.num_blocks - 1, -1, -1)) for name, group in self._groups.items()}
        self._tables: dict[int, BlockTable] = {}
        self._committed: dict[int, int] = {}
        self._fresh: dict[str, list[int]] = {name: [] for name in self._groups}
        self._scrub: dict[str, list[int]] = {name: [] for name in self._groups}

    @property
    def capacity_tokens(self) -> int | None:
        """Length of the longest sequence that an empty cache holds; None: no group grows with length."""
        rows = [group.num_blocks * group.tokens_per_block for group in self._groups.values() if group.kind == "rows"]
        return min(rows, default=None)

    def match(self, tokens: Sequence[int], *, salt: bytes = b"") -> Prefix:
        """The longest computed prefix that every group can resume from; changes nothing."""
        return Prefix()

    def reserve(
        self, seq_id: int, num_tokens: int, *, prefix: Prefix | None = None, upto: int = 0, spare: Mapping[str, int] = _NOTHING
    ) -> BlockTable | None:
        """Make the table hold `num_tokens`: in all groups, or None and nothing has changed.

        Also None when afterwards it could not grow on to `upto` tokens with `spare` blocks per group left over for others.
        """
        assert prefix is None or not prefix.num_tokens, "nothing is shared yet, so no prefix can be resumed"
        table = self._tables.get(seq_id)
        lacking: list[tuple[str, int]] = []
        for name, group in self._groups.items():
            held = len(table.blocks[name]) if table is not None else 0
            count = group.blocks_for(num_tokens) - held
            most = max(count, group.blocks_for(upto) - held) if upto else count
            if most > 0 and most + spare.get(name, 0) > len(self._free[name]):
                return None
            if count > 0:
                lacking.append((name, count))
        if table is None:
            table = self._tables[seq_id] = BlockTable(seq_id, {name: array("q") for name in self._groups})
            self._committed[seq_id] = 0
        for name, count in lacking:
            free = self._free[name]
            taken = free[: -count - 1 : -1]
            del free[-count:]
            table.blocks[name].extend(taken)
            self._fresh[name].extend(taken)
        return table

    def commit(self, seq_id: int, tokens: Sequence[int], num_tokens: int | None = None) -> None:
        """Say that the first `num_tokens` of `tokens` (None: all) lie in the blocks; never copies them."""
        self._committed[seq_id] = len(tokens) if num_tokens is None else num_tokens

    def release(self, seq_id: int, *, scrub: bool = False) -> None:
        """Take all blocks of a sequence back; unknown ids are fine. `scrub`: their content is dangerous, see `take_scrub`."""
        table = self._tables.pop(seq_id, None)
        if table is None:
            return
        del self._committed[seq_id]
        for name, blocks in table.blocks.items():
            self._free[name].extend(reversed(blocks))
        if scrub:
            self.mark_scrub(table.blocks)

    def mark_scrub(self, blocks: Mapping[str, Iterable[int]]) -> None:
        """Put blocks on the list of `take_scrub`: for those that a step should have prepared and did not."""
        for name, ids in blocks.items():
            self._scrub[name].extend(ids)

    def take_fresh(self) -> Mapping[str, tuple[int, ...]]:
        """Blocks that changed hands since the last call: old content must not be read."""
        return _drain(self._fresh)

    def take_scrub(self) -> Mapping[str, tuple[int, ...]]:
        """Blocks to zero before the next compute: released since the last call by a sequence that failed."""
        return _drain(self._scrub)

    def fits(self, *num_tokens: int) -> bool:
        """Whether an empty cache holds sequences of these lengths together."""
        return all(sum(map(group.blocks_for, num_tokens)) <= group.num_blocks for group in self._groups.values())

    def growth(self, lengths: Mapping[int, int]) -> dict[str, int]:
        """Blocks per group that these sequences (id -> length) lack to be so long."""
        found = dict.fromkeys(self._groups, 0)
        for seq_id, num_tokens in lengths.items():
            table = self._tables.get(seq_id)
            for name, group in self._groups.items():
                held = len(table.blocks[name]) if table is not None else 0
                found[name] += max(0, group.blocks_for(num_tokens) - held)
        return found

    def usage(self) -> float:
        """Used share of the fullest group, 0 to 1."""
        return max((1 - len(self._free[name]) / group.num_blocks for name, group in self._groups.items()), default=0.0)

    def counts(self) -> dict[str, dict[str, str | int]]:
        """Per group: kind, and blocks in total, free, used, cached."""
        found: dict[str, dict[str, str | int]] = {}
        for name, group in self._groups.items():
            free, total = len(self._free[name]), group.num_blocks
            found[name] = {"kind": group.kind, "total": total, "free": free, "used": total - free, "cached": 0}
        return found

    def check(self) -> None:
        """Assert that every block has exactly one owner and that no table is shorter than what was committed to it."""
        for name, group in self._groups.items():
            owned = [block for table in self._tables.values() for block in table.blocks[name]]
            everywhere = sorted([*owned, *self._free[name]])
            assert everywhere == list(range(group.num_blocks)), f"{name}: blocks are lost, doubled or invented"
            for seq_id, table in self._tables.items():
                held, needed = len(table.blocks[name]), group.blocks_for(self._committed[seq_id])
                assert held >= needed, f"{name}: sequence {seq_id} committed {needed} blocks and owns {held}"
                assert group.kind == "rows" or held == 1, f"{name}: sequence {seq_id} owns {held} states"


def _drain(lists: dict[str, list[int]]) -> Mapping[str, tuple[int, ...]]:
    taken = {name: tuple(dict.fromkeys(ids)) for name, ids in lists.items() if ids}
    for ids in lists.values():
        ids.clear()
    return taken
