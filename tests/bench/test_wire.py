"""HTTP as it comes: the same reply however its bytes are cut, every way to end, every way to break."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any

import pytest

from firstlight.bench.wire import Connection, Fault, Pool, ReplyReader
from tests.bench.scripted import Asked, Line, Server, VirtualLoop, virtually


class Kept:
    """A receiver that keeps everything."""

    def __init__(self) -> None:
        self.status, self.headers, self.text = 0, {}, b""

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self.status, self.headers = status, dict(headers)

    def body(self, piece: bytes, at_s: float) -> None:
        self.text += piece


CHUNKED = (
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n6;name=value\r\n\r\nworl\r\n1\r\nd\r\n0\r\nX-Trailer: 1\r\n\r\n"
)
SIZED = b"HTTP/1.1 404 Not Found\r\nContent-Length: 12\r\nconnection: close\r\n\r\nhello\r\nworld"
ENDLESS = b"HTTP/1.0 200 OK\r\n\r\nhello\r\nworld"
REPLIES = {"chunked": (CHUNKED, 200, True), "sized": (SIZED, 404, False), "endless": (ENDLESS, 200, False)}


@pytest.mark.parametrize("name", REPLIES)
@pytest.mark.parametrize("seed", range(40))
def test_any_cut_gives_the_same_reply(name: str, seed: int) -> None:
    reply, status, reusable = REPLIES[name]
    rng, kept = random.Random(seed), Kept()
    reader, place = ReplyReader(kept), 0
    while place < len(reply):
        assert not reader.done
        size = 1 if seed == 0 else rng.randint(1, 12)
        reader.feed(reply[place : place + size], 1.0)
        place += size
    reader.close()
    assert (True, None, reusable) == (reader.done, reader.fault, reader.reusable)
    assert (status, b"hello\r\nworld") == (kept.status, kept.text)


@pytest.mark.parametrize("size", range(1, len(CHUNKED)))
def test_a_reply_that_is_cut_off_is_a_disconnect(size: int) -> None:
    reader = ReplyReader(Kept())
    reader.feed(CHUNKED[:size], 1.0)
    assert not reader.done
    reader.close()
    assert reader.fault is not None and "disconnect" == reader.fault.kind


@pytest.mark.parametrize(
    "reply", [b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/2 200\r\n\r\n", b"HTTP/1.1 OK\r\n\r\n", CHUNKED.replace(b"5\r\n", b"five\r\n"), b"x" * 70_000,
              CHUNKED.replace(b"5\r\n", b"0" * 70_000)],
)
def test_what_is_no_http_is_a_fault(reply: bytes) -> None:
    reader = ReplyReader(Kept())
    reader.feed(reply, 1.0)
    assert reader.fault is not None and "protocol" == reader.fault.kind


def test_bytes_behind_a_reply_spoil_the_connection() -> None:
    reader = ReplyReader(Kept())
    reader.feed(CHUNKED + b"HTTP/1.1 200 OK\r\n", 1.0)
    assert (True, None, False) == (reader.done, reader.fault, reader.reusable)


def exchanged(behave: Any, count: int = 1, together: bool = False) -> tuple[list[Fault | None], list[Kept], Server]:
    """Requests through a pool, one behind the other or all at once."""

    async def main(loop: VirtualLoop) -> Any:
        server = Server(loop, behave)
        pool = Pool("http://host:1/v1/", {"x-key": "k"}, loop.time, server.connect)
        kept = [Kept() for _ in range(count)]
        calls = [pool.send("POST", "/completions", b"{}", receiver) for receiver in kept]
        faults = list(await asyncio.gather(*calls)) if together else [await call for call in calls]
        pool.close()
        await asyncio.sleep(0)
        return faults, kept, server

    return virtually(main)


async def echo(asked: Asked, line: Line) -> None:
    await asyncio.sleep(1)
    line.plain(200, {"path": asked.path, "key": asked.headers["x-key"], "host": asked.headers["host"]})


def test_a_connection_is_used_again() -> None:
    faults, kept, server = exchanged(echo, 3)
    assert ([None] * 3, 1) == (faults, server.num_connections)
    assert b'{"path": "/v1/completions", "key": "k", "host": "host:1"}' == kept[2].text


def test_requests_at_once_have_a_connection_each() -> None:
    assert 3 == exchanged(echo, 3, together=True)[2].num_connections


def test_a_connection_that_the_server_gave_up_is_replaced_once() -> None:
    async def behave(asked: Asked, line: Line) -> None:
        if line.server.num_connections == 1 and len(line.server.asked) == 2:
            line.abort()
        else:
            line.plain(200, {})

    faults, _, server = exchanged(behave, 2)
    assert ([None, None], 2, 3) == (faults, server.num_connections, len(server.asked))


def test_a_fresh_connection_that_breaks_is_not_tried_again() -> None:
    async def behave(asked: Asked, line: Line) -> None:
        line.abort()

    (fault,), _, server = exchanged(behave)
    assert fault is not None
    assert ("disconnect", 1) == (fault.kind, len(server.asked))


def test_nobody_there_is_a_fault() -> None:
    async def main(loop: VirtualLoop) -> Fault | None:
        async def refuse(factory: Any) -> Connection:
            raise ConnectionRefusedError("nobody there")

        return await Pool("http://host", {}, loop.time, refuse).send("GET", "/", b"", Kept())

    assert Fault("connect", "nobody there") == virtually(main)


def test_a_cancelled_request_drops_its_connection() -> None:
    async def behave(asked: Asked, line: Line) -> None:
        await asyncio.sleep(100)

    async def main(loop: VirtualLoop) -> tuple[int, int]:
        server = Server(loop, behave)
        pool = Pool("http://host", {}, loop.time, server.connect)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await pool.send("POST", "/", b"{}", Kept())
        await asyncio.sleep(0.1)
        return server.in_flight, len(pool._idle)

    assert (0, 0) == virtually(main)
