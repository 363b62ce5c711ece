"""POST /v1/chat/completions: a conversation goes on. What messages mean and how an answer is read is the chat format's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

from firstlight.engine.sampler import TokenLogprobs
from firstlight.sched.sequence import Event
from firstlight.serve.fields import ChatFields, read
from firstlight.serve.params import choice_params, sampling, stops_of
from firstlight.serve.refusal import bad, refusal_of
from firstlight.serve.reply import Reply, tell
from firstlight.serve.service import Job, Service, merged, new_id, together
from firstlight.serve.usage import Usage
from firstlight.serve.visit import Visit
from firstlight.spec.errors import FirstlightError, RequestError
from firstlight.text.answer import Delta, Message
from firstlight.text.chat import ChatFormat
from firstlight.text.reader import Reader

_OWN = frozenset({"model", "messages", "tools"})


@dataclass(slots=True)
class _Choice:
    """One choice on its way; `untold` are logprobs of tokens that have not shown anything yet."""

    index: int
    job: Job
    reader: Reader
    thinks: bool
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    untold: list[TokenLogprobs] = field(default_factory=list)


def format_of(service: Service) -> ChatFormat:
    """Raises: Refusal when the model has no chat format."""
    found = service.chat
    if isinstance(found, FirstlightError):
        raise bad(f"this model has no chat format: {found.fact}", "Use /v1/completions.", "messages", code="unsupported_model")
    return found


def render(service: Service, content: Mapping[str, Any]) -> list[int]:
    """Prompt ids of a body with `messages`. Raises: Refusal, RequestError."""
    for message in content["messages"]:
        # Earlier answers may be shortened by the format; what others said stays whole.
        if isinstance(message, dict) and message.get("role") != "assistant" and isinstance(message.get("content"), str):
            service.check_length(message["content"], "messages")
    try:
        return format_of(service).render(content["messages"], content.get("tools"), **_asked(content))
    except RequestError as error:
        raise refusal_of(error, param="messages") from None


def _asked(content: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a body that a chat format may read beside messages and tools."""
    return {name: value for name, value in content.items() if name not in _OWN and value is not None}


