"""An engine without a model: a clock that only moves when a step says so, a price per step, tokens out of a hash. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import accumulate

from firstlight.cache.blocks import Group
from firstlight.sched.sequence import Batch, Chunk, StepResult

_WORD = (1 << 64) - 1
_SPOILED = -1


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

    With a memory, tokens come out of the blocks of the table and a wrong block is an AssertionError; without, they follow from the last
    token and the length alone and cost the same at any context.
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
    """Blocks as a pool would hold them: each row and each state with the fold of all tokens up to it, each block with its owner.

    What a sequence would read and did not write is our own mistake and an AssertionError. Spoiled memory fails the sequences that touch it.
    Note: work grows with the context; it is a witness for tests, not for long simulations.
    """

    def __init__(self, groups: Iterable[Group]) -> None:
        self.groups = {group.name: group for group in groups}
        self._rows: dict[tuple[str, int], int] = {}
        self._states: dict[tuple[str, int], int] = {}
        self._owners: dict[tuple[str, int], int | None] = {}  # None: announced, and nobody has come yet

    def prepare(self, batch: Batch) -> None:
        """Take in what was announced, then do the copies before the compute.

        Like a pool, `fresh` clears states only: spoiled rows stay until they are scrubbed or written.
        """
        for scrubbed, blocks in ((True, batch.scrub), (False, batch.fresh)):
            for name, ids in blocks.items():
                for block in ids:
                    self._owners[name, block] = None
                    self._forget(name, block, scrubbed)
        self.copy(batch, "before")

    def copy(self, batch: Batch, when: str) -> None:
        """Do the copies of one moment of the step."""
        for move in batch.transfers:
            if move.when == when:
                group = self.groups[move.group]
                _copy(self._states, (move.group, move.source), (move.group, move.target))
                sources, targets = (_slots(group, [block], group.tokens_per_block) for block in (move.source, move.target))
                for source, target in zip(sources, targets, strict=True):
                    _copy(self._rows, (move.group, source), (move.group, target))

    def spoil(self, chunk: Chunk) -> None:
        """Ruin what a sequence remembers before a chunk, as one non-finite value would."""
        if not chunk.continues:
            return
        for name, group in self.groups.items():
            ids = chunk.table.blocks[name]
            if group.kind == "state":
                self._states[name, ids[0]] = _SPOILED
            for slot in _slots(group, ids, chunk.begin):
                self._rows[name, slot] = _SPOILED

    def fill(self, name: str, block: int, value: int) -> None:
        """Overwrite a block from outside."""
        group = self.groups[name]
        if group.kind == "state":
            self._states[name, block] = value
        for slot in _slots(group, [block], group.tokens_per_block):
            self._rows[name, slot] = value

    def compute(self, chunk: Chunk) -> int | None:
        """Write the rows and states of a chunk and read all that it attends to; None: something there is spoiled."""
        self._claim(chunk)
        folds = list(accumulate(chunk.seq.tokens[: chunk.end], _mix, initial=0))
        told = 0
        for name, group in self.groups.items():
            read = self._state(name, chunk, folds) if group.kind == "state" else self._attend(name, group, chunk, folds)
            if read is None:
                return None
            told = _mix(told, read)
        return told

    def _claim(self, chunk: Chunk) -> None:
        """A chunk writes into its state and into the blocks of its own tokens: nobody else may have written there since they were announced."""
        seq_id = chunk.seq.seq_id
        assert chunk.table.seq_id == seq_id, f"sequence {seq_id} was given the table of {chunk.table.seq_id}"
        for name, group in self.groups.items():
            ids = chunk.table.blocks[name]
            assert len(ids) >= group.blocks_for(chunk.end), f"{name}: {len(ids)} blocks are too few for {chunk.end} tokens"
            size = group.tokens_per_block
            written = ids[chunk.begin // size : -(-chunk.end // size)] if group.kind == "rows" else ids
            for block in written:
                assert 0 <= block < group.num_blocks, f"{name}: there is no block {block}"
                assert (name, block) in self._owners, f"{name}: block {block} was never announced as fresh"
                owner = self._owners[name, block]
                assert owner is None or owner == seq_id, f"{name}: block {block} of {seq_id} still belongs to {owner}"
                self._owners[name, block] = seq_id

    def _state(self, name: str, chunk: Chunk, folds: list[int]) -> int | None:
        block = chunk.table.blocks[name][0]
        held = self._states.get((name, block)) if chunk.continues else folds[0]
        if held == _SPOILED:
            return None
        assert held == folds[chunk.begin], f"{name}: state {block} is not that of sequence {chunk.seq.seq_id} at {chunk.begin}"
        self._states[name, block] = folds[chunk.end]
        return self._states[name, block]

    def _attend(self, name: str, group: Group, chunk: Chunk, folds: list[int]) -> int | None:
        ids = chunk.table.blocks[name]
        slots = _slots(group, ids, group.blocks_for(chunk.end) * group.tokens_per_block)
        for position in range(chunk.begin, chunk.end):
            self._rows[name, slots[position]] = folds[position + 1]
        # Whole blocks are read: what lies behind the end is masked, but a masked value that is not finite still spoils a sum.
        held = [self._rows.get((name, slot)) for slot in slots]
        if _SPOILED in held:
            return None
        del held[chunk.end :]
        foreign = next((position for position, row in enumerate(held) if row != folds[position + 1]), None)
        assert foreign is None, f"{name}: row {foreign} of sequence {chunk.seq.seq_id} is not its own"
        return held[-1]

    def _forget(self, name: str, block: int, scrubbed: bool) -> None:
        self._states.pop((name, block), None)
        for slot in _slots(self.groups[name], [block], self.groups[name].tokens_per_block):
            if scrubbed or self._rows.get((name, slot)) != _SPOILED:
                self._rows.pop((name, slot), None)


def _copy(memory: dict[tuple[str, int], int], source: tuple[str, int], target: tuple[str, int]) -> None:
    if source in memory:
        memory[target] = memory[source]
    else:
        memory.pop(target, None)


def _slots(group: Group, ids: Rows[int], num_tokens: int) -> list[int]:
    """Slots of the first tokens of a table; a state group has none."""
    size = group.tokens_per_block
    return [ids[position // size] * size + position % size for position in range(num_tokens)] if group.kind == "rows" else []


def _mix(left: int, right: int) -> int:
    """A 64-bit hash of two numbers, the same in every process."""
    word = (left * 0x9E3779B97F4A7C15 + right + 0x632BE59BD9B4E019) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)
