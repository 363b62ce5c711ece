"""Many clients, one thread: everybody gets their own events in order, whoever leaves is cancelled, nobody costs another anything."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from firstlight import LLM, AsyncEngine, Engine, SamplingParams
from firstlight.cache.blocks import Group
from firstlight.cache.manager import CacheManager
from firstlight.engine.faulty import Fault, FaultyRunner
from firstlight.engine.loop import Runner
from firstlight.engine.sim import SimMemory, SimRunner, VirtualClock
from firstlight.sched.limits import Limits
from firstlight.sched.scheduler import Scheduler
from firstlight.sched.sequence import Batch, Event, Sequence, StepResult
from firstlight.spec.errors import CapacityError, FirstlightError, PeerError, RequestError

NUM_VOCAB = 1000
LIMIT_S = 30.0


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run to the end; what hangs is a failure."""

    async def bounded() -> None:
        await asyncio.wait_for(work, LIMIT_S)

    asyncio.run(bounded())


class Gate:
    """A runner that waits, while closed, before each step."""

    def __init__(self, inner: Runner) -> None:
        self.inner = inner
        self.opened = threading.Event()
        self.opened.set()
        self.entered = threading.Event()

    def run(self, batch: Batch) -> StepResult:
        self.entered.set()
        assert self.opened.wait(LIMIT_S)
        return self.inner.run(batch)

    def close(self) -> None:
        self.inner.close()


class World:
    """A simulated engine whose tokens come out of the blocks, so that a wrong block shows."""

    def __init__(self, *faults: Fault, num_blocks: int = 60, num_states: int = 6) -> None:
        groups = (Group("mla", "rows", num_blocks, 4), Group("kda", "state", num_states))
        self.cache = CacheManager(groups)
        self.closed = 0
        self.gate = Gate(FaultyRunner(SimRunner(VirtualClock(), num_vocab=NUM_VOCAB, memory=SimMemory(groups)), faults))
        scheduler = Scheduler(Limits(tokens_per_step=32, sequences_per_step=num_states, chunk_tokens=8), self.cache)
        self.engine = Engine(scheduler, self.gate, num_vocab=NUM_VOCAB)

    def check_empty(self) -> None:
        """Nothing is held any more, by anybody."""
        self.cache.check()
        assert 0.0 == self.cache.usage()
        assert self.engine.idle()


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 131 + position * 17 + 5) % NUM_VOCAB for position in range(length)]


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0)


@cache
def alone(seed: int, length: int, max_tokens: int) -> tuple[int, ...]:
    """What a request yields with the engine for itself."""
    world = World(num_blocks=400)
    world.engine.submit(prompt(seed, length), params(max_tokens))
    tokens = []
    while not world.engine.idle():
        tokens += [event.token for event in world.engine.step() if event.token is not None]
    return tuple(tokens)


async def collected(engine: AsyncEngine, tokens: list[int], max_tokens: int, **more: Any) -> list[Event]:
    return [event async for event in engine.generate(tokens, params(max_tokens), **more)]


def tokens_of(events: list[Event]) -> tuple[int, ...]:
    return tuple(event.token for event in events if event.token is not None)


async def until(holds: Any) -> None:
    """Wait for another thread."""
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


def test_one_request() -> None:
    async def work() -> None:
        world = World()
        async with AsyncEngine(world.engine) as engine:
            events = await collected(engine, prompt(1, 9), 7, priority="interactive", salt="a")
        assert alone(1, 9, 7) == tokens_of(events)
        assert [None] * 6 + ["length"] == [event.finish for event in events]
        assert {0} == {event.seq_id for event in events}
        world.check_empty()

    run(work())


