"""The simulated memory is the witness of the scheduler tests, so each kind of wrong block must stop it."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest

from firstlight.cache.manager import BlockTable, CacheManager, Group, Transfer
from firstlight.engine.faulty import Fault, FaultyRunner
from firstlight.engine.loop import Engine
from firstlight.engine.sim import SimMemory, SimRunner, VirtualClock
from firstlight.sched.limits import Limits
from firstlight.sched.scheduler import Scheduler
from firstlight.sched.sequence import Batch, Chunk, Sequence
from firstlight.spec.sampling import SamplingParams

GROUPS = (Group("mla", "rows", 12, 4), Group("kda", "state", 4))
EVERYTHING = {"mla": tuple(range(12)), "kda": tuple(range(4))}


def sequence(seq_id: int, length: int = 8) -> Sequence:
    return Sequence(seq_id, [seq_id * 100 + position for position in range(length)], length, SamplingParams())


def table(seq_id: int, rows: list[int], state: int) -> BlockTable:
    return BlockTable(seq_id, {"mla": array("q", rows), "kda": array("q", [state])})


def run(memory: SimMemory, *chunks: Chunk, **prepared: dict[str, tuple[int, ...]]) -> dict[int, int]:
    result = SimRunner(VirtualClock(), memory=memory).run(Batch(chunks, **prepared))  # type: ignore[arg-type]
    assert {} == result.errors
    return dict(result.next_tokens)


def begun() -> tuple[SimMemory, Sequence, BlockTable]:
    """Sequence 0 with its first 4 of 8 tokens in blocks 0, 1 and state 0."""
    memory, seq, own = SimMemory(GROUPS), sequence(0), table(0, [0, 1], 0)
    assert {} == run(memory, Chunk(seq, 0, 4, own), fresh=EVERYTHING), "half a prompt yields no token"
    return memory, seq, own


def test_what_is_right_passes_and_the_split_does_not_matter() -> None:
    memory, seq, own = begun()
    whole = SimMemory(GROUPS)
    expected = run(whole, Chunk(sequence(0), 0, 8, table(0, [7, 3], 2)), fresh=EVERYTHING)
    assert {0} == set(expected)
    assert expected == run(memory, Chunk(seq, 4, 8, own))


def test_tokens_depend_on_the_whole_history() -> None:
    """Changing any token of the prompt changes what follows, so a wrong recompute cannot hide."""
    seen = set()
    for changed in range(9):
        seq = sequence(0)
        seq.tokens[changed % 8] += 50 * (changed < 8)
        seen.add(run(SimMemory(GROUPS), Chunk(seq, 0, 8, table(0, [0, 1], 0)), fresh=EVERYTHING)[0])
    assert 9 == len(seen)


def test_collecting_samples_nothing() -> None:
    seq = sequence(0)
    seq.collect = True
    assert {} == run(SimMemory(GROUPS), Chunk(seq, 0, 8, table(0, [0, 1], 0)), fresh=EVERYTHING)


Wrong = Callable[[Sequence, BlockTable], tuple[Chunk, ...]]


@pytest.mark.parametrize(("wrong", "said"), [
    (lambda seq, own: (Chunk(seq, 5, 8, own),), "mla: row 4 of sequence 0 is not its own"),
    (lambda seq, own: (Chunk(seq, 3, 8, own),), "kda: state 0 is not that of sequence 0 at 3"),
    (lambda seq, own: (Chunk(sequence(1), 4, 8, table(1, [2, 3], 1)),), "mla: row 0 of sequence 1 is not its own"),
    (lambda seq, own: (Chunk(seq, 4, 8, table(1, [0, 1], 0)),), "sequence 0 was given the table of 1"),
    (lambda seq, own: (Chunk(seq, 4, 8, table(0, [0], 0)),), "mla: 1 blocks are too few for 8 tokens"),
    (lambda seq, own: (Chunk(seq, 4, 8, table(0, [0, 12], 0)),), "mla: there is no block 12"),
    (lambda seq, own: (Chunk(seq, 4, 8, table(0, [2, 1], 0)),), "mla: row 0 of sequence 0 is not its own"),
    (lambda seq, own: (Chunk(seq, 4, 8, table(0, [0, 1], 1)),), "kda: state 1 is not that of sequence 0 at 4"),
    (lambda seq, own: (Chunk(sequence(1), 0, 8, table(1, [0, 2], 1)),), "mla: block 0 of 1 still belongs to 0"),
    (lambda seq, own: (Chunk(sequence(1), 0, 8, table(1, [2, 3], 0)),), "kda: block 0 of 1 still belongs to 0"),
    (lambda seq, own: (Chunk(sequence(1), 0, 8, table(1, [2, 3], 1)), Chunk(sequence(2), 0, 8, table(2, [3, 4], 2))),
     "mla: block 3 of 2 still belongs to 1"),
])
def test_a_wrong_chunk_is_noticed(wrong: Wrong, said: str) -> None:
    memory, seq, own = begun()
    with pytest.raises(AssertionError, match=said):
        run(memory, *wrong(seq, own))


def test_a_block_nobody_announced_is_noticed() -> None:
    with pytest.raises(AssertionError, match="mla: block 1 was never announced as fresh"):
        run(SimMemory(GROUPS), Chunk(sequence(0), 0, 8, table(0, [0, 1], 0)), fresh={"mla": (0,), "kda": (0,)})


def test_announcing_or_scrubbing_a_living_block_is_noticed() -> None:
    for prepared in ({"fresh": {"mla": (0,)}}, {"scrub": {"mla": (0,)}}):
        memory, seq, own = begun()
        with pytest.raises(AssertionError, match="row 0 of sequence 0"):
            run(memory, Chunk(seq, 4, 8, own), **prepared)


def test_a_copy_carries_rows_and_states_to_another_sequence() -> None:
    """A second sequence with the same beginning goes on from copies; without them, or from another moment's, it is noticed."""
    for missing in (None, "mla", "kda"):
        memory, seq, own = begun()
        moves = [Transfer("mla", own.blocks["mla"][0], 3), Transfer("kda", own.blocks["kda"][0], 1)]
        other = sequence(0)
        other.seq_id = 1
        chunk = Chunk(other, 4, 8, table(1, [3, 4], 1))
        memory.prepare(Batch((chunk,), tuple(move for move in moves if move.group != missing)))
        if missing is None:
            assert memory.compute(chunk) == memory.compute(Chunk(seq, 4, 8, own))
        else:
            with pytest.raises(AssertionError, match=missing):
                memory.compute(chunk)


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_forgotten_scrub_costs_the_next_owner(forgotten: bool) -> None:
    """Spoiled rows outlive the change of hands, as they do in a pool; only the scrub list removes them."""
    cache, memory, clock = CacheManager(GROUPS), SimMemory(GROUPS), VirtualClock()
    if forgotten:
        cache.mark_scrub = lambda blocks: None  # type: ignore[method-assign]
    runner = FaultyRunner(SimRunner(clock, memory=memory), [Fault(kind="spoil", step=2)], spoil=memory.spoil)
    engine = Engine(Scheduler(Limits(sequences_per_step=1), cache), runner, clock, num_vocab=1000)
    for _ in range(2):
        engine.submit([1, 2, 3, 4, 5, 6, 7], SamplingParams(max_tokens=3, temperature=0))
        engine.submit([1, 2], SamplingParams(max_tokens=3, temperature=0))
    ends = {}
    for _ in range(20):
        ends.update({event.seq_id: event.finish for event in engine.step() if event.finish is not None})
    assert {0: "error", 1: "error" if forgotten else "length"} == {seq_id: ends[seq_id] for seq_id in (0, 1)}
    assert engine.idle()
