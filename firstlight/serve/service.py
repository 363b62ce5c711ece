"""What a server holds: one model with its engine, its names and settings, and how a request of any kind runs on it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

from firstlight.engine.async_engine import AsyncEngine
from firstlight.engine.boot import Machine
from firstlight.engine.llm import LLM
from firstlight.sched.sequence import Event
from firstlight.serve.door import Door
from firstlight.serve.limits import Limits
from firstlight.serve.profiles import PROFILES, Profile
from firstlight.serve.refusal import Refusal, bad, failed, refusal_of, unavailable, unknown_model
from firstlight.serve.structured import Structures
from firstlight.serve.text import Spelling
from firstlight.serve.visit import Visit
from firstlight.serve.watch import Watch
from firstlight.spec.errors import CapacityError, FirstlightError, RequestError
from firstlight.spec.sampling import SamplingParams
from firstlight.spec.structured import Constraint
from firstlight.text import chat
from firstlight.text.chat import ChatFormat
from firstlight.text.tokenizer import Tokenizer

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to serve. `names`: what the model is called, the first of them in answers. `keys`: empty for no key."""

    names: tuple[str, ...] = ("default",)
    keys: tuple[str, ...] = ()
    profile: Profile = PROFILES["openai"]
    limits: Limits = field(default_factory=Limits)
    unknown_refused: bool = False
    origins: tuple[str, ...] = ()
    tool_call_ids: Literal["native", "unique"] = "native"
    texts_logged: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """One choice to compute. `collect`: the prompt only."""

    tokens: Sequence[int]
    params: SamplingParams
    priority: str = "standard"
    salt: str | None = None
    collect: bool = False
    constraint: Constraint | None = None


