"""The loop on a simulated runner: requests checked at the door, ends told once, faults cost those they hit and nobody else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from firstlight.cache.blocks import Group
from firstlight.cache.manager import CacheManager
from firstlight.engine.faulty import Fault, FaultyRunner
from firstlight.engine.loop import Engine
from firstlight.engine.sim import SimMemory, SimRunner, StepCost, VirtualClock
from firstlight.sched.limits import Limits
from firstlight.sched.scheduler import Scheduler
from firstlight.sched.sequence import Batch, Event, StepResult
from firstlight.spec.errors import CapacityError, FirstlightError, RequestError
from firstlight.spec.sampling import SamplingParams

GROUPS = (Group("mla", "rows", 24, 4), Group("kda", "state", 4))
NUM_VOCAB = 1000


class Rig:
    """An engine, its parts, and what it told."""

    def __init__(self, *script: Fault, spoil: bool = True, sequences: int = 4, groups: Sequence[Group] = GROUPS) -> None:
        self.clock = VirtualClock()
        self.cache = CacheManager(groups)
        self.memory = SimMemory(groups)
        self.sim = SimRunner(self.clock, num_vocab=NUM_VOCAB, memory=self.memory)
        self.runner = FaultyRunner(self.sim, script, spoil=self.memory.spoil if spoil else None, sleep=self.clock.advance)
        limits = Limits(tokens_per_step=16, sequences_per_step=sequences, chunk_tokens=8)
        self.engine = Engine(Scheduler(limits, self.cache), self.runner, self.clock, num_vocab=NUM_VOCAB)
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, Event] = {}

    def submit(self, seed: int, length: int = 10, max_tokens: int = 6, **options: Any) -> int:
        tokens = [(seed * 37 + position * 11) % NUM_VOCAB for position in range(length)]
        return self.engine.submit(tokens, SamplingParams(max_tokens=max_tokens, temperature=0), **options)

    def take(self, events: list[Event]) -> None:
        for event in events:
            assert event.seq_id not in self.ends, "told after the end"
            if event.token is not None:
                self.tokens.setdefault(event.seq_id, []).append(event.token)
            if event.finish is not None:
                self.ends[event.seq_id] = event

    def step(self) -> None:
        self.take(self.engine.step())
        self.cache.check()

    def drain(self, max_steps: int = 100) -> None:
        for _ in range(max_steps):
            if self.engine.idle():
                break
            self.step()
        assert self.engine.idle()
        assert 0.0 == self.cache.usage()


def alone(seed: int, length: int = 10, max_tokens: int = 6) -> list[int]:
    rig = Rig()
    seq_id = rig.submit(seed, length, max_tokens)
    rig.drain()
    return rig.tokens[seq_id]


def test_requests_get_their_own_tokens_and_one_end_each() -> None:
    rig = Rig()
    ids = [rig.submit(seed, 5 + 3 * seed, 4 + seed) for seed in range(6)]
    assert [0, 1, 2, 3, 4, 5] == ids
    rig.drain()
    for seed, seq_id in enumerate(ids):
        assert alone(seed, 5 + 3 * seed, 4 + seed) == rig.tokens[seq_id]
        assert ("length", None) == (rig.ends[seq_id].finish, rig.ends[seq_id].error)


def test_an_idle_engine_may_be_stepped() -> None:
    rig = Rig()
    assert rig.engine.idle()
    assert [] == rig.engine.step()
    assert 0 == rig.runner.num_steps, "nothing to run"


def test_cancel_in_every_phase() -> None:
    rig = Rig(sequences=2)
    probe = rig.submit(1, 10, 20)
    prefill, waiting = rig.submit(2, 40), rig.submit(3)
    rig.step()
    rig.engine.cancel(waiting)
    rig.engine.cancel(prefill)
    rig.engine.cancel(prefill)
    rig.engine.cancel(12345)
    assert not rig.engine.idle()
    rig.step()
    assert ["abort", "abort"] == [rig.ends[seq_id].finish for seq_id in (prefill, waiting)]
    early = rig.submit(4)
    rig.engine.cancel(early)
    rig.drain()
    assert "abort" == rig.ends[early].finish
    assert early not in rig.tokens
    assert alone(1, 10, 20) == rig.tokens[probe]
    rig.engine.cancel(probe)
    assert rig.engine.idle()


@pytest.mark.parametrize("after", range(8))
def test_preempted_equals_uninterrupted(after: int) -> None:
    rig = Rig()
    first, second = rig.submit(1, 21, 6), rig.submit(2, 9, 6)
    for _ in range(after):
        rig.step()
    for seq_id in (first, first, second, 999):
        rig.engine.preempt(seq_id)
    rig.drain()
    assert alone(1, 21, 6) == rig.tokens[first]
    assert alone(2, 9, 6) == rig.tokens[second]
    assert (1 if 0 < after else 0) == rig.ends[first].num_preemptions


def test_a_sequence_that_fails_ends_alone() -> None:
    rig = Rig(Fault(kind="fail", seq_id=1, position=12))
    ids = [rig.submit(seed) for seed in range(3)]
    rig.drain()
    assert ("error", "request 1 failed at position 12, as the fault script says") == (rig.ends[1].finish, rig.ends[1].error)
    assert alone(1)[:3] == rig.tokens[1], "what was told before stays told"
    for seq_id in (ids[0], ids[2]):
        assert alone(seq_id) == rig.tokens[seq_id]


@pytest.mark.parametrize("position", [0, 7, 8, 9, 13])
def test_spoiled_memory_costs_one_request_and_is_scrubbed_before_reuse(position: int) -> None:
    """The next owners of the slots say what they say in a clean cache."""
    rig = Rig(Fault(kind="spoil", seq_id=0, position=position), sequences=2)
    scrubbed: dict[str, set[int]] = {"mla": set(), "kda": set()}
    prepare = rig.memory.prepare

    def watch(batch: Batch) -> None:
        for name, blocks in batch.scrub.items():
            scrubbed[name].update(blocks)
        prepare(batch)

    rig.memory.prepare = watch  # type: ignore[method-assign]
    ids = [rig.submit(seed) for seed in range(6)]
    rig.drain()
    # Before its first token is computed nothing of it can be spoiled: a first chunk reads no state and writes its rows itself.
    hit = position >= 8
    assert ("error" if hit else "length") == rig.ends[0].finish
    assert (("spoiled" in str(rig.ends[0].error)) if hit else rig.ends[0].error is None)
    assert ({True} if hit else {False}) == {bool(blocks) for blocks in scrubbed.values()}
    for seed in ids[1:]:
        assert alone(seed) == rig.tokens[seed]


def test_non_finite_logits_without_a_memory_to_spoil() -> None:
    rig = Rig(Fault(kind="spoil", seq_id=0, position=11), spoil=False)
    rig.submit(0)
    rig.drain()
    assert "logits at position 11 are not finite" == rig.ends[0].error


def test_a_broken_batch_ends_its_sequences_and_the_engine_goes_on() -> None:
    rig = Rig(Fault(kind="break", step=3), sequences=2)
    ids = [rig.submit(seed) for seed in range(4)]
    rig.drain()
    assert ["error", "error", "length", "length"] == [rig.ends[seq_id].finish for seq_id in ids]
    assert "a worker stopped answering, as the fault script says. Take the fault out of the script." == rig.ends[0].error
    for seq_id in ids[2:]:
        assert alone(seq_id) == rig.tokens[seq_id]
    assert [(3, "break", 0)] == rig.runner.log


def test_a_batch_that_breaks_again_still_scrubs_what_the_first_one_left() -> None:
    """Scrubbing that a broken step did not come to is asked for again, though its own sequence owns only few of those blocks."""
    rig = Rig(Fault(kind="fail", seq_id=0, position=10), Fault(kind="break", step=2), sequences=1)
    rig.submit(0, 30)
    rig.submit(1, 4)
    rig.submit(2, 10)
    asked: list[Batch] = []
    inner = rig.runner.run

    def watch(batch: Batch) -> StepResult:
        asked.append(batch)
        return inner(batch)

    rig.engine.runner.run = watch  # type: ignore[method-assign]
    rig.drain()
    failed = {name: set(ids) for name, ids in asked[2].scrub.items()}
    assert 8 == len(failed["mla"]), "the first failure is scrubbed in the step that breaks"
    again = {name: set(ids) for name, ids in asked[3].scrub.items()}
    assert all(ids <= again[name] for name, ids in failed.items())
    assert ["error", "error", "length"] == [rig.ends[seq_id].finish for seq_id in range(3)]
    assert alone(2) == rig.tokens[2]


def test_a_broken_batch_leaves_no_block_unprepared() -> None:
    """A sequence that had entered without a chunk lives on; its blocks were to be prepared in the step that broke."""
    rig = Rig(Fault(kind="break", step=0), groups=(Group("mla", "rows", 80, 4), Group("kda", "state", 4)))
    ids = [rig.submit(0, 56, 3), rig.submit(1, 4, 3), rig.submit(2, 56, 3, split=(20, 36)), rig.submit(3, 56, 3)]
    asked: list[Batch] = []
    inner = rig.runner.run

    def watch(batch: Batch) -> StepResult:
        asked.append(batch)
        return inner(batch)

    rig.engine.runner.run = watch  # type: ignore[method-assign]
    rig.drain()
    assert ids[2] not in [chunk.seq.seq_id for chunk in asked[0].chunks]
    unprepared = {name: set(blocks) for name, blocks in asked[0].fresh.items()}
    assert {"mla", "kda"} == set(unprepared), "the third one has entered"
    assert all(blocks <= set(asked[1].scrub[name]) for name, blocks in unprepared.items())
    assert ["error", "error", "length", "length"] == [rig.ends[seq_id].finish for seq_id in ids]
    assert alone(2, 56, 3) == rig.tokens[ids[2]]


def test_our_own_mistake_passes_through_and_loses_nobody() -> None:
    rig = Rig(Fault(kind="break", step=2, error=ZeroDivisionError("by hand")), sequences=2)
    ids = [rig.submit(seed) for seed in range(3)]
    rig.step()
    rig.step()
    with pytest.raises(ZeroDivisionError, match="by hand"):
        rig.engine.step()
    rig.cache.check()
    assert not rig.engine.idle()
    rig.drain()
    assert ["error", "error", "length"] == [rig.ends[seq_id].finish for seq_id in ids]
    assert "the step broke down: ZeroDivisionError('by hand')" == rig.ends[0].error
    assert alone(2) == rig.tokens[2]


def test_a_mistake_is_told_even_when_nothing_else_is_left() -> None:
    rig = Rig(Fault(kind="break", step=0, error=KeyboardInterrupt()))
    seq_id = rig.submit(0)
    with pytest.raises(KeyboardInterrupt):
        rig.engine.step()
    assert not rig.engine.idle()
    rig.step()
    assert "error" == rig.ends[seq_id].finish
    assert rig.engine.idle()


def test_cancelled_in_flight_in_a_batch_that_breaks() -> None:
    rig = Rig(Fault(kind="break", step=1))
    first, second = rig.submit(0), rig.submit(1)
    rig.step()
    batch = rig.engine.scheduler.schedule(rig.clock())
    rig.engine.cancel(first)
    with pytest.raises(FirstlightError) as lost:
        rig.runner.run(batch)
    rig.take(rig.engine.scheduler.fail(batch, str(lost.value), rig.clock()))
    assert ["abort", "error"] == [rig.ends[seq_id].finish for seq_id in (first, second)]
    assert 0.0 == rig.cache.usage()


def test_a_runner_that_forgets_a_token_fails_that_sequence() -> None:
    rig = Rig()
    rig.submit(0)
    rig.submit(1)
    rig.step()
    batch = rig.engine.scheduler.schedule(rig.clock())
    result = rig.sim.run(batch)
    assert {0, 1} == set(result.next_tokens)
    rig.take(rig.engine.scheduler.update(batch, StepResult({1: result.next_tokens[1]}, 0.0), rig.clock()))
    rig.drain()
    assert "the runner returned no token for request 0 at position 10" == rig.ends[0].error
    assert "length" == rig.ends[1].finish


def test_delay_is_seen_by_the_clock_and_in_the_result() -> None:
    slow, fast = Rig(Fault(kind="delay", delay_s=5.0, times=2)), Rig()
    for rig in (slow, fast):
        rig.submit(0)
        rig.drain()
    assert 10.0 == pytest.approx(slow.clock() - fast.clock())
    assert fast.tokens == slow.tokens
    assert [0, 1] == [step for step, _, _ in slow.runner.log]


def test_simulated_seconds_follow_the_cost() -> None:
    rig = Rig()
    cost = StepCost(step_s=1.0, prefill_token_s=0.1, decode_token_s=0.5, context_token_s=0.01)
    rig.sim.cost = cost
    rig.submit(0, 10, 2)
    begun = rig.clock()
    rig.step()
    assert 1.0 + 8 * 0.1 + 0.01 * 36 == pytest.approx(rig.clock() - begun)
    begun = rig.clock()
    rig.step()
    assert 1.0 + 2 * 0.1 + 0.01 * (2 * 8 + 3) == pytest.approx(rig.clock() - begun)
    begun = rig.clock()
    rig.step()
    assert 1.0 + 0.5 + 0.01 * 11 == pytest.approx(rig.clock() - begun)


def test_the_simulated_memory_notices_a_stranger() -> None:
    """The witness can speak: a block of somebody else, a stale state or a foreign row stops the step."""
    for harm in ("row", "state", "swap"):
        rig = Rig()
        rig.submit(0, 10, 8)
        rig.submit(1, 10, 8)
        for _ in range(4):
            rig.step()
        batch = rig.engine.scheduler.schedule(rig.clock())
        tables = {chunk.seq.seq_id: chunk.table for chunk in batch.chunks}
        rig.take(rig.engine.scheduler.update(batch, rig.sim.run(batch), rig.clock()))
        if harm == "swap":
            tables[0].blocks["mla"][0], tables[1].blocks["mla"][0] = tables[1].blocks["mla"][0], tables[0].blocks["mla"][0]
        else:
            rig.memory.fill("mla" if harm == "row" else "kda", tables[0].blocks["mla" if harm == "row" else "kda"][0], 3)
        said = {"row": "row 0 of sequence 0 is not its own", "state": "is not that of sequence 0", "swap": "row 0 of sequence 0 is not its own"}[harm]
        with pytest.raises(AssertionError, match=said):
            rig.engine.step()


GREEDY = SamplingParams(max_tokens=4, temperature=0)


@pytest.mark.parametrize(("tokens", "params", "options", "said"), [
    ([], GREEDY, {}, "the prompt has no tokens"),
    ([3, -1], GREEDY, {}, "token id -1 is outside of the vocabulary of 1000. Use ids from 0 to 999"),
    ([1000], GREEDY, {}, "token id 1000 is outside of the vocabulary of 1000"),
    ([1, 2.5], GREEDY, {}, "the prompt is no list of whole numbers"),
    ([1, None], GREEDY, {}, "the prompt is no list of whole numbers"),
    ([1, True], GREEDY, {}, "the prompt holds true or false"),
    ([10**5000], GREEDY, {}, "token id of 16610 bits is outside of the vocabulary of 1000"),
    ([1], {"max_tokens": 4}, {}, "`params` is a dict. Use SamplingParams"),
    (7, GREEDY, {}, "the prompt is no list of whole numbers"),
    ("abc", GREEDY, {}, "the prompt is a str, not token ids"),
    ([1], GREEDY, {"priority": "urgent"}, "`priority` is 'urgent'. Use one of interactive, standard, background"),
    ([1], GREEDY, {"priority": 3}, "`priority` is 3"),
    ([1], GREEDY, {"salt": b"x"}, "`salt` is b'x'"),
    ([1], GREEDY, {"images": [b""]}, "1 images were given"),
    ([1, 2], GREEDY, {"collect": True, "split": (1, 2)}, "sum to 3 for a prompt of 2 tokens"),
    ([1, 2], GREEDY, {"collect": True, "split": (2, 0)}, "chunks [2, 0]"),
    ([1, 2], GREEDY, {"collect": True, "split": (1.5, 0.5)}, "chunks [1.5, 0.5] are no sizes"),
    ([1, 2], GREEDY, {"collect": True, "split": ("1",)}, "chunks ['1'] are no sizes"),
    ([1], SamplingParams(logit_bias={1000: 1.0}), {}, "`logit_bias` names token 1000, outside of the vocabulary of 1000"),
    ([1], SamplingParams(stop_token_ids=(5, 4000)), {}, "`stop_token_ids` names token 4000"),
    ([1], SamplingParams(max_tokens=3, min_tokens=4), {}, "`min_tokens` is 4, `max_tokens` only 3"),
])
def test_bad_requests_are_refused_and_cost_nobody_anything(tokens: Any, params: SamplingParams, options: dict[str, Any], said: str) -> None:
    rig = Rig()
    good = rig.submit(1)
    rig.step()
    before = (rig.engine.counts(), rig.cache.counts())
    with pytest.raises(RequestError) as refused:
        rig.engine.submit(tokens, params, **options)
    assert said in str(refused.value)
    assert before == (rig.engine.counts(), rig.cache.counts())
    rig.drain()
    assert alone(1) == rig.tokens[good]


def test_a_broken_step_leaves_nobody_with_blocks_that_were_never_prepared() -> None:
    """A forced chunk too large for the rest of the step waits with its blocks; the step that was to prepare them breaks."""
    rig = Rig(Fault(kind="break", step=0))
    broken, forced = rig.submit(0, 8), rig.submit(2, 12, split=(12,))
    batch = rig.engine.scheduler.schedule(rig.clock())
    assert [broken] == [chunk.seq.seq_id for chunk in batch.chunks]
    held = {name: set(ids) - {block for chunk in batch.chunks for block in chunk.table.blocks[name]}
            for name, ids in batch.fresh.items()}
    assert (3, 1) == (len(held["mla"]), len(held["kda"])), "the second has its blocks and no chunk"
    with pytest.raises(FirstlightError) as lost:
        rig.runner.run(batch)
    rig.take(rig.engine.scheduler.fail(batch, str(lost.value), rig.clock()))
    after = rig.engine.scheduler.schedule(rig.clock())
    assert all(ids <= {*after.scrub.get(name, ()), *after.fresh.get(name, ())} for name, ids in held.items())
    rig.take(rig.engine.scheduler.update(after, rig.runner.run(after), rig.clock()))
    rig.drain()
    assert ["error", "length"] == [rig.ends[seq_id].finish for seq_id in (broken, forced)]
    assert alone(2, 12) == rig.tokens[forced]


def test_any_string_is_a_salt() -> None:
    """A lone surrogate is legal in JSON and has no UTF-8 form."""
    rig = Rig()
    for salt in ("\ud800", "", "a\0b"):
        rig.submit(1, salt=salt)
    rig.drain()
    assert {"length"} == {end.finish for end in rig.ends.values()}


def test_what_can_never_fit_is_refused_with_numbers_and_remedy() -> None:
    rig = Rig()
    with pytest.raises(CapacityError) as refused:
        rig.submit(0, 90, 8)
    expected = (
        "request 0 needs 97 tokens of cache (prompt 90), an empty cache holds 96. Lower max_tokens to 7 or less, or raise cache_bytes."
    )
    assert expected == str(refused.value)
    assert rig.engine.idle()
    rig.submit(0, 90, 7)
    rig.drain()


def test_tokens_may_be_any_whole_numbers_and_are_copied() -> None:
    class Whole:
        def __index__(self) -> int:
            return 5

    rig = Rig()
    tokens: list[Any] = [Whole(), 3]
    seq_id = rig.engine.submit(tokens, GREEDY)
    tokens.clear()
    rig.drain()
    assert 4 == len(rig.tokens[seq_id])


def test_close_reaches_the_runner() -> None:
    closed: list[bool] = []
    rig = Rig()
    rig.sim.close = lambda: closed.append(True)  # type: ignore[method-assign]
    rig.engine.close()
    assert [True] == closed
