"""Which computed tokens lie where: keys, published blocks, snapshots of states. No tensor, no torch.

A key names a whole prefix: key(i) = BLAKE2b(tokens of block i, keyed with key(i - 1)), 128 bits, starting from a root that holds
the model's identity and the caller's salt. Equal keys mean equal prefixes, in every process and on every machine.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from firstlight.cache.evict import worth

KEY_BYTES = 16


class Chain:
    """Keys of a sequence's full blocks; grows with the sequence, each token is hashed once."""

    __slots__ = ("_tokens_per_block", "keys", "root")

    def __init__(self, root: bytes, tokens_per_block: int) -> None:
        self.root = root
        self.keys: list[bytes] = []
        self._tokens_per_block = tokens_per_block

    def extend(self, tokens: Sequence[int], num_tokens: int) -> None:
        """Hash the full blocks among the first `num_tokens` that are not hashed yet."""
        size, begin = self._tokens_per_block, len(self.keys) * self._tokens_per_block
        end = num_tokens - num_tokens % size
        if end <= begin:
            return
        packed, key = memoryview(array("I", tokens[begin:end])).cast("B"), self.at(len(self.keys))
        step = size * array("I").itemsize
        for offset in range(0, len(packed), step):
            key = blake2b(packed[offset : offset + step], digest_size=KEY_BYTES, key=key).digest()
            self.keys.append(key)

    def at(self, num_blocks: int) -> bytes:
        """The key of the first blocks together; 0 blocks: the root."""
        return self.keys[num_blocks - 1] if num_blocks else self.root

    def key(self, tokens: Sequence[int], num_tokens: int) -> bytes:
        """The key of any number of tokens whose full blocks are hashed."""
        num_blocks, rest = divmod(num_tokens, self._tokens_per_block)
        return tail_key(self.at(num_blocks), tokens[num_tokens - rest : num_tokens]) if rest else self.at(num_blocks)


def root_key(identity: bytes, salt: bytes) -> bytes:
    """Where the chains of one model and one namespace start."""
    return blake2b(len(identity).to_bytes(8, "little") + identity + salt, digest_size=KEY_BYTES, person=b"firstlight.root").digest()