class Chat:
    """One request, understood: its choices, and how they are told."""

    def __init__(self, service: Service, fields: ChatFields, content: Mapping[str, Any]) -> None:
        self.service, self.fields, self.content = service, fields, content
        self.id, self.created_s = new_id("chatcmpl"), int(time.time())
        self.choices: list[_Choice] = []
        self.usage = Usage(num_reasoning=0)

    async def prepare(self) -> None:
        """Make the choices. Raises: Refusal, RequestError, CapacityError."""
        service, fields = self.service, self.fields
        service.check_model(fields.model)
        _check_combinations(fields)
        stops = stops_of(fields, service.limits)
        num_choices = fields.n or 1
        if num_choices > service.limits.num_choices:
            raise bad(f"`n` is {num_choices}", f"Ask for at most {service.limits.num_choices} choices in one request.", "n")
        chat = format_of(service)
        tokens = await asyncio.to_thread(render, service, self.content)
        service.check_size(tokens, "messages")
        asked = _asked(self.content)
        thinks = chat.thinks(messages=fields.messages, **asked)
        grammar = None if service.structures is None else await service.structures.chat(self.content, chat)
        if grammar is not None and fields.ignore_eos:
            raise bad("`ignore_eos` is true, and the answer has a form", "Leave one of them out: a form ends where it is complete.", "ignore_eos")
        limit = fields.max_completion_tokens or fields.max_tokens or service.default_tokens(len(tokens))
        ends = () if fields.ignore_eos else tuple(chat.end_ids)
        params = sampling(
            fields, service.machine.defaults, service.settings.profile, service.limits, max_tokens=limit,
            logprobs=(fields.top_logprobs or 0) if fields.logprobs else None, also_stop=ends)
        tools = chat.tools(fields.messages, fields.tools)
        for index in range(num_choices):
            job = Job(
                tokens, choice_params(params, index), fields.priority or "standard", fields.cache_salt,
                constraint=None if grammar is None else grammar.begin())
            if not index:
                service.check(job, "messages")
            reader = chat.reader(
                tools, messages=fields.messages, stop=stops, include_stop=bool(fields.include_stop_str_in_output),
                tool_call_ids=service.settings.tool_call_ids, **{name: value for name, value in asked.items() if name != "stop"})
            self.choices.append(_Choice(index, job, reader, thinks))
        self.usage.add_prompt(max(0, len(tokens) - chat.num_pending))

    async def answer(self, reply: Reply, visit: Visit) -> None:
        """Compute and tell all choices."""
        first = self.choices[0].job
        visit.asks(
            operation="chat", model=self.fields.model, response_id=self.id, params=first.params, priority=first.priority,
            num_prompt_tokens=self.usage.num_prompt, num_choices=len(self.choices), stream=bool(self.fields.stream))
        if self.fields.stream:
            head = self._head("chat.completion.chunk")
            streams = merged([self._chunks(choice, visit) for choice in self.choices])
            await tell(reply, head, streams, self.usage, self.fields.stream_options)
            return
        choices = await together(self._whole(choice, visit) for choice in self.choices)
        await reply.whole({**self._head("chat.completion"), "choices": choices, "usage": self.usage.content()})

    async def _whole(self, choice: _Choice, visit: Visit) -> dict[str, Any]:
        async with aclosing(self._deltas(choice, visit)) as stream:
            async for _ in stream:
                choice.logprobs += choice.untold
                choice.untold = []
        message = choice.reader.message
        return {
            "index": choice.index, "message": _message(message), "logprobs": self._rated(choice.logprobs), "finish_reason": message.finish_reason,
            **self._ids(choice),
        }

    async def _chunks(self, choice: _Choice, visit: Visit) -> AsyncGenerator[dict[str, Any], None]:
        """What a stream says of a choice: its role, every piece as it comes, and how it ended."""
        yield self._chunk(choice, {"role": "assistant", "content": ""})
        async with aclosing(self._deltas(choice, visit)) as stream:
            async for deltas in stream:
                for delta in deltas:
                    yield self._chunk(choice, _delta(delta))
        yield self._chunk(choice, {}, choice.reader.message.finish_reason)

    async def _deltas(self, choice: _Choice, visit: Visit) -> AsyncGenerator[list[Delta], None]:
        """What every event makes visible, which may be nothing."""
        async with aclosing(self.service.events(choice.job, visit)) as events:
            async for event in events:
                deltas, ended = self._take(choice, event)
                yield deltas
                if ended:
                    if event.finish is None:
                        visit.stops(event.seq_id)
                    return

    def _take(self, choice: _Choice, event: Event) -> tuple[list[Delta], bool]:
        """Enter an event: what it makes visible, and whether the answer has ended, be it by a stop string."""
        deltas: list[Delta] = []
        if event.token is not None:
            ends = event.finish == "stop" and event.token in (self.fields.stop_token_ids or ()) and not choice.reader.marks(event.token)
            deltas = [] if ends else choice.reader.push([event.token])
            self.usage.num_generated += 1
            if choice.thinks and not choice.reader.answering and self.usage.num_reasoning is not None:
                self.usage.num_reasoning += 1
            if self.fields.return_token_ids:
                choice.tokens.append(event.token)
            if event.logprobs is not None:
                choice.untold.append(event.logprobs)
        stopped = choice.reader.stopped is not None
        if event.finish is None and not stopped:
            return deltas, False
        if not choice.index:
            self.usage.num_cached = min(event.num_cached_tokens, self.usage.num_prompt)
        reason: Literal["stop", "length"] = "stop" if stopped or event.finish == "stop" else "length"
        return [*deltas, *choice.reader.finish(reason)], True

    def _chunk(self, choice: _Choice, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        rated, choice.untold = self._rated(choice.untold), []
        chunk = {"index": choice.index, "delta": delta, "logprobs": rated, "finish_reason": finish, **self._ids(choice)}
        choice.tokens = []
        return chunk

    def _rated(self, entries: list[TokenLogprobs]) -> dict[str, Any] | None:
        return {"content": self.service.spelling.content(entries), "refusal": None} if self.fields.logprobs else None

    def _ids(self, choice: _Choice) -> dict[str, list[int]]:
        return {"token_ids": choice.tokens} if self.fields.return_token_ids else {}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id, "object": kind, "created": self.created_s, "model": self.fields.model,
            "system_fingerprint": self.service.fingerprint,
        }


async def answer(service: Service, content: Mapping[str, Any], reply: Reply, visit: Visit) -> None:
    """Serve one request. Raises: Refusal and what the engine or the chat format refuse with."""
    fields, ignored = read(ChatFields, content, unknown_refused=service.settings.unknown_refused)
    reply.ignores(ignored)
    chat = Chat(service, fields, content)
    await chat.prepare()
    with service.door.enter(len(chat.choices)):
        await chat.answer(reply, visit)


def _message(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
    if message.reasoning is not None:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in message.tool_calls
        ]
    return found


def _delta(delta: Delta) -> dict[str, Any]:
    if delta.reasoning is not None:
        return {"reasoning_content": delta.reasoning}
    call = delta.tool_call
    if call is None:
        return {"content": delta.content}
    if call.id is None:
        return {"tool_calls": [{"index": call.index, "function": {"arguments": call.arguments}}]}
    opening = {"name": call.name, "arguments": call.arguments}
    return {"tool_calls": [{"index": call.index, "id": call.id, "type": "function", "function": opening}]}


def _check_combinations(fields: ChatFields) -> None:
    """Raises: Refusal for fields that contradict each other."""
    if fields.stream_options is not None and not fields.stream:
        raise bad("`stream_options` is given, `stream` is not true", "Set stream to true, or leave it out.", "stream_options")
    if fields.top_logprobs is not None and not fields.logprobs:
        raise bad(f"`top_logprobs` is {fields.top_logprobs}, `logprobs` is not true", "Set logprobs to true, or leave it out.", "top_logprobs")
    if fields.modalities is not None and fields.modalities != ["text"]:
        raise bad(f"`modalities` is {fields.modalities}"[:200], 'Use ["text"]; answers are text.', "modalities", code="unsupported_parameter")
