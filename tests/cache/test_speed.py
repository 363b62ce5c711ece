"""What prefixes cost in Python: linear in what is new, nothing in what is old."""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from firstlight.cache.blocks import Group
from firstlight.cache.manager import CacheManager
from firstlight.engine.sim import SimRunner, VirtualClock
from firstlight.sched.limits import Limits
from firstlight.sched.scheduler import Scheduler
from firstlight.sched.sequence import Sequence
from firstlight.spec.sampling import SamplingParams

LAYOUTS = {
    "rows": (Group("mla", "rows", 140_000, 16),),
    "hybrid": (Group("mla", "rows", 140_000, 16), Group("kda", "state", 300, num_kept=256)),
}
SECONDS_PER_MILLION = 1.0


def calls(work: Callable[[], object]) -> int:
    """Python and C calls of a piece of work."""
    found = 0

    def count(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    sys.setprofile(count)
    work()
    sys.setprofile(None)
    return found


def seconds(work: Callable[[], object]) -> float:
    """Of this thread, without the garbage collector, whose cost is that of everything that lives in the process."""
    gc.collect()
    gc.disable()
    begun = time.thread_time()
    work()
    took = time.thread_time() - begun
    gc.enable()
    return took


def life(layout: str, num_tokens: int, measure: Callable[[Callable[[], object]], float]) -> dict[str, float]:
    """What each verb costs for a prompt of this length, first unknown, then known."""
    cache = CacheManager(LAYOUTS[layout], identity=b"m", prefix_cache=True)
    rng = random.Random(1)
    tokens = [rng.randrange(160_000) for _ in range(num_tokens)]
    found: dict[str, float] = {}
    for seq_id, kind in enumerate(("new", "known")):
        prefix = None

        def match() -> None:
            nonlocal prefix
            prefix = cache.match(tokens)

        found[f"match {kind}"] = measure(match)
        found[f"reserve {kind}"] = measure(lambda: cache.reserve(seq_id, num_tokens, prefix=prefix))  # noqa: B023
        if layout == "hybrid":
            cache.snapshot(seq_id, tokens, num_tokens - 1)
        found[f"commit {kind}"] = measure(lambda: cache.commit(seq_id, tokens, num_tokens - 1))  # noqa: B023
        found[f"release {kind}"] = measure(lambda: cache.release(seq_id, tokens=tokens))  # noqa: B023
    assert prefix is not None
    assert prefix.num_tokens >= num_tokens - 16
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_calls_are_linear_in_the_prompt(layout: str) -> None:
    few, many = life(layout, 40_000, calls), life(layout, 160_000, calls)
    for verb, count in many.items():
        assert count <= 4.1 * few[verb] + 200, f"{verb}: {few[verb]} calls for 40k, {count} for 160k"


def per_million(found: dict[str, float], num_tokens: int, names: tuple[str, ...]) -> float:
    return sum(found[name] for name in names) * 1_000_000 / num_tokens


MATCH, COMMIT = ("match new", "match known"), ("commit new",)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_match_and_commit_of_a_quarter_million_tokens(layout: str) -> None:
    found = min((life(layout, 250_000, seconds) for _ in range(2)), key=lambda each: each["commit new"])
    for name in (*MATCH, *COMMIT):
        assert found[name] * 4 < SECONDS_PER_MILLION, f"{name}: {found[name] * 4:.2f} s per million tokens"


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_match_and_commit_of_a_million_tokens(layout: str) -> None:
    quarter = [life(layout, 250_000, seconds) for _ in range(3)]
    million = [life(layout, 1_000_000, seconds) for _ in range(3)]
    for name in (*MATCH, *COMMIT):
        few, many = min(each[name] for each in quarter) * 4, min(each[name] for each in million)
        print(f"\n{layout} {name}: {few:.3f} s per million at 250k, {many:.3f} s at a million")
        assert many < SECONDS_PER_MILLION
        assert many <= 1.6 * few, f"{name}: {few:.3f} s per million at 250k, {many:.3f} s at a million"


def decode(layout: str, context: int, measure: Callable[[Callable[[], object]], float]) -> float:
    """256 steps of one sequence, a snapshot on a grid now and then."""
    cache = CacheManager(LAYOUTS[layout], identity=b"m", prefix_cache=True, snapshot_tokens=64 if layout == "hybrid" else 0)
    tokens = [7] * context
    cache.reserve(0, context, prefix=cache.match(tokens))
    cache.commit(0, tokens)

    def steps() -> None:
        for _ in range(256):
            tokens.append(5)
            assert cache.reserve(0, len(tokens)) is not None
            if len(tokens) == cache.next_mark(0, len(tokens) - 1, context):
                cache.snapshot(0, tokens, len(tokens))
            cache.take_transfers()
            cache.take_fresh()
            cache.commit(0, tokens, len(tokens))

    return measure(steps)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_decode_costs_the_same_at_any_context(layout: str) -> None:
    short, long = decode(layout, 1024, calls), decode(layout, 512_000, calls)
    assert short > 256 * 4, "nothing was counted"
    assert abs(long - short) <= 0.02 * short, f"{short} calls at 1k, {long} at 512k"


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_decode_takes_the_same_time_at_any_context(layout: str) -> None:
    fast, slow = (min(decode(layout, context, seconds) for _ in range(3)) for context in (1024, 512_000))
    assert slow <= 3 * fast + 2e-3, f"{fast * 1e3:.2f} ms at 1k, {slow * 1e3:.2f} ms at 512k"


def test_who_waits_is_hashed_once() -> None:
    """A prompt that does not fit yet asks anew in every step; its keys stay."""
    cache = CacheManager((Group("mla", "rows", 3000, 16),), prefix_cache=True)
    scheduler, runner = Scheduler(Limits(tokens_per_step=100_000, sequences_per_step=4, chunk_tokens=100_000), cache), SimRunner(VirtualClock())
    for seq_id in range(2):
        scheduler.add(Sequence(seq_id, [seq_id] * 30_000, 30_000, SamplingParams(max_tokens=9)))
    costs = []
    for _ in range(4):
        costs.append(calls(lambda: scheduler.schedule(0.0)))
        batch = scheduler._batch
        assert batch is not None
        assert [0] == [chunk.seq.seq_id for chunk in batch.chunks]
        scheduler.update(batch, runner.run(batch), 0.0)
        assert 1 == scheduler.counts()["waiting"]
    assert costs[0] > 2 * 30_000 / 16, "nothing was hashed"
    assert max(costs[1:]) < 300, costs
