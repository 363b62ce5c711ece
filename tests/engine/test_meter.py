"""The meter against a log that the test keeps itself: same times, same tokens, at a bounded cost per step."""

from __future__ import annotations

import asyncio
import bisect
import sys
import threading
from types import FrameType
from typing import Any

import pytest

from firstlight.cache.blocks import Group
from firstlight.cache.manager import CacheManager
from firstlight.engine.async_engine import AsyncEngine
from firstlight.engine.faulty import Fault, FaultyRunner
from firstlight.engine.llm import LLM
from firstlight.engine.loop import Engine
from firstlight.engine.meter import LONG_S, NUM_KEPT_STEPS, SHORT_S, Histogram, Meter
from firstlight.engine.sim import SimMemory, SimRunner, VirtualClock
from firstlight.sched.scheduler import Limits, Scheduler
from firstlight.sched.sequence import Batch, Event, Priority, StepResult
from firstlight.spec.sampling import SamplingParams

TIERS = [priority.name.lower() for priority in Priority]


class World:
    """A simulated engine with a meter, and the times of all its events."""

    def __init__(self, *faults: Fault, num_blocks: int = 40) -> None:
        groups = (Group("mla", "rows", num_blocks, 4), Group("kda", "state", 6))
        self.clock = VirtualClock()
        runner = FaultyRunner(SimRunner(self.clock, memory=SimMemory(groups)), faults)
        self.scheduler = Scheduler(Limits(tokens_per_step=32, sequences_per_step=6, chunk_tokens=8), CacheManager(groups))
        self.engine = Engine(self.scheduler, runner, self.clock, num_vocab=1000)
        self.engine.meter = self.meter = Meter()
        self.tier: dict[int, int] = {}
        self.arrived_s: dict[int, float] = {}
        self.cancelled_s: dict[int, float] = {}
        self.told: list[tuple[float, Event]] = []

    def submit(self, seed: int, length: int, max_tokens: int) -> int:
        tier = seed % 3
        tokens = [(seed * 131 + place * 17) % 1000 for place in range(length)]
        seq_id = self.engine.submit(tokens, SamplingParams(max_tokens=max_tokens, temperature=0), priority=TIERS[tier])
        self.tier[seq_id], self.arrived_s[seq_id] = tier, self.clock()
        return seq_id

    def cancel(self, seq_id: int) -> None:
        self.engine.cancel(seq_id)
        self.cancelled_s[seq_id] = self.clock()

    def run(self, num_steps: int | None = None) -> None:
        while not self.engine.idle() and (num_steps is None or num_steps > 0):
            events = self.engine.step()
            self.told += [(self.clock(), event) for event in events]
            num_steps = None if num_steps is None else num_steps - 1

    def expected(self) -> dict[str, list[list[float]]]:
        """What the histograms should hold, from the events alone."""
        found: dict[str, list[list[float]]] = {name: [[], [], []] for name in ("first_token_s", "inter_token_s", "per_token_s", "request_s")}
        times: dict[int, list[float]] = {}
        for now, event in self.told:
            tier = self.tier[event.seq_id]
            if event.token is not None:
                own = times.setdefault(event.seq_id, [])
                if own:
                    found["inter_token_s"][tier].append(now - own[-1])
                else:
                    found["first_token_s"][tier].append(now - self.arrived_s[event.seq_id])
                own.append(now)
            if event.finish is not None:
                now = self.cancelled_s.get(event.seq_id, now)
                found["request_s"][tier].append(now - self.arrived_s[event.seq_id])
                own = times.get(event.seq_id, [])
                if event.finish == "length" and len(own) > 1:
                    found["per_token_s"][tier].append((own[-1] - own[0]) / (len(own) - 1))
        return found


def same(expected: list[float], got: Histogram) -> None:
    counts = [0] * (len(got.bounds) + 1)
    for value in expected:
        counts[bisect.bisect_left(got.bounds, value)] += 1
    assert counts == got.counts
    assert sum(expected) == pytest.approx(got.total, abs=1e-9)


@pytest.mark.parametrize("num_blocks", [40, 16])
def test_latencies_are_those_of_the_events(num_blocks: int) -> None:
    """Also with cancellations, with one that fails, and with so little memory that sequences are preempted."""
    world = World(Fault(kind="fail", seq_id=3, position=12), num_blocks=num_blocks)
    for seed in range(9):
        world.submit(seed, 5 + 3 * seed, 4 + 3 * (seed % 4))
        world.run(2)
    world.cancel(7)
    world.run()
    preemptions = world.engine.counts()["preemptions"]
    assert (preemptions > 0) == (num_blocks == 16), preemptions
    expected = world.expected()
    assert all(any(lists) for lists in expected.values())
    for name, lists in expected.items():
        for tier, values in enumerate(lists):
            same(values, getattr(world.meter, name)[tier])
    assert {"length", "abort", "error"} == {event.finish for _, event in world.told if event.finish}


