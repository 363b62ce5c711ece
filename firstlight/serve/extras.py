"""The routes beside completions: models, tokens, the cache's reasons, and whether the server lives and takes requests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import to_json
from starlette.responses import Response

from firstlight.serve.chat import render
from firstlight.serve.completions import listed
from firstlight.serve.fields import read
from firstlight.serve.refusal import JSON_TYPE, bad
from firstlight.serve.reply import Reply
from firstlight.serve.service import Service
from firstlight.serve.visit import Visit


class TokenizeFields(BaseModel):
    """The body of /tokenize: a text, or messages as in a chat."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    tools: list[Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeFields(BaseModel):
    """The body of /detokenize."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    tokens: list[int]


class ExplainFields(BaseModel):
    """The body of /v1/cache/explain: a prompt as in a completion, or messages as in a chat."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    prompt: Any = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    tools: list[Any] | None = None
    cache_salt: str | None = None


async def tokenize(service: Service, content: Mapping[str, Any], reply: Reply, visit: Visit) -> None:
    """POST /tokenize."""
    fields, _ = read(TokenizeFields, content)
    service.check_model(fields.model)
    _check_one(fields.prompt, fields.messages)
    special = fields.add_special_tokens is not False
    tokens = await asyncio.to_thread(_tokens, service, content, fields.prompt, special=special)
    names = await asyncio.to_thread(list, map(service.spelling.name, tokens)) if fields.return_token_strs else None
    await reply.whole({"count": len(tokens), "max_model_len": service.max_context, "tokens": tokens, "token_strs": names})


async def detokenize(service: Service, content: Mapping[str, Any], reply: Reply, visit: Visit) -> None:
    """POST /detokenize."""
    fields, _ = read(DetokenizeFields, content)
    service.check_model(fields.model)
    if service.tokenizer is None:
        raise bad("`tokens` is given, the model's folder has no tokenizer", "There is no text to be had.", "tokens")
    await asyncio.to_thread(service.check_ids, fields.tokens, "tokens")
    await reply.whole({"prompt": await asyncio.to_thread(service.tokenizer.decode, fields.tokens)})


async def explain(service: Service, content: Mapping[str, Any], reply: Reply, visit: Visit) -> None:
    """POST /v1/cache/explain: how much of a prompt would be reused now, and why not more."""
    fields, _ = read(ExplainFields, content)
    service.check_model(fields.model)
    _check_one(fields.prompt, fields.messages)
    tokens = await asyncio.to_thread(_asked, service, content, fields.prompt)
    salt = (fields.cache_salt or "").encode()
    await reply.whole(await service.engine.ask(partial(service.machine.cache.explain, tokens, salt=salt)))


def _check_one(prompt: Any, messages: Any) -> None:
    if (prompt is None) == (messages is None):
        raise bad(f"{'neither' if prompt is None else 'both'} of `prompt` and `messages` given", "Give exactly one of them.", "prompt")


def _asked(service: Service, content: Mapping[str, Any], prompt: Any) -> Sequence[int]:
    """The one prompt of a body, checked: it goes to the thread that steps the engine, which must not be held up."""
    given = prompt
    if prompt is not None:
        prompts = listed(prompt)
        if len(prompts) != 1:
            raise bad(f"`prompt` holds {len(prompts)} prompts", "Ask for one at a time.", "prompt")
        given = prompts[0]
    tokens = given if isinstance(given, list) else _tokens(service, content, given)
    service.check_tokens(tokens, "messages" if prompt is None else "prompt")
    return tokens


def _tokens(service: Service, content: Mapping[str, Any], text: str | None, *, special: bool = True) -> list[int]:
    """Ids of a text, or of the messages where there is none. Slow for long ones: called in a thread."""
    if text is None:
        return render(service, content)
    begin = service.tokenizer.prefix_ids if special and service.tokenizer is not None else ()
    return [*begin, *service.encode(text, "prompt")]


def models(service: Service) -> Response:
    """GET /v1/models."""
    return _json({"object": "list", "data": [_model(service, name) for name in service.settings.names]})


def model(service: Service, name: str) -> Response:
    """GET /v1/models/{id}. Raises: Refusal."""
    service.check_model(name)
    return _json(_model(service, name))


def health(service: Service) -> Response:
    """GET /health: 503 when nothing will be computed any more, or a step takes so long that it must be stuck."""
    trouble = _trouble(service)
    return _json({"status": "ok" if trouble is None else "failing", "reason": trouble}, 200 if trouble is None else 503)


def ready(service: Service) -> Response:
    """GET /ready: whether the next request should come here."""
    trouble = _trouble(service)
    if trouble is None and service.door.closed:
        trouble = "the server is shutting down"
    if trouble is None and service.door.num_inside >= service.door.most:
        trouble = f"the queue is full: {service.door.num_inside} choices are under way"
    return _json({"status": "ready" if trouble is None else "not ready", "reason": trouble}, 200 if trouble is None else 503)


def _trouble(service: Service) -> str | None:
    engine = service.engine
    if not engine.healthy:
        return "the engine broke down and computes nothing any more"
    stalled_s = engine.stalled_s
    if stalled_s > service.limits.stall_s:
        return f"no step has ended for {stalled_s:.0f} s, more than the {service.limits.stall_s:g} s after which a step counts as stuck"
    return None


def _model(service: Service, name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": service.created_s, "owned_by": "firstlight", "max_model_len": service.max_context}


def _json(content: Mapping[str, Any], status: int = 200) -> Response:
    return Response(to_json(content), status, media_type=JSON_TYPE)


