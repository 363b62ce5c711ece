"""One thread steps the engine, every client gets its own events in order. No torch.

What clients want reaches the engine between two steps, through an inbox; events go back through each client's own event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from collections.abc import Sequence as Rows
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from firstlight.engine.loop import Engine
from firstlight.sched.sequence import Event
from firstlight.spec.errors import FirstlightError, PeerError
from firstlight.spec.sampling import SamplingParams

log = logging.getLogger("firstlight")
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Client:
    """One request as its client sees it. The queue never holds more than the tokens of the request, because nobody else writes to it."""

    loop: asyncio.AbstractEventLoop
    arrived_s: float
    most_unread: int | None = None
    events: asyncio.Queue[Event | Exception] = field(default_factory=asyncio.Queue)
    seq_id: int | None = None
    late: bool = False


class AsyncEngine:
    """Owns an engine: nobody else may step it any more, and `close` closes it. `async with` drains, or cancels when an error passes."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.num_steps = 0
        self.last_step_s = engine.clock()
        self._counts = engine.counts()
        self._clients: dict[int, _Client] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._busy = self._closing = self._ended = False
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._work, name="firstlight-engine", daemon=True)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """False for good once a mistake of ours ended the stepping thread."""
        return self._failure is None

    @property
    def closing(self) -> bool:
        """Whether new requests are refused."""
        return self._closing or self._ended

    @property
    def stalled_s(self) -> float:
        """Time since a step last ended, or since there is work again; 0 while there is none. Much more than a step takes means stuck."""
        return self.engine.clock() - self.last_step_s if self._busy else 0.0

    def counts(self) -> dict[str, int]:
        """Those of the engine after its last step."""
        return dict(self._counts)

    async def generate(
        self, tokens: Rows[int], params: SamplingParams, *, priority: str = "standard", salt: str | None = None, most_unread: int | None = None,
        **options: Any,
    ) -> AsyncGenerator[Event, None]:
        """The events of one request up to its end. Leaving earlier by break, aclose, cancellation or an exception cancels the request.

        `most_unread`: a reader that leaves more events than this unread has left; None: as many as there are. `options`: those of `submit`.

        Raises: RequestError or CapacityError for a request that cannot be served, PeerError when the engine is closing or broken, or the
        reader was too slow.
        Note: after a break, Python closes the iterator once nothing refers to it; contextlib.aclosing does so at once.
        """
        client = _Client(asyncio.get_running_loop(), self.engine.clock(), most_unread)
        options = {"priority": priority, "salt": salt, "arrived_s": client.arrived_s, **options}
        if not self._post(lambda: self._enter(client, tokens, params, options), entering=True):
            raise self._refusal()
        ended = False
        try:
            while not ended:
                event = await client.events.get()
                ended = isinstance(event, Exception) or event.finish is not None
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            if not ended:
                self._post(lambda: self._leave(client))

    async def ask(self, call: Callable[[], T]) -> T:
        """The result of a call that is made between two steps, by the only thread that may touch the engine.

        Raises: what the call raises; PeerError when nothing is run any more.
        """
        answer: Future[T] = Future()
        if not self._post(lambda: _answer(answer, call)):
            raise self._refusal()
        return await asyncio.wrap_future(answer)

    async def close(self, *, drain: bool = True) -> None:
        """Refuse new requests, finish those under way (or cancel them), end the thread and close the engine.

        Again is fine, as is cancelling what a first call still waits for.
        """
        with self._wake:
            self._closing = True
            self._wake.notify()
        if not drain:
            self._post(self._cancel_all)
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, kind: object, *reason: object) -> None:
        await self.close(drain=kind is None)

    def _post(self, call: Callable[[], None], *, entering: bool = False) -> bool:
        """Have the stepping thread do something before its next step; False: it takes no more."""
        with self._wake:
            if self._ended or (entering and self._closing):
                return False
            self._inbox.append(call)
            self._wake.notify()
            return True

    def _refusal(self) -> PeerError:
        return PeerError(self._failure or "the engine is closing", "Send the request to another server, or start this one again.")

    def _work(self) -> None:
        """The main function of the stepping thread."""
        try:
            while self._turn():
                pass
        except BaseException as error:
            log.exception("the stepping thread ends")
            self._fail(f"the engine broke down: {error!r}")
        finally:
            self.engine.close()

    def _turn(self) -> bool:
        """What the inbox says, then one step; sleeps while there is neither. False: closed, and nothing is left."""
        with self._wake:
            if not self._inbox and self.engine.idle():
                self._busy = False
                self._wake.wait_for(lambda: self._inbox or self._closing)
            if not self._busy:
                self.last_step_s = self.engine.clock()
            # Decided under the lock, so that nothing is posted that nobody will read.
            self._ended = self._closing and not self._inbox and self.engine.idle()
            self._busy = not self._ended
        for _ in range(len(self._inbox)):
            self._inbox.popleft()()
        if not self.engine.idle():
            events = self.engine.step()
            self.num_steps += 1
            self.last_step_s = self.engine.clock()
            self._counts = self.engine.counts()
            self._deliver(events)
        return not self._ended

    def _enter(self, client: _Client, tokens: Rows[int], params: SamplingParams, options: Mapping[str, Any]) -> None:
        if self._failure is not None:
            self._tell(client.loop, [(client, self._refusal())])
            return
        try:
            client.seq_id = self.engine.submit(tokens, params, **options)
        except FirstlightError as error:
            self._tell(client.loop, [(client, error)])
        except Exception as error:
            # What nobody thought of in one request costs that request only.
            log.exception("a request was not understood")
            self._tell(client.loop, [(client, error)])
        else:
            self._clients[client.seq_id] = client

    def _leave(self, client: _Client) -> None:
        if client.seq_id is not None and self._clients.pop(client.seq_id, None) is not None:
            self.engine.cancel(client.seq_id)

    def _cancel_all(self) -> None:
        for seq_id in self._clients:
            self.engine.cancel(seq_id)

    def _deliver(self, events: Iterable[Event]) -> None:
        told: dict[asyncio.AbstractEventLoop, list[tuple[_Client, Event | Exception]]] = {}
        for event in events:
            # Who has left hears nothing, not even that it ended.
            client = self._clients.get(event.seq_id)
            if client is not None:
                told.setdefault(client.loop, []).append((client, event))
            if event.finish is not None:
                self._clients.pop(event.seq_id, None)
        for loop, pairs in told.items():
            self._tell(loop, pairs)

    def _tell(self, loop: asyncio.AbstractEventLoop, pairs: list[tuple[_Client, Event | Exception]]) -> None:
        """Hand over to an event loop, at one go; if it is closed, its clients are gone without leaving."""
        try:
            loop.call_soon_threadsafe(self._hand_over, pairs)
        except RuntimeError:
            for client, _ in pairs:
                self._leave(client)

    def _fail(self, failure: str) -> None:
        """Tell everybody that nothing will come any more."""
        with self._wake:
            self._failure, self._ended, self._busy = failure, True, False
            calls, self._inbox = self._inbox, deque()
        self._deliver([Event(seq_id, None, "error", error=failure) for seq_id in self._clients])
        for call in calls:
            call()


    def _hand_over(self, pairs: list[tuple[_Client, Event | Exception]]) -> None:
        """Put events where their clients read; who has fallen too far behind is told so, as the last thing, and leaves."""
        for client, event in pairs:
            if client.late:
                continue
            if client.most_unread is not None and client.events.qsize() >= client.most_unread:
                client.late = True
                event = PeerError(f"{client.most_unread} events wait for a reader that does not come", "Read faster, or ask for fewer tokens.")
                self._post(partial(self._leave, client))
            client.events.put_nowait(event)


def _answer(answer: Future[T], call: Callable[[], T]) -> None:
    if answer.set_running_or_notify_cancel():
        try:
            answer.set_result(call())
        except Exception as error:  # noqa: BLE001  (the asker gets it, the thread goes on)
            answer.set_exception(error)
