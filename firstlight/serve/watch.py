"""What is seen of a server: every visit from its first byte to its last, and what access line, metrics and trace say of it then."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from firstlight.engine.async_engine import AsyncEngine
from firstlight.engine.boot import Machine
from firstlight.engine.llm import LLM
from firstlight.engine.meter import Meter
from firstlight.serve.logs import MARKS
from firstlight.serve.visit import Visit
from firstlight.spec.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from firstlight.serve.tracing import Tracing

access = logging.getLogger("firstlight.access")

REASONS = {
    400: "invalid", 401: "key", 403: "key", 404: "unknown", 405: "method", 408: "timeout", 413: "too_large", 415: "invalid", 422: "invalid",
    429: "full", 500: "mistake", 503: "unavailable", 504: "timeout",
}
"""Why a request was refused, by status; all others of 400 and above count as "other"."""
QUIET = {"/", "/health", "/ready", "/metrics", "/panel.json"}
"""What machines ask every few seconds: said at debug level unless it fails."""
DISCONNECTED = 499
"""Status in logs and metrics when the client left before it was answered; never sent."""
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
_SANE_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class Watch:
    """Everything that can be seen of a server. Gives the engine its meter, and belongs to one event loop.

    `texts_logged`: messages about what a client did wrong, which may quote its prompt, are logged whole.
    """

    def __init__(
        self, llm: LLM, engine: AsyncEngine, *, model_name: str, texts_logged: bool = False, tracing: Tracing | None = None
    ) -> None:
        assert llm.machine is not None, "the model is closed"
        self.machine: Machine = llm.machine
        self.engine, self.model_name, self.texts_logged, self.tracing = engine, model_name, texts_logged, tracing
        self.meter = self.machine.engine.meter = Meter()
        self.begun_s = engine.engine.clock()
        self.responses: Counter[tuple[str, str, int]] = Counter()
        self.rejections: Counter[str] = Counter(dict.fromkeys([*REASONS.values(), "capacity", "other"], 0))
        self.ends: Counter[tuple[str, str]] = Counter()
        self.num_open = 0

    @property
    def now_s(self) -> float:
        """The engine's clock, by which everything is timed."""
        return self.engine.engine.clock()

    def operators(self) -> dict[tuple[str, str], int]:
        """(operator, back-end) -> uses in the model."""
        found: Counter[tuple[str, str]] = Counter()
        for choice, count in self.machine.binder.choices.items():
            found[choice.use.op, choice.backend] += count
        return dict(sorted(found.items()))

    def open(self, scope: Scope) -> Visit:
        """A request begins: give it an id, and a span if it is to be traced."""
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get("x-request-id", "")
        request_id = given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex
        visit = Visit(request_id, scope["method"], scope["path"], self.now_s, time.time(), self.engine.engine.clock)
        if self.tracing is not None and scope["path"] not in QUIET:
            self.tracing.begin(visit, headers)
        self.num_open += 1
        return visit

    def end(self, visit: Visit, scope: MutableMapping[str, Any]) -> None:
        """A request is over: count it, finish its trace, and say one line."""
        self.num_open -= 1
        visit.ended_s = self.now_s
        visit.route = getattr(scope.get("route"), "path", None)
        status = DISCONNECTED if visit.status is None else visit.status
        self.responses[visit.method if visit.method in _METHODS else "other", visit.route or "other", status] += 1
        # The key is asked for before the path is looked at; a path that nobody serves is no request to refuse.
        if status >= 400 and status != DISCONNECTED and (visit.route is not None or status in (401, 403)):
            too_long = isinstance(visit.error, CapacityError) or visit.error_code == "context_length_exceeded"
            self.rejections["capacity" if too_long else REASONS.get(status, "other")] += 1
        for finish in visit.finish_reasons():
            self.ends[visit.priority or "standard", finish] += 1
        if self.tracing is not None and visit.span is not None:
            self.tracing.end(visit, self.model_name)
        self._say(visit, status)

    def close(self) -> None:
        """Send the traces that have not been sent."""
        if self.tracing is not None:
            self.tracing.close()

    def _say(self, visit: Visit, status: int) -> None:
        # A stream that breaks has begun with 200; what it ended with is said by the error.
        worst = max(status, getattr(visit.error, "status", 0))
        level = logging.ERROR if worst >= 500 and worst != 503 else logging.DEBUG if visit.path in QUIET and worst < 400 else logging.INFO
        if not access.isEnabledFor(level):
            return
        seconds = visit.ended_s - visit.begun_s
        fields: dict[str, Any] = {
            "request_id": visit.request_id, "trace_id": visit.trace_id, "method": visit.method, "path": visit.path[:200], "status": status,
            "duration_s": round(seconds, 6), "left": visit.left or None,
        }
        if visit.operation is not None:
            first_s = None if visit.first_token_s is None else round(visit.first_token_s - visit.begun_s, 6)
            fields |= {
                "model": visit.model, "priority": visit.priority, "stream": visit.stream, "prompt_tokens": visit.num_prompt_tokens,
                "cached_tokens": visit.num_cached_tokens, "generated_tokens": visit.num_generated_tokens, "first_token_s": first_s,
                "finish": visit.finish_reasons(), "seq_ids": list(visit.seq_ids), "preemptions": visit.num_preemptions or None,
            }
        if visit.error is not None:
            # What a client did wrong is told in its own words, which are part of its prompt.
            fields |= {"error": visit.error_code or type(visit.error).__name__, "param": getattr(visit.error, "param", None)}
            fields["error_text"] = str(visit.error) if self.texts_logged or worst >= 500 else None
        fields["failure"] = visit.failure
        access.log(level, "%s %s %d", visit.method, fields["path"], status, extra={"fields": fields})


class Watching:
    """The outermost layer of the application: opens a visit per HTTP request, puts it into the scope as "visit", and ends it."""

    def __init__(self, app: ASGIApp, watch: Watch) -> None:
        self.app, self.watch = app, watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection; an exception passes through."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        visit = scope["visit"] = self.watch.open(scope)
        # Left set: the task is the request's own, and what the server says about it afterwards should bear the id too.
        MARKS.set({"request_id": visit.request_id} if visit.trace_id is None else {"request_id": visit.request_id, "trace_id": visit.trace_id})

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", visit.request_id.encode())]}
            await send(message)
            if message["type"] == "http.response.start":
                visit.status = message["status"]
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                visit.whole = True

        try:
            await self.app(scope, receive, tell)
        except Exception as error:
            visit.fails(error)
            raise
        finally:
            self.watch.end(visit, scope)


def tracing_to(endpoint: str, *, share: float = 1.0) -> Tracing:
    """Traces of this share of requests to an OTLP collector. Raises ConfigError when OpenTelemetry is not installed."""
    try:
        from firstlight.serve.tracing import Tracing
    except ModuleNotFoundError as error:
        raise ConfigError(f"traces are to go to {endpoint}, but {error.name} is not installed", "Run pip install 'firstlight[otel]'.") from None
    return Tracing.to(endpoint, share=share)