def test_queue_time_is_until_the_first_block() -> None:
    """Of those that got none, until their end."""
    world = World(num_blocks=10)
    first, second = world.submit(1, 30, 8), world.submit(4, 30, 3)
    world.run(1)
    world.clock.advance(5.0)
    entered_s = []
    while not world.engine.idle():
        before = world.scheduler.num_running
        begun_s = world.clock()
        world.run(1)
        if world.scheduler.num_running == 1 and before == 0:
            entered_s.append(begun_s)
    queue = world.meter.queue_s[Priority.STANDARD]
    assert 2 == sum(queue.counts)
    accounts = {event.seq_id: event.account for _, event in world.told if event.account is not None}
    waits = [accounts[seq_id].entered_s - accounts[seq_id].arrived_s for seq_id in (first, second)]  # type: ignore[operator]
    assert 0.0 == waits[0] and waits[1] > 5.0
    same(waits, queue)
    third, fourth = world.submit(7, 30, 8), world.submit(10, 30, 3)
    world.run(3)
    world.cancel(fourth)
    waits += [0.0, world.clock() - world.arrived_s[fourth]]
    assert waits[3] > 0 and world.scheduler.num_running == 1
    world.run()
    same(waits, queue)
    assert {third: "length", fourth: "abort"} == {event.seq_id: event.finish for _, event in world.told if event.finish and event.seq_id >= third}


def test_steps_add_up_to_what_was_computed() -> None:
    world = World(num_blocks=40)
    for seed in range(12):
        world.submit(seed, 21, 60)
    world.run(9)
    for seq_id in (0, 3):
        world.engine.preempt(seq_id)
    world.run()
    counts, records = world.engine.counts(), world.meter.steps()
    assert 2 == counts["preemptions"] and counts["recomputed_tokens"] > 0
    assert counts["computed_tokens"] == sum(record.num_prefill_tokens + record.num_decode_tokens for record in records)
    assert counts["computed_tokens"] == world.meter.num_prefill_tokens + world.meter.num_decode_tokens == world.meter.step_tokens.total
    assert sum(event.token is not None for _, event in world.told) == world.meter.num_generated_tokens == 12 * 60
    assert list(range(len(records))) == [record.number for record in records]
    assert records[5:] == world.meter.steps(after=4)
    assert (0, 0) == (records[-1].num_running, records[-1].num_waiting)
    assert max(record.num_waiting for record in records) >= 6
    assert (12 * 21, 12 * 60) == (world.meter.prompt_tokens.total, world.meter.answer_tokens.total)
    assert counts["held_back_memory"] + counts["held_back_slots"] > 0


def test_the_ring_keeps_the_last_steps() -> None:
    world = World(num_blocks=1000)
    world.submit(0, 5, 2 * NUM_KEPT_STEPS)
    world.run()
    records = world.meter.steps()
    assert NUM_KEPT_STEPS == len(records)
    assert world.meter.num_steps - 1 == records[-1].number
    assert [] == world.meter.steps(after=records[-1].number)


def test_waiting_is_counted_by_priority() -> None:
    world = World(num_blocks=10)
    for seed in (0, 1, 2, 2, 5, 8):
        world.submit(seed, 30, 4)
    world.run(1)
    assert (0, 1, 4) == world.meter.waiting == world.scheduler.waiting()
    world.run()
    assert (0, 0, 0) == world.meter.waiting


def test_a_preempted_sequence_waits_in_its_own_priority() -> None:
    world = World(num_blocks=30)
    seq_id = world.submit(2, 30, 40)
    world.run(5)
    world.engine.preempt(seq_id)
    assert (0, 0, 1) == world.scheduler.waiting()


def test_checks_of_prefix_hits_are_no_requests() -> None:
    """They compute, and that shows in steps; prompts, answers and latencies are those of clients."""
    tokens = [(place * 7) % 280 for place in range(40)]
    with LLM("default", dtype="float32", cache_bytes=4_000_000, verify_hits=1.0) as llm:
        llm.engine.meter = meter = Meter()
        for _ in range(3):
            (out,) = llm.generate([tokens], SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))
        while not llm.engine.idle():
            llm.engine.step()
        stats = llm.stats()
    assert 2 == stats["canary"]["checked"] and out.num_cached_tokens > 0
    assert (3 * 40, 2 * out.num_cached_tokens) == (stats["entered_tokens"], stats["cached_tokens"])
    assert (15, 3, 12) == (meter.num_generated_tokens, sum(meter.first_token_s[1].counts), sum(meter.inter_token_s[1].counts))
    assert (3 * 40, 15) == (meter.prompt_tokens.total, meter.answer_tokens.total)
    assert stats["computed_tokens"] == meter.step_tokens.total > 3 * 45 - 2 * out.num_cached_tokens
    assert 0 == sum(meter.first_token_s[2].counts)


