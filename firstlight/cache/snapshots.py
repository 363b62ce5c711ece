"""Which states are kept, where on their paths, and which goes first. No tensor, no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from firstlight.cache.evict import Ranking, worth
from firstlight.cache.keys import Chain, tail_key


@dataclass(slots=True, eq=False)
class Snapshot:
    """States after `num_tokens`, never written again; `tail` are the blocks of the rows behind the last full block, whose key is `parent`.

    `num_uses`: sequences that came past here, as far as anybody saw. `continued`: a longer one was kept on the way of one of them.
    """

    key: bytes
    parent: bytes
    num_tokens: int
    slots: tuple[int, ...]
    tail: tuple[int, ...] = ()
    num_uses: int = 0
    continued: bool = False
    num_pins: int = 0


class Snapshots:
    """Snapshots by key, and by the block that they stand in. Calls `drop(kind, blocks)` when it lets go of one.

    One that is being copied is pinned: it is not let go before the copy is done, even if it is forgotten meanwhile.
    """

    def __init__(self, tokens_per_block: int, drop: Callable[[str, tuple[int, ...]], None]) -> None:
        self.pinned: set[Snapshot] = set()
        self._tokens_per_block = tokens_per_block
        self._drop = drop
        self._by_key: dict[bytes, Snapshot] = {}
        self._tails: dict[bytes, dict[int, dict[bytes, Snapshot]]] = {}  # parent -> tokens behind it -> key
        self._ranking: Ranking[Snapshot] = Ranking()

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self._by_key.values())

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    def lists(self, snapshot: Snapshot) -> bool:
        """Whether this very snapshot can be found."""
        return self._by_key.get(snapshot.key) is snapshot

    def on_path(self, chain: Chain, tokens: Sequence[int], num_blocks: int, limit: int) -> Iterator[Snapshot]:
        """Those of a sequence within `limit` tokens and not behind the block after `num_blocks`, the longest first."""
        for depth in range(num_blocks, -1, -1):
            parent, begin = chain.at(depth), depth * self._tokens_per_block
            tails = self._tails.get(parent, {})
            for rest in sorted(tails, reverse=True):
                found = tails[rest].get(tail_key(parent, tokens[begin : begin + rest])) if begin + rest <= limit else None
                if found is not None:
                    yield found
            if depth and parent in self._by_key:
                yield self._by_key[parent]

    def at(self, key: bytes) -> list[Snapshot]:
        """Those that need the block of this key as their last full one."""
        found = [snapshot for by_key in self._tails.get(key, {}).values() for snapshot in by_key.values()]
        return [*found, self._by_key[key]] if key in self._by_key else found

    def keep(self, snapshot: Snapshot, after: Snapshot | None = None) -> None:
        """List a snapshot whose key is not listed; `after` is the one before it on the way of its sequence."""
        assert snapshot.key not in self._by_key, "a snapshot is listed twice"
        self._by_key[snapshot.key] = snapshot
        rest = snapshot.num_tokens % self._tokens_per_block
        if rest:
            self._tails.setdefault(snapshot.parent, {}).setdefault(rest, {})[snapshot.key] = snapshot
        self._ranking.put(snapshot, _worth(snapshot))
        if after is not None:
            after.continued = True
            self._ranking.revalue(after, _worth(after))

    def pin(self, snapshot: Snapshot) -> None:
        """A sequence goes on from here: until the copy is done, this snapshot stays."""
        snapshot.num_pins += 1
        snapshot.num_uses += 1
        self.pinned.add(snapshot)
        self._ranking.drop(snapshot)

    def unpin(self, snapshot: Snapshot) -> None:
        """The copy is done; a snapshot that was forgotten meanwhile goes now."""
        snapshot.num_pins -= 1
        if snapshot.num_pins:
            return
        self.pinned.discard(snapshot)
        if self.lists(snapshot):
            self._ranking.put(snapshot, _worth(snapshot))
        else:
            self._let_go(snapshot)

    def evict(self) -> bool:
        """Let go of the least valuable one; False: all are being copied."""
        least = self._ranking.sink()
        if least is not None:
            self.forget(least)
        return least is not None

    def evict_tail(self) -> bool:
        """Let go of one that holds rows; False: none does, or they are being copied."""
        found = min((each for each in self if each.tail and not each.num_pins), key=_worth, default=None)
        if found is not None:
            self.forget(found)
        return found is not None

    def forget(self, snapshot: Snapshot) -> None:
        """Nobody may find it any more."""
        del self._by_key[snapshot.key]
        self._ranking.drop(snapshot)
        rest = snapshot.num_tokens % self._tokens_per_block
        if rest:
            tails = self._tails[snapshot.parent]
            del tails[rest][snapshot.key]
            if not tails[rest]:
                del tails[rest]
            if not tails:
                del self._tails[snapshot.parent]
        if not snapshot.num_pins:
            self._let_go(snapshot)

    def _let_go(self, snapshot: Snapshot) -> None:
        self._drop("state", snapshot.slots)
        if snapshot.tail:
            self._drop("rows", snapshot.tail)


def _worth(snapshot: Snapshot) -> float:
    return worth(num_tokens=snapshot.num_tokens, num_uses=snapshot.num_uses, continued=snapshot.continued)
