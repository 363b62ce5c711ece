"""POST /v1/completions: text or token ids go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from firstlight.serve.fields import CompletionFields, read
from firstlight.serve.params import choice_params, sampling, stops_of
from firstlight.serve.refusal import Refusal, bad
from firstlight.serve.reply import Reply, tell
from firstlight.serve.service import Job, Service, merged, new_id, together
from firstlight.serve.text import Lists, Piece, Text
from firstlight.serve.usage import Usage
from firstlight.serve.visit import Visit
from firstlight.text.detokenizer import Detokenizer

MAX_TOKENS = 16
"""Tokens that are made when the request does not say: OpenAI's default."""


@dataclass(slots=True)
class _Choice:
    """One choice on its way."""

    index: int
    job: Job
    echo: str | None
    text: Text
    lists: Lists | None
    pieces: list[dict[str, Any]] = field(default_factory=list)


class Completion:
    """One request, understood: its choices, and how they are told."""

    def __init__(self, service: Service, fields: CompletionFields) -> None:
        self.service, self.fields = service, fields
        self.id, self.created_s = new_id("cmpl"), int(time.time())
        self.num_tokens = MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
        self.stops = stops_of(fields, service.limits)
        self.choices: list[_Choice] = []
        self.usage = Usage()

    async def prepare(self, content: Mapping[str, Any]) -> None:
        """Make the choices. Raises: Refusal, RequestError, CapacityError."""
        service, fields = self.service, self.fields
        service.check_model(fields.model)
        _check_combinations(fields, known=service.tokenizer is not None)
        num_choices = fields.n or 1
        given = fields.prompt
        if isinstance(given, list) and len(given) > service.limits.num_prompts and isinstance(given[0], str | list):
            raise bad(f"`prompt` holds {len(given)} prompts", f"Send at most {service.limits.num_prompts} in one request.", "prompt")
        prompts = await asyncio.to_thread(list, self._prompts(given))
        if len(prompts) * num_choices > service.limits.num_choices:
            fact = f"{len(prompts)} prompts with `n` {num_choices} make {len(prompts) * num_choices} choices"
            raise bad(fact, f"Ask for at most {service.limits.num_choices} in one request.", "n")
        rated = fields.logprobs if fields.echo else None
        grammar = None if service.structures is None else await service.structures.completion(content)
        params = sampling(
            fields, service.machine.defaults, service.settings.profile, service.limits, max_tokens=max(1, self.num_tokens),
            logprobs=fields.logprobs, prompt_logprobs=rated)
        for shown, tokens in prompts:
            for place in range(num_choices):
                job = Job(
                    tokens, choice_params(params, place), fields.priority or "standard", fields.cache_salt,
                    collect=not self.num_tokens and rated is not None, constraint=None if grammar is None else grammar.begin())
                if not place:
                    service.check(job, "prompt")
                self.choices.append(self._choice(job, shown if fields.echo else None))
            self.usage.add_prompt(len(tokens))

    async def answer(self, reply: Reply, visit: Visit) -> None:
        """Compute and tell all choices."""
        first = self.choices[0].job
        visit.asks(
            operation="text_completion", model=self.fields.model, response_id=self.id, params=first.params, priority=first.priority,
            num_prompt_tokens=self.usage.num_prompt, num_choices=len(self.choices), stream=bool(self.fields.stream))
        if self.fields.stream:
            streams = merged([self._pieces(choice, visit) for choice in self.choices])
            await tell(reply, self._head(), streams, self.usage, self.fields.stream_options)
            return
        choices = await together(self._whole(choice, visit) for choice in self.choices)
        await reply.whole({**self._head(), "choices": choices, "usage": self.usage.content()})

    async def _whole(self, choice: _Choice, visit: Visit) -> dict[str, Any]:
        async with aclosing(self._pieces(choice, visit)) as stream:
            pieces = [piece async for piece in stream]
        lists = [piece["logprobs"] for piece in pieces if piece["logprobs"] is not None]
        joined = {name: [item for part in lists for item in part[name]] for name in lists[0]} if lists else None
        ids = {"token_ids": [token for piece in pieces for token in piece["token_ids"]]} if self.fields.return_token_ids else {}
        return {
            "index": choice.index, "text": "".join(map(itemgetter("text"), pieces)), "logprobs": joined,
            "finish_reason": pieces[-1]["finish_reason"], **ids,
        }

    async def _pieces(self, choice: _Choice, visit: Visit) -> AsyncGenerator[dict[str, Any], None]:
        """What a stream says of a choice: the prompt if it is echoed, then every piece of text; the last has the reason of its end."""
        rated = choice.job.params.prompt_logprobs is not None
        if choice.echo is not None and not rated:
            yield self._told(choice, choice.echo, [], None, None)
        async with aclosing(self.service.events(choice.job, visit)) as events:
            async for event in events:
                piece = choice.text.take(event)
                if not self.num_tokens:
                    piece = Piece(finish=piece.finish and "length", num_cached=piece.num_cached, prompt_logprobs=piece.prompt_logprobs)
                self.usage.take(piece, first=choice.index % (self.fields.n or 1) == 0)
                if piece.prompt_logprobs is not None and choice.echo is not None and choice.lists is not None:
                    yield self._told(choice, choice.echo, choice.job.tokens, choice.lists.of(choice.job.tokens, piece.prompt_logprobs), None)
                lists = choice.lists.of(piece.tokens, piece.logprobs) if choice.lists is not None and piece.tokens else None
                if piece.text or lists is not None or piece.finish is not None or self.fields.return_token_ids:
                    yield self._told(choice, piece.text, piece.tokens, lists, piece.finish)
                if piece.finish is not None:
                    if event.finish is None:
                        visit.stops(event.seq_id)
                    return

    def _told(self, choice: _Choice, text: str, tokens: Any, logprobs: Any, finish: str | None) -> dict[str, Any]:
        ids = {"token_ids": list(tokens)} if self.fields.return_token_ids else {}
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": finish, **ids}

    def _choice(self, job: Job, echo: str | None) -> _Choice:
        service, fields = self.service, self.fields
        skip_special = fields.skip_special_tokens is not False
        detokenizer = measure = None
        if service.tokenizer is not None:
            detokenizer = Detokenizer(
                service.tokenizer, stop=self.stops, skip_special=skip_special, include_stop=bool(fields.include_stop_str_in_output))
            measure = Detokenizer(service.tokenizer, skip_special=skip_special)
        lists = None if fields.logprobs is None else Lists(service.spelling, measure)
        return _Choice(len(self.choices), job, echo, Text(detokenizer, len(job.tokens)), lists)

    def _prompts(self, prompt: Any) -> Iterator[tuple[str, list[int]]]:
        """(what an echo shows, token ids) of every prompt."""
        service = self.service
        for each in listed(prompt):
            if isinstance(each, str):
                begin = service.tokenizer.prefix_ids if service.tokenizer is not None and self.fields.add_special_tokens is not False else ()
                yield each, [*begin, *service.encode(each, "prompt")]
            else:
                known = service.tokenizer is not None and self.fields.echo and max(each, default=0) < service.machine.spec.num_vocab
                yield _text(service, each) if known and min(each, default=0) >= 0 else "", each

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id, "object": "text_completion", "created": self.created_s, "model": self.fields.model,
            "system_fingerprint": self.service.fingerprint,
        }