def test_reach_is_how_far_rows_knew_a_prompt() -> None:
    """A prompt that branches off where no state was kept: rows are there, and cannot be used yet."""
    tokens = [(place * 7) % 280 for place in range(64)]
    with LLM("default", dtype="float32", cache_bytes=4_000_000) as llm:
        greedy = SamplingParams(max_tokens=1, temperature=0)
        llm.generate([tokens], greedy)
        llm.generate([[*tokens[:40], 1, 2, 3]], greedy)
        stats = llm.stats()
    assert 32 == stats["reached_tokens"]
    assert 0 == stats["cached_tokens"]


def test_a_token_that_nobody_gets_is_not_counted() -> None:
    """A request is cancelled while its step runs: what that step draws for it is thrown away."""
    world = World()
    inner = world.engine.runner

    class Leaving:
        def run(self, batch: Batch) -> StepResult:
            if world.meter.num_steps == 3:
                world.engine.cancel(0)
            return inner.run(batch)

        def close(self) -> None:
            inner.close()

    world.engine.runner = Leaving()
    for _ in range(2):
        world.submit(1, 5, 9)
    world.run()
    told = [event.seq_id for _, event in world.told if event.token is not None]
    assert [3, 9] == [told.count(0), told.count(1)]
    assert 12 == world.meter.num_generated_tokens == world.meter.answer_tokens.total
    assert [2, 10] == [sum(histogram[Priority.STANDARD].counts) for histogram in (world.meter.first_token_s, world.meter.inter_token_s)]


def test_time_before_the_engine_looks_counts_as_waiting() -> None:
    """A request that comes while a long step runs has arrived when its client asked."""
    world = World()
    opened, entered, inner = threading.Event(), threading.Event(), world.engine.runner

    class Gate:
        def run(self, batch: Batch) -> StepResult:
            entered.set()
            assert opened.wait(20)
            return inner.run(batch)

        def close(self) -> None:
            inner.close()

    world.engine.runner = Gate()

    async def ask(engine: AsyncEngine) -> Event:
        return [event async for event in engine.generate([1, 2, 3], SamplingParams(max_tokens=2, temperature=0))][-1]

    async def work() -> list[Event]:
        async with AsyncEngine(world.engine) as engine:
            first = asyncio.ensure_future(ask(engine))
            await asyncio.to_thread(entered.wait, 20)
            second = asyncio.ensure_future(ask(engine))
            await asyncio.sleep(0)
            world.clock.advance(7.0)
            opened.set()
            return [await first, await second]

    first, second = (event.account for event in asyncio.run(asyncio.wait_for(work(), 30)))
    assert first is not None and second is not None and second.entered_s is not None
    assert 0.0 == first.arrived_s == second.arrived_s
    assert second.entered_s >= 7.0
    assert world.meter.queue_s[Priority.STANDARD].total == pytest.approx(second.entered_s)


@pytest.mark.parametrize("bounds", [LONG_S, SHORT_S])
def test_quantiles_lie_between_the_bounds_around_them(bounds: tuple[float, ...]) -> None:
    histogram = Histogram(bounds)
    assert None is histogram.quantile(0.5)
    values = sorted((seed * 7919 % 1000) / 1000 * 0.9 for seed in range(1, 400))
    for value in values:
        histogram.add(value)
    for share in (0.01, 0.5, 0.95, 1.0):
        exact = values[max(0, round(share * len(values)) - 1)]
        place = bisect.bisect_left(bounds, exact)
        got = histogram.quantile(share)
        assert got is not None
        low = bounds[place - 2] if place > 1 else 0.0
        assert low <= got <= bounds[place + 1], (share, exact, got)
    far = Histogram(bounds)
    far.add(10 * bounds[-1])
    assert bounds[-1] == far.quantile(0.5)


class Shunt:
    """A runner that costs nothing worth counting."""

    def run(self, batch: Batch) -> StepResult:
        return StepResult({chunk.seq.seq_id: 5 for chunk in batch.chunks}, 0.0)

    def close(self) -> None:
        pass


def calls_per_step(num_sequences: int, meter: Meter | None) -> float:
    """Python and C calls of a decode step."""
    cache = CacheManager([Group("mla", "rows", 20 * num_sequences, 16), Group("kda", "state", num_sequences)])
    limits = Limits(tokens_per_step=64 * num_sequences, sequences_per_step=num_sequences, chunk_tokens=64)
    engine = Engine(Scheduler(limits, cache), Shunt(), VirtualClock(), num_vocab=1000)
    engine.meter = meter
    for _ in range(num_sequences):
        engine.submit([7] * 64, SamplingParams(max_tokens=100, temperature=0, ignore_eos=True))
    engine.step()
    calls = 0

    def count(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        for _ in range(16):
            engine.step()
    finally:
        sys.setprofile(before)
    assert num_sequences == engine.counts()["running"]
    return calls / 16


def test_metering_costs_no_call_per_token() -> None:
    """What it adds to a step is the same for 8 and for 64 sequences."""
    added = {count: calls_per_step(count, Meter()) - calls_per_step(count, None) for count in (8, 64)}
    assert 0 < added[8] < 40, added
    assert abs(added[8] - added[64]) < 1, added
