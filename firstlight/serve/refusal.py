"""An answer that is no: every error as status, OpenAI's error object and headers."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import Response

from firstlight.spec.errors import CapacityError, FirstlightError, PeerError, RequestError

log = logging.getLogger("firstlight")
JSON_TYPE = "application/json"

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refusal(FirstlightError):
    """A request that gets an error response; made by the functions below."""

    def __init__(
        self, fact: str, fix: str, *, status: int = 400, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(fact, fix)
        self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})

    def content(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole answer."""
        return Response(to_json(self.content()), self.status, self.headers, media_type=JSON_TYPE)


def bad(fact: str, fix: str, param: str | None = None, *, code: str | None = None) -> Refusal:
    """400: the request cannot be served as it is."""
    return Refusal(fact, fix, param=param, code=code)


def too_large(fact: str, fix: str) -> Refusal:
    """413. The connection closes, because nobody reads the rest of the body."""
    return Refusal(fact, fix, status=413, code="request_too_large", headers={"Connection": "close"})


def not_json(fact: str, fix: str) -> Refusal:
    """415: the body is in another form."""
    return Refusal(fact, fix, status=415, code="unsupported_media_type")


def too_slow(fact: str, fix: str) -> Refusal:
    """408: the body did not come in time. The connection closes."""
    return Refusal(fact, fix, status=408, code="timeout", headers={"Connection": "close"})


def failed(fact: str) -> Refusal:
    """500: the request was right, the generation went wrong."""
    return Refusal(fact, "Try again, or report it.", status=500, code="generation_failed")


def full(fact: str, retry_s: int) -> Refusal:
    """429: the queue is full."""
    return Refusal(fact, f"Try again in {retry_s} s.", status=429, code="queue_full", headers={"Retry-After": str(retry_s)})


def unavailable(fact: str, fix: str, retry_s: int, code: str) -> Refusal:
    """503: not this server, or not now."""
    return Refusal(fact, fix, status=503, code=code, headers={"Retry-After": str(retry_s)})


def no_key(fact: str) -> Refusal:
    """401."""
    return Refusal(fact, "Send `Authorization: Bearer KEY`.", status=401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def unknown_model(name: str, served: str) -> Refusal:
    """404, as OpenAI answers it."""
    return Refusal(f"the model {name[:200]!r} is not served here", f"Use {served!r}.", status=404, param="model", code="model_not_found")


def refusal_of(error: BaseException, *, retry_s: int = 1, param: str | None = None) -> Refusal:
    """What to answer when something was raised; what is our own mistake is logged, and not told to the client. `param`: if the error names none."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, RequestError | CapacityError):
        named = re.match(r"`(\w+)`", error.fact)
        param = named.group(1) if named else param
        return bad(error.fact, error.fix, param, code="context_length_exceeded" if isinstance(error, CapacityError) else None)
    if isinstance(error, PeerError):
        return unavailable(error.fact, error.fix, retry_s, "unavailable")
    if isinstance(error, TimeoutError):
        return Refusal("the request took longer than this server allows", "Ask for fewer tokens.", status=504, code="timeout")
    if isinstance(error, HTTPException):
        return _of_route(error)
    log.error("a request broke down", exc_info=error)
    return Refusal("the server made a mistake", "Report it with the request id and the server's log.", status=500, code="internal_error")


def _of_route(error: HTTPException) -> Refusal:
    facts = {
        404: ("there is nothing at this path", "See docs/http.md for the paths; they begin with /v1."),
        405: ("this path does not take this method", f"Use {(error.headers or {}).get('Allow', 'another one')}."),
    }
    fact, fix = facts.get(error.status_code, (error.detail, "Send another request."))
    return Refusal(fact, fix, status=error.status_code, headers=error.headers)