def tail_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a prefix that ends inside a block."""
    return blake2b(array("I", tokens).tobytes(), digest_size=KEY_BYTES, key=parent).digest()


@dataclass(slots=True, eq=False)
class Rows:
    """A full block of every rows group, published under its key; `num_users` tables hold it."""

    key: bytes
    parent: bytes
    blocks: tuple[int, ...]
    num_users: int = 0


@dataclass(slots=True, eq=False)
class Snapshot:
    """States after `num_tokens`, never written again; `tail` are the blocks of the rows behind the last full block."""

    key: bytes
    parent: bytes
    num_tokens: int
    slots: tuple[int, ...]
    tail: tuple[int, ...] = ()
    num_pins: int = 0
    num_hits: int = 0
    used: int = 0


@dataclass(frozen=True, slots=True)
class Match:
    """How far a prompt is known: `rows_tokens` by rows, `num_tokens` by all groups; the blocks and the snapshot to resume from."""

    num_tokens: int = 0
    rows_tokens: int = 0
    rows: tuple[Rows, ...] = ()
    snapshot: Snapshot | None = None
    chain: Chain | None = None


@dataclass(slots=True)
class Counts:
    """Totals since the start."""

    evicted_rows: int = 0
    evicted_snapshots: int = 0
    withdrawn: int = 0


class PrefixIndex:
    """Content by key. It holds one reference on each block it lists and calls `drop(kind, blocks)` when it lets go."""

    def __init__(self, *, tokens_per_block: int, num_rows_groups: int, num_state_groups: int, drop: Callable[[str, tuple[int, ...]], None]) -> None:
        self.tokens_per_block = tokens_per_block
        self.counts = Counts()
        self._has_rows, self._has_states = num_rows_groups > 0, num_state_groups > 0
        self._drop = drop
        self._rows: dict[bytes, Rows] = {}
        self._snapshots: dict[bytes, Snapshot] = {}
        self._tails: dict[bytes, dict[int, int]] = {}
        self._idle: OrderedDict[tuple[str, bytes], None] = OrderedDict()  # nobody's blocks, least recently used first
        self._pinned: set[Snapshot] = set()
        self._clock = 0

    @property
    def num_rows(self) -> int:
        """Published full blocks."""
        return len(self._rows)

    @property
    def num_pinned(self) -> int:
        """Snapshots that are being copied."""
        return len(self._pinned)

    @property
    def num_pinned_tails(self) -> int:
        """Those among them that hold rows behind the last full block."""
        return sum(1 for snapshot in self._pinned if snapshot.tail)

    def holdings(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(kind, blocks) of every reference that the index holds; a snapshot forgotten while it is copied still counts."""
        for rows in self._rows.values():
            yield "rows", rows.blocks
        for snapshot in {*self._snapshots.values(), *self._pinned}:
            yield "state", snapshot.slots
            if snapshot.tail:
                yield "rows", snapshot.tail

    @property
    def num_snapshots(self) -> int:
        """Snapshots kept."""
        return len(self._snapshots)

    def rows(self) -> Iterator[Rows]:
        """All published full blocks."""
        yield from self._rows.values()

    def snapshots(self) -> Iterator[Snapshot]:
        """All snapshots that can be found."""
        yield from self._snapshots.values()

    def match(self, chain: Chain, tokens: Sequence[int], limit: int) -> Match:
        """The longest prefix of at most `limit` tokens that all groups can resume from; changes nothing but the chain."""
        chain.extend(tokens, len(tokens))
        rows = tuple(self._known(chain)) if self._has_rows else ()
        depth = min(len(rows) if self._has_rows else len(chain.keys), limit // self.tokens_per_block)
        covered = depth * self.tokens_per_block
        if not self._has_states:
            return Match(covered, covered, rows[:depth], None, chain)
        found = next(self._resumable(chain, tokens, depth, limit), None)
        if found is None:
            return Match(0, covered, (), None, chain)
        return Match(found.num_tokens, max(covered, found.num_tokens), rows[: found.num_tokens // self.tokens_per_block], found, chain)

    def _known(self, chain: Chain) -> Iterator[Rows]:
        for key in chain.keys:
            rows = self._rows.get(key)
            if rows is None:
                return
            yield rows

    def _resumable(self, chain: Chain, tokens: Sequence[int], depth: int, limit: int) -> Iterator[Snapshot]:
        """Snapshots on the path, the longest first."""
        for num_blocks in range(depth, -1, -1):
            parent, begin = chain.at(num_blocks), num_blocks * self.tokens_per_block
            for rest in sorted(self._tails.get(parent, ()), reverse=True):
                if begin + rest <= limit:
                    found = self._snapshots.get(tail_key(parent, tokens[begin : begin + rest]))
                    if found is not None:
                        yield found
            if num_blocks and parent in self._snapshots:
                yield self._snapshots[parent]

    def holds(self, match: Match) -> bool:
        """Whether everything that was matched can still be found."""
        snapshot = match.snapshot
        listed = snapshot is None or self._snapshots.get(snapshot.key) is snapshot
        return listed and all(self._rows.get(rows.key) is rows for rows in match.rows)

    def take(self, match: Match) -> None:
        """A table now holds what was matched: it cannot be evicted until given back."""
        for rows in match.rows:
            self._use(rows)
        if match.snapshot is not None:
            match.snapshot.num_pins += 1
            self._pinned.add(match.snapshot)
            match.snapshot.num_hits += 1
            self._touch(match.snapshot)

    def unpin(self, snapshot: Snapshot) -> None:
        """The copy out of a snapshot is done; one that was forgotten meanwhile goes now."""
        snapshot.num_pins -= 1
        if snapshot.num_pins == 0:
            self._pinned.discard(snapshot)
        if self._snapshots.get(snapshot.key) is snapshot:
            self._touch(snapshot)
        elif snapshot.num_pins == 0:
            self._let_go(snapshot)

    def publish(self, key: bytes, parent: bytes, blocks: tuple[int, ...]) -> Rows | None:
        """List a full block that a table holds; None when the prefix is known already, the block stays the table's own."""
        if key in self._rows:
            return None
        rows = self._rows[key] = Rows(key, parent, blocks, 1)
        return rows

    def give_back(self, rows: Sequence[Rows]) -> None:
        """A table lets go of published blocks; the deepest become the first to be evicted."""
        for each in reversed(rows):
            each.num_users -= 1
            if each.num_users == 0 and self._rows.get(each.key) is each:
                self._idle[("rows", each.key)] = None
                self._idle.move_to_end(("rows", each.key))

    def keep(self, snapshot: Snapshot) -> None:
        """List a snapshot; its key must not be listed yet."""
        assert snapshot.key not in self._snapshots, "a snapshot is listed twice"
        self._snapshots[snapshot.key] = snapshot
        rest = snapshot.num_tokens % self.tokens_per_block
        if rest:
            counts = self._tails.setdefault(snapshot.parent, {})
            counts[rest] = counts.get(rest, 0) + 1
        self._touch(snapshot)

    def has_snapshot(self, key: bytes) -> bool:
        """Whether the state after this prefix is kept."""
        return key in self._snapshots

    def refresh(self, match: Match) -> None:
        """What was matched counts as used now, its end before its beginning."""
        for rows in reversed(match.rows):
            if rows.num_users == 0:
                self._idle.move_to_end(("rows", rows.key))

    def evict_rows(self) -> bool:
        """Let go of the least recently used thing that may free rows; False: nothing is left."""
        for kind, key in self._idle:
            if kind == "rows":
                self._forget_rows(self._rows[key])
                self.counts.evicted_rows += 1
                return True
            if self._snapshots[key].num_pins == 0:
                self._forget(self._snapshots[key])
                self.counts.evicted_snapshots += 1
                return True
        return False

    def evict_snapshot(self, at_most: float | None = None) -> bool:
        """Let go of the least valuable snapshot that is not being copied; False: there is none, or none worth less than `at_most`."""
        candidates = [snapshot for snapshot in self._snapshots.values() if snapshot.num_pins == 0]
        if not candidates:
            return False
        least = min(candidates, key=self.worth)
        if at_most is not None and self.worth(least) >= at_most:
            return False
        self._forget(least)
        self.counts.evicted_snapshots += 1
        return True

    def worth(self, snapshot: Snapshot) -> float:
        """The value of a snapshot now."""
        return worth(num_tokens=snapshot.num_tokens, num_hits=snapshot.num_hits, age=self._clock - snapshot.used)

    def withdraw(self, rows: Sequence[Rows], snapshots: Sequence[Snapshot]) -> None:
        """Nobody may find these any more: their content is in doubt. Tables that hold the blocks keep them."""
        for each in rows:
            if self._rows.get(each.key) is each:
                self._forget_rows(each)
                self.counts.withdrawn += 1
        for snapshot in snapshots:
            if self._snapshots.get(snapshot.key) is snapshot:
                self._forget(snapshot)
                self.counts.withdrawn += 1

    def clear(self) -> None:
        """Forget everything; blocks that tables hold stay theirs, snapshots being copied live until the copy is done."""
        for rows in list(self._rows.values()):
            self._forget_rows(rows)
        for snapshot in list(self._snapshots.values()):
            self._forget(snapshot)

    def waste(self) -> int:
        """Published blocks from which nobody can resume: no snapshot stands at or behind them on their path."""
        if not self._has_states:
            return 0
        reachable: set[bytes] = set()
        for snapshot in self._snapshots.values():
            key = snapshot.parent
            while key in self._rows and key not in reachable:
                reachable.add(key)
                key = self._rows[key].parent
        return len(self._rows) - len(reachable)

    def _use(self, rows: Rows) -> None:
        rows.num_users += 1
        self._idle.pop(("rows", rows.key), None)

    def _touch(self, snapshot: Snapshot) -> None:
        self._clock += 1
        snapshot.used = self._clock
        if self._snapshots.get(snapshot.key) is snapshot:
            self._idle[("snapshot", snapshot.key)] = None
            self._idle.move_to_end(("snapshot", snapshot.key))

    def _forget_rows(self, rows: Rows) -> None:
        del self._rows[rows.key]
        self._idle.pop(("rows", rows.key), None)
        self._drop("rows", rows.blocks)

    def _forget(self, snapshot: Snapshot) -> None:
        del self._snapshots[snapshot.key]
        self._idle.pop(("snapshot", snapshot.key), None)
        rest = snapshot.num_tokens % self.tokens_per_block
        if rest:
            counts = self._tails[snapshot.parent]
            counts[rest] -= 1
            if not counts[rest]:
                del counts[rest]
            if not counts:
                del self._tails[snapshot.parent]
        if snapshot.num_pins == 0:
            self._let_go(snapshot)

    def _let_go(self, snapshot: Snapshot) -> None:
        self._drop("state", snapshot.slots)
        if snapshot.tail:
            self._drop("rows", snapshot.tail)
