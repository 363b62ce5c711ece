"""What a step costs in Python: little, and the same at any context."""

from __future__ import annotations

import sys
import time
from types import FrameType
from typing import Any

import pytest

from firstlight.cache.blocks import Group
from firstlight.cache.manager import CacheManager
from firstlight.engine.sim import SimRunner, VirtualClock
from firstlight.sched.limits import Limits
from firstlight.sched.scheduler import Scheduler
from firstlight.sched.sequence import Sequence, Status
from firstlight.spec.sampling import SamplingParams

NUM_SEQUENCES = 64
NUM_STEPS = 128  # a whole number of blocks, so that each context sees as many new ones


def decoding(context: int) -> tuple[Scheduler, SimRunner]:
    """64 sequences past their prefill, one of them per block border, and as many more waiting for room."""
    per_sequence = (context + 2 * NUM_STEPS + NUM_SEQUENCES) // 16 + 8
    cache = CacheManager([Group("mla", "rows", NUM_SEQUENCES * per_sequence, 16), Group("kda", "state", NUM_SEQUENCES)])
    scheduler = Scheduler(Limits(tokens_per_step=10**8, sequences_per_step=NUM_SEQUENCES, chunk_tokens=10**7), cache)
    runner = SimRunner(VirtualClock())
    members = [Sequence(number, [7] * (context + number), context + number, SamplingParams(max_tokens=2 * NUM_STEPS)) for number in range(64)]
    for seq in members:
        scheduler.add(seq)
    for number in range(64, 128):
        scheduler.add(Sequence(number, [7] * 16, 16, SamplingParams(max_tokens=4)))
    step(scheduler, runner)
    assert all(seq.status is Status.RUNNING and 1 == seq.num_pending for seq in members)
    return scheduler, runner


def step(scheduler: Scheduler, runner: SimRunner) -> float:
    """Seconds of one step without the runner, on this thread."""
    begun = time.thread_time()
    batch = scheduler.schedule(0.0)
    planned = time.thread_time()
    result = runner.run(batch)
    ran = time.thread_time()
    scheduler.update(batch, result, 0.0)
    return planned - begun + time.thread_time() - ran


def calls(context: int) -> int:
    """Python and C calls of NUM_STEPS steps."""
    scheduler, runner = decoding(context)
    found = 0

    def count(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    sys.setprofile(count)
    for _ in range(NUM_STEPS):
        step(scheduler, runner)
    sys.setprofile(None)
    return found


@pytest.mark.slow
def test_a_step_of_64_sequences_takes_at_most_2_ms() -> None:
    scheduler, runner = decoding(20_000)
    times = sorted(step(scheduler, runner) for _ in range(NUM_STEPS))
    assert times[len(times) // 2] <= 2e-3, f"median {times[len(times) // 2] * 1e3:.2f} ms"


@pytest.mark.slow
def test_letting_64_sequences_in_takes_at_most_4_ms() -> None:
    """The most that a single step can have to do."""
    best = 1.0
    for _ in range(5):
        cache = CacheManager([Group("mla", "rows", 1000, 16), Group("kda", "state", NUM_SEQUENCES)])
        scheduler = Scheduler(Limits(tokens_per_step=4096, sequences_per_step=NUM_SEQUENCES), cache)
        for number in range(NUM_SEQUENCES):
            scheduler.add(Sequence(number, [7] * 30, 30, SamplingParams()))
        best = min(best, step(scheduler, SimRunner(VirtualClock())))
        assert NUM_SEQUENCES == scheduler.counts()["running"]
    assert best <= 4e-3, f"{best * 1e3:.2f} ms"


def test_the_work_of_a_step_is_flat_in_context() -> None:
    short, long = calls(1_000), calls(32_000)
    assert short > NUM_STEPS * NUM_SEQUENCES, "nothing was counted"
    assert abs(long - short) <= 0.02 * short, f"{short} calls at 1k, {long} at 32k"


@pytest.mark.slow
def test_new_blocks_cost_the_same_however_many_there_are() -> None:
    """Amortised: 10,000 blocks one by one in a table of 100,000 take no longer than in an empty one."""

    def seconds(held: int) -> float:
        cache = CacheManager([Group("mla", "rows", 200_000, 1)])
        cache.reserve(0, held)
        begun = time.thread_time()
        for num_tokens in range(held + 1, held + 10_001):
            cache.reserve(0, num_tokens)
        return time.thread_time() - begun

    few, many = min(seconds(1) for _ in range(3)), min(seconds(100_000) for _ in range(3))
    assert many <= 2 * few, f"{few:.4f} s into an empty table, {many:.4f} s into a long one"
