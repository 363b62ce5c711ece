"""One step, then another: schedule, run, update. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence as Rows
from itertools import count
from typing import Any, Protocol

from firstlight.sched.scheduler import Scheduler
from firstlight.sched.sequence import Batch, Event, Priority, Sequence, StepResult
from firstlight.spec.errors import FirstlightError, RequestError
from firstlight.spec.sampling import SamplingParams


class Runner(Protocol):
    """Computes batches: on a device, in a simulation, or with faults."""

    def run(self, batch: Batch) -> StepResult:
        """Compute every chunk of the batch."""

    def close(self) -> None:
        """Give everything back."""


class Engine:
    """Owns the queue and drives a runner; one thread at a time may call it."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, clock: Callable[[], float] = time.monotonic, *, num_vocab: int, stop_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.scheduler, self.runner, self.clock = scheduler, runner, clock
        self.num_vocab, self.stop_ids = num_vocab, stop_ids
        self._ids = count()

    def submit(
        self, tokens: Rows[int], params: SamplingParams, *, priority: str = "standard", salt: str | None = None, images: Rows[Any] = (),
        collect: bool = False, split: tuple[int, ...] = (),
    ) -> int:
        """Queue a request and return its id. `collect` keeps the logits of all positions instead of sampling; `split` forces chunks.

        Raises: RequestError for what cannot be served as it is, CapacityError for what could never fit.
        """
        self._check(tokens, params, priority, images)
        seq = Sequence(
            seq_id=next(self._ids), tokens=list(tokens), num_prompt=len(tokens), sampling=params, priority=Priority[priority.upper()],
            arrived_s=self.clock(), salt=(salt or "").encode(), collect=collect, split=split, stop_ids=self.stop_ids)
        self.scheduler.add(seq)
        return seq.seq_id

    def cancel(self, seq_id: int) -> None:
        """End a request with "abort"; twice and for unknown ids is fine."""
        self.scheduler.cancel(seq_id)

    def preempt(self, seq_id: int) -> None:
        """Take a running request's blocks; it is computed again later. For tests."""
        self.scheduler.preempt(seq_id)

    def step(self) -> list[Event]:
        """One step; a step that breaks down ends its own sequences with "error" and leaves the engine alive."""
        batch = self.scheduler.schedule(self.clock())
        if not batch.chunks:
            return self.scheduler.update(batch, StepResult({}, 0.0), self.clock())
        try:
            result = self.runner.run(batch)
        except FirstlightError as error:
            return self.scheduler.fail(batch, str(error), self.clock())
        return self.scheduler.update(batch, result, self.clock())

    def idle(self) -> bool:
        """Whether nothing is left to do or to tell."""
        return self.scheduler.idle()

    def counts(self) -> dict[str, int]:
        """Sequences running and waiting, totals of preemptions and tokens."""
        return self.scheduler.counts()

    def _check(self, tokens: Rows[int], params: SamplingParams, priority: str, images: Rows[Any]) -> None:
        if not tokens:
            raise RequestError("the prompt has no tokens", "Give at least one token.")
        bad = next((token for token in tokens if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.num_vocab), None)
        if bad is not None:
            raise RequestError(f"token id {bad!r} is outside of the vocabulary of {self.num_vocab}", f"Use ids from 0 to {self.num_vocab - 1}.")
        beyond = [token for token in (*(params.logit_bias or {}), *params.stop_token_ids) if not 0 <= token < self.num_vocab]
        if beyond:
            raise RequestError(f"logit_bias or stop_token_ids name {beyond[0]}, outside of the vocabulary of {self.num_vocab}", f"Use ids from 0 to {self.num_vocab - 1}.")
        if priority.upper() not in Priority.__members__:
            raise RequestError(f"priority is {priority!r}", f"Use one of {', '.join(name.lower() for name in Priority.__members__)}.")
        if images:
            raise RequestError(f"{len(images)} images were given, this version reads text only", "Leave images out.")
