"""The offline face: a folder in, verified tokens out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from firstlight.engine.boot import Machine, Options, boot
from firstlight.engine.loop import Engine
from firstlight.sched.sequence import Event
from firstlight.spec.errors import RequestError
from firstlight.spec.sampling import SamplingParams
from firstlight.text.detokenizer import Detokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Output:
    """What became of one prompt. `text` is None when the folder has no tokenizer."""

    prompt_tokens: list[int]
    tokens: list[int]
    text: str | None
    finish_reason: str
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    logprobs: list[Any] | None = None
    error: str | None = None
    first_token_s: float | None = None


class LLM:
    """One model on this machine. Arguments are those of Options; `model` is a folder or "default"."""

    def __init__(
        self, model: str | os.PathLike[str] = "default", *, device: str = "cpu", dtype: str = "auto", backends: Sequence[str] | None = None,
        seed: int = 0, cache_bytes: int | None = None, tokens_per_block: int = 16, snapshot_tokens: int | str = "auto",
        max_step_tokens: int = 2048, chunk_tokens: int = 512, max_sequences: int = 64, max_context: int | None = None,
        prefix_cache: bool = True, poison_freed: bool = False, allow_unread: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        options = Options(
            device=device, dtype=dtype, backends=None if backends is None else tuple(backends), seed=seed, cache_bytes=cache_bytes,
            tokens_per_block=tokens_per_block, max_step_tokens=max_step_tokens, chunk_tokens=chunk_tokens, max_sequences=max_sequences,
            max_context=max_context, poison_freed=poison_freed, allow_unread=allow_unread)
        self.machine: Machine | None = boot(model, options, progress)
        self.spec, self.tokenizer, self.defaults = self.machine.spec, self.machine.tokenizer, self.machine.defaults

    @property
    def engine(self) -> Engine:
        """The loop, for stepping by hand."""
        return self._up.engine

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None, *,
        priority: str | Sequence[str] = "standard", salt: str | None = None,
    ) -> list[Output]:
        """Completes every prompt; a request that fails ends alone, its Output says why."""
        batch = _as_list(prompts)
        each_params = self._per_prompt(params if params is not None else self.defaults.params(), len(batch), "params")
        each_priority = self._per_prompt(priority, len(batch), "priority")
        jobs: dict[int, _Job] = {}
        order: list[int] = []
        try:
            for prompt, sampling, urgency in zip(batch, each_params, each_priority, strict=True):
                tokens = self.tokens_of(prompt)
                detokenizer = self._detokenizer(sampling)
                seq_id = self.engine.submit(tokens, sampling, priority=urgency, salt=salt)
                order.append(seq_id)
                jobs[seq_id] = _Job(tokens, detokenizer, time.perf_counter())
            self._drive(jobs)
        except BaseException:
            for seq_id in order:
                self.engine.cancel(seq_id)
            raise
        return [jobs[seq_id].output() for seq_id in order]

    def logits(self, tokens: Sequence[int], *, images: Sequence[Any] = (), chunks: Sequence[int] | None = None, cached: bool = False) -> Tensor:
        """Float32 logits [T, V] at every position, through the runner and caches that serve. `chunks` forces the split of the prefill."""
        if images:
            raise RequestError(f"{len(images)} images were given, this version reads text only", "Leave images out.")
        if cached:
            raise RequestError("cached=True was given, this version keeps no prefix", "Leave cached out.")
        split = tuple(chunks or ())
        if split and (sum(split) != len(tokens) or min(split) < 1):
            fact = f"chunks {list(split)} sum to {sum(split)} for {len(tokens)} tokens"
            raise RequestError(fact, "Give positive sizes that sum to the number of tokens.")
        seq_id = self.engine.submit(list(tokens), SamplingParams(max_tokens=1), collect=True, split=split)
        rows: dict[int, Tensor] = {}
        while not self.engine.idle():
            for event in self.engine.step():
                if event.seq_id != seq_id:
                    continue
                if event.error:
                    raise RequestError(f"logits of {len(tokens)} tokens failed: {event.error}", "Check the checkpoint with `firstlight align`.")
                if event.logits is not None:
                    rows[event.begin] = event.logits
        return torch.cat([rows[begin] for begin in sorted(rows)])

    def stats(self) -> dict[str, Any]:
        """Blocks of every cache group, sequences running and waiting, preemptions, fallbacks of operators."""
        machine = self._up
        return {"groups": machine.cache.counts(), **machine.engine.counts(), "fallbacks": machine.binder.num_fallbacks}

    def close(self) -> None:
        """Give the memory back; twice is fine."""
        if self.machine is not None:
            self.machine.runner.close()
            self.machine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def tokens_of(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt in any of its forms. Raises RequestError."""
        if isinstance(prompt, Mapping):
            if prompt.get("images"):
                raise RequestError(f"{len(prompt['images'])} images were given, this version reads text only", "Leave images out.")
            forms = [key for key in ("tokens", "text") if key in prompt]
            if len(forms) != 1:
                raise RequestError(f"a prompt has the keys {sorted(prompt)}", 'Give exactly one of "tokens" and "text".')
            return self.tokens_of(prompt[forms[0]])
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(f"{self._up.folder} has no tokenizer, text cannot be read", "Give token ids.")
            return [*self.tokenizer.prefix_ids, *self.tokenizer.encode(prompt)]
        return list(prompt)

    @property
    def _up(self) -> Machine:
        if self.machine is None:
            raise RequestError("this LLM is closed", "Make a new one.")
        return self.machine

    def _drive(self, jobs: dict[int, _Job]) -> None:
        while any(job.finish is None for job in jobs.values()):
            for event in self.engine.step():
                job = jobs.get(event.seq_id)
                if job is not None and job.take(event):
                    self.engine.cancel(event.seq_id)

    def _detokenizer(self, params: SamplingParams) -> Detokenizer | None:
        if self.tokenizer is not None:
            return Detokenizer(self.tokenizer, stop=params.stop)
        if params.stop:
            raise RequestError(f"stop strings {list(params.stop)} were given, but the folder has no tokenizer", "Use stop_token_ids.")
        return None

    def _per_prompt(self, value: Any, count: int, name: str) -> list[Any]:
        if isinstance(value, (str, SamplingParams)):
            return [value] * count
        values = list(value)
        if len(values) != count:
            raise RequestError(f"{len(values)} {name} for {count} prompts", "Give one for all, or one per prompt.")
        return values


