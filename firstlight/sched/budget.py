"""What still fits into the step that is being put together."""

from __future__ import annotations

from dataclasses import dataclass, field

from firstlight.cache.blocks import BlockTable
from firstlight.sched.sequence import Chunk, Sequence


@dataclass(slots=True)
class StepPlan:
    """Chunks chosen so far and tokens left; `lane` is what long prefills may still take of `budget`.

    `spare`: times preempted -> blocks per group that running sequences must be left when one enters that was preempted so often.
    """

    budget: int
    lane: int = 0
    prefilling: bool = False
    chunks: dict[int, Chunk] = field(default_factory=dict)
    preempted: set[int] = field(default_factory=set)
    spare: dict[int, dict[str, int]] = field(default_factory=dict)

    def put(self, seq: Sequence, num_tokens: int, table: BlockTable) -> None:
        """Compute the next tokens of a sequence in this step."""
        self.chunks[seq.seq_id] = Chunk(seq, seq.num_computed, seq.num_computed + num_tokens, table)
        self.budget -= num_tokens

    def drop(self, seq_id: int) -> None:
        """Take a sequence out of the step because its blocks are taken away."""
        self.preempted.add(seq_id)
        self.spare.clear()
        chunk = self.chunks.pop(seq_id, None)
        if chunk is not None:
            self.budget += chunk.end - chunk.begin