async def leaving_client(engine: AsyncEngine, rng: random.Random, number: int, kept: dict[int, tuple[int, ...]]) -> None:
    """Takes some or all events of a request, slowly or at once, and leaves in one of five ways."""
    length, max_tokens = rng.randint(1, 40), rng.randint(1, 20)
    way = rng.choice(["stay", "stay", "break", "aclose", "raise", "cancel"])
    stay = max_tokens if way == "stay" else rng.randint(0, max_tokens - 1)
    patience_s = rng.choice([0.0, 0.0, 0.001])
    await asyncio.sleep(rng.random() * 0.05)
    got: list[int] = []

    async def take() -> None:
        stream = engine.generate(prompt(number, length), params(max_tokens), priority=rng.choice(["interactive", "standard", "background"]))
        async with contextlib.aclosing(stream):
            async for event in stream:
                assert event.token is not None
                got.append(event.token)
                if len(got) > stay and way == "break":
                    break
                if len(got) > stay and way == "raise":
                    raise KeyError(number)
                if len(got) > stay and way == "aclose":
                    await stream.aclose()
                await asyncio.sleep(patience_s)

    task = asyncio.ensure_future(take())
    if way == "cancel":
        await asyncio.sleep(rng.random() * 0.02)
        task.cancel()
    with contextlib.suppress(KeyError, asyncio.CancelledError):
        await task
    want = alone(number, length, max_tokens)
    assert want[: len(got)] == tuple(got)
    if way in ("stay", "break", "raise", "aclose"):
        assert min(stay + (way != "stay"), max_tokens) == len(got)
    kept[number] = tuple(got)


@pytest.mark.parametrize("seed", range(3))
def test_many_clients_that_leave_early(seed: int) -> None:
    async def work() -> None:
        world, kept = World(), dict[int, tuple[int, ...]]()
        rngs = [random.Random(1000 * seed + number) for number in range(64)]
        async with AsyncEngine(world.engine) as engine:
            await asyncio.gather(*(leaving_client(engine, rng, number, kept) for number, rng in enumerate(rngs)))
            assert engine.healthy
        assert 64 == len(kept)
        assert any(kept.values())
        world.check_empty()

    run(work())


@pytest.mark.parametrize("way", ["break", "aclose", "raise", "cancel"])
def test_leaving_cancels(way: str) -> None:
    """A request that would take for ever gives its blocks back at once; another one goes on."""
    async def work() -> None:
        world = World(num_blocks=13_000)
        async with AsyncEngine(world.engine) as engine:
            beside = asyncio.ensure_future(collected(engine, prompt(2, 5), 300))
            first = asyncio.Event()

            async def endless() -> None:
                stream = engine.generate(prompt(1, 9), params(50_000))
                async for event in stream:
                    first.set()
                    if way == "break" and event.token is not None:
                        break
                    if way == "raise":
                        raise KeyError
                    if way == "aclose":
                        await stream.aclose()
                        with pytest.raises(StopAsyncIteration):
                            await anext(stream)
                        return

            task = asyncio.ensure_future(endless())
            await first.wait()
            if way == "cancel":
                task.cancel()
            with contextlib.suppress(KeyError, asyncio.CancelledError):
                await task
            del task
            gc.collect()
            await until(lambda: engine.counts()["running"] <= 1)
            assert alone(2, 5, 300) == tokens_of(await beside)
        assert world.engine.counts()["computed_tokens"] < 25_000
        world.check_empty()

    run(work())


def test_leaving_before_the_request_has_entered() -> None:
    async def work() -> None:
        world = World()
        async with AsyncEngine(world.engine) as engine:
            world.gate.opened.clear()
            beside = asyncio.ensure_future(collected(engine, prompt(2, 5), 3))
            await until(world.gate.entered.is_set)
            task = asyncio.ensure_future(collected(engine, prompt(1, 9), 50))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            world.gate.opened.set()
            assert alone(2, 5, 3) == tokens_of(await beside)
        world.check_empty()

    run(work())


class Odd:
    """Tokens as nobody thinks of them."""

    def __iter__(self) -> Iterator[int]:
        raise ZeroDivisionError


