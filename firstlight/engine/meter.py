"""How long and how much: what a step and a request came to, entered once per step by the thread that steps. No torch.

Other threads may read at any time: counts only grow, and lists are replaced or copied whole.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

from firstlight.sched.scheduler import Scheduler
from firstlight.sched.sequence import Account, Batch, Event, Priority, StepResult

LONG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0)
"""Bounds for waiting and whole requests."""
SHORT_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Bounds for steps, and for the time from token to token."""
TOKENS = tuple(float(2**power) for power in range(21))
"""Bounds for numbers of tokens."""
NUM_KEPT_STEPS = 512


class Histogram:
    """Counts of values up to each bound, and one more beyond the last."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """Enter one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def quantile(self, share: float) -> float | None:
        """Where this share of the values lies below, straight between two bounds; the last bound for what is beyond; None: no values."""
        counts = self.counts[:]
        rest, low = share * sum(counts), 0.0
        if not any(counts):
            return None
        for count, bound in zip(counts, self.bounds, strict=False):
            if count and rest <= count:
                return low + (bound - low) * rest / count
            rest, low = rest - count, bound
        return low


def per_priority(bounds: tuple[float, ...]) -> tuple[Histogram, ...]:
    """One histogram for each priority, in their order."""
    return tuple(Histogram(bounds) for _ in Priority)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step as a point of a timeline. Waiting and running are counted after it."""

    number: int
    ended_s: float
    seconds: float
    num_prefill_tokens: int
    num_decode_tokens: int
    num_running: int
    num_waiting: int


@dataclass(slots=True)
class Meter:
    """Latencies by priority, tokens and the last steps. Times are those of the engine's clock.

    The check of a prefix hit is no request: its tokens and times appear in steps only.
    """

    queue_s: tuple[Histogram, ...] = field(default_factory=lambda: per_priority(LONG_S))
    first_token_s: tuple[Histogram, ...] = field(default_factory=lambda: per_priority(LONG_S))
    inter_token_s: tuple[Histogram, ...] = field(default_factory=lambda: per_priority(SHORT_S))
    per_token_s: tuple[Histogram, ...] = field(default_factory=lambda: per_priority(SHORT_S))
    request_s: tuple[Histogram, ...] = field(default_factory=lambda: per_priority(LONG_S))
    step_s: Histogram = field(default_factory=lambda: Histogram(SHORT_S))
    step_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    prompt_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    answer_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_generated_tokens: int = 0
    num_steps: int = 0
    waiting: tuple[int, ...] = (0,) * len(Priority)
    _ring: list[StepRecord | None] = field(default_factory=lambda: [None] * NUM_KEPT_STEPS)

    def enter(self, batch: Batch, result: StepResult, events: Rows[Event], scheduler: Scheduler, begun_s: float, ended_s: float) -> None:
        """Enter one step, after its results were entered and before its events are told."""
        self.waiting = scheduler.waiting()
        if batch.chunks:
            self._tokens(batch, result, ended_s)
            num_prefill, num_decode = _split(batch)
            self.num_prefill_tokens += num_prefill
            self.num_decode_tokens += num_decode
            self.step_s.add(ended_s - begun_s)
            self.step_tokens.add(num_prefill + num_decode)
            self._ring[self.num_steps % NUM_KEPT_STEPS] = StepRecord(
                self.num_steps, ended_s, ended_s - begun_s, num_prefill, num_decode, scheduler.num_running, sum(self.waiting))
            self.num_steps += 1
        for event in events:
            if event.account is not None and event.finish is not None:
                self._end(event.account, event.finish)

    def steps(self, after: int = -1) -> list[StepRecord]:
        """The last steps with a greater number, in order."""
        kept = [record for record in self._ring[:] if record is not None and record.number > after]
        return sorted(kept, key=lambda record: record.number)

    def _tokens(self, batch: Batch, result: StepResult, now: float) -> None:
        """The time since the last token of each sequence that got one: the same for nearly all, so it is looked up once."""
        known_s, place = -1.0, 0
        num_generated = 0
        for chunk in batch.chunks:
            seq = chunk.seq
            if (seq.cold and seq.watched) or seq.seq_id not in result.next_tokens or seq.finish in ("abort", "error"):
                continue
            num_generated += 1
            last_s, seq.last_token_s = seq.last_token_s, now
            if last_s is None:
                assert seq.entered_s is not None, "a token without blocks"
                self.queue_s[seq.priority].add(seq.entered_s - seq.arrived_s)
                self.first_token_s[seq.priority].add(now - seq.arrived_s)
                continue
            seconds, histogram = now - last_s, self.inter_token_s[seq.priority]
            if seconds != known_s:
                known_s, place = seconds, bisect_left(histogram.bounds, seconds)
            histogram.counts[place] += 1
            histogram.total += seconds
        self.num_generated_tokens += num_generated

    def _end(self, account: Account, finish: str) -> None:
        priority = account.priority
        self.request_s[priority].add(account.ended_s - account.arrived_s)
        self.prompt_tokens.add(account.num_prompt)
        self.answer_tokens.add(account.num_generated)
        if account.first_token_s is None:
            self.queue_s[priority].add((account.ended_s if account.entered_s is None else account.entered_s) - account.arrived_s)
        elif account.num_generated > 1 and finish in ("stop", "length"):
            self.per_token_s[priority].add((account.ended_s - account.first_token_s) / (account.num_generated - 1))


def _split(batch: Batch) -> tuple[int, int]:
    """Tokens of the chunks that catch up, and of those that follow the last token."""
    num_tokens = num_decodes = 0
    for chunk in batch.chunks:
        num_tokens += chunk.end - chunk.begin
        num_decodes += chunk.end - chunk.begin == 1 and chunk.begin >= chunk.seq.num_prompt
    return num_tokens - num_decodes, num_decodes
