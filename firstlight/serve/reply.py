"""The way back to one client: a JSON object or a stream of events, with a clear end also when something breaks."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

from pydantic_core import to_json
from starlette.types import Receive, Send

from firstlight.serve.fields import StreamOptions
from firstlight.serve.refusal import JSON_TYPE, Refusal
from firstlight.serve.usage import Usage

_DONE = b"data: [DONE]\n\n"
_LINE_ENDS = tuple((chr(code).encode(), f"\\u{code:04x}".encode()) for code in (0x85, 0x2028, 0x2029))
"""Ends of lines that JSON does not escape by itself."""


def event_line(content: Mapping[str, Any]) -> bytes:
    """An event of a stream, in one line whatever a reader takes for a line's end: many clients split text where Unicode does."""
    body = to_json(content)
    if not body.isascii():
        for mark, escape in _LINE_ENDS:
            body = body.replace(mark, escape)
    return b"data: " + body + b"\n\n"


class Reply:
    """Sends one response. A stream waits for its reader: what piles up meanwhile is bounded where the engine hands over."""

    def __init__(self, send: Send, *, write_s: float, headers: Mapping[str, str] | None = None) -> None:
        self._send, self._write_s = send, write_s
        self.headers = dict(headers or {})
        self.begun = False

    def ignores(self, names: Sequence[str]) -> None:
        """Say in a header which fields were set aside."""
        if names:
            self.headers["X-Ignored-Fields"] = ", ".join(re.sub(r"[^\w.-]", "?", name[:60] or "?", flags=re.ASCII) for name in names[:20])

    async def whole(self, content: Mapping[str, Any]) -> None:
        """Answer with a JSON object."""
        body = to_json(content)
        await self._begin(JSON_TYPE, length=len(body))
        await self._write(body, more=False)

    async def event(self, content: Mapping[str, Any]) -> None:
        """Send an event of an open stream."""
        await self._write(event_line(content))

    async def open_stream(self) -> None:
        """Send the head of a stream; from here on errors are events."""
        self.headers |= {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        await self._begin("text/event-stream; charset=utf-8")

    async def done(self) -> None:
        """End a stream that is whole."""
        await self._write(_DONE, more=False)

    async def fail(self, refusal: Refusal) -> None:
        """End a stream that is not whole: with the error as its last event and without [DONE]. Who does not read is left."""
        with suppress(TimeoutError):
            await self._write(event_line(refusal.content()), more=False)

    async def _begin(self, kind: str, *, length: int | None = None) -> None:
        self.begun = True
        headers = {"Content-Type": kind, **self.headers} if length is None else {"Content-Type": kind, "Content-Length": str(length), **self.headers}
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]
        async with asyncio.timeout(self._write_s):
            await self._send({"type": "http.response.start", "status": 200, "headers": raw})

    async def _write(self, body: bytes, *, more: bool = True) -> None:
        async with asyncio.timeout(self._write_s):
            await self._send({"type": "http.response.body", "body": body, "more_body": more})


async def tell(
    reply: Reply, head: Mapping[str, Any], choices: AsyncGenerator[tuple[int, dict[str, Any]], None], usage: Usage, options: StreamOptions | None
) -> None:
    """Stream what is said of the choices, each piece a chunk of its own; then the usage, if it is wanted; then the end."""
    counted = options is not None and bool(options.include_usage)
    always = counted and options is not None and bool(options.continuous_usage_stats)
    head = {**head, "usage": None} if counted else head
    await reply.open_stream()
    async with aclosing(choices):
        async for _, choice in choices:
            await reply.event({**head, "choices": [choice], "usage": usage.content()} if always else {**head, "choices": [choice]})
    if counted:
        await reply.event({**head, "choices": [], "usage": usage.content()})
    await reply.done()


async def while_there(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Do the work while the client is there; False: it left, and the work was cancelled. The request's body must have been read."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
            return True
        return False
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
