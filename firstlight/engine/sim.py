"""An engine without a model: a clock that only moves when a step says so, a price per step, tokens out of a hash. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from firstlight.cache.blocks import Group
from firstlight.sched.sequence import Batch, Chunk, StepResult

_WORD = (1 << 64) - 1


class VirtualClock:
    """Time as a number that is moved by hand. Units: seconds."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """The time."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What a step costs: a fixed part, a part per new token, and one per token of context that a new token attends to."""

    step_s: float = 2e-3
    prefill_token_s: float = 5e-5
    decode_token_s: float = 2e-4
    context_token_s: float = 1e-9

    def seconds(self, batch: Batch) -> float:
        """Duration of a batch; a chunk of one token is priced as a decode."""
        total = self.step_s
        for chunk in batch.chunks:
            count = chunk.end - chunk.begin
            token_s = self.decode_token_s if count == 1 else self.prefill_token_s
            attended = count * chunk.begin + count * (count + 1) // 2
            total += count * token_s + attended * self.context_token_s
        return total


class SimRunner:
    """Moves the clock by the cost of each batch and draws tokens that depend on what a sequence holds, never on its neighbours.

    With a memory, tokens come out of the blocks of the table, so a wrong block shows; without, they cost the same at any length.
    """

    def __init__(
        self, clock: VirtualClock, cost: StepCost | None = None, *, num_vocab: int = 1000, seed: int = 0, memory: SimMemory | None = None
    ) -> None:
        self.clock, self.cost = clock, cost or StepCost()
        self.num_vocab, self.seed, self.memory = num_vocab, seed, memory

    def run(self, batch: Batch) -> StepResult:
        """Draw one token per sampling chunk; a sequence whose memory is spoiled fails alone."""
        seconds = self.cost.seconds(batch)
        self.clock.advance(seconds)
        if self.memory is not None:
            self.memory.prepare(batch)
        next_tokens: dict[int, int] = {}
        errors: dict[int, str] = {}
        for chunk in batch.chunks:
            told = self._content(chunk)
            if told is None:
                errors[chunk.seq.seq_id] = f"the memory before position {chunk.end} is spoiled"
            elif chunk.samples:
                next_tokens[chunk.seq.seq_id] = _mix(_mix(told, self.seed), chunk.end) % self.num_vocab
        if self.memory is not None:
            self.memory.copy(batch, "after")
        return StepResult(next_tokens, seconds, errors)

    def close(self) -> None:
        """Nothing to give back."""

    def _content(self, chunk: Chunk) -> int | None:
        if self.memory is not None:
            return self.memory.compute(chunk)
        return _mix(chunk.seq.num_prompt, chunk.seq.tokens[chunk.end - 1])


class SimMemory:
    """Blocks as a pool would hold them, each slot with the token written there and each state with the fold of its tokens.

    Reads what a model would read and nothing else: rows and states that were never written, or written by a stranger, are noticed.
    Note: work grows with the context; it is a witness for tests, not for long simulations.
    """

    def __init__(self, groups: Iterable[Group]) -> None:
        self.groups = {group.name: group for group in groups}
        self._rows: dict[tuple[str, int], int | None] = {}
        self._states: dict[tuple[str, int], int | None] = {}

    def prepare(self, batch: Batch) -> None:
        """Spoil what changed hands, so that reading it before writing is noticed; then do the copies."""
        for blocks in (batch.scrub, batch.fresh):
            for name, ids in blocks.items():
                for block in ids:
                    self.fill(name, block, None)
        self.copy(batch, "before")

    def copy(self, batch: Batch, when: str) -> None:
        """Do the copies of one moment of the step."""
        for move in batch.transfers:
            if move.when != when:
                continue
            group = self.groups[move.group]
            if group.kind == "state":
                self._states[move.group, move.target] = self._states.get((move.group, move.source))
                continue
            size = group.tokens_per_block
            for place in range(size):
                self._rows[move.group, move.target * size + place] = self._rows.get((move.group, move.source * size + place))

    def spoil(self, chunk: Chunk) -> None:
        """Ruin what a sequence remembers, as one non-finite value would."""
        for name, ids in chunk.table.blocks.items():
            for block in ids:
                self.fill(name, block, None)

    def fill(self, name: str, block: int, value: int | None) -> None:
        """Overwrite a block from outside; None spoils it."""
        group = self.groups[name]
        if group.kind == "state":
            self._states[name, block] = value
            return
        for slot in range(block * group.tokens_per_block, (block + 1) * group.tokens_per_block):
            self._rows[name, slot] = value

    def compute(self, chunk: Chunk) -> int | None:
        """Write the rows and states of a chunk, then fold all that it attends to; None: something there is not its own."""
        fold = 0
        for name, group in self.groups.items():
            ids = chunk.table.blocks[name]
            read = self._state(name, ids[0], chunk) if group.kind == "state" else self._attend(name, group, chunk)
            if read is None:
                return None
            fold = _mix(fold, read)
        return fold

    def _state(self, name: str, block: int, chunk: Chunk) -> int | None:
        fold = self._states.get((name, block)) if chunk.continues else 0
        if fold is not None:
            for token in chunk.seq.tokens[chunk.begin : chunk.end]:
                fold = _mix(fold, token)
        self._states[name, block] = fold
        return fold

    def _attend(self, name: str, group: Group, chunk: Chunk) -> int | None:
        ids, size = chunk.table.blocks[name], group.tokens_per_block
        slots = [(name, ids[position // size] * size + position % size) for position in range(chunk.end)]
        for position in range(chunk.begin, chunk.end):
            self._rows[slots[position]] = chunk.seq.tokens[position]
        fold = 1
        for slot in slots:
            row = self._rows.get(slot)
            if row is None:
                return None
            fold = _mix(fold, row)
        return fold


def _mix(left: int, right: int) -> int:
    """A 64-bit hash of two numbers, the same in every process."""
    word = (left * 0x9E3779B97F4A7C15 + right + 0x632BE59BD9B4E019) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)