@dataclass(slots=True)
class _Job:
    """One prompt on its way."""

    prompt: list[int]
    detokenizer: Detokenizer | None
    begun_s: float
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None
    first_token_s: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    def take(self, event: Event) -> bool:
        """Enter an event; True when a stop string ended the text, so that the engine need not go on."""
        if self.finish is not None:
            return False
        if event.token is not None:
            self._token(event)
        self.num_cached_tokens, self.num_preemptions = event.num_cached_tokens, event.num_preemptions
        self.finish, self.error = event.finish, event.error
        if self.finish is not None and self.detokenizer is not None:
            self.pieces.append(self.detokenizer.finish())
        if self.detokenizer is not None and self.detokenizer.stopped is not None:
            ended, self.finish = self.finish is not None, "stop"
            return not ended
        return False

    def _token(self, event: Event) -> None:
        assert event.token is not None
        self.first_token_s = self.first_token_s or time.perf_counter() - self.begun_s
        self.tokens.append(event.token)
        if event.logprobs is not None:
            self.logprobs.append(event.logprobs)
        if self.detokenizer is not None and event.finish != "stop":  # a stop token is no text
            self.pieces.append(self.detokenizer.feed(event.token))

    def output(self) -> Output:
        """The finished result."""
        text = "".join(self.pieces) if self.detokenizer is not None else None
        return Output(
            self.prompt, self.tokens, text, self.finish or "abort", self.num_cached_tokens, self.num_preemptions, self.logprobs or None,
            self.error, self.first_token_s)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A lone prompt counts as a batch of one."""
    if isinstance(prompts, (str, Mapping)) or (prompts and all(isinstance(item, int) for item in prompts)):
        return [prompts]  # type: ignore[list-item]
    return [*prompts]
