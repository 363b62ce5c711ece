"""Which sequence holds which block. Bookkeeping only: no tensor is touched, no torch imported.

A block has one writer or none: the sequence that took it. Full blocks and snapshots that are published under their key may be
held by many, and nobody writes them. References are counted; a block without a reference is free.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from firstlight.cache.blocks import Blocks, BlockTable, Fill, Group, Transfer, drain
from firstlight.cache.holding import Holding, Prefix
from firstlight.cache.keys import Chain, root_key
from firstlight.cache.prefix import Match, PrefixIndex
from firstlight.cache.snapshots import Snapshot
from firstlight.spec.errors import CapacityError, ConfigError

_NOTHING: Mapping[str, int] = {}


class CacheManager:
    """Hands blocks of all groups to sequences and takes them back; free ones first, then the least valuable cached ones.

    `identity` names model, dtype and layout in every key. `prefix_cache` False: nothing is published.
    `snapshot_tokens` > 0: a snapshot at every multiple of it too. Raises: CapacityError when a group has no blocks at all.
    """

    def __init__(self, groups: Sequence[Group], *, identity: bytes = b"", prefix_cache: bool = False, snapshot_tokens: int = 0) -> None:
        self._groups = {group.name: group for group in groups}
        assert len(self._groups) == len(groups), "two cache groups of one name"
        for group in groups:
            if group.num_blocks < 1 or group.tokens_per_block < 1:
                fact = f"cache group {group.name} has {group.num_blocks} blocks of {group.tokens_per_block} tokens"
                raise CapacityError(fact, "Raise cache_bytes, or lower tokens_per_block.")
        self._rows = [group for group in groups if group.kind == "rows"]
        self._states = [group for group in groups if group.kind == "state"]
        sizes = {group.tokens_per_block for group in self._rows} or {16}
        if prefix_cache and len(sizes) > 1:
            raise ConfigError(f"rows groups have blocks of {sorted(sizes)} tokens", "Use one size for all, or prefix_cache=False.")
        self.prefix_cache, self.identity, self.snapshot_tokens = prefix_cache, identity, snapshot_tokens
        self.tokens_per_block = min(sizes)
        self.index = PrefixIndex(
            tokens_per_block=self.tokens_per_block, num_rows_groups=len(self._rows), num_state_groups=len(self._states), drop=self._drop_kind)
        self._blocks = {group.name: Blocks(group) for group in groups}
        self._of_rows = [self._blocks[group.name] for group in self._rows]
        self._of_states = [self._blocks[group.name] for group in self._states]
        self._held: dict[int, Holding] = {}
        # dicts are sets that keep the order
        self._fresh: dict[str, dict[int, None]] = {name: {} for name in self._groups}
        self._scrub: dict[str, dict[int, None]] = {name: {} for name in self._groups}
        self._num_pending = 0

    @property
    def capacity_tokens(self) -> int | None:
        """Length of the longest sequence that an empty cache holds; None: no group grows with length."""
        return min((group.num_blocks * group.tokens_per_block for group in self._rows), default=None)

    def match(self, tokens: Sequence[int], *, salt: bytes = b"", chain: Chain | None = None) -> Prefix:
        """The longest computed prefix that all groups can resume from, one token short of all at most; `chain`: that of an earlier match."""
        chain = chain or Chain(root_key(self.identity, salt), self.tokens_per_block)
        if not self.prefix_cache:
            return Prefix(match=Match(chain=chain))
        found = self.index.match(chain, tokens, len(tokens) - 1)
        mark = found.rows_tokens - found.rows_tokens % self.tokens_per_block if self._states else 0
        return Prefix(found.num_tokens, mark if mark > found.num_tokens else 0, found)

    def explain(self, tokens: Sequence[int], *, salt: bytes = b"") -> dict[str, Any]:
        """How many tokens could be reused now, how far each group reaches, and why it is not more."""
        match = self.match(tokens, salt=salt).match
        rows = match.rows_tokens if self.prefix_cache else 0
        reach = {group.name: rows if group.kind == "rows" else match.num_tokens for group in self._groups.values()}
        return {
            "matched_tokens": match.num_tokens, "by_group": reach,
            "reason": match.limit(len(tokens)) if self.prefix_cache else "the prefix cache is off",
            "minimum_reusable_tokens": 1 if self._states else self.tokens_per_block,
        }

    def reserve(
        self, seq_id: int, num_tokens: int, *, prefix: Prefix | None = None, upto: int = 0, spare: Mapping[str, int] = _NOTHING
    ) -> BlockTable | None:
        """Make the table hold `num_tokens`: in all groups, or None and nothing has changed.

        Also None when afterwards it could not grow on to `upto` tokens with `spare` blocks per group left over for others.
        """
        held = self._held.get(seq_id)
        match = prefix.match if prefix is not None and held is None else Match()
        lacking: list[tuple[str, int]] = []
        for name, group in self._groups.items():
            have = len(match.rows) if group.kind == "rows" else 0
            if held is not None:
                have = len(held.table.blocks[name])
            count = group.blocks_for(num_tokens) - have
            most = max(count, group.blocks_for(upto) - have) if upto else count
            if most > 0 and most + spare.get(name, 0) > self._available(name, match):
                return None
            lacking.append((name, count))
        if held is None:
            held = self._open(seq_id, prefix or Prefix())
        for name, count in lacking:
            if count > 0:
                self._make_room(name, count)
                taken = self._blocks[name].take(count)
                held.table.blocks[name].extend(taken)
                self._fresh[name].update(dict.fromkeys(taken))
        if held.source is not None and not held.resumed:
            self._resume(held, held.source)
        return held.table

    def next_mark(self, seq_id: int, begin: int, num_prompt: int) -> int | None:
        """The next length after `begin` at which a snapshot is wanted: the prompt's end less one, a branch seen again, the grid."""
        if not self.prefix_cache or not self._states:
            return None
        marks = [num_prompt - 1, self._held[seq_id].mark]
        if self.snapshot_tokens:
            marks.append(begin - begin % self.snapshot_tokens + self.snapshot_tokens)
        return min((mark for mark in marks if mark > begin), default=None)

    def snapshot(self, seq_id: int, tokens: Sequence[int], num_tokens: int) -> None:
        """Copy the states after this step, when `num_tokens` will be computed, if a slot can be had; `commit` lists the copy."""
        held = self._held[seq_id]
        held.chain.extend(tokens, num_tokens)
        if held.pending is not None or held.chain.key(tokens, num_tokens) in self.index.kept:
            return
        slots = self._slots_for_snapshot()
        if slots is None:
            return
        for group, slot in zip(self._states, slots, strict=True):
            held.transfers.append(Transfer(group.name, held.table.blocks[group.name][0], slot, "after"))
        held.pending = (num_tokens, slots)
        self._num_pending += 1

    def commit(self, seq_id: int, tokens: Sequence[int], num_tokens: int | None = None) -> None:
        """Say that the first `num_tokens` of `tokens` (None: all) lie in the blocks: full blocks and the pending snapshot are listed."""
        held = self._held[seq_id]
        held.num_committed = len(tokens) if num_tokens is None else num_tokens
        if held.source is not None:
            self.index.kept.unpin(held.source)
            held.source = None
        if not self.prefix_cache:
            return
        held.chain.extend(tokens, held.num_committed)
        self._publish(held)
        if held.pending is not None:
            (position, slots), held.pending = held.pending, None
            self._num_pending -= 1
            if position != held.num_committed or not self._list_snapshot(held, tokens, position, slots):
                self._drop_kind("state", slots)

    def release(self, seq_id: int, *, scrub: bool = False, tokens: Sequence[int] | None = None) -> None:
        """Take all blocks of a sequence back; unknown ids are fine.

        `tokens`: its states are kept as a snapshot of what was committed. `scrub`: its content is dangerous: what it published is
        withdrawn, and its own blocks are put on the list of `take_scrub`.
        """
        held = self._held.pop(seq_id, None)
        if held is None:
            return
        if held.source is not None:
            self.index.kept.unpin(held.source)
        if held.pending is not None:
            self._num_pending -= 1
            self._drop_kind("state", held.pending[1])
        if scrub:
            # what it resumed from may be what ruined it
            self.index.withdraw(held.rows, [*held.kept, *([held.origin] if held.origin else [])])
            self.mark_scrub(self._private(held))
        elif tokens is not None and self.prefix_cache and self._states and held.num_committed and held.source is None:
            self._keep_state(held, tokens)
        self.index.give_back(held.rows)
        for name, blocks in held.table.blocks.items():
            self._blocks[name].give_back(reversed(blocks))

    def adopt_rows(self, key: bytes, parent: bytes, fill: Fill) -> bool:
        """List a full block of every rows group whose content comes from outside; `parent` is the key of the block before.

        False: it is listed already, there is no room, or `fill` could not fill a block. Note: only between steps, for a batch in flight
        may have been told to clear what is free now.
        """
        if not self.prefix_cache or not self._rows or self.index.has_rows(key):
            return False
        blocks = self._filled(self._of_rows, fill)
        if blocks is not None:
            self.index.adopt(key, parent, blocks)
        return blocks is not None

    def adopt_snapshot(self, key: bytes, parent: bytes, num_tokens: int, fill: Fill) -> bool:
        """List states after `num_tokens` that come from outside, with the rows behind the last full block, whose key is `parent`.

        Otherwise like `adopt_rows`; a snapshot of less worth makes room.
        """
        if not self.prefix_cache or not self._states or key in self.index.kept or not self._room_for_snapshot():
            return False
        blocks = self._filled([*self._of_states, *(self._of_rows if num_tokens % self.tokens_per_block else ())], fill)
        if blocks is not None:
            count = len(self._states)
            self.index.kept.keep(Snapshot(key, parent, num_tokens, blocks[:count], blocks[count:]))
        return blocks is not None

    def disable(self) -> None:
        """Forget every cached prefix and keep none any more."""
        self.reset()
        self.prefix_cache = False

    def reset(self) -> None:
        """Forget every cached prefix; running sequences keep their blocks."""
        self.index.clear()
        for held in self._held.values():
            held.own.clear()
            held.kept.clear()

    def mark_scrub(self, blocks: Mapping[str, Iterable[int]]) -> None:
        """Put blocks on the list of `take_scrub`: for those that a step should have prepared and did not."""
        for name, ids in blocks.items():
            self._scrub[name].update(dict.fromkeys(ids))

    def take_fresh(self) -> Mapping[str, tuple[int, ...]]:
        """Blocks that changed hands since the last call: old content must not be read."""
        return drain(self._fresh)

    def take_scrub(self) -> Mapping[str, tuple[int, ...]]:
        """Blocks to zero before the next compute: released since the last call by a sequence that failed."""
        return drain(self._scrub)

    def take_transfers(self) -> tuple[Transfer, ...]:
        """Copies that the next step must do; those of a sequence that was released meanwhile are gone with it."""
        taken = [transfer for held in self._held.values() for transfer in held.transfers]
        for held in self._held.values():
            held.transfers.clear()
        return tuple(taken)

    def fits(self, *num_tokens: int) -> bool:
        """Whether an empty cache holds sequences of these lengths together."""
        return all(sum(map(group.blocks_for, num_tokens)) <= group.num_blocks for group in self._groups.values())

    def growth(self, lengths: Mapping[int, int]) -> dict[str, int]:
        """Blocks per group that these sequences (id -> length) lack to be so long."""
        found = dict.fromkeys(self._groups, 0)
        for seq_id, num_tokens in lengths.items():
            held = self._held.get(seq_id)
            for name, group in self._groups.items():
                have = len(held.table.blocks[name]) if held is not None else 0
                found[name] += max(0, group.blocks_for(num_tokens) - have)
        return found

    def usage(self, kind: str | None = None) -> float:
        """Share of the fullest group, of all or of a kind, that running sequences use, 0 to 1; what is only cached counts as free."""
        return max((each.num_used / each.group.num_blocks for each in self._blocks.values() if kind in (None, each.group.kind)), default=0.0)

    def counts(self) -> dict[str, dict[str, str | int]]:
        """Per group: kind, and blocks in total, free, used by sequences, cached only."""
        return {
            name: {"kind": blocks.group.kind, "total": blocks.group.num_blocks, "free": len(blocks.free), "used": blocks.num_used,
                   "cached": blocks.num_cached}
            for name, blocks in self._blocks.items()
        }

    def prefix_counts(self) -> dict[str, int | bool]:
        """Blocks and snapshots that can be found, blocks nobody can resume from, and what was evicted or withdrawn since the start."""
        counts = self.index.counts
        return {
            "on": self.prefix_cache, "rows": self.index.num_rows, "snapshots": self.index.num_snapshots, "wasted_rows": self.index.waste(),
            "evicted_rows": counts.evicted_rows, "evicted_snapshots": counts.evicted_snapshots, "withdrawn": counts.withdrawn,
        }

    def check(self) -> None:
        """Assert conservation: references add up, free blocks have none, states have one table, tables are long enough."""
        listed = list(self.index.holdings()) + [("state", held.pending[1]) for held in self._held.values() if held.pending]
        for kind, groups in (("rows", self._rows), ("state", self._states)):
            for place, group in enumerate(groups):
                tables = [block for held in self._held.values() for block in held.table.blocks[group.name]]
                self._blocks[group.name].check(tables, [blocks[place] for each, blocks in listed if each == kind])
                assert kind == "rows" or len(tables) == len(set(tables)), f"{group.name}: two sequences write one state"
        for seq_id, held in self._held.items():
            for name, group in self._groups.items():
                have, needed = len(held.table.blocks[name]), group.blocks_for(held.num_committed)
                assert have >= needed, f"{name}: sequence {seq_id} committed {needed} blocks and holds {have}"

    def _available(self, name: str, match: Match) -> int:
        """Blocks that can be had: free, or cached and neither wanted by this match nor being copied."""
        if self._groups[name].kind == "state":
            kept_back = self.index.num_pinned + self._num_pending + (match.snapshot is not None and not match.snapshot.num_pins)
        else:
            kept_back = sum(1 for rows in match.rows if not rows.num_users) + self.index.num_pinned_tails
            kept_back += match.snapshot is not None and bool(match.snapshot.tail) and not match.snapshot.num_pins
        blocks = self._blocks[name]
        return len(blocks.free) + max(0, blocks.num_cached - kept_back)

    def _open(self, seq_id: int, prefix: Prefix) -> Holding:
        match = prefix.match
        assert self.index.holds(match), "a match outlived what it found"
        self.index.take(match)
        table = BlockTable(seq_id, {name: array("q") for name in self._groups})
        chain = match.chain or Chain(root_key(self.identity, b""), self.tokens_per_block)
        held = self._held[seq_id] = Holding(
            table, chain, list(match.rows), len(match.rows), prefix.num_tokens, prefix.mark, match.snapshot, match.snapshot,
            origin=match.snapshot)
        for rows in match.rows:
            for blocks, block in zip(self._of_rows, rows.blocks, strict=True):
                table.blocks[blocks.group.name].append(block)
                blocks.share(block)
        return held

    def _make_room(self, name: str, count: int) -> None:
        """Evict cached blocks until so many are free; `_available` has promised that this works."""
        rows = self._groups[name].kind == "rows"
        while len(self._blocks[name].free) < count:
            found = self.index.evict_rows() if rows else self.index.evict_snapshot()
            assert found, f"{name}: {count} blocks were promised, nothing is left to evict"

    def _filled(self, groups: Sequence[Blocks], fill: Fill) -> tuple[int, ...] | None:
        """One block per group that `fill` has filled, held by the index; None: it could not, or there is no room, and none is held."""
        if any(self._available(blocks.group.name, Match()) < 1 for blocks in groups):
            return None
        places: list[tuple[Blocks, int]] = []
        filled = False
        try:
            for blocks in groups:
                self._make_room(blocks.group.name, 1)
                places.append((blocks, blocks.take_for_index()))
            filled = all(fill(blocks.group.name, block) for blocks, block in places)
        finally:
            for blocks, block in places:
                if not filled:
                    blocks.unlist(block)
                else:
                    # whoever had it before may have left word that it must be cleared
                    self._fresh[blocks.group.name].pop(block, None)
                    self._scrub[blocks.group.name].pop(block, None)
        return tuple(block for _, block in places) if filled else None

    def _drop_kind(self, kind: str, blocks: tuple[int, ...]) -> None:
        """The index lets go of one block per group of a kind."""
        for each, block in zip(self._of_rows if kind == "rows" else self._of_states, blocks, strict=True):
            each.unlist(block)

    def _publish(self, held: Holding) -> None:
        begin, end = held.num_published, held.num_committed // self.tokens_per_block
        if not self._rows or begin >= end:
            return
        for i, blocks in enumerate(zip(*(held.table.blocks[group.name][begin:end] for group in self._rows), strict=True), begin):
            rows = self.index.publish(held.chain.keys[i], held.chain.at(i), blocks, held.rows[-1] if held.rows else None)
            if rows is not None:
                for each, block in zip(self._of_rows, blocks, strict=True):
                    each.list(block)
                held.rows.append(rows)
                held.own.append(rows)
        held.num_published = end

    def _resume(self, held: Holding, source: Snapshot) -> None:
        """Copy what would be written on: the states, and the rows of an unfinished block."""
        held.resumed = True
        for group, slot in zip(self._states, source.slots, strict=True):
            held.transfers.append(Transfer(group.name, slot, held.table.blocks[group.name][0]))
        place = source.num_tokens // self.tokens_per_block
        for group, block in zip(self._rows if source.tail else (), source.tail, strict=True):
            held.transfers.append(Transfer(group.name, block, held.table.blocks[group.name][place]))

    def _slots_for_snapshot(self) -> tuple[int, ...] | None:
        """A slot per state group within what snapshots may take; the least valuable one makes room."""
        if not self._room_for_snapshot():
            return None
        if any(not blocks.free for blocks in self._of_states) and not self.index.evict_snapshot():
            return None
        return tuple(blocks.take_for_index() for blocks in self._of_states)

    def _room_for_snapshot(self) -> bool:
        most = min(group.num_kept for group in self._states)
        if self.index.num_snapshots + self._num_pending < most:
            return True
        return most > 0 and self.index.evict_snapshot()

    def _list_snapshot(self, held: Holding, tokens: Sequence[int], position: int, slots: tuple[int, ...]) -> bool:
        key = held.chain.key(tokens, position)
        if key in self.index.kept:
            return False
        place, rest = divmod(position, self.tokens_per_block)
        tail = tuple(held.table.blocks[group.name][place] for group in self._rows) if rest else ()
        for blocks, block in zip(self._of_rows if tail else (), tail, strict=True):
            blocks.list(block)
        # at a branch, two sequences have come past
        snapshot = Snapshot(key, held.chain.at(place), position, slots, tail, num_uses=2 if position == held.mark else 0)
        self.index.kept.keep(snapshot, held.last)
        held.kept.append(snapshot)
        held.last = snapshot
        return True

    def _keep_state(self, held: Holding, tokens: Sequence[int]) -> None:
        """The sequence is over: its own slots become the snapshot, nothing is copied."""
        if held.chain.key(tokens, held.num_committed) in self.index.kept or not self._room_for_snapshot():
            return
        slots = tuple(held.table.blocks[group.name][0] for group in self._states)
        for blocks, slot in zip(self._of_states, slots, strict=True):
            blocks.list(slot)
        self._list_snapshot(held, tokens, held.num_committed, slots)

    def _private(self, held: Holding) -> dict[str, list[int]]:
        return {name: [block for block in ids if self._blocks[name].references[block] == 1] for name, ids in held.table.blocks.items()}
