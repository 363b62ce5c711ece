"""Who goes next: every step, computed tokens catch up with known tokens. Pure but for its queues; time comes in as a number."""

from __future__ import annotations

import sys
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

from firstlight.cache.blocks import BlockTable
from firstlight.cache.holding import Prefix
from firstlight.cache.manager import CacheManager
from firstlight.sched.budget import StepPlan
from firstlight.sched.policy import Policy, by_priority
from firstlight.sched.queue import WaitingQueue
from firstlight.sched.sequence import Batch, Chunk, Event, Sequence, Status, StepResult
from firstlight.spec.errors import CapacityError, ConfigError, RequestError

# Growth, in tokens per sequence, that must stay free when a sequence enters that was preempted so many times.
# After the last entry its whole need and that of all running ones must fit: then it cannot be preempted for want of blocks.
LOOKAHEAD_TOKENS = (32, 512)
MAX_PREEMPTIONS = len(LOOKAHEAD_TOKENS)

# A prefill with more chunks than this to go is long: all long ones together get half a step while short ones wait.
LONG_CHUNKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one step may hold. At most `sequences_per_step` sequences own blocks at a time, and no more than there are tokens in a step.

    Raises: ConfigError when one of them is not above zero.
    """

    tokens_per_step: int = 2048
    sequences_per_step: int = 64
    chunk_tokens: int = 512

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ConfigError(f"`{name}` is {getattr(self, name)}, no step could do anything", "Use 1 or more.")


class Scheduler:
    """Running sequences own blocks and come first; waiting ones own nothing and enter in the order of the policy.

    Progress: each step advances somebody, and nobody is preempted more than MAX_PREEMPTIONS times unless by `preempt`.
    """

    def __init__(self, limits: Limits, cache: CacheManager, *, policy: Policy = by_priority, max_context: int | None = None) -> None:
        self.limits = limits
        self.cache = cache
        self.max_context = sys.maxsize if max_context is None else max_context
        self._policy = policy
        self._now = 0.0
        # Every decode gets its token in every step, so no more may run than there are tokens.
        self._num_slots = min(limits.sequences_per_step, limits.tokens_per_step)
        self._sequences: dict[int, Sequence] = {}
        self._running: dict[int, Sequence] = {}  # in order of admission
        self._ranks: dict[int, tuple[float, ...]] = {}
        self._waiting = WaitingQueue(policy)
        self._splits: dict[int, list[int]] = {}
        self._batch: Batch | None = None
        self._in_flight: frozenset[int] = frozenset()
        self._cancelled: set[int] = set()
        self._to_preempt: set[int] = set()
        self._events: list[Event] = []
        self._totals = {"preemptions": 0, "prompt_tokens": 0, "computed_tokens": 0, "recomputed_tokens": 0}

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Raises: CapacityError when it could never fit, RequestError when its id is in use."""
        if seq.seq_id in self._sequences:
            raise RequestError(f"request {seq.seq_id} is still being served", "Use a new id.")
        self._check_room(seq)
        self._sequences[seq.seq_id] = seq
        self._now = max(self._now, seq.arrived_s)
        if seq.split:
            self._splits[seq.seq_id] = list(accumulate(seq.split))
        self._totals["prompt_tokens"] += seq.num_prompt
        self._waiting.join(seq, self._now)

    def cancel(self, seq_id: int) -> None:
        """End a sequence with "abort"; in any phase, more than once, and for unknown ids. The batch in flight is left whole."""
        if seq_id in self._in_flight:
            self._cancelled.add(seq_id)
        elif seq_id in self._sequences:
            self._end(self._sequences[seq_id], "abort")

    def preempt(self, seq_id: int) -> None:
        """Take the blocks of a running sequence; it is computed again later. No-op for any other id."""
        if seq_id in self._in_flight:
            self._to_preempt.add(seq_id)
        elif seq_id in self._running:
            self._preempt(self._running[seq_id])

    def idle(self) -> bool:
        """Whether nothing is left to compute or to tell."""
        return not self._sequences and not self._events

    def counts(self) -> dict[str, int]:
        """Sequences running and waiting; totals of preemptions and of prompt, computed and thrown-away (recomputed) tokens."""
        return {"running": len(self._running), "waiting": len(self._waiting), **self._totals}

    def schedule(self, now: float) -> Batch:
        """The work of the next step; `update` or `fail` must follow."""
        assert self._batch is None, "the last batch has not come back"
        self._now = now
        order = sorted(self._running.values(), key=lambda seq: self._ranks[seq.seq_id])
        plan = StepPlan(self.limits.tokens_per_step)
        self._plan_decodes(plan, order)
        plan.lane = self._lane(plan.budget, order)
        self._plan_prefills(plan, order)
        self._admit(plan)
        plan.lane = plan.budget
        self._plan_prefills(plan, list(self._running.values()))
        if plan.chunks:
            chunks = tuple(plan.chunks.values())
            self._plan_snapshots(chunks)
            batch = Batch(chunks, self.cache.take_transfers(), self.cache.take_fresh(), self.cache.take_scrub())
        else:
            batch = Batch(())
        self._batch, self._in_flight = batch, frozenset(plan.chunks)
        return batch

    def update(self, batch: Batch, result: StepResult, now: float) -> list[Event]:
        """Enter what a step brought; all events since the last call, each end exactly once."""
        assert batch is self._batch, "this batch is not in flight"
        self._now = now
        self._batch, self._in_flight = None, frozenset()
        for chunk in batch.chunks:
            self._advance(chunk, result)
        for seq_id in sorted(self._to_preempt & self._running.keys()):
            self._preempt(self._running[seq_id])
        self._cancelled.clear()
        self._to_preempt.clear()
        events, self._events = self._events, []
        return events

    def fail(self, batch: Batch, message: str, now: float) -> list[Event]:
        """Enter that a step broke down as a whole: its sequences end with "error", all others go on."""
        # The runner may not have come to the blocks that it was to prepare; none of them has been written since.
        self.cache.mark_scrub(batch.scrub)
        self.cache.mark_scrub(batch.fresh)
        errors = {chunk.seq.seq_id: message for chunk in batch.chunks}
        return self.update(batch, StepResult({}, 0.0, errors=errors), now)

    def _plan_decodes(self, plan: StepPlan, order: list[Sequence]) -> None:
        for seq in order:
            if seq.num_pending == 1 and seq.seq_id in self._running:
                table = self._grow(seq, plan, order)
                if table is not None:
                    plan.put(seq, 1, table)

    def _grow(self, seq: Sequence, plan: StepPlan, order: list[Sequence]) -> BlockTable | None:
        """Blocks for all tokens of a running sequence, taken from the last in order if need be; None: it was the last itself."""
        while True:
            table = self.cache.reserve(seq.seq_id, len(seq.tokens))
            if table is not None:
                return table
            # Whoever entered last without a full promise has been preempted fewer times than allowed, so there is always a victim.
            victim = next(
                other for other in reversed(order) if other.seq_id in self._running and other.num_preemptions < MAX_PREEMPTIONS
            )
            assert len(self._running) > 1, "a lone sequence does not fit, though `add` said so"
            plan.drop(victim.seq_id)
            self._preempt(victim)
            if victim is seq:
                return None

    def _lane(self, budget: int, order: list[Sequence]) -> int:
        """What long prefills may take before short ones, waiting ones among them, have had their turn."""
        shorts = any(seq.num_pending > 1 and not self._is_long(seq) for seq in order)
        return -(-budget // 2) if shorts or (self._waiting and len(self._running) < self._num_slots) else budget

    def _plan_prefills(self, plan: StepPlan, order: list[Sequence]) -> None:
        prefills = [seq for seq in order if seq.num_pending > 1 and seq.seq_id in self._running and seq.seq_id not in plan.chunks]
        for seq in sorted(prefills, key=self._is_long, reverse=True):
            if plan.budget <= 0:
                return
            table = self.cache.reserve(seq.seq_id, len(seq.tokens))
            assert table is not None, "a prefill lost blocks that it had"
            self._plan_prefill(plan, seq, table)

    def _plan_prefill(self, plan: StepPlan, seq: Sequence, table: BlockTable) -> None:
        forced = self._forced_end(seq)
        room = min(plan.lane, plan.budget) if self._is_long(seq) else plan.budget
        if forced is None:
            mark = self.cache.next_mark(seq.seq_id, seq.num_computed, seq.num_prompt)
            size = min(seq.num_pending, self.limits.chunk_tokens, room, sys.maxsize if mark is None else mark - seq.num_computed)
        else:
            # A forced chunk is never cut: it waits for room, or goes first and beyond the budget.
            size = forced - seq.num_computed
            if size > room and plan.prefilling:
                return
        if size > 0:
            plan.lane -= size if self._is_long(seq) else 0
            plan.prefilling = True
            plan.put(seq, size, table)

    def _plan_snapshots(self, chunks: tuple[Chunk, ...]) -> None:
        """Keep the states of chunks that end where a snapshot is wanted."""
        for chunk in chunks:
            if chunk.end == self.cache.next_mark(chunk.seq.seq_id, chunk.begin, chunk.seq.num_prompt):
                self.cache.snapshot(chunk.seq.seq_id, chunk.seq.tokens, chunk.end)

    def _is_long(self, seq: Sequence) -> bool:
        return seq.num_pending > LONG_CHUNKS * self.limits.chunk_tokens

    def _forced_end(self, seq: Sequence) -> int | None:
        ends = self._splits.get(seq.seq_id)
        if ends is None or ends[-1] <= seq.num_computed:
            return None
        return min(ends[bisect_left(ends, seq.num_computed + 1)], len(seq.tokens))

    def _admit(self, plan: StepPlan) -> None:
        """Let waiting sequences enter strictly in order: none overtakes one that does not fit yet."""
        while plan.budget > 0 or len(self._running) >= self._num_slots:
            seq = self._waiting.head(self._now)
            if seq is None or seq.seq_id in plan.preempted:
                return
            entry = self._enter(seq, plan) or self._displace(seq, plan)
            if entry is None:
                return
            table, prefix = entry
            self._waiting.leave(seq)
            self._running[seq.seq_id] = seq
            self._ranks[seq.seq_id] = self._policy(seq, self._now)
            seq.status = Status.RUNNING
            seq.num_computed = prefix.num_tokens
            if seq.split and not seq.num_preemptions:
                self._splits[seq.seq_id] = [prefix.num_tokens + end for end in accumulate(seq.split)]
            self._totals["recomputed_tokens"] += max(0, seq.num_lost - prefix.num_tokens)
            seq.num_lost = 0
            if not seq.num_preemptions:
                seq.num_cached_tokens = prefix.num_tokens
            self._plan_prefill(plan, seq, table)
            if seq.seq_id not in plan.chunks:
                return

    def _enter(self, seq: Sequence, plan: StepPlan) -> tuple[BlockTable, Prefix] | None:
        """Blocks for a waiting sequence and what it resumes from; matched anew each time, as a preemption may have evicted something."""
        if len(self._running) >= self._num_slots:
            return None
        prefix = self.cache.match(seq.tokens, salt=seq.salt, chain=seq.chain)
        seq.chain = prefix.match.chain
        times = min(seq.num_preemptions, MAX_PREEMPTIONS)
        if times not in plan.spare:
            plan.spare[times] = self.cache.growth({other.seq_id: self._reach(other, times) for other in self._running.values()})
        upto, spare = self._reach(seq, times), plan.spare[times]
        # second, cold: what is cached may stand in the way of what must be computed
        for begin in (prefix.cold(),) if seq.cold else (prefix, prefix.cold()):
            table = self.cache.reserve(seq.seq_id, len(seq.tokens), prefix=begin, upto=upto, spare=spare)
            if table is not None:
                for level, room in plan.spare.items():
                    for name, count in self.cache.growth({seq.seq_id: self._reach(seq, level)}).items():
                        room[name] += count
                return table, begin
        return None

    def _displace(self, seq: Sequence, plan: StepPlan) -> tuple[BlockTable, Prefix] | None:
        """Preempt running sequences of lower priority, the last in order first, if that lets this one enter."""
        rank = self._policy(seq, self._now)
        victims = [
            other
            for other in reversed(self._running.values())
            if other.priority > seq.priority and self._ranks[other.seq_id] > rank and other.num_preemptions < MAX_PREEMPTIONS
        ]
        times = min(seq.num_preemptions, MAX_PREEMPTIONS)
        stay = [other for other in self._running.values() if other not in victims]
        if not victims or not self.cache.fits(*(self._reach(other, times) for other in [*stay, seq])):
            return None
        for victim in sorted(victims, key=lambda other: self._ranks[other.seq_id], reverse=True):
            plan.drop(victim.seq_id)
            self._preempt(victim)
            entry = self._enter(seq, plan)
            if entry is not None:
                return entry
        return None

    def _reach(self, seq: Sequence, times: int) -> int:
        """How far a sequence should be able to grow for one to enter that was preempted so many times."""
        need = self._need(seq)
        return need if times >= MAX_PREEMPTIONS else min(need, len(seq.tokens) + LOOKAHEAD_TOKENS[times])

    def _need(self, seq: Sequence) -> int:
        """Rows at its end; the last sampled token is never computed."""
        if seq.collect:
            return seq.num_prompt
        return min(seq.num_prompt + seq.sampling.max_tokens, self.max_context) - 1

    def _check_room(self, seq: Sequence) -> None:
        most = self.max_context - (0 if seq.collect else 1)
        if seq.num_prompt > most:
            fact = f"request {seq.seq_id} has a prompt of {seq.num_prompt} tokens, the context of {self.max_context} leaves {most} for it"
            raise CapacityError(fact, "Shorten the prompt, or raise max_context.")
        need = self._need(seq)
        if not self.cache.fits(need):
            capacity = self.cache.capacity_tokens
            fact = f"request {seq.seq_id} needs {need} tokens of cache (prompt {seq.num_prompt}), an empty cache holds {capacity}"
            assert capacity is not None, "only rows can be too few for one sequence"
            spare = capacity + 1 - seq.num_prompt
            lower = f"Lower max_tokens to {spare} or less" if spare > 0 and not seq.collect else "Shorten the prompt"
            raise CapacityError(fact, f"{lower}, or raise cache_bytes.")

    def _preempt(self, seq: Sequence) -> None:
        del self._running[seq.seq_id], self._ranks[seq.seq_id]
        self.cache.release(seq.seq_id, tokens=seq.tokens)
        self._totals["preemptions"] += 1
        seq.num_lost = seq.num_computed
        seq.num_preemptions += 1
        seq.num_computed = 0
        self._waiting.join(seq, self._now)

    def _advance(self, chunk: Chunk, result: StepResult) -> None:
        seq = chunk.seq
        error = result.errors.get(seq.seq_id)
        token = result.next_tokens.get(seq.seq_id) if chunk.samples else None
        if error is None and token is None and chunk.samples:
            error = f"the runner returned no token for request {seq.seq_id} at position {chunk.end}"
        if seq.seq_id in self._cancelled:
            # its states have moved on beyond what was committed
            self._end(seq, "abort", scrub=error is not None, keep=False)
            return
        if error is not None:
            self._end(seq, "error", error=error, scrub=True)
            return
        seq.num_computed = chunk.end
        self._totals["computed_tokens"] += chunk.end - chunk.begin
        self.cache.commit(seq.seq_id, seq.tokens, chunk.end)
        if token is not None:
            if seq.watched and seq.seq_id in result.logits:
                self._tell_logits(seq, result, chunk)
            seq.tokens.append(token)
            finish = self._finish(seq, token)
            if finish is None:
                self._tell(seq, token, None, logprobs=result.logprobs.get(seq.seq_id))
            else:
                self._end(seq, finish, token=token, logprobs=result.logprobs.get(seq.seq_id))
        elif seq.collect:
            self._tell_logits(seq, result, chunk)
            if seq.num_computed >= seq.num_prompt:
                self._end(seq, "length")

    def _finish(self, seq: Sequence, token: int) -> str | None:
        sampling = seq.sampling
        stops = token in sampling.stop_token_ids or (token in seq.stop_ids and not sampling.ignore_eos)
        if stops and seq.num_generated >= sampling.min_tokens:
            return "stop"
        full = seq.num_generated >= sampling.max_tokens or len(seq.tokens) >= self.max_context
        return "length" if full else None

    def _end(
        self, seq: Sequence, finish: str, *, token: int | None = None, error: str | None = None, scrub: bool = False, keep: bool = True,
        logprobs: object = None,
    ) -> None:
        self.cache.release(seq.seq_id, scrub=scrub, tokens=seq.tokens if keep else None)
        self._waiting.leave(seq)
        self._running.pop(seq.seq_id, None)
        self._ranks.pop(seq.seq_id, None)
        self._splits.pop(seq.seq_id, None)
        del self._sequences[seq.seq_id]
        seq.status, seq.finish, seq.error = Status.FINISHED, finish, error
        self._tell(seq, token, finish, error, logprobs)

    def _tell_logits(self, seq: Sequence, result: StepResult, chunk: Chunk) -> None:
        self._events.append(Event(
            seq.seq_id, None, None, logits=result.logits.get(seq.seq_id), begin=chunk.begin, watched=seq.watched,
            num_cached_tokens=seq.num_cached_tokens))

    def _tell(self, seq: Sequence, token: int | None, finish: str | None, error: str | None = None, logprobs: object = None) -> None:
        self._events.append(Event(
            seq.seq_id, token, finish, error, logprobs, num_cached_tokens=seq.num_cached_tokens, num_preemptions=seq.num_preemptions))
