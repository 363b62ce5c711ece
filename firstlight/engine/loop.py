"""One step, then another: schedule, run, update. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from itertools import count
from operator import index
from typing import Any, Protocol

from firstlight.engine.canary import Canary
from firstlight.engine.meter import Meter
from firstlight.sched.scheduler import Scheduler
from firstlight.sched.sequence import Batch, Event, Priority, Sequence, StepResult
from firstlight.spec.errors import FirstlightError, RequestError
from firstlight.spec.sampling import SamplingParams
from firstlight.spec.structured import Constraint


class Runner(Protocol):
    """Computes batches: on a device, in a simulation, or with faults."""

    def run(self, batch: Batch) -> StepResult:
        """Compute every chunk of the batch."""

    def close(self) -> None:
        """Give everything back."""


class Engine:
    """Owns the queue and drives a runner; one thread at a time may call it."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, clock: Callable[[], float] = time.monotonic, *, num_vocab: int,
        stop_ids: frozenset[int] = frozenset(), canary: Canary | None = None,
    ) -> None:
        self.scheduler, self.runner, self.clock = scheduler, runner, clock
        self.num_vocab, self.stop_ids, self.canary = num_vocab, stop_ids, canary
        self.meter: Meter | None = None
        self._ids = count()
        self._untold: list[Event] = []

    def submit(
        self, tokens: Rows[int], params: SamplingParams, *, priority: str = "standard", salt: str | None = None, images: Rows[Any] = (),
        collect: bool = False, cold: bool = False, split: tuple[int, ...] = (), arrived_s: float | None = None,
        constraint: Constraint | None = None,
    ) -> int:
        """Queue a request and return its id.

        `collect` keeps the logits of all computed positions instead of sampling; `cold` resumes from no prefix; `split` forces the
        sizes of the chunks from the first computed position on; `arrived_s`: by this engine's clock, None: now;
        `constraint` holds the answer to a structure and is this request's alone.

        Raises: RequestError for what cannot be served as it is, CapacityError for what could never fit.
        """
        seq = self._sequence(tokens, params, priority, salt, images, split, collect, constraint)
        seq.seq_id = next(self._ids)
        # What is cached yields no logits.
        seq.cold = cold or params.prompt_logprobs is not None
        if arrived_s is not None:
            seq.arrived_s = arrived_s
        if self.canary is not None:
            self.canary.watch(seq)
        self.scheduler.add(seq)
        return seq.seq_id

    def check(
        self, tokens: Rows[int], params: SamplingParams, *, priority: str = "standard", salt: str | None = None, collect: bool = False,
        constraint: Constraint | None = None,
    ) -> None:
        """Refuse what `submit` would refuse, and do nothing else; any thread may call it at any time."""
        self.scheduler.check_room(self._sequence(tokens, params, priority, salt, (), (), collect, constraint), "the request")

    def cancel(self, seq_id: int) -> None:
        """End a request with "abort"; twice and for unknown ids is fine."""
        self.scheduler.cancel(seq_id)

    def preempt(self, seq_id: int) -> None:
        """Take a running request's blocks; it is computed again later. For tests."""
        self.scheduler.preempt(seq_id)

    def step(self) -> list[Event]:
        """One step. If the runner refuses the batch, its sequences end with "error"; all others and the engine go on.

        Note: a mistake of ours (any other exception) passes through, and the ends of the sequences it hit come with the next step.
        """
        begun_s, result = self.clock(), StepResult({}, 0.0)
        batch = self.scheduler.schedule(begun_s)
        try:
            result = self.runner.run(batch) if batch.chunks else result
        except FirstlightError as error:
            events = self.scheduler.fail(batch, str(error), self.clock())
        except BaseException as error:
            self._untold += self.scheduler.fail(batch, f"the step broke down: {error!r}", self.clock())
            raise
        else:
            events = self.scheduler.update(batch, result, self.clock())
        events[:0], self._untold = self._untold, []
        told = events if self.canary is None else self._verified(events, self.canary)
        if self.meter is not None:
            self.meter.enter(batch, result, told, self.scheduler, begun_s, self.clock())
        return told

    def _verified(self, events: list[Event], canary: Canary) -> list[Event]:
        """The clients' own events; prefix hits that the canary chose are computed again, and one wrong hit ends all use of prefixes."""
        kept = []
        for event in events:
            if canary.owns(event.seq_id):
                if not canary.judge(event):
                    self.scheduler.cache.disable()
                continue
            shadow = canary.shadow(event, next(self._ids)) if event.logits is not None or event.finish is not None else None
            if shadow is not None:
                self.scheduler.add(shadow)
            if event.token is not None or event.finish is not None or not event.watched:
                kept.append(event)
        return kept

    def idle(self) -> bool:
        """Whether nothing is left to do or to tell."""
        return self.scheduler.idle() and not self._untold

    def counts(self) -> dict[str, int]:
        """Sequences running and waiting, totals of preemptions and tokens."""
        return self.scheduler.counts()

    def close(self) -> None:
        """Give back what the runner holds."""
        self.runner.close()

    def _sequence(
        self, tokens: Rows[int], params: SamplingParams, priority: str, salt: str | None, images: Rows[Any], split: tuple[int, ...], collect: bool,
        constraint: Constraint | None,
    ) -> Sequence:
        ids = _checked_ids(tokens, self.num_vocab)
        self._check_params(params)
        _check_constraint(params, constraint)
        _check_options(priority, salt, images, split, len(ids))
        return Sequence(
            seq_id=-1, tokens=ids, num_prompt=len(ids), sampling=params, priority=Priority[priority.upper()], arrived_s=self.clock(),
            salt=(salt or "").encode(errors="surrogatepass"), collect=collect, split=split, stop_ids=self.stop_ids, constraint=constraint)

    def _check_params(self, params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise RequestError(f"`params` is a {type(params).__name__}", "Use SamplingParams.")
        for name, ids in (("logit_bias", params.logit_bias or {}), ("stop_token_ids", params.stop_token_ids)):
            beyond = _beyond(ids, self.num_vocab)
            if beyond is not None:
                fact = f"`{name}` names token {beyond}, outside of the vocabulary of {self.num_vocab}"
                raise RequestError(fact, f"Use ids from 0 to {self.num_vocab - 1}.")
        if params.min_tokens > params.max_tokens:
            raise RequestError(f"`min_tokens` is {params.min_tokens}, `max_tokens` only {params.max_tokens}", "Raise max_tokens.")


def _checked_ids(tokens: Rows[int], num_vocab: int) -> list[int]:
    if isinstance(tokens, (str, bytes)):
        raise RequestError(f"the prompt is a {type(tokens).__name__}, not token ids", "Encode it with the model's tokenizer.")
    try:
        given = list(tokens)
        ids = [index(token) for token in given]
    except TypeError:
        raise RequestError("the prompt is no list of whole numbers", "Give token ids.") from None
    if bool in set(map(type, given)):
        raise RequestError("the prompt holds true or false, not whole numbers only", "Give token ids.")
    if not ids:
        raise RequestError("the prompt has no tokens", "Give at least one token.")
    beyond = _beyond(ids, num_vocab)
    if beyond is not None:
        raise RequestError(f"token id {beyond} is outside of the vocabulary of {num_vocab}", f"Use ids from 0 to {num_vocab - 1}.")
    return ids


def _beyond(ids: Iterable[int], num_vocab: int) -> str | None:
    """The first id that is no token; Python refuses to spell out numbers of thousands of digits."""
    token = next((token for token in ids if not 0 <= token < num_vocab), None)
    return None if token is None else str(token) if token.bit_length() <= 64 else f"of {token.bit_length()} bits"


def _check_constraint(params: SamplingParams, constraint: Constraint | None) -> None:
    if params.structured is not None and constraint is None:
        fact = f"`structured` asks for a {type(params.structured).__name__}, but no constraint came with it"
        raise RequestError(fact, "Pass constraint=llm.grammars.compile(params.structured).begin(), or use LLM.generate.")
    if constraint is not None and params.ignore_eos:
        raise RequestError("`ignore_eos` is true and the answer is held to a structure that has an end", "Leave one of the two out.")


def _check_options(priority: str, salt: str | None, images: Rows[Any], split: tuple[int, ...], num_tokens: int) -> None:
    tiers = [tier.name.lower() for tier in Priority]
    if priority not in tiers:
        raise RequestError(f"`priority` is {priority!r}", f"Use one of {', '.join(tiers)}.")
    if salt is not None and not isinstance(salt, str):
        raise RequestError(f"`salt` is {salt!r}", "Use a string, or None.")
    if images:
        raise RequestError(f"{len(images)} images were given, this version reads text only", "Leave images out.")
    if any(type(size) is not int or size < 1 for size in split):
        raise RequestError(f"chunks {list(split)} are no sizes", "Give whole numbers from 1.")
    if sum(split) > num_tokens:
        fact = f"chunks {list(split)} sum to {sum(split)} for a prompt of {num_tokens} tokens"
        raise RequestError(fact, "Give sizes that sum to no more than the prompt.")
