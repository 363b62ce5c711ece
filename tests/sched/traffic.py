"""Requests that arrive at given times, under a clock that only the steps move; who waited how long."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

from firstlight.cache.blocks import Group
from firstlight.cache.manager import CacheManager
from firstlight.engine.sim import SimRunner, StepCost, VirtualClock
from firstlight.sched.limits import Limits
from firstlight.sched.scheduler import Scheduler
from firstlight.sched.sequence import Batch, Priority, Sequence
from firstlight.spec.sampling import SamplingParams

COST = StepCost(step_s=2e-3, prefill_token_s=5e-5, decode_token_s=2e-4, context_token_s=1e-9)
DOUBLE_TOKENS = round(COST.prefill_token_s / COST.context_token_s)
"""Context at which a token of this machine costs twice what it costs at the start."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to come."""

    at_s: float
    num_prompt: int
    max_tokens: int
    priority: Priority = Priority.STANDARD


@dataclass(slots=True)
class Course:
    """What became of one request."""

    seq: Sequence
    began_s: float | None = None
    first_token_s: float | None = None
    end_s: float | None = None

    @property
    def wait_s(self) -> float:
        """Time to the first token."""
        assert self.first_token_s is not None
        return self.first_token_s - self.seq.arrived_s

    @property
    def whole_s(self) -> float:
        """Time to the last token."""
        assert self.end_s is not None
        return self.end_s - self.seq.arrived_s


@dataclass(slots=True)
class Traffic:
    """A run: `courses` in the order of arrival; `seen` is told every batch."""

    scheduler: Scheduler
    arrivals: Rows[Arrival]
    seen: Callable[[Batch], None] = lambda batch: None
    cost: StepCost = COST
    courses: list[Course] = field(default_factory=list)
    num_steps: int = 0

    def run(self, *, until: Callable[[], bool] | None = None, max_steps: int = 10**6) -> Traffic:
        """Step until everybody has ended, or until asked to stop."""
        clock = VirtualClock()
        runner = SimRunner(clock, self.cost)
        coming = sorted(self.arrivals, key=lambda each: each.at_s)
        while (coming or not self.scheduler.idle()) and not (until and until()):
            assert self.num_steps < max_steps, self.scheduler.counts()
            if self.scheduler.idle():
                clock.advance(max(0.0, coming[0].at_s - clock()))
            while coming and coming[0].at_s <= clock():
                self._add(coming.pop(0))
            self._step(clock, runner)
        return self

    def _add(self, each: Arrival) -> None:
        number = len(self.courses)
        # no two prompts share a beginning
        tokens = [number, *[7] * (each.num_prompt - 1)]
        seq = Sequence(number, tokens, each.num_prompt, SamplingParams(max_tokens=each.max_tokens), each.priority, each.at_s)
        self.courses.append(Course(seq))
        self.scheduler.add(seq)

    def _step(self, clock: VirtualClock, runner: SimRunner) -> None:
        begun_s = clock()
        batch = self.scheduler.schedule(begun_s)
        self.num_steps += 1
        self.seen(batch)
        for chunk in batch.chunks:
            course = self.courses[chunk.seq.seq_id]
            course.began_s = begun_s if course.began_s is None else course.began_s
        for event in self.scheduler.update(batch, runner.run(batch), clock()):
            course = self.courses[event.seq_id]
            if event.token is not None and course.first_token_s is None:
                course.first_token_s = clock()
            if event.finish is not None:
                course.end_s = clock()


def machine(limits: Limits, *, num_blocks: int = 40_000, num_states: int = 64) -> Scheduler:
    """A scheduler over blocks of 16 tokens."""
    return Scheduler(limits, CacheManager([Group("mla", "rows", num_blocks, 16), Group("kda", "state", num_states)]))


def poisson(
    draw: random.Random, count: int, rate: float, *, prompts: tuple[int, int], max_tokens: int, priority: Priority = Priority.STANDARD
) -> list[Arrival]:
    """Requests with prompts of these lengths at so many per second."""
    at_s, arrivals = 0.0, []
    for _ in range(count):
        at_s += draw.expovariate(rate)
        arrivals.append(Arrival(at_s, draw.randint(*prompts), max_tokens, priority))
    return arrivals


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least this share of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-round(share * 1000) * len(ordered) // 1000) - 1)]