class Service:
    """Made inside a running event loop, which it belongs to; `close` ends it."""

    def __init__(self, llm: LLM, settings: Settings, *, watch: Watch | None = None, engine: AsyncEngine | None = None) -> None:
        assert llm.machine is not None, "the model is closed"
        self.llm, self.settings, self.limits = llm, settings, settings.limits
        self.machine: Machine = llm.machine
        self.engine = engine or AsyncEngine(llm.engine)
        self.watch = watch or Watch(llm, self.engine, model_name=settings.names[0], texts_logged=settings.texts_logged)
        self.tokenizer: Tokenizer | None = llm.tokenizer
        self.spelling = Spelling(self.tokenizer)
        self.created_s = int(time.time())
        slots = llm.engine.scheduler.limits.sequences_per_step
        self.door = Door(slots, settings.limits.num_queued, retry_s=settings.limits.retry_s)
        self.structures = Structures(llm.grammars) if self.tokenizer is not None else None

    @property
    def name(self) -> str:
        """The model's name in answers."""
        return self.settings.names[0]

    @cached_property
    def fingerprint(self) -> str:
        """Changes with the weights, the dtype and the layout of the caches."""
        return f"fl-{self.machine.cache.identity.hex()[:12]}"

    @cached_property
    def max_context(self) -> int:
        """Tokens of prompt and answer together at most: of the model, or what an empty cache holds."""
        capacity = self.machine.cache.capacity_tokens
        longest = self.machine.spec.max_context
        return longest if capacity is None else min(longest, capacity + 1)

    @cached_property
    def longest_chars(self) -> int:
        """No text with more characters fits the context, whatever it says: none of its tokens has more bytes than the longest one."""
        assert self.tokenizer is not None
        return self.max_context * max(len(self.tokenizer.token_bytes(token)) for token in range(self.tokenizer.num_vocab))

    @cached_property
    def chat(self) -> ChatFormat | FirstlightError:
        """The model's chat format, or why it has none."""
        try:
            return chat.load(str(self.machine.folder), self.tokenizer)
        except FirstlightError as error:
            return error

    def check_model(self, name: str | None) -> None:
        """Raises: Refusal for another model than this one."""
        if name is not None and name not in self.settings.names:
            raise unknown_model(name, self.name)

    def default_tokens(self, num_prompt: int) -> int:
        """Tokens of an answer when nobody says how many: what the model's files say, within what the context leaves."""
        left = max(1, self.max_context - num_prompt)
        return min(left, self.machine.defaults.max_tokens or left, self.limits.max_tokens or left)

    def encode(self, text: str, param: str) -> list[int]:
        """Ids of plain text, without what begins a prompt. Raises: Refusal without a tokenizer."""
        if self.tokenizer is None:
            raise bad(f"`{param}` is text, the model's folder has no tokenizer", "Give token ids.", param)
        self.check_length(text, param)
        return self.tokenizer.encode(text)

    def check_length(self, text: str, param: str) -> None:
        """Raises: Refusal for a text that cannot fit, before time is spent on its tokens."""
        if self.tokenizer is not None and len(text) > self.longest_chars:
            raise _too_long(f"`{param}` has {len(text):,} characters, more than {self.max_context:,} tokens can spell", param)

    def check_size(self, tokens: Sequence[int], param: str) -> None:
        """Raises: Refusal for more tokens than the context."""
        if len(tokens) > self.max_context:
            raise _too_long(f"`{param}` has {len(tokens):,} tokens, this model takes {self.max_context:,}", param)

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Raises: Refusal for more tokens than the context, or for one outside of the vocabulary."""
        self.check_size(tokens, param)
        self.check_ids(tokens, param)

    def check_ids(self, tokens: Sequence[int], param: str) -> None:
        """Raises: Refusal for a token outside of the vocabulary."""
        num_vocab = self.machine.spec.num_vocab
        beyond = next((token for token in tokens if not 0 <= token < num_vocab), None)
        if beyond is not None:
            fact = f"`{param}` holds {str(beyond)[:30]}, outside of the vocabulary of {num_vocab}"
            raise bad(fact, f"Use ids from 0 to {num_vocab - 1}.", param)

    def check(self, job: Job, param: str) -> None:
        """Raises: Refusal for what the engine would refuse, before any head of a response is sent; `param` is where the tokens come from."""
        self.check_size(job.tokens, param)
        try:
            self.machine.engine.check(
                job.tokens, job.params, priority=job.priority, salt=job.salt, collect=job.collect, constraint=job.constraint)
        except (RequestError, CapacityError) as error:
            raise refusal_of(error, param=param) from None

    async def events(self, job: Job, visit: Visit) -> AsyncGenerator[Event, None]:
        """The events of a choice, seen by the watch. Raises: Refusal when it ends with an error or is aborted by the server."""
        visit.begins()
        stream = self.engine.generate(
            job.tokens, job.params, priority=job.priority, salt=job.salt, most_unread=self.limits.most_unread, collect=job.collect,
            constraint=job.constraint)
        async with aclosing(stream):
            async for event in stream:
                visit.take(event)
                if event.finish == "error":
                    raise failed(f"the generation failed: {event.error}")
                if event.finish == "abort":
                    raise unavailable("the server ended the request", "Send it to another server.", self.limits.retry_s, "aborted")
                yield event

    async def drain(self) -> bool:
        """Take nothing new and wait until all have left, within the limit; whether they did. Those who did not are cancelled."""
        self.door.close()
        emptied = await self.door.emptied(self.limits.drain_s)
        await self.close(drain=emptied)
        return emptied

    async def close(self, *, drain: bool = False) -> None:
        """End the engine; twice is fine."""
        self.door.close()
        await self.engine.close(drain=drain)
        if self.structures is not None:
            self.structures.close()
        await asyncio.to_thread(self.watch.close)


def _too_long(fact: str, param: str) -> Refusal:
    return bad(fact, "Shorten it.", param, code="context_length_exceeded")


def new_id(kind: str) -> str:
    """A name for an answer."""
    return f"{kind}-{uuid.uuid4().hex}"


async def together(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; the first error cancels the others and is raised as it is."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all streams as they come, each with the index of its stream; no stream runs ahead, an error ends all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    nexts = {asyncio.ensure_future(anext(stream, None)): index for index, stream in enumerate(streams)}
    try:
        while nexts:
            done, _ = await asyncio.wait(nexts, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=nexts.__getitem__):
                found, index = task.result(), nexts.pop(task)
                if found is not None:
                    yield index, found
                    nexts[asyncio.ensure_future(anext(streams[index], None))] = index
    finally:
        for task in nexts:
            task.cancel()
        await asyncio.gather(*nexts, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
