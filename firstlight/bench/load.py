"""Who asks when: clients that wait for their answers, or arrivals that wait for nobody."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from firstlight.bench.client import Dialogue
from firstlight.bench.exchange import Exchange
from firstlight.bench.wire import Fault
from firstlight.bench.workload import Conversation, Turn

LAG_PERIOD_S = 0.01


class Asker(Protocol):
    """What the load needs of a client."""

    def body(self, turn: Turn, dialogue: Dialogue) -> bytes:
        """The request of a turn."""

    async def ask(self, body: bytes, turn: Turn, due_s: float, dialogue: Dialogue | None = None) -> Exchange:
        """Send it and measure the reply."""


@dataclass(slots=True)
class Record:
    """What became of a run; its times are readings of the load's clock."""

    begun_s: float = 0.0
    end_s: float = 0.0
    exchanges: list[Exchange] = field(default_factory=list)
    num_abandoned: int = 0
    """Turns that were never sent, because the turn before them failed or the run was over."""
    interrupted: bool = False
    lags_s: array[float] = field(default_factory=lambda: array("d"))


class Load:
    """Runs conversations against a client. Clock and pause are given."""

    def __init__(
        self, client: Asker, clock: Callable[[], float], sleep: Callable[[float], Awaitable[None]], *,
        think_s: float = 0.0, duration_s: float | None = None, seen: Callable[[Exchange], None] = lambda _: None,
    ) -> None:
        self.client, self.clock, self.sleep, self.seen = client, clock, sleep, seen
        self.think_s, self.duration_s = think_s, duration_s
        self.record = Record()
        self._under_way: dict[int, tuple[Turn, float]] = {}

    async def run(self, conversations: Iterator[Conversation], num_clients: int | None) -> Record:
        """All conversations, by so many clients or, without a number, when they are due; interrupted, what there is until then."""
        self.record.begun_s = self.clock()
        async with self._watched():
            try:
                async with asyncio.TaskGroup() as group:
                    if num_clients is None:
                        await self._arrive(conversations, group)
                    for _ in range(num_clients or 0):
                        group.create_task(self._serve(conversations))
            except asyncio.CancelledError:
                task = asyncio.current_task()
                assert task is not None
                task.uncancel()
                self.record.interrupted = True
                self._cut()
        self.record.end_s = max((exchange.end_s for exchange in self.record.exchanges), default=self.clock())
        return self.record

    def _over(self, at_s: float) -> bool:
        return self.duration_s is not None and at_s >= self.record.begun_s + self.duration_s

    async def _serve(self, conversations: Iterator[Conversation]) -> None:
        """One client of the closed loop."""
        for conversation in conversations:
            if self._over(self.clock()):
                return
            dialogue = Dialogue()
            body = self.client.body(conversation.turns[0], dialogue)
            await self._talk(conversation, dialogue, body, self.clock())

    async def _arrive(self, conversations: Iterator[Conversation], group: asyncio.TaskGroup) -> None:
        """The open loop: the next request is written before it is due, and nothing is waited for but time."""
        for conversation in conversations:
            due_s = self.record.begun_s + (conversation.due_s or 0.0)
            if self._over(due_s):
                return
            dialogue = Dialogue()
            body = self.client.body(conversation.turns[0], dialogue)
            await self.sleep(max(0.0, due_s - self.clock()))
            group.create_task(self._talk(conversation, dialogue, body, due_s))

    async def _talk(self, conversation: Conversation, dialogue: Dialogue, body: bytes, due_s: float) -> None:
        """The turns of one conversation, one behind the other; a failed one is the last."""
        last = len(conversation.turns) - 1
        for number, turn in enumerate(conversation.turns):
            if number:
                await self.sleep(self.think_s)
                if self._over(self.clock()):
                    self.record.num_abandoned += last + 1 - number
                    return
                body, due_s = self.client.body(turn, dialogue), self.clock()
            self._under_way[id(turn)] = (turn, due_s)
            exchange = await self.client.ask(body, turn, due_s, dialogue if number < last else None)
            del self._under_way[id(turn)]
            self._enter(exchange)
            if exchange.fault is not None:
                self.record.num_abandoned += last - number
                return

    def _enter(self, exchange: Exchange) -> None:
        self.record.exchanges.append(exchange)
        self.seen(exchange)

    def _cut(self) -> None:
        """Requests under way when the user interrupts count as such."""
        now = self.clock()
        for turn, due_s in self._under_way.values():
            fault = Fault("interrupted", "the run was stopped while this was under way")
            self._enter(Exchange(due_s, due_s, turn.num_output, turn.num_shared, end_s=now, fault=fault))

    @asynccontextmanager
    async def _watched(self) -> AsyncIterator[None]:
        """Measure how late the event loop wakes a task that wants to run every 10 ms."""

        async def watch() -> None:
            while True:
                at_s = self.clock()
                await self.sleep(LAG_PERIOD_S)
                self.record.lags_s.append(self.clock() - at_s - LAG_PERIOD_S)

        task = asyncio.create_task(watch())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
