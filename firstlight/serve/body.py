"""A request body: read within its limits, parsed as strict JSON, an object at the top."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request

from firstlight.serve.limits import Limits
from firstlight.serve.refusal import JSON_TYPE, bad, not_json, too_large, too_slow

_SMALL_BYTES = 2**20
"""What is parsed at once; more is left to a thread, so that the event loop goes on with the others."""


async def read_object(request: Request, limits: Limits) -> dict[str, Any]:
    """The JSON object of a POST. Raises: Refusal; ClientDisconnect when the client goes before it has said all."""
    kind = request.headers.get("content-type", JSON_TYPE).partition(";")[0].strip().lower()
    if kind != JSON_TYPE and not kind.endswith("+json"):
        raise not_json(f"the body's Content-Type is {kind[:100]!r}", f"Send {JSON_TYPE}.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise not_json("the body is compressed", "Send it as plain JSON.")
    raw = await _read(request, limits)
    if len(raw) > _SMALL_BYTES:
        return await asyncio.to_thread(parse, raw, limits.json_depth)
    return parse(raw, limits.json_depth)


def parse(raw: bytes | bytearray, depth: int) -> dict[str, Any]:
    """Strict JSON: no NaN, no lone surrogates, nested no deeper than `depth`, and an object. Raises: Refusal."""
    try:
        # Its own recursion ends at about 200 levels, far from the interpreter's.
        content = from_json(bytes(raw), allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise bad(f"the body is not JSON ({str(error)[:200]})", "Send a JSON object.") from None
    if not isinstance(content, dict):
        raise bad(f"the body is a JSON {type(content).__name__}", "Send a JSON object.")
    _check_depth(content, depth)
    return content


async def _read(request: Request, limits: Limits) -> bytearray:
    said = request.headers.get("content-length", "")
    if said.isascii() and said.isdecimal() and (len(said) > 15 or int(said) > limits.body_bytes):
        raise too_large(f"the body has {said[:30]} bytes, this server reads {limits.body_bytes:,}", "Send less in one request.")
    raw = bytearray()
    try:
        async with asyncio.timeout(limits.body_s):
            async for piece in request.stream():
                raw += piece
                if len(raw) > limits.body_bytes:
                    raise too_large(f"the body has more than {limits.body_bytes:,} bytes", "Send less in one request.")
    except TimeoutError:
        raise too_slow(f"the body was not complete after {limits.body_s:g} s", "Send it at one go.") from None
    return raw


def _check_depth(content: dict[str, Any], most: int) -> None:
    level: list[Any] = [content]
    for _ in range(most):
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer) if isinstance(inner, dict | list)]
        if not level:
            return
    raise bad(f"the body is nested more than {most} levels deep", "Flatten it.")


