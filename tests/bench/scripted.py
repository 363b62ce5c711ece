"""A server in memory that does what a script says, on a clock that jumps to the next thing to do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from firstlight.bench.options import Options
from firstlight.bench.serve import Surroundings, measured
from firstlight.bench.wire import Connection

STREAM = {"content-type": "text/event-stream", "transfer-encoding": "chunked"}


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only when nobody has anything to do."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        select = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None) -> Any:
            assert timeout is not None, "everybody waits for something that never comes"
            ready = select(0)
            self.now_s += 0 if ready else timeout
            return ready

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now_s


def virtually(main: Callable[[VirtualLoop], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine in virtual time; what it leaves behind is an error."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main(loop))
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


@dataclass(frozen=True)
class Asked:
    """A request as the server saw it."""

    method: str
    path: str
    headers: dict[str, str]
    fields: dict[str, Any]
    at_s: float


def event(text: str | None = None, *, finish: str | None = None, usage: dict[str, Any] | None = None, **more: Any) -> bytes:
    """One event of a completions stream; without text, its choices are empty."""
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": finish}]
    return b"data: " + json.dumps({"choices": choices, "usage": usage, **more}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


class Line(asyncio.Transport):
    """The server's end of one connection."""

    def __init__(self, connection: Connection, server: Server) -> None:
        super().__init__()
        self.connection, self.server = connection, server
        self.received = b""
        self.task: asyncio.Task[None] | None = None
        self.closed = False

    def write(self, piece: Any) -> None:
        self.received += bytes(piece)
        head, gap, body = self.received.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        if gap and len(body) == int(headers["content-length"]):
            self.received = b""
            method, path, _ = first.split(" ")
            fields = json.loads(body) if body else {}
            asked = Asked(method, path, headers, fields, self.server.loop.time())
            self.task = asyncio.ensure_future(self.server.answer(asked, self))

    def head(self, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.say(f"HTTP/1.1 {status} Some\r\n".encode() + b"".join(f"{k}: {v}\r\n".encode() for k, v in (headers or STREAM).items()) + b"\r\n")

    def chunk(self, piece: bytes) -> None:
        self.say(b"%x\r\n%s\r\n" % (len(piece), piece))

    def say(self, piece: bytes) -> None:
        if not self.closed:
            self.connection.data_received(piece)

    def plain(self, status: int, found: Any, headers: dict[str, str] | None = None) -> None:
        text = json.dumps(found).encode()
        self.head(status, {"content-type": "application/json", "content-length": str(len(text)), **(headers or {})})
        self.say(text)

    def abort(self) -> None:
        """Either side hangs up."""
        if not self.closed:
            self.closed = True
            self.server.loop.call_soon(self.connection.connection_lost, None)
            if self.task is not None and self.task is not asyncio.current_task():
                self.task.cancel()


Behaviour = Callable[[Asked, Line], Awaitable[None]]


@dataclass
class Server:
    """Lists one model; what else it does is the behaviour. `asked` holds what it was asked, in order."""

    loop: asyncio.AbstractEventLoop
    behave: Behaviour
    asked: list[Asked] = field(default_factory=list)
    num_connections: int = 0
    in_flight: int = 0
    most_in_flight: int = 0

    async def connect(self, factory: Callable[[], Connection]) -> Connection:
        connection = factory()
        self.num_connections += 1
        connection.connection_made(Line(connection, self))
        return connection

    async def answer(self, asked: Asked, line: Line) -> None:
        if asked.method == "GET":
            line.plain(200, {"data": [{"id": "scripted", "max_model_len": 4096}]}, {"server": "script"})
            return
        self.asked.append(asked)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await self.behave(asked, line)
        finally:
            self.in_flight -= 1


def symbols(asked: Asked) -> int:
    """Words or ids of a prompt."""
    prompt = asked.fields["prompt"] if "prompt" in asked.fields else " ".join(message["content"] for message in asked.fields["messages"])
    return len(prompt.split() if isinstance(prompt, str) else prompt)


def speak(first_s: float = 0.5, each_s: float = 0.25, *, cached: int = 0, per_chunk: int = 1) -> Behaviour:
    """A whole answer of max_tokens tokens with usage at its end."""

    async def behave(asked: Asked, line: Line) -> None:
        line.head()
        left, pause_s = asked.fields["max_tokens"], first_s
        while left > 0:
            await asyncio.sleep(pause_s)
            count, pause_s = min(per_chunk, left), each_s
            left -= count
            line.chunk(event(" word" * count, finish=None if left else "length"))
        usage = {"prompt_tokens": symbols(asked), "completion_tokens": asked.fields["max_tokens"], "prompt_tokens_details": {"cached_tokens": cached}}
        line.chunk(event(usage=usage))
        line.chunk(DONE)
        line.say(b"0\r\n\r\n")

    return behave


def measured_on(behave: Behaviour, **options: Any) -> tuple[dict[str, Any], Any, Server]:
    """A whole run against a scripted server in virtual time: report, record, server."""

    async def main(loop: VirtualLoop) -> tuple[dict[str, Any], Any, Server]:
        server = Server(loop, behave)
        around = Surroundings(clock=loop.time, sleep=asyncio.sleep, connect=server.connect)
        made, record = await measured(Options(**{"warmup": 0, **options}), around)
        server.asked = server.asked[-len(record.exchanges) - sum(exchange.num_refused for exchange in record.exchanges):] if record.exchanges else []
        return made, record, server

    return virtually(main)


def paths(made: Any, prefix: str = "") -> Iterable[str]:
    """Names of all values of a report, with dots between the levels."""
    if not isinstance(made, dict) or not made:
        yield prefix
        return
    for name, value in made.items():
        yield from paths(value, f"{prefix}.{name}" if prefix else name)
