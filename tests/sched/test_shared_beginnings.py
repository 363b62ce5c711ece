"""Hundreds of crowded workloads whose prompts share beginnings, in a simulated memory: every row and state read is the reader's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from firstlight.cache.budget import split
from firstlight.cache.manager import CacheManager
from firstlight.engine.loop import Engine
from firstlight.engine.sim import SimMemory, SimRunner, VirtualClock
from firstlight.models.registry import read
from firstlight.sched.limits import Limits
from firstlight.sched.scheduler import Scheduler
from firstlight.spec.model import ModelSpec
from tests.engine.workloads import Tally, Workload, draw, drive

DATA = Path(__file__).parents[1] / "data"


def simulated(spec: ModelSpec, workload: Workload) -> Engine:
    """The engine that would run a workload, without its model."""
    states = spec.state_bytes_per_sequence
    rows = spec.row_bytes_per_token * workload.tokens_per_block
    longest = max(len(job.tokens) + job.max_tokens for job in workload.jobs)
    groups = split(
        spec, cache_bytes=max(16 * states, workload.max_sequences * states + workload.num_blocks * rows), tokens_per_block=workload.tokens_per_block,
        max_sequences=workload.max_sequences, max_context=longest, prefix_cache=True)
    limits = Limits(
        tokens_per_step=workload.max_step_tokens, sequences_per_step=workload.max_sequences, chunk_tokens=workload.chunk_tokens)
    clock = VirtualClock()
    scheduler = Scheduler(limits, CacheManager(groups, prefix_cache=True), max_context=longest)
    return Engine(scheduler, SimRunner(clock, memory=SimMemory(groups)), clock, num_vocab=spec.num_vocab)


@pytest.mark.parametrize("name", ["kimi_k3_tiny", "kimi_k3_long"])
def test_nobody_reads_what_is_not_its_own(name: str) -> None:
    spec, tally = read(DATA / name).spec, Tally()
    for seed in range(150):
        engine = simulated(spec, draw(seed, spec.num_vocab))
        drive(engine, engine.scheduler.cache, draw(seed, spec.num_vocab), tally)
    assert tally.num_cached_tokens > 500
