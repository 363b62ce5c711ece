"""A server in small: the embedded model, an engine thread, a watch, and one path that generates."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from firstlight import LLM, AsyncEngine, SamplingParams
from firstlight.serve.panel import panel_routes
from firstlight.serve.visit import Visit
from firstlight.serve.watch import Watch, Watching
from firstlight.spec.errors import FirstlightError

SECRET_TEXT = "the quick brown secret"


class Site:
    """Everything between a socket and the model, without the real server's rules."""

    def __init__(self, llm: LLM, **options: Any) -> None:
        self.llm = llm
        self.engine = AsyncEngine(llm.engine)
        self.watch = Watch(llm, self.engine, model_name="tiny", **options)
        routes = [
            Route("/v1/completions", self.answer, methods=["POST"]), Route("/v1/items/{item}", self.item), Route("/health", self.health),
            *panel_routes(self.watch)]
        self.app = Watching(Starlette(routes=routes, exception_handlers={FirstlightError: self.refuse}), self.watch)

    async def item(self, request: Request) -> Response:
        raise ZeroDivisionError("planted")

    async def health(self, request: Request) -> Response:
        return Response("good")

    async def refuse(self, request: Request, error: Exception) -> Response:
        request.scope["visit"].fails(error)
        return JSONResponse({"error": {"message": str(error)}}, 400)

    async def answer(self, request: Request) -> Response:
        visit: Visit = request.scope["visit"]
        body = await request.json()
        params = SamplingParams(max_tokens=body.get("max_tokens", 4), temperature=0, ignore_eos=True, seed=3)
        priority, count = body.get("priority", "standard"), body.get("n", 1)
        visit.asks(
            operation="text_completion", model="asked", params=params, priority=priority, num_prompt_tokens=len(body["tokens"]),
            response_id="cmpl-1", num_choices=count, stream=body.get("stream", False))

        async def one() -> list[int]:
            found = []
            async for event in self.engine.generate(body["tokens"], params, priority=priority):
                visit.take(event)
                found.append(event.token)
            return found

        async def lines() -> AsyncIterator[str]:
            async with contextlib.aclosing(self.engine.generate(body["tokens"], params, priority=priority)) as events:
                async for event in events:
                    visit.take(event)
                    yield f"data: {event.token}\n\n"

        if body.get("stream"):
            return StreamingResponse(lines(), media_type="text/event-stream")
        return JSONResponse(await asyncio.gather(*(one() for _ in range(count))))

    async def __aenter__(self) -> httpx.AsyncClient:
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(self.app, raise_app_exceptions=False), base_url="http://site")
        return self.client

    async def __aexit__(self, *reason: object) -> None:
        await self.client.aclose()
        await self.engine.close()
        self.watch.close()


def small(**options: Any) -> LLM:
    """The embedded model with little memory."""
    return LLM("default", dtype="float32", cache_bytes=4_000_000, max_sequences=4, chunk_tokens=32, **options)


def prompt(seed: int, length: int) -> list[int]:
    """Token ids that are not the same for two seeds."""
    return [(seed * 131 + place * 17 + 5) % 280 for place in range(length)]
