"""Loops: clients never ask more than there are of them, arrivals wait for nobody, and what was not sent is counted."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from firstlight.bench.client import Dialogue
from firstlight.bench.exchange import Exchange
from firstlight.bench.load import Load, Record
from firstlight.bench.wire import Fault
from firstlight.bench.workload import Conversation, Turn
from tests.bench.scripted import VirtualLoop, virtually


class Stalled:
    """A client whose server takes `takes_s` for each answer; `fails` are the numbers of requests that fail."""

    def __init__(self, loop: VirtualLoop, takes_s: Any, fails: tuple[int, ...] = ()) -> None:
        self.loop, self.takes_s, self.fails = loop, takes_s, fails
        self.in_flight = self.most = self.asked = 0
        self.written_s: list[float] = []

    def body(self, turn: Turn, dialogue: Dialogue) -> bytes:
        self.written_s.append(self.loop.time())
        return b"{}"

    async def ask(self, body: bytes, turn: Turn, due_s: float, dialogue: Dialogue | None = None) -> Exchange:
        exchange, number = Exchange(due_s, self.loop.time()), self.asked
        self.asked += 1
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            await asyncio.sleep(self.takes_s(number))
        finally:
            self.in_flight -= 1
        exchange.end_s = self.loop.time()
        exchange.fault = Fault("test", "planted") if number in self.fails else None
        return exchange


def ran(
    conversations: list[Conversation], num_clients: int | None, takes_s: Any, fails: tuple[int, ...] = (), **given: Any
) -> tuple[Record, Stalled]:
    """A whole load in virtual time."""

    async def main(loop: VirtualLoop) -> tuple[Record, Stalled]:
        client = Stalled(loop, takes_s, fails)
        return await Load(client, loop.time, asyncio.sleep, **given).run(iter(conversations), num_clients), client

    return virtually(main)


def plan(count: int, turns: int = 1, gap_s: float | None = None) -> list[Conversation]:
    """So many conversations, each due `gap_s` behind the last."""
    return [Conversation(tuple(Turn((), 1) for _ in range(turns)), None if gap_s is None else number * gap_s) for number in range(count)]


@pytest.mark.parametrize("num_clients", [1, 3, 8, 40])
def test_clients_never_have_more_under_way_than_there_are(num_clients: int) -> None:
    record, client = ran(plan(30), num_clients, lambda number: 1 + number * 7 % 5)
    assert (30, min(num_clients, 30)) == (len(record.exchanges), client.most)


def test_a_free_client_asks_at_once() -> None:
    record, _ = ran(plan(10), 2, lambda number: 1.0)
    assert 5.0 == pytest.approx(record.end_s - record.begun_s)


@pytest.mark.parametrize("takes_s", [0.001, 50.0])
def test_arrivals_do_not_know_how_the_server_is(takes_s: float) -> None:
    record, client = ran(plan(20, gap_s=0.25), None, lambda number: takes_s)
    assert [number * 0.25 for number in range(20)] == pytest.approx([exchange.begun_s - record.begun_s for exchange in sorted(
        record.exchanges, key=lambda exchange: exchange.begun_s)])
    assert (20 if takes_s > 5 else 1) == client.most


def test_late_starts_are_measured_from_when_they_were_due() -> None:
    """A pause that always lasts 0.3 s too long stands for a tool that does not keep up."""

    async def main(loop: VirtualLoop) -> Record:
        async def oversleep(pause_s: float) -> None:
            await asyncio.sleep(pause_s + 0.3)

        return await Load(Stalled(loop, lambda number: 1.0), loop.time, oversleep).run(iter(plan(3, gap_s=0.1)), None)

    record = virtually(main)
    assert [0.3, 0.5, 0.7] == pytest.approx([exchange.late_s for exchange in record.exchanges])
    assert [1.3, 1.5, 1.7] == pytest.approx([exchange.e2e_s for exchange in record.exchanges])
    assert all(lag == pytest.approx(0.3) for lag in record.lags_s)


def test_bodies_are_written_before_they_are_due() -> None:
    _, client = ran(plan(3, gap_s=1.0), None, lambda number: 0.1)
    assert [1000, 1000, 1001] == pytest.approx(client.written_s)


def test_a_duration_ends_both_loops_and_waits_for_what_is_under_way() -> None:
    record, _ = ran(plan(100), 2, lambda number: 0.75, duration_s=2.0)
    assert (6, 2.25) == (len(record.exchanges), pytest.approx(record.end_s - record.begun_s))
    record, _ = ran(plan(100, gap_s=0.5), None, lambda number: 3.0, duration_s=2.0)
    assert (4, 4.5) == (len(record.exchanges), pytest.approx(record.end_s - record.begun_s))


def test_turns_follow_one_another_with_a_pause() -> None:
    record, client = ran(plan(1, turns=3), 4, lambda number: 1.0, think_s=0.5)
    assert [0, 1.5, 3.0] == pytest.approx([exchange.begun_s - record.begun_s for exchange in record.exchanges])
    assert 1 == client.most


def test_a_failed_turn_is_the_last_and_the_rest_is_counted() -> None:
    record, _ = ran(plan(2, turns=4), 1, lambda number: 1.0, fails=(1,))
    assert (6, 2) == (len(record.exchanges), record.num_abandoned)


def test_turns_behind_the_duration_are_counted() -> None:
    record, _ = ran(plan(1, turns=5), 1, lambda number: 1.0, duration_s=1.5)
    assert (2, 3) == (len(record.exchanges), record.num_abandoned)


def test_an_interrupted_run_reports_what_was_under_way() -> None:
    async def main(loop: VirtualLoop) -> tuple[Record, int]:
        client = Stalled(loop, lambda number: 1.0 if number < 2 else 100.0)
        task = asyncio.ensure_future(Load(client, loop.time, asyncio.sleep).run(iter(plan(9)), 3))
        await asyncio.sleep(5)
        task.cancel()
        return await task, client.in_flight

    record, in_flight = virtually(main)
    assert (True, 0, 2, 3) == (record.interrupted, in_flight, sum(exchange.fault is None for exchange in record.exchanges), sum(
        exchange.fault is not None and exchange.fault.kind == "interrupted" for exchange in record.exchanges))


def test_a_busy_event_loop_is_noticed() -> None:
    """On the real clock: a call that blocks for 80 ms shows as a lag of most of that."""

    async def main(blocks_s: float) -> float:
        loop = asyncio.get_running_loop()

        class Blocking(Stalled):
            async def ask(self, body: bytes, turn: Turn, due_s: float, dialogue: Dialogue | None = None) -> Exchange:
                await asyncio.sleep(0.03)
                time.sleep(blocks_s)
                await asyncio.sleep(0.03)
                return Exchange(due_s, due_s, end_s=loop.time())

        record = await Load(Blocking(loop, None), time.perf_counter, asyncio.sleep).run(iter(plan(1)), 1)  # type: ignore[arg-type]
        return max(record.lags_s)

    assert 0.06 < asyncio.run(main(0.08))