async def complete(service: Service, content: Mapping[str, Any], reply: Reply, visit: Visit) -> None:
    """Serve one request. Raises: Refusal and what the engine refuses with."""
    fields, ignored = read(CompletionFields, content, unknown_refused=service.settings.unknown_refused)
    reply.ignores(ignored)
    completion = Completion(service, fields)
    await completion.prepare(content)
    with service.door.enter(len(completion.choices)):
        await completion.answer(reply, visit)


def _text(service: Service, tokens: list[int]) -> str:
    assert service.tokenizer is not None
    detokenizer = Detokenizer(service.tokenizer)
    return "".join(map(detokenizer.feed, tokens)) + detokenizer.finish()


def listed(prompt: Any) -> list[str] | list[list[int]]:
    """One text, ids, or a list of either, as a list. Raises: Refusal."""
    prompts = [prompt] if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and not isinstance(prompt[0], str | list)) else prompt
    if not isinstance(prompts, list) or not prompts:
        raise _wrong(prompt)
    for each in prompts:
        if type(each) is not type(prompts[0]) or (isinstance(each, list) and not set(map(type, each)) <= {int}):
            raise _wrong(prompt)
    if not isinstance(prompts[0], str | list):
        raise _wrong(prompt)
    return prompts


def _wrong(prompt: Any) -> Refusal:
    shown = repr(prompt) if not isinstance(prompt, list) else f"a list that begins with {prompt[0]!r}" if prompt else "an empty list"
    return bad(f"`prompt` is {shown[:100]}", "Use a text, token ids, or a list of either.", "prompt", code="invalid_value")


def _check_combinations(fields: CompletionFields, *, known: bool) -> None:
    """Raises: Refusal for fields that contradict each other."""
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        fact = f"`best_of` is {fields.best_of}, `n` is {fields.n or 1}"
        raise bad(fact, "Leave `best_of` out, and choose among `n` choices by their logprobs.", "best_of", code="unsupported_parameter")
    if fields.stream_options is not None and not fields.stream:
        raise bad("`stream_options` is given, `stream` is not true", "Set stream to true, or leave it out.", "stream_options")
    if not known and fields.stop:
        raise bad("`stop` is given, the model's folder has no tokenizer", "Use `stop_token_ids`.", "stop")
    if fields.ignore_eos and (fields.structured or (fields.response_format or {}).get("type", "text") != "text"):
        raise bad("`ignore_eos` is true together with a response format", "Leave one of them out: a form ends where it is complete.", "ignore_eos")
