"""What still fits into the step that is being put together."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from firstlight.cache.blocks import BlockTable
from firstlight.sched.sequence import Chunk, Priority, Sequence

NOBODY = len(Priority)
"""An urgency below that of any sequence."""


@dataclass(frozen=True, slots=True)
class Price:
    """What a chunk has taken: worth of the step, and whether out of the lane."""

    worth: int
    laned: bool = False


@dataclass(slots=True)
class StepPlan:
    """Chunks chosen so far and what is left, in worth: a token at the start of a prompt is worth 1.

    `shares`: what running prefills of a priority may still take before all have had their turn; one that is not in it may take anything.
    `lane`: what long prefills may still take beside short ones whose priority is at least theirs: `urgent` is the first among these.
    `first_short`: the first priority of the short prefills that got a chunk.
    `alive`: sequences running and waiting, per priority.
    `spare`: times preempted -> blocks per group that running sequences must be left when one enters that was preempted so often.
    """

    budget: int
    alive: dict[Priority, int] = field(default_factory=dict)
    shares: dict[Priority, int] = field(default_factory=dict)
    lane: int = 0
    urgent: int = NOBODY
    first_short: int = NOBODY
    prefilling: bool = False
    blocked: bool = False
    chunks: dict[int, Chunk] = field(default_factory=dict)
    prices: dict[int, Price] = field(default_factory=dict)
    preempted: set[int] = field(default_factory=set)
    spare: dict[int, dict[str, int]] = field(default_factory=dict)

    def put(self, seq: Sequence, num_tokens: int, table: BlockTable, price: Price) -> None:
        """Compute the next tokens of a sequence in this step."""
        self.chunks[seq.seq_id] = Chunk(seq, seq.num_computed, seq.num_computed + num_tokens, table)
        self.prices[seq.seq_id] = price
        self.budget -= price.worth
        self.lane -= price.worth if price.laned else 0
        if seq.priority in self.shares:
            self.shares[seq.priority] -= price.worth

    def undo(self, seq: Sequence) -> int:
        """Take a sequence out of the step, and give back and say what it took; 0 for one that is not in it."""
        if self.chunks.pop(seq.seq_id, None) is None:
            return 0
        price = self.prices.pop(seq.seq_id)
        self.budget += price.worth
        self.lane += price.worth if price.laned else 0
        if seq.priority in self.shares:
            self.shares[seq.priority] += price.worth
        return price.worth

    def drop(self, seq: Sequence) -> None:
        """Take a sequence out of the step because its blocks are taken away."""
        self.preempted.add(seq.seq_id)
        self.spare.clear()
        self.undo(seq)

    def room(self, priority: Priority, *, long: bool) -> int:
        """What a prefill may take now."""
        lane = self.lane if long and self.urgent <= priority else sys.maxsize
        return max(0, min(self.budget, lane, self.shares.get(priority, sys.maxsize)))

    def lanes(self) -> tuple[Priority, ...]:
        """Priorities whose long prefills may take something now."""
        return tuple(priority for priority in Priority if self.room(priority, long=True) > 0)

    def alone(self, priority: Priority) -> bool:
        """Whether nobody of this priority or a higher one is there but the one who asks."""
        return sum(count for other, count in self.alive.items() if other <= priority) == 1

    def open(self) -> None:
        """Whoever has work takes what is left; long prefills beside short ones only out of the lane."""
        self.shares.clear()
        self.urgent = self.first_short
