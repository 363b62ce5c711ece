"""A scheduler with a simulated runner whose tokens come out of the blocks; what must hold in every step is checked in every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from functools import cache

from firstlight.cache.blocks import Group
from firstlight.cache.manager import CacheManager
from firstlight.engine.sim import SimMemory, SimRunner, StepCost, VirtualClock
from firstlight.sched.fairness import affordable, worth
from firstlight.sched.limits import LONG_CHUNKS, LOOKAHEAD_TOKENS, MAX_PREEMPTIONS, Limits
from firstlight.sched.policy import Policy, by_priority
from firstlight.sched.scheduler import Scheduler
from firstlight.sched.sequence import Batch, Event, Priority, Sequence, Status
from firstlight.spec.sampling import SamplingParams

TOKENS_PER_BLOCK = 4


def groups(num_blocks: int, num_states: int) -> tuple[Group, ...]:
    """One rows group and one state group."""
    return (Group("mla", "rows", num_blocks, TOKENS_PER_BLOCK), Group("kda", "state", num_states))


def prompt(seed: int, length: int) -> list[int]:
    """Tokens that differ from seed to seed."""
    return [(seed * 131 + position * 17 + 5) % 1000 for position in range(length)]


@cache
def alone(seed: int, length: int, max_tokens: int) -> tuple[int, ...]:
    """What a request yields in a cache of its own, in one chunk."""
    world = World(groups(length + max_tokens, 1), Limits(tokens_per_step=10**6, sequences_per_step=1, chunk_tokens=10**6))
    seq = world.add(seed, length, max_tokens)
    world.drain(max_tokens)
    return tuple(seq.tokens[length:])


class World:
    """Steps a scheduler and asserts its invariants."""

    def __init__(
        self, layout: Rows[Group], limits: Limits, *, policy: Policy = by_priority, max_context: int | None = None, memory: bool = True,
        cost: StepCost | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self.limits, self.policy = limits, policy
        self.cache = CacheManager(layout)
        self.scheduler = Scheduler(limits, self.cache, policy=policy, max_context=max_context)
        self.runner = SimRunner(self.clock, cost, memory=SimMemory(layout) if memory else None)
        self.sequences: dict[int, Sequence] = {}
        self.ends: dict[int, str] = {}
        self.told: dict[int, list[int]] = {}
        self.first_token_s: dict[int, float] = {}
        self.num_steps = 0
        self.manual: dict[int, int] = {}

    def add(
        self, seed: int, length: int, max_tokens: int, *, priority: Priority = Priority.STANDARD, arrived_s: float | None = None,
        sampling: SamplingParams | None = None, stop_ids: Iterable[int] = (), collect: bool = False, split: tuple[int, ...] = (),
    ) -> Sequence:
        """Queue a request made of numbers."""
        seq = Sequence(
            len(self.sequences), prompt(seed, length), length, sampling or SamplingParams(max_tokens=max_tokens, temperature=0), priority,
            self.clock() if arrived_s is None else arrived_s, stop_ids=frozenset(stop_ids), collect=collect, split=split)
        self.scheduler.add(seq)
        self.sequences[seq.seq_id] = seq
        return seq

    def preempt(self, seq: Sequence) -> None:
        """Preempt and remember it, since only the scheduler's own preemptions are bounded."""
        self.manual[seq.seq_id] = self.manual.get(seq.seq_id, 0) + 1
        self.scheduler.preempt(seq.seq_id)

    def step(self, during: Callable[[Batch], None] | None = None) -> list[Event]:
        """One step with all checks; `during` runs while the batch is in flight."""
        waiting = [seq for seq in self.sequences.values() if seq.status is Status.WAITING]
        running = [seq for seq in self.sequences.values() if seq.status is Status.RUNNING]
        times = {seq.seq_id: seq.num_preemptions for seq in running}
        now = self.clock()
        keys = {seq.seq_id: (self.policy(seq, now), seq.seq_id) for seq in waiting}
        longs = {seq.seq_id for seq in self.sequences.values() if self.long(seq)}
        batch = self.scheduler.schedule(now)
        self.num_steps += 1
        self._check_order(waiting, keys, longs)
        self._check_batch(batch, running, longs)
        self._check_shares(batch, longs)
        self._check_room(waiting, running, times)
        self.cache.check()
        if during is not None:
            during(batch)
        result = self.runner.run(batch)
        assert {} == result.errors
        events = self.scheduler.update(batch, result, self.clock())
        self.cache.check()
        self._check_events(events)
        return events

    def drain(self, max_steps: int) -> None:
        """Step until idle; a livelock is a failure, not a hang."""
        for _ in range(max_steps):
            if self.scheduler.idle():
                break
            self.step()
        assert self.scheduler.idle(), f"{self.scheduler.counts()} after {max_steps} steps"
        self.check_empty()

    def check_empty(self) -> None:
        """Nothing leaked: no block is in use, every sequence has ended once, no queue remembers it."""
        assert 0.0 == self.cache.usage()
        assert set(self.ends) == set(self.sequences)
        assert (0, 0) == (self.scheduler.counts()["running"], self.scheduler.counts()["waiting"])
        for seq in self.sequences.values():
            assert Status.FINISHED is seq.status
            assert self.ends[seq.seq_id] == seq.finish

    def worth(self, num_tokens: int, begin: int = 0) -> int:
        """Tokens in the currency of a step."""
        return worth(num_tokens, begin, self.limits.fairness.double_tokens)

    def long(self, seq: Sequence) -> bool:
        """Whether what a sequence has to compute counts as long; no prefix is cached here."""
        return self.worth(seq.num_pending, seq.num_computed) > LONG_CHUNKS * self.limits.chunk_tokens

    def _check_order(self, waiting: list[Sequence], keys: dict[int, tuple[tuple[float, ...], int]], longs: set[int]) -> None:
        """Nobody is overtaken, but long ones by short ones."""
        entered = [seq.seq_id for seq in waiting if seq.status is Status.RUNNING]
        passed = [seq.seq_id for seq in waiting if seq.status is Status.WAITING]
        for first, second in ((entered, [each for each in passed if each not in longs]), ([each for each in entered if each in longs], passed)):
            assert not first or not second or max(keys[each] for each in first) < min(keys[each] for each in second), "somebody was overtaken"

    def _check_batch(self, batch: Batch, running: list[Sequence], longs: set[int]) -> None:
        alive = [seq for seq in self.sequences.values() if seq.status is not Status.FINISHED]
        assert bool(alive) == bool(batch.chunks), "a step without progress"
        ids = [chunk.seq.seq_id for chunk in batch.chunks]
        assert len(set(ids)) == len(ids)
        counts = self.scheduler.counts()
        assert len(ids) <= counts["running"] <= self.limits.sequences_per_step
        if not any(chunk.seq.split for chunk in batch.chunks):
            assert batch.num_tokens <= self.limits.tokens_per_step
        for seq in running:
            if seq.status is Status.RUNNING and seq.num_pending == 1:
                assert seq.seq_id in ids, "a decode was left out"
        for chunk in batch.chunks:
            assert chunk.seq.num_computed == chunk.begin < chunk.end <= len(chunk.seq.tokens)
            assert (chunk.begin > 0) == chunk.continues
            alone = not any(seq.priority <= chunk.seq.priority for seq in alive if seq is not chunk.seq)
            most = self.limits.tokens_per_step if alone and chunk.seq.seq_id in longs else self.limits.chunk_tokens
            size = chunk.end - chunk.begin
            assert self.worth(size, chunk.begin) <= most or size == 1 or chunk.seq.split
            assert len(chunk.table.blocks["mla"]) * TOKENS_PER_BLOCK >= chunk.end
            assert 1 == len(chunk.table.blocks["kda"])
        for seq in alive:
            assert seq.num_preemptions <= MAX_PREEMPTIONS + self.manual.get(seq.seq_id, 0)

    def _check_shares(self, batch: Batch, longs: set[int]) -> None:
        """Long prefills keep to their lane beside short ones, and nothing is left that a short one could have taken."""
        if any(chunk.seq.split for chunk in batch.chunks):
            return
        price = {chunk.seq.seq_id: self.worth(chunk.end - chunk.begin, chunk.begin) for chunk in batch.chunks}
        prefills = [chunk for chunk in batch.chunks if chunk.seq.num_pending > 1]
        num_decodes = len(batch.chunks) - len(prefills)
        # one token may be worth more than what is left
        excess = max((self.worth(1, chunk.begin) for chunk in prefills), default=1) - 1
        left = self.limits.tokens_per_step - num_decodes - sum(price[chunk.seq.seq_id] for chunk in prefills)
        assert left >= -excess
        for short in prefills:
            if short.seq.seq_id not in longs:
                beside = [chunk.seq.seq_id for chunk in prefills if chunk.seq.seq_id in longs and chunk.seq.priority >= short.seq.priority]
                assert sum(price[each] for each in beside) <= self.limits.fairness.lane_tokens + excess
        for seq in self.sequences.values():
            if left > 0 and seq.status is Status.RUNNING and seq.num_pending > 1 and seq.seq_id not in longs:
                size = min(seq.num_pending, affordable(self.limits.chunk_tokens, seq.num_computed, self.limits.fairness.double_tokens))
                got = sum(chunk.end - chunk.begin for chunk in prefills if chunk.seq is seq)
                longer = self.worth(got + 1, seq.num_computed) - self.worth(got, seq.num_computed)
                assert got == size or longer > left, "a step was left unused"

    def _check_room(self, waiting: list[Sequence], running: list[Sequence], times: dict[int, int]) -> None:
        for seq in running:
            assert seq.num_preemptions == times[seq.seq_id] or Status.WAITING is seq.status, "in and out in one step"
        for seq in self.sequences.values():
            assert seq.status is not Status.WAITING or 0 == seq.num_computed
        if any(seq.status is Status.RUNNING for seq in waiting):
            members = [seq for seq in self.sequences.values() if seq.status is Status.RUNNING]
            ahead = {seq.seq_id: seq.num_prompt + min(seq.sampling.max_tokens - 1, seq.num_generated + LOOKAHEAD_TOKENS[0]) for seq in members}
            free = self.cache.counts()["mla"]["free"]
            assert self.cache.growth(ahead)["mla"] <= free, "let in without room to grow"  # type: ignore[operator]

    def _check_events(self, events: list[Event]) -> None:
        for event in events:
            assert event.seq_id not in self.ends, "told after the end"
            if event.token is not None:
                self.told.setdefault(event.seq_id, []).append(event.token)
                self.first_token_s.setdefault(event.seq_id, self.clock())
            if event.finish is not None:
                self.ends[event.seq_id] = event.finish
        for seq_id, tokens in self.told.items():
            seq = self.sequences[seq_id]
            assert seq.tokens[seq.num_prompt :] == tokens
