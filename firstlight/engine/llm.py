"""The offline face: a folder in, verified tokens out."""

from __future__ import annotations

import os
import reprlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from operator import index
from typing import Any, Literal, overload

import torch
from torch import Tensor

from firstlight.engine.boot import Machine, Options, boot
from firstlight.engine.sampler import TokenLogprobs
from firstlight.engine.shared import SharedEngine
from firstlight.sched.limits import Fairness
from firstlight.sched.sequence import Event
from firstlight.spec.errors import RequestError
from firstlight.spec.sampling import SamplingParams
from firstlight.text.detokenizer import Detokenizer
from firstlight.text.grammar import Grammars

Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Output:
    """What became of one prompt. `text` is None when the folder has no tokenizer.

    `logprobs`: one entry per token of `tokens`, of the distribution before temperature, penalties and bias; None when not asked for.
    `prompt_logprobs`: likewise of `prompt_tokens`, the first of which nothing rates.
    `error`: why it ended with finish_reason "error"; the tokens before that are good.
    """

    prompt_tokens: list[int]
    tokens: list[int]
    text: str | None
    finish_reason: str
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    first_token_s: float | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class LLM:
    """One model on this machine; use it in a `with` block, or close it.

    - `model`: a folder with config.json, *.safetensors and tokenizer files (without those, prompts are token ids), "default", or a name that
      `firstlight fetch` knows.
    - `dtype`: "auto" is the checkpoint's; "float32" and "bfloat16" convert what the policy of the model does not keep as it is.
    - `backends`: names in order of preference; None is all that are ready, references last.
    - `seed`: what requests without a seed of their own draw from; the same calls in the same order give the same tokens.
    - `cache_bytes`: memory of all cache groups together; None takes a quarter of the free memory at most. `tokens_per_block`: rows of a block.
    - `max_step_tokens`, `chunk_tokens`, `max_sequences`: tokens in a step, of one prompt in a step, sequences in a step, each at most.
    - `max_context`: tokens of prompt and answer at most; None is what the model was made for.
    - `fairness`: how far one request may hold up another: patience, shares of a step, watermarks.
    - `prefix_cache`, `snapshot_tokens`: whether prompts resume from what is cached; a grid for states beside prompt ends and branches.
    - `verify_hits`: the share of hits that is computed again without the cache, 0 to 1; a wrong one turns the cache off.
    - `poison_freed`: fill freed and fresh cache memory with NaN. `allow_unread`: run although config keys were not understood.
    - `progress`: told how many tensors of how many are loaded.

    Raises: ConfigError, CheckpointError, CoverageError, CapacityError for what cannot run, before any cache is allocated.
    Note: in bfloat16 two ways to cut a prompt round differently; equalities hold to the last digits in float32.
    """

    def __init__(
        self, model: str | os.PathLike[str] = "default", *, device: str = "cpu", dtype: str = "auto", backends: Sequence[str] | None = None,
        seed: int = 0, cache_bytes: int | None = None, tokens_per_block: int = 16, snapshot_tokens: int | str = "auto",
        max_step_tokens: int = 2048, chunk_tokens: int = 512, max_sequences: int = 64, max_context: int | None = None,
        fairness: Fairness | None = None, prefix_cache: bool = True, verify_hits: float = 0.0, poison_freed: bool = False,
        allow_unread: bool = False, progress: Callable[[int, int], None] | None = None,
    ) -> None:
        options = Options(
            device=device, dtype=dtype, backends=_names(backends), seed=seed, cache_bytes=cache_bytes,
            tokens_per_block=tokens_per_block, max_step_tokens=max_step_tokens, chunk_tokens=chunk_tokens, max_sequences=max_sequences,
            max_context=max_context, fairness=fairness or Fairness(),
            prefix_cache=prefix_cache, snapshot_tokens=snapshot_tokens, verify_hits=verify_hits, poison_freed=poison_freed, allow_unread=allow_unread)
        self.machine: Machine | None = boot(model, options, progress)
        self.spec, self.tokenizer, self.defaults = self.machine.spec, self.machine.tokenizer, self.machine.defaults
        self._grammars: Grammars | None = None

    @property
    def engine(self) -> SharedEngine:
        """The loop, for stepping by hand. Requests that are submitted here go on while `generate` or `logits` runs; no event gets lost."""
        return self._up.engine

    @property
    def grammars(self) -> Grammars:
        """What compiles schemas for this model's vocabulary. Raises: RequestError when the folder has no tokenizer."""
        if self._grammars is None:
            if self.tokenizer is None:
                raise RequestError(f"{self._up.folder} has no tokenizer, so no answer can be held to a structure", "Leave `structured` out.")
            self._grammars = Grammars(self.tokenizer, self.spec.num_vocab, self.engine.stop_ids)
        return self._grammars

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None, *,
        priority: str | Sequence[str] = "standard", salt: str | None = None, progress: Callable[[int, int], None] | None = None,
    ) -> list[Output]:
        """Completes every prompt; a request that fails ends alone, its Output says why.

        `params` None: what generation_config.json says; `params.structured` holds a whole answer to a structure.
        `progress` is told after every step how many tokens of how many at most are done.
        Raises: RequestError or CapacityError for the first invalid prompt, before any is computed; whatever interrupts cancels all.
        """
        batch = _as_list(prompts)
        each_params = _per_prompt(self.defaults.params() if params is None else params, len(batch), "params", SamplingParams)
        each_priority = _per_prompt(priority, len(batch), "priority", str)
        engine, events = self.engine, list[Event]()
        waiting = [_Job(self.tokens_of(prompt), sampling, self._detokenizer(sampling)) for prompt, sampling in zip(batch, each_params, strict=True)]
        grammars = [None if job.params.structured is None else self.grammars.compile(job.params.structured) for job in waiting]
        jobs: dict[int, _Job] = {}
        try:
            for job, urgency, grammar in zip(waiting, each_priority, grammars, strict=True):
                seq_id = engine.submit(job.prompt, job.params, priority=urgency, salt=salt, constraint=None if grammar is None else grammar.begin())
                jobs[seq_id] = job
                engine.claim(seq_id, events)
            _drive(engine, jobs, events, progress)
        except BaseException:
            engine.abandon(jobs)
            raise
        return [job.output() for job in waiting]

    @overload
    def logits(
        self, tokens: Sequence[int], *, images: Sequence[Any] = (), chunks: Sequence[int] | None = None, cached: Literal[False] = False,
        salt: str | None = None,
    ) -> Tensor: ...
    @overload
    def logits(
        self, tokens: Sequence[int], *, images: Sequence[Any] = (), chunks: Sequence[int] | None = None, cached: Literal[True],
        salt: str | None = None,
    ) -> tuple[Tensor, int]: ...

    def logits(
        self, tokens: Sequence[int], *, images: Sequence[Any] = (), chunks: Sequence[int] | None = None, cached: bool = False,
        salt: str | None = None,
    ) -> Tensor | tuple[Tensor, int]:
        """Float32 logits [T, V] at every position, through the runner and caches that serve. `chunks` forces the split of the prefill.

        `cached` starts from a prefix hit: the logits of the computed tail and the position of its first token come back; `chunks` then
        splits the tail.
        Note: requests that were submitted by hand go on meanwhile, but nobody waits for them.
        """
        if images:
            raise RequestError(f"{len(images)} images were given, this version reads text only", "Leave images out.")
        ids = self.tokens_of(tokens)
        split = _split(chunks, len(ids), exact=not cached)
        engine, events = self.engine, list[Event]()
        seq_id = engine.submit(ids, SamplingParams(max_tokens=1), salt=salt, collect=True, cold=not cached, split=split)
        engine.claim(seq_id, events)
        try:
            while not events or events[-1].finish is None:
                engine.advance()
        except BaseException:
            engine.abandon([seq_id])
            raise
        if events[-1].error is not None:
            fact = f"logits of {len(ids)} tokens failed: {events[-1].error}"
            raise RequestError(fact, "Compare the checkpoint with the published one, or use dtype='float32'.")
        rows: list[tuple[int, Tensor]] = []
        for event in events:
            if event.logits is not None:
                # after a preemption the computation goes on further ahead: what was told from there on is told again
                rows = [(begin, found) for begin, found in rows if begin < event.begin]
                rows.append((event.begin, event.logits))
        first = rows[0][0]
        found_TV = torch.cat([found[: after - begin] for (begin, found), after in zip(rows, [*(b for b, _ in rows[1:]), len(ids)], strict=True)])
        return (found_TV, first) if cached else found_TV

    def explain(self, prompt: Prompt, *, salt: str | None = None) -> dict[str, Any]:
        """How much of a prompt is cached, per group, and why not more; changes nothing."""
        return self._up.cache.explain(self.tokens_of(prompt), salt=(salt or "").encode())

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; running requests go on."""
        self._up.cache.reset()

    def stats(self) -> dict[str, Any]:
        """Blocks of every cache group, what `Scheduler.counts` says, fallbacks of operators, unusable blocks from outside."""
        machine = self._up
        return {
            "groups": machine.cache.counts(), **machine.engine.counts(), "fallbacks": machine.binder.num_fallbacks,
            "prefix": machine.cache.prefix_counts(), "canary": None if machine.engine.canary is None else machine.engine.canary.counts(),
            "unusable_blocks": dict(machine.pool.unusable),
        }

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
        try:
            # Bytes would pass for ids.
            ids = None if isinstance(prompt, bytes) else list(map(index, prompt))
        except TypeError:
            ids = None
        if ids is None:
            raise RequestError(f"a prompt is {reprlib.repr(prompt)}", "Give text, token ids, or an object with one of them.")
        return ids

    @property
    def _up(self) -> Machine:
        if self.machine is None:
            raise RequestError("this LLM is closed", "Make a new one.")
        return self.machine

    def _detokenizer(self, params: SamplingParams) -> Detokenizer | None:
        if self.tokenizer is not None:
            return Detokenizer(self.tokenizer, stop=params.stop)
        if params.stop:
            raise RequestError(f"stop strings {list(params.stop)} were given, but the folder has no tokenizer", "Use stop_token_ids.")
        return None


@dataclass(slots=True)
class _Job:
    """One prompt on its way."""

    prompt: list[int]
    params: SamplingParams
    detokenizer: Detokenizer | None
    begun_s: float = field(default_factory=time.perf_counter)
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None
    first_token_s: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])

    @property
    def num_expected(self) -> int:
        """Tokens of prompt and answer at most."""
        return len(self.prompt) + self.params.max_tokens

    @property
    def num_done(self) -> int:
        """Tokens of the answer, and of the prompt once there is one; all that were expected when it has ended."""
        if self.finish is not None:
            return self.num_expected
        return len(self.prompt) + len(self.tokens) if self.tokens else 0

    def take(self, event: Event) -> bool:
        """Enter an event; True when a stop string ended the text, so that the engine need not go on."""
        if self.finish is not None:
            return False
        if event.prompt_logprobs is not None:
            # After a preemption they come again; those that are known stay.
            self.prompt_logprobs += event.prompt_logprobs[len(self.prompt_logprobs) - 1 - event.begin :]
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
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter() - self.begun_s
        self.tokens.append(event.token)
        if event.logprobs is not None:
            self.logprobs.append(event.logprobs)
        if self.detokenizer is not None and event.finish != "stop":  # a stop token is no text
            self.pieces.append(self.detokenizer.feed(event.token))

    def output(self) -> Output:
        """The finished result."""
        text = "".join(self.pieces) if self.detokenizer is not None else None
        return Output(
            self.prompt, self.tokens, text, self.finish or "abort", self.num_cached_tokens, self.num_preemptions,
            self.logprobs if self.params.logprobs is not None else None, self.error, self.first_token_s,
            self.prompt_logprobs if self.params.prompt_logprobs is not None else None)


def _drive(engine: SharedEngine, jobs: Mapping[int, _Job], events: list[Event], progress: Callable[[int, int], None] | None) -> None:
    """Step until all jobs have ended; the engine puts what happens to them into `events`."""
    running = set(jobs)
    total = sum(job.num_expected for job in jobs.values())
    num_done = 0
    while running:
        engine.advance()
        for event in events:
            job = jobs[event.seq_id]
            num_done -= job.num_done
            if job.take(event):
                engine.abandon([event.seq_id])
            num_done += job.num_done
            if job.finish is not None:
                running.discard(event.seq_id)
        events.clear()
        if progress is not None:
            progress(num_done, total)


def _split(chunks: Any, num_tokens: int, *, exact: bool) -> tuple[int, ...]:
    """The forced sizes of chunks; `exact`: they must cover the prompt."""
    try:
        split = tuple(map(index, () if chunks is None else chunks))
    except TypeError:
        raise RequestError(f"chunks are {reprlib.repr(chunks)}", "Give a list of whole numbers, as in [3, 1, 7].") from None
    if split and (min(split) < 1 or (exact and sum(split) != num_tokens)):
        fact = f"chunks {list(split)} sum to {sum(split)} for {num_tokens} tokens"
        raise RequestError(fact, "Give positive sizes that sum to the number of tokens.")
    return split


def _names(backends: str | Sequence[str] | None) -> tuple[str, ...] | None:
    return (backends,) if isinstance(backends, str) else None if backends is None else tuple(backends)


def _as_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """A lone prompt counts as a batch of one."""
    if isinstance(prompts, (str, bytes, Mapping)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError(f"the prompts are {prompts!r}", "Give a text, token ids, or a list of them.")
    items = list(prompts)
    if items and all(isinstance(item, Integral) for item in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def _per_prompt(value: Any, count: int, name: str, kind: type) -> list[Any]:
    values = [value] * count if isinstance(value, kind) else list(value) if isinstance(value, (list, tuple)) else [value]
    if any(not isinstance(item, kind) for item in values):
        raise RequestError(f"`{name}` is {value!r}", f"Use one {kind.__name__} for all, or a list with one per prompt.")
    if len(values) != count:
        raise RequestError(f"{len(values)} {name} for {count} prompts", "Give one for all, or one per prompt.")
    return values
