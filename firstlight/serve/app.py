"""The application: routes, the key, and the one place where what was raised becomes a response."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Coroutine, Mapping
from hashlib import sha256
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from firstlight.serve import extras
from firstlight.serve.body import read_object
from firstlight.serve.chat import answer
from firstlight.serve.completions import complete
from firstlight.serve.panel import panel_routes
from firstlight.serve.refusal import no_key, refusal_of
from firstlight.serve.reply import Reply, while_there
from firstlight.serve.service import Service
from firstlight.serve.visit import Visit
from firstlight.serve.watch import Watching
from firstlight.spec.errors import FirstlightError

OPEN_PATHS = frozenset({"/", "/health", "/ready"})
"""What is answered without a key: nothing about the model or its use."""

Handler = Callable[[Service, Mapping[str, Any], Reply, Visit], Coroutine[Any, Any, None]]


def build_app(service: Service) -> ASGIApp:
    """Everything that a server answers."""
    post = {
        "/v1/completions": complete, "/v1/chat/completions": answer, "/v1/cache/explain": extras.explain,
        "/tokenize": extras.tokenize, "/detokenize": extras.detokenize,
    }
    get: dict[str, Callable[[Request], Response]] = {
        "/v1/models": lambda request: extras.models(service),
        "/v1/models/{name:path}": lambda request: extras.model(service, request.path_params["name"]),
        "/health": lambda request: extras.health(service),
        "/ready": lambda request: extras.ready(service),
    }
    routes = [
        *(Route(path, Posted(service, handler), methods=["POST"]) for path, handler in post.items()),
        *(Route(path, _asked(call), methods=["GET"]) for path, call in get.items()),
        *panel_routes(service.watch),
    ]
    cors = [Middleware(CORSMiddleware, allow_origins=list(service.settings.origins), allow_methods=["*"], allow_headers=["*"])]
    app = Starlette(
        routes=routes, middleware=[*(cors if service.settings.origins else []), Middleware(Keyed, keys=service.settings.keys)],
        exception_handlers={HTTPException: _refuse, Exception: _refuse})
    app.router.redirect_slashes = False
    return Watching(app, service.watch)


class Posted:
    """A route that reads a JSON object: errors before the answer begins are responses, later ones end a stream."""

    def __init__(self, service: Service, handler: Handler) -> None:
        self.service, self.handler = service, handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        service, visit = self.service, scope["visit"]
        reply = Reply(send, write_s=service.limits.write_s)
        try:
            service.door.check_open()
            content = await read_object(Request(scope, receive), service.limits)
            await while_there(receive, self._served(content, reply, visit))
        except ClientDisconnect:
            return
        except Exception as error:  # noqa: BLE001  (the boundary: whatever one request raises costs that request only)
            await self._fail(error, reply, scope, receive, send)

    async def _served(self, content: Mapping[str, Any], reply: Reply, visit: Visit) -> None:
        async with asyncio.timeout(self.service.limits.request_s):
            await self.handler(self.service, content, reply, visit)

    async def _fail(self, error: Exception, reply: Reply, scope: Scope, receive: Receive, send: Send) -> None:
        visit = scope["visit"]
        visit.fails(error)
        refusal = refusal_of(error, retry_s=self.service.limits.retry_s)
        if reply.begun:
            await reply.fail(refusal)
        else:
            await refusal.response()(scope, receive, send)


class Keyed:
    """Asks for one of the keys, and takes the same time whichever is wrong and where."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self.app = app
        self._digests = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if not self._digests or scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        given = Request(scope).headers.get("authorization", "")
        scheme, _, key = given.partition(" ")
        digest = sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        if scheme.lower() == "bearer" and sum([hmac.compare_digest(digest, known) for known in self._digests]):
            await self.app(scope, receive, send)
            return
        refusal = no_key("no API key was sent" if not given else "the API key is wrong")
        scope["visit"].fails(refusal)
        await refusal.response()(scope, receive, send)


def _asked(call: Callable[[Request], Response]) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    async def answered(request: Request) -> Response:
        try:
            return call(request)
        except FirstlightError as error:
            return await _refuse(request, error)

    return answered


async def _refuse(request: Request, error: Exception) -> Response:
    request.scope["visit"].fails(error)
    return refusal_of(error).response()
