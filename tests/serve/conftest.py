"""A server on the embedded model, in this process: requests go through ASGI, steps through the engine's thread."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from firstlight import LLM
from firstlight.serve.app import build_app
from firstlight.serve.limits import Limits
from firstlight.serve.service import Service, Settings
from tests.serve.process import Process, server

LIMIT_S = 60.0


@pytest.fixture(scope="session")
def model() -> Iterator[Callable[..., LLM]]:
    """A small LLM with an empty cache; float32, so that company cannot tip a near tie. The same options give the same one again."""
    made: dict[str, LLM] = {}

    def make(**options: Any) -> LLM:
        options = {"dtype": "float32", "cache_bytes": 64 << 20, "max_sequences": 16, "max_context": 2048, **options}
        llm = made.get(repr(options)) or made.setdefault(repr(options), LLM("default", **options))
        llm.reset_prefix_cache()
        return llm

    yield make
    for llm in made.values():
        llm.close()


class Client:
    """Asks a service and says what came back; every call checks that errors have OpenAI's shape."""

    def __init__(self, service: Service, http: httpx.AsyncClient) -> None:
        self.service, self.http = service, http

    async def post(self, path: str, content: Any = None, **options: Any) -> httpx.Response:
        """A POST of a JSON body."""
        answer = await self.http.post(path, json=content, **options)
        if answer.status_code >= 400:
            assert {"message", "type", "param", "code"} == set(answer.json()["error"]), answer.text
        return answer

    async def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        answer = await self.post("/v1/completions", {"model": "default", "prompt": prompt, **fields})
        assert 200 == answer.status_code, answer.text
        return answer.json()

    async def chat(self, messages: Any, **fields: Any) -> dict[str, Any]:
        """A chat completion that must succeed; a text is one user message."""
        answer = await self.post("/v1/chat/completions", {"model": "default", "messages": said(messages), **fields})
        assert 200 == answer.status_code, answer.text
        return answer.json()

    async def events(self, path: str, content: dict[str, Any]) -> list[dict[str, Any]]:
        """All events of a stream, which must end with [DONE]."""
        async with self.http.stream("POST", path, json={"model": "default", **content, "stream": True}) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
        assert 200 == answer.status_code, lines
        assert "text/event-stream; charset=utf-8" == answer.headers["content-type"]
        assert "data: [DONE]" == lines[-1], lines[-1]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    async def emptied(self) -> None:
        """Nobody holds a block or a place any more."""
        engine = self.service.machine.engine
        for _ in range(2000):
            if await self.service.engine.ask(engine.idle) and not self.service.door.num_inside:
                break
            await asyncio.sleep(0.005)
        cache = self.service.machine.cache

        def check() -> float:
            cache.check()
            return cache.usage()

        assert 0.0 == await self.service.engine.ask(check)
        assert 0 == self.service.door.num_inside


def said(messages: Any) -> Any:
    """A text as the one message of a user."""
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def assert_alike(expected: Any, got: Any) -> None:
    """Equal, but for the last digits of numbers: in other company sums are taken in another order."""
    assert type(expected) is type(got)
    if isinstance(expected, dict):
        assert set(expected) == set(got)
        for name in expected:
            assert_alike(expected[name], got[name])
    elif isinstance(expected, list):
        assert len(expected) == len(got)
        for mine, yours in zip(expected, got, strict=True):
            assert_alike(mine, yours)
    elif isinstance(expected, float):
        assert expected == pytest.approx(got, abs=1e-4)
    else:
        assert expected == got


@asynccontextmanager
async def serving(llm: LLM, settings: Settings | None = None, **limits: Any) -> AsyncIterator[Client]:
    """A service that ends with the block; afterwards the pool must be whole."""
    service = Service(llm, settings or Settings(limits=Limits(**limits)))
    transport = httpx.ASGITransport(build_app(service))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=LIMIT_S) as http:
            client = Client(service, http)
            yield client
            if service.engine.healthy and not service.engine.closing:
                await client.emptied()
    finally:
        await service.close()


@pytest.fixture(scope="session")
def running() -> Iterator[Process]:
    """A server process that tests share; it ends well after the last of them."""
    with server() as process:
        yield process


@pytest.fixture
def serve(model: Callable[..., LLM]) -> Callable[..., None]:
    """Runs a test against a service of its own: `serve(test, limits...)`."""

    def run(test: Callable[[Client], Coroutine[Any, Any, None]], settings: Settings | None = None, *, options: Any = None, **limits: Any) -> None:
        async def bounded() -> None:
            async with serving(model(**(options or {})), settings, **limits) as client:
                await asyncio.wait_for(test(client), LIMIT_S)

        asyncio.run(bounded())

    return run
