"""Which computed tokens lie where: published blocks and snapshots of states, by the key of the prefix that they end. No tensor, no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from firstlight.cache.keys import Chain
from firstlight.cache.snapshots import Snapshot, Snapshots


@dataclass(slots=True, eq=False)
class Rows:
    """A full block of every rows group, published under its key; `num_users` tables hold it.

    `before` is the block before it if every table that holds this one holds that one too; `num_after` counts the other direction.
    """

    key: bytes
    parent: bytes
    blocks: tuple[int, ...]
    before: Rows | None = None
    num_users: int = 0
    num_after: int = 0
    used: int = 0


@dataclass(frozen=True, slots=True)
class Match:
    """How far a prompt is known: `rows_tokens` by rows, `num_tokens` by all groups; the blocks and the snapshot to resume from."""

    num_tokens: int = 0
    rows_tokens: int = 0
    rows: tuple[Rows, ...] = ()
    snapshot: Snapshot | None = None
    chain: Chain | None = None

    def limit(self, num_tokens: int) -> str:
        """Why no more than this can be reused of a prompt."""
        if self.num_tokens >= num_tokens - 1:
            return "all but the last token is cached; one token is always computed"
        if self.num_tokens < self.rows_tokens:
            return f"rows are cached for {self.rows_tokens} tokens, but no state is kept behind token {self.num_tokens}; the next run keeps one"
        if not self.rows_tokens:
            return "nothing with this beginning is cached in this namespace"
        return f"what follows token {self.num_tokens} has not been computed yet, or was evicted"


@dataclass(slots=True)
class Counts:
    """Totals since the start."""

    evicted_rows: int = 0
    evicted_snapshots: int = 0
    withdrawn: int = 0
    adopted_rows: int = 0


class PrefixIndex:
    """Content by key. It holds one reference on each block it lists and calls `drop(kind, blocks)` when it lets go.

    Rows go in the order of their last use, the end of a path before its beginning; snapshots go by what they are worth.
    """

    def __init__(self, *, tokens_per_block: int, num_rows_groups: int, num_state_groups: int, drop: Callable[[str, tuple[int, ...]], None]) -> None:
        self.tokens_per_block = tokens_per_block
        self.counts = Counts()
        self.kept = Snapshots(tokens_per_block, drop)
        self._has_rows, self._has_states = num_rows_groups > 0, num_state_groups > 0
        self._drop = drop
        self._rows: dict[bytes, Rows] = {}
        self._idle: list[tuple[int, int, Rows]] = []  # a heap of ends that no table holds; entries may be out of date
        self._clock = 0
        self._num_pushes = 0

    @property
    def num_rows(self) -> int:
        """Published full blocks."""
        return len(self._rows)

    @property
    def num_snapshots(self) -> int:
        """Snapshots that can be found."""
        return len(self.kept)

    @property
    def num_pinned(self) -> int:
        """Snapshots that are being copied."""
        return len(self.kept.pinned)

    @property
    def num_pinned_tails(self) -> int:
        """Those among them that hold rows behind the last full block."""
        return sum(1 for snapshot in self.kept.pinned if snapshot.tail)

    def holdings(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(kind, blocks) of every reference that the index holds; a snapshot forgotten while it is copied still counts."""
        for rows in self._rows.values():
            yield "rows", rows.blocks
        for snapshot in {*self.kept, *self.kept.pinned}:
            yield "state", snapshot.slots
            if snapshot.tail:
                yield "rows", snapshot.tail

    def rows(self) -> Iterator[Rows]:
        """All published full blocks."""
        yield from self._rows.values()

    def snapshots(self) -> Iterator[Snapshot]:
        """All snapshots that can be found."""
        yield from self.kept

    def has_rows(self, key: bytes) -> bool:
        """Whether a full block is published under this key."""
        return key in self._rows

    def match(self, chain: Chain, tokens: Sequence[int], limit: int) -> Match:
        """The longest prefix of at most `limit` tokens that all groups can resume from; changes nothing but the chain."""
        chain.extend(tokens, len(tokens))
        rows = tuple(self._known(chain)) if self._has_rows else ()
        depth = min(len(rows) if self._has_rows else len(chain.keys), limit // self.tokens_per_block)
        covered = depth * self.tokens_per_block
        if not self._has_states:
            return Match(covered, covered, rows[:depth], None, chain)
        found = next(self.kept.on_path(chain, tokens, depth, limit), None)
        if found is None:
            return Match(0, covered, (), None, chain)
        return Match(found.num_tokens, max(covered, found.num_tokens), rows[: found.num_tokens // self.tokens_per_block], found, chain)

    def _known(self, chain: Chain) -> Iterator[Rows]:
        for key in chain.keys:
            rows = self._rows.get(key)
            if rows is None:
                return
            yield rows

    def holds(self, match: Match) -> bool:
        """Whether everything that was matched can still be found."""
        listed = match.snapshot is None or self.kept.lists(match.snapshot)
        return listed and all(self._rows.get(rows.key) is rows for rows in match.rows)

    def take(self, match: Match) -> None:
        """A table now holds what was matched: it cannot be evicted until given back."""
        for rows in match.rows:
            rows.num_users += 1
        if match.snapshot is not None:
            self.kept.pin(match.snapshot)

    def publish(self, key: bytes, parent: bytes, blocks: tuple[int, ...], before: Rows | None = None, *, num_users: int = 1) -> Rows | None:
        """List a full block; None when the prefix is known already. `before` is what the same table holds of the block before, if listed."""
        known = self._rows.get(key)
        if known is not None:
            # computed a second time, which would not have been needed a step later: that counts as a use
            self._clock += 1
            known.used = self._clock
            self._offer(known)
            return None
        linked = before if before is not None and before.key == parent and self._rows.get(parent) is before else None
        rows = self._rows[key] = Rows(key, parent, blocks, linked, num_users)
        if linked is not None:
            linked.num_after += 1
        return rows

    def give_back(self, rows: Sequence[Rows]) -> None:
        """A table lets go of published blocks."""
        self._clock += 1
        for each in reversed(rows):
            each.num_users -= 1
            each.used = self._clock
            self._offer(each)

    def adopt(self, key: bytes, parent: bytes, blocks: tuple[int, ...]) -> None:
        """List a full block that no table holds, as used now."""
        rows = self.publish(key, parent, blocks, self._rows.get(parent), num_users=0)
        assert rows is not None, "a block is listed twice"
        self._clock += 1
        rows.used = self._clock
        self._offer(rows)
        self.counts.adopted_rows += 1

    def evict_rows(self) -> bool:
        """Let go of the end of the least recently used path, or else of a snapshot that holds rows; False: nothing is left."""
        while self._idle:
            used, _, rows = heappop(self._idle)
            if self._rows.get(rows.key) is rows and not rows.num_users and not rows.num_after and rows.used == used:
                # whoever stands on this block cannot be resumed from without it
                for snapshot in self.kept.at(rows.key):
                    self.kept.forget(snapshot)
                    self.counts.evicted_snapshots += 1
                self._forget_rows(rows)
                self.counts.evicted_rows += 1
                return True
        return self._count(self.kept.evict_tail())

    def evict_snapshot(self) -> bool:
        """Let go of the least valuable snapshot; False: there is none that is not being copied."""
        return self._count(self.kept.evict())

    def withdraw(self, rows: Sequence[Rows], snapshots: Sequence[Snapshot]) -> None:
        """Nobody may find these any more: their content is in doubt. Tables that hold the blocks keep them."""
        for each in rows:
            if self._rows.get(each.key) is each:
                self._forget_rows(each)
                self.counts.withdrawn += 1
        for snapshot in snapshots:
            if self.kept.lists(snapshot):
                self.kept.forget(snapshot)
                self.counts.withdrawn += 1

    def clear(self) -> None:
        """Forget everything; blocks that tables hold stay theirs, snapshots being copied live until the copy is done."""
        for rows in list(self._rows.values()):
            self._forget_rows(rows)
        for snapshot in list(self.kept):
            self.kept.forget(snapshot)

    def waste(self) -> int:
        """Published blocks from which nobody can resume: no snapshot whose rows are all there stands at or behind them on their path."""
        if not self._has_states:
            return 0
        reachable: set[bytes] = set()
        for snapshot in self.kept:
            path, key = [], snapshot.parent
            while key in self._rows and key not in reachable:
                path.append(key)
                key = self._rows[key].parent
            if key in reachable or len(path) == snapshot.num_tokens // self.tokens_per_block:
                reachable.update(path)
        return len(self._rows) - len(reachable)

    def _count(self, evicted: bool) -> bool:
        self.counts.evicted_snapshots += evicted
        return evicted

    def _offer(self, rows: Rows) -> None:
        """Put a block in line for eviction if it may go; what goes on behind it goes first."""
        if rows.num_users or rows.num_after or self._rows.get(rows.key) is not rows:
            return
        self._num_pushes += 1
        heappush(self._idle, (rows.used, self._num_pushes, rows))
        if len(self._idle) > 2 * len(self._rows) + 64:
            latest = {entry[2].key: entry for entry in self._idle if entry[2].used == entry[0] and self._rows.get(entry[2].key) is entry[2]}
            self._idle = list(latest.values())
            heapify(self._idle)

    def _forget_rows(self, rows: Rows) -> None:
        del self._rows[rows.key]
        if rows.before is not None:
            rows.before.num_after -= 1
            self._offer(rows.before)
            rows.before = None
        self._drop("rows", rows.blocks)
