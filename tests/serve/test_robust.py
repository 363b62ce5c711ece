"""What happens when clients leave, lag or come in crowds, when time is up, when the server is told to stop, and when a step is stuck."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from firstlight.engine.loop import Runner
from firstlight.sched.sequence import Batch, StepResult
from firstlight.serve.app import build_app
from firstlight.serve.reply import event_line, while_there
from firstlight.serve.service import Settings, merged, together
from tests.serve.conftest import LIMIT_S, Client, said

Serve = Callable[..., None]
COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"model": "default", "prompt": "The first light", "max_tokens": 1500, "ignore_eos": True, "seed": 1}


class Gate:
    """A runner that waits, while closed, before each step."""

    def __init__(self, inner: Runner) -> None:
        self.inner = inner
        self.opened = threading.Event()
        self.opened.set()
        self.num_steps = 0

    def run(self, batch: Batch) -> StepResult:
        self.num_steps += 1
        assert self.opened.wait(LIMIT_S)
        return self.inner.run(batch)

    def close(self) -> None:
        self.inner.close()


@pytest.fixture
def gated(serve: Serve) -> Callable[..., None]:
    """As `serve`, with a gate in front of the runner as the test's second argument."""

    def run(test: Callable[[Client, Gate], Any], settings: Settings | None = None, **limits: Any) -> None:
        async def wrapped(client: Client) -> None:
            engine = client.service.machine.engine
            gate = Gate(engine.runner)
            engine.runner = gate
            try:
                await test(client, gate)
            finally:
                gate.opened.set()
                engine.runner = gate.inner

        serve(wrapped, settings, **limits)

    return run


class Line:
    """One ASGI request by hand: the test decides when the client reads and when it leaves."""

    def __init__(self, client: Client, path: str, content: dict[str, Any]) -> None:
        self.app = build_app(client.service)
        raw = httpx.Request("POST", "http://test", json=content).content
        self.scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http", "path": path,
            "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)}
        self.gone, self.reads = asyncio.Event(), asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self._messages = [{"type": "http.request", "body": raw, "more_body": False}]
        self.task = asyncio.ensure_future(self.app(self.scope, self._receive, self._send))  # type: ignore[arg-type]

    async def _receive(self) -> dict[str, Any]:
        if self._messages:
            return self._messages.pop()
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] != "http.response.start":
            await self.reads.wait()
        self.sent.append(message)


async def until(holds: Callable[[], Any]) -> None:
    """Wait for another thread or task."""
    async with asyncio.timeout(LIMIT_S):
        while not holds():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("content", [
    {**LONG, "stream": True}, LONG, {**LONG, "n": 5, "stream": True}, {**LONG, "n": 3}, {**LONG, "prompt": ["a", "b"], "stream": True},
])
@pytest.mark.parametrize("after", ["at once", "while computing"])
def test_who_leaves_is_cancelled(gated: Callable[..., None], content: dict[str, Any], after: str) -> None:
    """Streaming or not, with one choice or many: nothing is computed for it any more, and every block comes back."""

    async def test(client: Client, gate: Gate) -> None:
        line = Line(client, COMPLETE, content)
        line.reads.set()
        await until(lambda: gate.num_steps >= (1 if after == "at once" else 20))
        line.gone.set()
        await asyncio.wait_for(line.task, LIMIT_S)
        await client.emptied()
        assert gate.num_steps < 1000
        assert not line.sent or line.sent[-1].get("more_body", True), "it never got an end"
        num_choices = content.get("n", 1) * (2 if isinstance(content["prompt"], list) else 1)
        assert {("standard", "abort"): num_choices} == client.service.watch.ends

    gated(test)


def test_who_does_not_read_is_cut_off(serve: Serve) -> None:
    """At most `most_unread` events wait; beyond that its sequence ends, and once it reads it learns why. Others go on."""

    async def test(client: Client) -> None:
        line = Line(client, COMPLETE, {**LONG, "stream": True})
        engine = client.service.machine.engine
        await until(lambda: not engine.idle())
        other = await client.complete("other", max_tokens=80, ignore_eos=True)
        assert 80 == other["usage"]["completion_tokens"]
        await until(lambda: engine.idle())
        line.reads.set()
        await asyncio.wait_for(line.task, LIMIT_S)
        body = b"".join(message.get("body", b"") for message in line.sent)
        assert body.count(b"data: ") <= 52
        assert b"50 events wait for a reader that does not come" in body.splitlines()[-2]
        assert b"[DONE]" not in body

    serve(test, most_unread=50)