def test_a_bad_request_costs_nobody_else_anything() -> None:
    bad: list[tuple[type[Exception], Any]] = [
        (RequestError, {"tokens": []}),
        (RequestError, {"tokens": [NUM_VOCAB]}),
        (RequestError, {"tokens": [-1]}),
        (RequestError, {"tokens": "text"}),
        (RequestError, {"tokens": None}),
        (RequestError, {"tokens": ["a"]}),
        (RequestError, {"priority": "urgent"}),
        (RequestError, {"salt": 3}),
        (RequestError, {"params": SamplingParams(logit_bias={NUM_VOCAB: 1.0})}),
        (CapacityError, {"params": SamplingParams(max_tokens=10**6)}),
        (Exception, {"params": None}),
        (ZeroDivisionError, {"tokens": Odd()}),
    ]

    async def work() -> None:
        world = World()
        async with AsyncEngine(world.engine) as engine:
            async def refused(kind: type[Exception], given: dict[str, Any]) -> None:
                whole = {"tokens": prompt(3, 5), "params": params(4), **given}
                with pytest.raises(kind) as caught:
                    async for _ in engine.generate(whole.pop("tokens"), whole.pop("params"), **whole):
                        raise AssertionError("an event of a request that cannot be served")
                assert not isinstance(caught.value, AssertionError)

            good = [asyncio.ensure_future(collected(engine, prompt(seed, 9), 15)) for seed in range(8)]
            await asyncio.gather(*(refused(kind, given) for kind, given in bad))
            for seed, task in enumerate(good):
                assert alone(seed, 9, 15) == tokens_of(await task)
            assert engine.healthy
        world.check_empty()

    run(work())


def test_a_failing_request_ends_alone() -> None:
    async def work() -> None:
        world = World(Fault(kind="fail", seq_id=1, position=12), Fault(kind="break", step=9))
        async with AsyncEngine(world.engine) as engine:
            results = await asyncio.gather(*(collected(engine, prompt(seed, 9), 5) for seed in range(3)))
            assert ["length", "error", "length"] == [events[-1].finish for events in results]
            assert "request 1 failed at position 12" in str(results[1][-1].error)
            assert alone(1, 9, 5)[:4] == tokens_of(results[1])
            # A peer that stops answering in one step ends the requests of that step, not the engine.
            results = await asyncio.gather(*(collected(engine, prompt(seed, 5), 8) for seed in range(3)))
            assert {"error"} == {events[-1].finish for events in results}
            assert engine.healthy
            assert alone(5, 5, 8) == tokens_of(await collected(engine, prompt(5, 5), 8))
        world.check_empty()

    run(work())


def test_a_mistake_of_ours_is_told_to_everybody(caplog: pytest.LogCaptureFixture) -> None:
    """Clients in the step, waiting clients and later ones; nobody hangs."""
    async def work() -> None:
        world = World(Fault(kind="break", step=3, error=ZeroDivisionError("planted")), num_states=2)
        engine = AsyncEngine(world.engine)
        assert engine.healthy
        tasks = [asyncio.ensure_future(collected(engine, prompt(seed, 9), 15)) for seed in range(5)]
        for events in await asyncio.gather(*tasks):
            assert ("error", "the engine broke down: ZeroDivisionError('planted')") == (events[-1].finish, events[-1].error)
        assert not engine.healthy and engine.closing
        assert 0.0 == engine.stalled_s
        with pytest.raises(PeerError, match="planted"):
            await collected(engine, prompt(1, 9), 15)
        await engine.close()
        assert not engine.healthy

    run(work())
    assert "ZeroDivisionError" in caplog.text


def test_a_mistake_of_ours_reaches_requests_that_had_not_entered() -> None:
    async def work() -> None:
        world = World(Fault(kind="break", step=0, error=ZeroDivisionError("planted")))
        engine = AsyncEngine(world.engine)
        world.gate.opened.clear()
        inside = asyncio.ensure_future(collected(engine, prompt(1, 9), 15))
        await until(world.gate.entered.is_set)
        outside = asyncio.ensure_future(collected(engine, prompt(2, 9), 15))
        await asyncio.sleep(0.01)
        world.gate.opened.set()
        assert "error" == (await inside)[-1].finish
        with pytest.raises(PeerError, match="planted"):
            await outside
        await engine.close()

    run(work())


