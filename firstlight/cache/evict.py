"""What is worth keeping: a pure function and an order, so that a policy can be tried in a simulation. No torch."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")

SECOND_CHANCE = 0.125
"""Uses to expect of a snapshot that somebody went on from: a turn may be edited or generated again."""


def worth(*, num_tokens: int, num_uses: int, continued: bool) -> float:
    """Tokens that a snapshot will save: its length times the uses to expect.

    An open end is expected to be used once more than it was. One that a longer snapshot continues has handed one use on to that; what is
    left are the uses of others, who branched off here. All snapshots of a model have the same size, so tokens order them as tokens per
    byte would.
    """
    return num_tokens * (max(0, num_uses - 1) + SECOND_CHANCE if continued else num_uses + 1)


class Ranking(Generic[T]):
    """Things by worth, which fades: each ranks with its worth above the level, and the level rises to the rank of what was let go.

    Every call costs at most the logarithm of the number of things, amortised. Source: GreedyDual, Young 1994 (doi 10.1007/BF01189992).
    """

    def __init__(self) -> None:
        self.level = 0.0
        self._heap: list[tuple[float, int, T]] = []
        self._ranks: dict[T, tuple[float, int]] = {}
        self._levels: dict[T, float] = {}
        self._num_puts = 0

    def __len__(self) -> int:
        return len(self._ranks)

    def put(self, item: T, value: float) -> None:
        """Rank a thing that is used now, new or not."""
        self._levels[item] = self.level
        self._rank(item, value)

    def revalue(self, item: T, value: float) -> None:
        """Give a thing another worth without counting that as a use; no-op for one that is not ranked."""
        if item in self._ranks:
            self._rank(item, value)

    def drop(self, item: T) -> None:
        """Forget a thing; no-op for one that is not ranked."""
        self._ranks.pop(item, None)
        self._levels.pop(item, None)

    def sink(self) -> T | None:
        """Let the least go for want of room, the oldest of equals: what was used since gains on what was not. None: nothing is ranked."""
        while self._heap:
            level, number, item = heappop(self._heap)
            if self._ranks.get(item) == (level, number):
                self.level = level
                self.drop(item)
                return item
        return None

    def _rank(self, item: T, value: float) -> None:
        self._num_puts += 1
        self._ranks[item] = (self._levels[item] + value, self._num_puts)
        heappush(self._heap, (*self._ranks[item], item))
        if len(self._heap) > 2 * len(self._ranks) + 64:
            self._heap = [(*rank, each) for each, rank in self._ranks.items()]
            heapify(self._heap)