def test_who_never_reads_is_given_up(serve: Serve) -> None:
    async def test(client: Client) -> None:
        line = Line(client, COMPLETE, {**LONG, "max_tokens": 3, "stream": True})
        await until(line.task.done)
        assert ["http.response.start"] == [message["type"] for message in line.sent]
        await client.emptied()

    serve(test, write_s=0.2)


def test_a_full_queue_says_when_to_come_back(gated: Callable[..., None]) -> None:
    """16 run and 2 wait; the next gets 429 with Retry-After, one that asks for more than there is room for at all a 400."""

    async def test(client: Client, gate: Gate) -> None:
        gate.opened.clear()
        body = {"model": "default", "prompt": "x", "max_tokens": 2}
        inside = [asyncio.ensure_future(client.post(COMPLETE, {**body, "n": 6})) for _ in range(3)]
        await until(lambda: client.service.door.num_inside == 18)
        for path, content in ((COMPLETE, body), (CHAT, {"model": "default", "messages": said("x")}), (COMPLETE, {**body, "stream": True})):
            refused = await client.post(path, content)
            assert (429, "1") == (refused.status_code, refused.headers["retry-after"])
            assert ("rate_limit_error", "queue_full") == (refused.json()["error"]["type"], refused.json()["error"]["code"])
        assert 503 == (await client.http.get("/ready")).status_code
        assert 400 == (await client.post(COMPLETE, {**body, "n": 19})).status_code
        gate.opened.set()
        assert [200] * 3 == [(await answer).status_code for answer in inside]
        assert 200 == (await client.post(COMPLETE, body)).status_code
        assert 200 == (await client.http.get("/ready")).status_code

    gated(test, num_queued=2)


def test_time_is_up(gated: Callable[..., None]) -> None:
    """A whole answer becomes 504, a stream ends with an error and without [DONE]; both are cancelled."""

    async def test(client: Client, gate: Gate) -> None:
        whole = await client.post(COMPLETE, LONG)
        assert (504, "timeout") == (whole.status_code, whole.json()["error"]["code"])
        async with client.http.stream("POST", COMPLETE, json={**LONG, "stream": True}) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
        assert 200 == answer.status_code
        assert '"code":"timeout"' in lines[-1]
        await client.emptied()

    gated(test, request_s=0.3)


def test_draining(gated: Callable[..., None]) -> None:
    """Who is inside finishes, who comes is sent away with Retry-After, and then there is nothing left."""

    async def test(client: Client, gate: Gate) -> None:
        gate.opened.clear()
        inside = [asyncio.ensure_future(client.complete("x", max_tokens=5, ignore_eos=True)) for _ in range(3)]
        stream = asyncio.ensure_future(client.events(CHAT, {"messages": said("x"), "max_tokens": 5, "ignore_eos": True}))
        await until(lambda: client.service.door.num_inside == 4)
        draining = asyncio.ensure_future(client.service.drain())
        await until(lambda: client.service.door.closed)
        for path in (COMPLETE, CHAT, "/tokenize"):
            refused = await client.post(path, {"model": "default", "prompt": "x", "messages": said("x")})
            assert (503, "1", "draining") == (refused.status_code, refused.headers["retry-after"], refused.json()["error"]["code"])
        assert (200, 503) == tuple([(await client.http.get(path)).status_code for path in ("/health", "/ready")])
        gate.opened.set()
        assert [5] * 3 == [(await answer)["usage"]["completion_tokens"] for answer in inside]
        assert "length" == (await stream)[-1]["choices"][0]["finish_reason"]
        assert await draining

    gated(test)


def test_draining_ends_in_time(gated: Callable[..., None]) -> None:
    """Who has not finished by then is told."""

    async def test(client: Client, gate: Gate) -> None:
        whole = asyncio.ensure_future(client.post(COMPLETE, LONG))
        line = Line(client, COMPLETE, {**LONG, "stream": True})
        line.reads.set()
        await until(lambda: client.service.door.num_inside == 2)
        assert not await client.service.drain()
        answer = await whole
        assert (503, "aborted") == (answer.status_code, answer.json()["error"]["code"])
        await asyncio.wait_for(line.task, LIMIT_S)
        body = b"".join(message.get("body", b"") for message in line.sent)
        assert (True, False) == (b'"code":"aborted"' in body, b"[DONE]" in body)

    gated(test, drain_s=0.05)


def test_health_sees_a_stuck_step(gated: Callable[..., None]) -> None:
    """An idle engine is well, a busy one too; one whose step does not end is not, and is again when it does."""

    async def test(client: Client, gate: Gate) -> None:
        assert 200 == (await client.http.get("/health")).status_code
        gate.opened.clear()
        asked = asyncio.ensure_future(client.complete("x", max_tokens=3))
        await until(lambda: gate.num_steps and client.service.engine.stalled_s > 0.3)
        for path in ("/health", "/ready"):
            answer = await client.http.get(path)
            assert 503 == answer.status_code
            assert "no step has ended" in answer.json()["reason"]
        gate.opened.set()
        await asked
        assert {200} == {(await client.http.get(path)).status_code for path in ("/health", "/ready")}

    gated(test, stall_s=0.3)