def test_it_sleeps_while_idle_and_wakes_at_once() -> None:
    async def work() -> None:
        world = World()
        async with AsyncEngine(world.engine) as engine:
            await collected(engine, prompt(1, 9), 5)
            steps, begun_s = engine.num_steps, time.process_time()
            await asyncio.sleep(0.3)
            assert steps == engine.num_steps
            assert time.process_time() - begun_s < 0.05, "a busy loop"
            assert 0.0 == engine.stalled_s
            begun_s = time.monotonic()
            await collected(engine, prompt(1, 9), 1)
            assert time.monotonic() - begun_s < 5.0
            assert steps < engine.num_steps

    run(work())


def test_progress_can_be_watched() -> None:
    """A step that hangs shows as time without progress; time that passed idle does not count."""
    async def work() -> None:
        world = World()
        clock = VirtualClock()
        world.engine.clock = clock
        async with AsyncEngine(world.engine) as engine:
            clock.advance(100.0)
            world.gate.opened.clear()
            task = asyncio.ensure_future(collected(engine, prompt(1, 9), 5))
            await until(world.gate.entered.is_set)
            assert (0.0, 0) == (engine.stalled_s, engine.num_steps)
            clock.advance(7.0)
            assert (7.0, 100.0) == (engine.stalled_s, engine.last_step_s)
            world.gate.opened.set()
            await task
            assert 107.0 == engine.last_step_s
            assert engine.num_steps >= 6
            await until(lambda: engine.stalled_s == 0.0)
            assert (0, 0) == (engine.counts()["running"], engine.counts()["waiting"])

    run(work())


def test_closing_drains() -> None:
    async def work() -> None:
        world = World()
        engine = AsyncEngine(world.engine)
        world.gate.opened.clear()
        tasks = [asyncio.ensure_future(collected(engine, prompt(seed, 9), 15)) for seed in range(8)]
        await until(world.gate.entered.is_set)
        await asyncio.sleep(0.01)
        closing = asyncio.ensure_future(engine.close())
        await until(lambda: engine.closing)
        with pytest.raises(PeerError, match="closing"):
            await collected(engine, prompt(9, 9), 15)
        world.gate.opened.set()
        await asyncio.gather(closing, engine.close(), engine.close(drain=True))
        for seed, task in enumerate(tasks):
            assert alone(seed, 9, 15) == tokens_of(await task)
        with pytest.raises(PeerError, match="closing"):
            await collected(engine, prompt(9, 9), 15)
        await engine.close()
        assert engine.healthy
        world.check_empty()

    run(work())


def test_closing_cancels() -> None:
    """Also after a first close gave the requests time to end and they did not."""
    async def work() -> None:
        world = World(num_blocks=2000)
        engine = AsyncEngine(world.engine)
        tasks = [asyncio.ensure_future(collected(engine, prompt(seed, 9), 10**3)) for seed in range(8)]
        await until(lambda: engine.num_steps > 3)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.close(), 0.01)
        await engine.close(drain=False)
        for seed, task in enumerate(tasks):
            events = await task
            assert "abort" == events[-1].finish
            assert alone(seed, 9, 60)[: len(events) - 1] == tokens_of(events)[:60]
        world.check_empty()

    run(work())


def test_an_error_in_the_block_cancels() -> None:
    async def work() -> None:
        world = World(num_blocks=50_000)
        with pytest.raises(KeyError):
            async with AsyncEngine(world.engine) as engine:
                task = asyncio.ensure_future(collected(engine, prompt(1, 9), 10**5))
                await until(lambda: engine.num_steps > 3)
                raise KeyError
        assert "abort" == (await task)[-1].finish
        world.check_empty()

    run(work())


def test_the_engine_is_closed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    world = World()
    monkeypatch.setattr(world.gate, "close", lambda: closed.append(threading.current_thread().name))

    async def work() -> None:
        async with AsyncEngine(world.engine) as engine:
            await collected(engine, prompt(1, 9), 5)
            assert [] == closed

    run(work())
    assert ["firstlight-engine"] == closed
    assert "firstlight-engine" not in [thread.name for thread in threading.enumerate()]


def num_alive(*kinds: type) -> int:
    """Objects of these kinds."""
    gc.collect()
    return sum(type(item) in kinds for item in gc.get_objects())


