"""HTTP/1.1 from the client's side, as small as a stopwatch must be: bytes are stamped as the loop hands them over, and no task wakes for them.

What goes wrong is a value (a Fault), because a load tool counts it rather than stops.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

MOST_HEAD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a request did not succeed: one word to count by, and what was seen."""

    kind: str
    message: str


class Receiver(Protocol):
    """What a reply is told to, in the order it comes."""

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        """Status line and headers, their names in lower case."""

    def body(self, piece: bytes, at_s: float) -> None:
        """Some bytes of the body, and when they came."""


class ReplyReader:
    """Bytes of a connection become head and body of one reply, however they are cut."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self.begun = False
        self.done = False
        self.reusable = True
        self.fault: Fault | None = None
        self._buffer = bytearray()
        self._left: int | None = None
        """Bytes of the chunk or body still to come; None: until the connection closes."""
        self._step: Callable[[float], bool] = self._head
        self._chunked = False

    def feed(self, piece: bytes, at_s: float) -> None:
        """Take what came; afterwards `done` says whether the reply is whole."""
        self.begun = True
        self._buffer += piece
        while not self.done and self._step(at_s):
            continue
        if self.done and self._buffer:
            self.reusable = False

    def close(self) -> None:
        """The connection ended; only a body without a length ends like that."""
        if self.done:
            return
        if self._step == self._body and self._left is None:
            self.done, self.reusable = True, False
        else:
            self._fail("disconnect", "the server closed the connection before the end of its reply")

    def _fail(self, kind: str, message: str) -> bool:
        self.fault, self.done, self.reusable = Fault(kind, message), True, False
        return False

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\n")
        if end < 0:
            if len(self._buffer) > MOST_HEAD_BYTES:
                self._fail("protocol", f"a line of more than {MOST_HEAD_BYTES} bytes where HTTP has short ones")
            return None
        line = bytes(self._buffer[:end]).rstrip(b"\r")
        del self._buffer[: end + 1]
        return line

    def _head(self, at_s: float) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return self._fail("protocol", f"headers of more than {MOST_HEAD_BYTES} bytes") if len(self._buffer) > MOST_HEAD_BYTES else False
        first, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
            return self._fail("protocol", f"not HTTP/1: {first[:80]!r}")
        status, headers = int(rest[:3]), {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        if status < 200:
            return True
        self._frame(version, status, headers)
        self.receiver.head(status, headers)
        return not self.done

    def _frame(self, version: str, status: int, headers: Mapping[str, str]) -> None:
        """How the end of the body is known."""
        connection = headers.get("connection", "").lower()
        self.reusable = connection != "close" and (version != "HTTP/1.0" or connection == "keep-alive")
        length = headers.get("content-length", "")
        if status in (204, 304):
            self.done = True
        elif "chunked" in headers.get("transfer-encoding", "").lower():
            self._chunked, self._step = True, self._size
        elif length.isdecimal():
            self._left, self._step, self.done = int(length), self._body, int(length) == 0
        else:
            self._step = self._body

    def _size(self, at_s: float) -> bool:
        line = self._line()
        if line is None:
            return False
        digits = line.partition(b";")[0].strip()
        try:
            self._left = int(digits, 16)
        except ValueError:
            return self._fail("protocol", f"the size of a chunk is {digits[:40]!r}")
        self._step = self._body if self._left else self._trailer
        return True

    def _body(self, at_s: float) -> bool:
        size = len(self._buffer) if self._left is None else min(self._left, len(self._buffer))
        if size == 0:
            return False
        piece = bytes(self._buffer[:size])
        del self._buffer[:size]
        if self._left is not None:
            self._left -= size
        self.receiver.body(piece, at_s)
        if self._left == 0:
            self._step, self.done = self._gap, not self._chunked
        return self._left == 0

    def _gap(self, at_s: float) -> bool:
        """The end of line behind a chunk."""
        if self._line() is None:
            return False
        self._step = self._size
        return True

    def _trailer(self, at_s: float) -> bool:
        line = self._line()
        if line == b"":
            self.done = True
        return line is not None


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.open = False
        self.used = False
        self._transport: asyncio.Transport | None = None
        self._reader: ReplyReader | None = None
        self._ended: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As asyncio says it."""
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.open = transport, True

    def data_received(self, piece: bytes) -> None:
        """As asyncio says it; the time is taken first."""
        at_s = self.clock()
        if self._reader is None:
            self.shut()
            return
        self._reader.feed(piece, at_s)
        if self._reader.done:
            self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """As asyncio says it."""
        self.open = False
        if self._reader is not None:
            self._reader.close()
            self._wake()

    def _wake(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    async def exchange(self, request: bytes, receiver: Receiver) -> ReplyReader:
        """Send a request and wait for the end of its reply, which the receiver has been told by then."""
        assert self._transport is not None and self._reader is None, "a connection serves one request at a time"
        self._reader = ReplyReader(receiver)
        self._ended = asyncio.get_running_loop().create_future()
        try:
            self._transport.write(request)
            await self._ended
            if not self._reader.reusable:
                self.shut()
            return self._reader
        except asyncio.CancelledError:
            self.shut()
            raise
        finally:
            self._reader, self._ended, self.used = None, None, True

    def shut(self) -> None:
        """Drop the connection at once, whatever is still to come."""
        self.open = False
        if self._transport is not None:
            self._transport.abort()


Connect = Callable[[Callable[[], Connection]], Awaitable[Connection]]


class Pool:
    """Connections to one server; as many as there are requests under way, and each is used again."""

    def __init__(self, url: str, headers: Mapping[str, str], clock: Callable[[], float], connect: Connect | None = None) -> None:
        parts = urlsplit(url)
        self.clock = clock
        self._address = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._root = parts.path.rstrip("/")
        self._head = "".join(f"{name}: {value}\r\n" for name, value in {"host": parts.netloc.rpartition("@")[2], **headers}.items())
        self._connect = connect or self._dial
        self._idle: list[Connection] = []

    async def send(self, method: str, path: str, body: bytes, receiver: Receiver) -> Fault | None:
        """One request; a connection that the server had already given up is replaced once, as long as no byte of a reply came."""
        head = f"{method} {self._root}{path} HTTP/1.1\r\n{self._head}content-length: {len(body)}\r\n\r\n"
        request = head.encode("latin-1") + body
        while True:
            connection = await self._take()
            if isinstance(connection, Fault):
                return connection
            stale = connection.used
            reply = await connection.exchange(request, receiver)
            if connection.open:
                self._idle.append(connection)
            if reply.fault is None or reply.begun or not stale:
                return reply.fault

    async def _take(self) -> Connection | Fault:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        try:
            return await self._connect(lambda: Connection(self.clock))
        except OSError as error:
            return Fault("connect", str(error) or type(error).__name__)

    async def _dial(self, factory: Callable[[], Connection]) -> Connection:
        host, port = self._address
        _, connection = await asyncio.get_running_loop().create_connection(factory, host, port, ssl=self._ssl)
        return connection

    def close(self) -> None:
        """Drop all idle connections."""
        while self._idle:
            self._idle.pop().shut()