def test_a_broken_engine_is_told(gated: Callable[..., None]) -> None:
    """What is under way gets a 5xx, what comes a 503, and /health says it; a stream ends with the error."""

    async def test(client: Client, gate: Gate) -> None:
        class Broken:
            def run(self, batch: Batch) -> StepResult:
                raise MemoryError("no more")

            def close(self) -> None:
                pass

        line = Line(client, COMPLETE, {**LONG, "stream": True})
        line.reads.set()
        await until(lambda: len(line.sent) > 5)
        client.service.machine.engine.runner = Broken()
        await asyncio.wait_for(line.task, LIMIT_S)
        assert (False, b"generation_failed") == (line.sent[-1]["more_body"], line.sent[-1]["body"][-22:-5])
        assert 503 == (await client.post(COMPLETE, {"model": "default", "prompt": "x"})).status_code
        health = await client.http.get("/health")
        assert (503, "the engine broke down and computes nothing any more") == (health.status_code, health.json()["reason"])

    gated(test)


def test_a_mistake_of_ours_costs_one_request(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A 500 that says nothing of our insides."""

    async def test(client: Client) -> None:
        def broken(*arguments: Any, **options: Any) -> None:
            raise KeyError("a secret detail")

        with monkeypatch.context() as patch:
            patch.setattr(client.service, "check", broken)
            answer = await client.post(COMPLETE, {"model": "default", "prompt": "x"})
        assert (500, "internal_error") == (answer.status_code, answer.json()["error"]["code"])
        assert "secret" not in answer.text
        await client.complete("x", max_tokens=1)

    serve(test)


def test_other_origins(serve: Serve) -> None:
    """No page may call unless its origin is allowed."""
    asked = {"origin": "https://a.example", "access-control-request-method": "POST", "access-control-request-headers": "authorization"}

    async def closed(client: Client) -> None:
        answer = await client.http.options(COMPLETE, headers=asked)
        assert (405, False) == (answer.status_code, "access-control-allow-origin" in answer.headers)

    async def opened(client: Client) -> None:
        answer = await client.http.options(COMPLETE, headers=asked)
        assert (200, "https://a.example") == (answer.status_code, answer.headers["access-control-allow-origin"])
        assert 400 == (await client.http.options(COMPLETE, headers={**asked, "origin": "https://b.example"})).status_code

    serve(closed)
    serve(opened, Settings(origins=("https://a.example",), keys=("k",)))


def test_merging_streams() -> None:
    """All items of each in order, no stream runs ahead, an error ends all of them."""
    ended: list[int] = []

    async def counting(index: int, count: int, fails: bool = False) -> Any:
        try:
            for number in range(count):
                await asyncio.sleep(0)
                yield number
            if fails:
                raise ValueError("enough")
        finally:
            ended.append(index)

    async def work() -> None:
        for count in (1, 4):
            items = [item async for item in merged([counting(index, 3 + index) for index in range(count)])]
            assert [[*range(3 + index)] for index in range(count)] == [[item for place, item in items if place == index] for index in range(count)]
        ended.clear()
        with pytest.raises(ValueError, match="enough"):
            _ = [item async for item in merged([counting(0, 10**6), counting(1, 3, fails=True), counting(2, 10**6)])]
        assert [0, 1, 2] == sorted(ended)

        async def failing() -> int:
            raise ValueError("first")

        with pytest.raises(ValueError, match="first"):
            await together([asyncio.sleep(LIMIT_S), failing()])  # type: ignore[list-item]

    asyncio.run(work())


def test_leaving_before_the_end_cancels_the_work() -> None:
    async def work() -> None:
        cancelled = asyncio.Event()

        async def waiting() -> None:
            try:
                await asyncio.sleep(LIMIT_S)
            finally:
                cancelled.set()

        async def leaving() -> Any:
            return {"type": "http.disconnect"}

        assert not await while_there(leaving, waiting())
        assert cancelled.is_set()

    asyncio.run(work())


def test_an_event_is_one_line_for_every_reader() -> None:
    """str.splitlines, which many clients call on decoded text, knows eleven ends of lines."""
    text = "".join(map(chr, range(0x20))) + "a\x7f\x85b\u2028c\u2029\u65e5"
    line = event_line({"text": text}).decode()
    assert [line.rstrip("\n"), ""] == line.splitlines()
    assert {"text": text} == json.loads(line.removeprefix("data: "))
