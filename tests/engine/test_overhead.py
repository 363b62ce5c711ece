"""What the loop itself costs in Python at 64 sequences: a bounded number of calls per step, the same at any context."""

from __future__ import annotations

import sys
import time
from functools import cache
from types import FrameType
from typing import Any

import pytest

from firstlight.cache.blocks import Group
from firstlight.cache.manager import CacheManager
from firstlight.engine.loop import Engine
from firstlight.engine.sim import SimRunner, VirtualClock
from firstlight.sched.limits import Limits
from firstlight.sched.scheduler import Scheduler
from firstlight.sched.sequence import Batch, StepResult
from firstlight.spec.sampling import SamplingParams

NUM_SEQUENCES = 64
TOKENS_PER_BLOCK = 16
NUM_STEPS = 2 * TOKENS_PER_BLOCK  # whole blocks, so that each context sees as many new ones
CALLS_PER_SEQUENCE = 54  # 49.5 when this was written: 47 to schedule and enter tokens, the rest for what is measured
STEP_S = 2e-3


class Shunt:
    """A runner that costs nothing worth counting: the same token for everybody."""

    def run(self, batch: Batch) -> StepResult:
        return StepResult({chunk.seq.seq_id: 5 for chunk in batch.chunks}, 0.0)

    def close(self) -> None:
        pass


def decoding(context: int, max_tokens: int) -> Engine:
    """An engine in which 64 sequences have their prefill behind them."""
    num_blocks = NUM_SEQUENCES * (-(-(context + max_tokens) // TOKENS_PER_BLOCK))
    memory = CacheManager([Group("mla", "rows", num_blocks, TOKENS_PER_BLOCK), Group("kda", "state", NUM_SEQUENCES)])
    limits = Limits(tokens_per_step=NUM_SEQUENCES * context, sequences_per_step=NUM_SEQUENCES, chunk_tokens=context)
    clock = VirtualClock()
    engine = Engine(Scheduler(limits, memory), SimRunner(clock), clock, num_vocab=1000)
    for _ in range(NUM_SEQUENCES):
        engine.submit([7] * context, SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True))
    assert NUM_SEQUENCES == sum(event.token is not None for event in engine.step())
    engine.runner = Shunt()
    return engine


@cache
def calls_per_step(context: int) -> float:
    """Python and C calls of a decode step."""
    engine = decoding(context, 2 * NUM_STEPS)
    calls = 0

    def count(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        for _ in range(NUM_STEPS):
            engine.step()
    finally:
        sys.setprofile(before)
    assert NUM_SEQUENCES == engine.counts()["running"], "not all were decoding"
    return calls / NUM_STEPS


def test_calls_of_a_step_are_bounded() -> None:
    calls = calls_per_step(1024)
    assert NUM_SEQUENCES < calls <= CALLS_PER_SEQUENCE * NUM_SEQUENCES, f"{calls / NUM_SEQUENCES:.1f} calls per sequence and step"


def test_calls_of_a_step_do_not_grow_with_the_context() -> None:
    short, long = calls_per_step(1024), calls_per_step(65_536)
    assert abs(long - short) <= 0.01 * short, f"{short:.0f} calls at 1k, {long:.0f} at 64k"


@pytest.mark.slow
@pytest.mark.parametrize("context", [1024, 65_536])
def test_a_step_takes_at_most_2_ms_of_processor_time(context: int) -> None:
    """Beside the count of calls, because a copy of all tokens is one call at any length."""
    engine = decoding(context, 400)
    spent = []
    for _ in range(200):
        begun = time.process_time()
        engine.step()
        spent.append(time.process_time() - begun)
    assert NUM_SEQUENCES == engine.counts()["running"], "not all were decoding"
    assert sorted(spent)[100] <= STEP_S, f"median {sorted(spent)[100] * 1e3:.2f} ms"