def test_a_slow_client_holds_its_own_events_only() -> None:
    async def work() -> None:
        before = num_alive(Event)
        world = World()
        async with AsyncEngine(world.engine) as engine:
            slow = engine.generate(prompt(1, 9), params(20))
            got = [await anext(slow)]
            await asyncio.gather(*(collected(engine, prompt(seed, 9), 20) for seed in range(2, 30)))
            await asyncio.sleep(0)  # the call that woke this task up holds what it brought
            assert num_alive(Event) - before <= 20
            got += [event async for event in slow]
            assert alone(1, 9, 20) == tokens_of(got)

    run(work())


def test_a_client_whose_loop_has_gone() -> None:
    """It could not leave; the engine notices when it has something to tell."""
    world = World(num_blocks=2000)
    engine = AsyncEngine(world.engine)

    async def begun() -> AsyncIterator[Event]:
        stream = engine.generate(prompt(1, 9), params(10**3))
        await anext(stream)
        return stream

    loop = asyncio.new_event_loop()
    stream = loop.run_until_complete(begun())
    loop.close()

    async def work() -> None:
        await until(lambda: world.engine.idle())
        assert alone(2, 9, 5) == tokens_of(await collected(engine, prompt(2, 9), 5))
        assert engine.healthy
        await engine.close()
        world.check_empty()

    run(work())
    del stream


def test_clients_in_several_loops() -> None:
    world = World()
    engine = AsyncEngine(world.engine)
    found: dict[int, list[tuple[int, ...]]] = {}

    def client(seed: int) -> None:
        async def work() -> None:
            found[seed] = [tokens_of(await collected(engine, prompt(seed, 9), 9)) for _ in range(3)]

        run(work())

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert {seed: [alone(seed, 9, 9)] * 3 for seed in range(4)} == found
    asyncio.run(engine.close())
    world.check_empty()


def test_many_requests_leave_nothing_behind() -> None:
    """After 600 requests, ended and abandoned, there are no more objects than before the first."""
    async def work() -> None:
        world = World()
        async with AsyncEngine(world.engine) as engine:
            counts = [num_alive(Sequence, Event, asyncio.Queue)]
            for _ in range(3):
                kept: dict[int, tuple[int, ...]] = {}
                rngs = [random.Random(number % 40) for number in range(200)]
                for begin in range(0, 200, 50):
                    some = rngs[begin : begin + 50]
                    await asyncio.gather(*(leaving_client(engine, rng, number % 40, kept) for number, rng in enumerate(some)))
                await until(lambda: engine.stalled_s == 0.0)
                counts.append(num_alive(Sequence, Event, asyncio.Queue))
            assert max(counts) <= counts[0] + 2, counts
        world.check_empty()

    run(work())


def test_errors_are_of_our_hierarchy() -> None:
    async def work() -> None:
        async with AsyncEngine(World().engine) as engine:
            with pytest.raises(FirstlightError) as caught:
                await collected(engine, [], 5)
        assert "Give at least one token" in str(caught.value)

    run(work())


def test_a_model_in_the_thread() -> None:
    """The same tokens as in the main thread, with seeds and penalties, whoever leaves meanwhile."""
    each = [SamplingParams(max_tokens=9, seed=seed, top_p=0.9, repetition_penalty=1.2, ignore_eos=True) for seed in range(6)]
    prompts = [prompt(seed, 12) for seed in range(6)]
    prompts = [[token % 500 for token in tokens] for tokens in prompts]
    with LLM(Path(__file__).parents[1] / "data/kimi_k3_tiny", dtype="float32", cache_bytes=2_000_000, max_sequences=3) as llm:
        want = [tuple(llm.generate([tokens], sampling)[0].tokens) for tokens, sampling in zip(prompts, each, strict=True)]

        async def work() -> None:
            async with AsyncEngine(llm.engine) as engine:
                async def client(number: int) -> tuple[int, ...]:
                    events = []
                    async for event in engine.generate(prompts[number], each[number]):
                        events.append(event)
                        if number == 2 and len(events) == 4:
                            break
                    return tokens_of(events)

                got = await asyncio.gather(*map(client, range(6)))
            assert [tokens if number != 2 else tokens[:4] for number, tokens in enumerate(want)] == got

        run(work())
        assert {0} == {group["used"] for group in llm.stats()["groups"].values()}
