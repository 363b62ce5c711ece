"""Who goes next: every step, computed tokens catch up with known tokens. Pure but for its queues; time comes in as a number."""

from __future__ import annotations

from firstlight.cache.blocks import BlockTable
from firstlight.cache.holding import Prefix
from firstlight.cache.manager import CacheManager
from firstlight.sched.budget import Price, StepPlan
from firstlight.sched.limits import MAX_PREEMPTIONS, Limits
from firstlight.sched.policy import Policy, rising
from firstlight.sched.prefill import Prefills
from firstlight.sched.queue import WaitingQueue
from firstlight.sched.room import Room
from firstlight.sched.sequence import Batch, Chunk, Event, Priority, Sequence, Status, StepResult
from firstlight.spec.errors import RequestError


class Scheduler:
    """Running sequences own blocks and come first; waiting ones own nothing and enter in the order of the policy.

    `policy` None: priority, rising with the patience of the limits.
    Progress: each step advances somebody, and nobody is preempted more than MAX_PREEMPTIONS times unless by `preempt`.
    """

    def __init__(self, limits: Limits, cache: CacheManager, *, policy: Policy | None = None, max_context: int | None = None) -> None:
        self.limits = limits
        self.cache = cache
        self._policy = policy or rising(limits.fairness.patience_s)
        self._now = 0.0
        # Every decode gets its token in every step, so no more may run than there are tokens.
        self._num_slots = min(limits.sequences_per_step, limits.tokens_per_step)
        self._sequences: dict[int, Sequence] = {}
        self._alive = dict.fromkeys(Priority, 0)
        self._running: dict[int, Sequence] = {}  # in order of admission
        self._ranks: dict[int, tuple[float, ...]] = {}
        self._waiting = WaitingQueue(self._policy)
        self._prefills = Prefills(limits, cache)
        self._room = Room(cache, limits.fairness, max_context)
        self.max_context = self._room.max_context
        self._batch: Batch | None = None
        self._in_flight: frozenset[int] = frozenset()
        self._cancelled: set[int] = set()
        self._to_preempt: set[int] = set()
        self._events: list[Event] = []
        self._totals = dict.fromkeys((
            "preemptions", "displaced", "prompt_tokens", "computed_tokens", "recomputed_tokens", "entered_tokens", "reached_tokens", "cached_tokens",
            "held_back_slots", "held_back_memory", "held_back_watermark"), 0)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Raises: CapacityError when it could never fit, RequestError when its id is in use."""
        if seq.seq_id in self._sequences:
            raise RequestError(f"request {seq.seq_id} is still being served", "Use a new id.")
        self._room.check(seq, f"request {seq.seq_id}")
        self._sequences[seq.seq_id] = seq
        self._alive[seq.priority] += 1
        self._now = max(self._now, seq.arrived_s)
        self._prefills.force(seq)
        self._totals["prompt_tokens"] += seq.num_prompt
        self._wait(seq)

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
        """Sequences running, waiting (also per priority) and held back by the high watermark; totals since the start.

        Totals: `preemptions`, `displaced` of them by a higher priority, `holds`: times that the high watermark was reached. Tokens of prompts,
        computed, and thrown away (recomputed); of prompts that entered and might resume: how many, as far as rows reached, and reused.
        Steps in which the next to enter was held back for want of a slot or of memory, or by a watermark.
        """
        waiting = {f"waiting_{priority.name.lower()}": count for priority, count in self._waiting.counts().items()}
        held = len(self._waiting) if self._room.held else 0
        return {
            "running": len(self._running), "waiting": len(self._waiting), **waiting, "held": held, "holds": self._room.num_holds, **self._totals}

    @property
    def num_running(self) -> int:
        """Sequences that own blocks."""
        return len(self._running)

    def waiting(self) -> tuple[int, ...]:
        """Sequences that wait, per priority."""
        return tuple(self._waiting.counts().values())

    def schedule(self, now: float) -> Batch:
        """The work of the next step; `update` or `fail` must follow."""
        assert self._batch is None, "the last batch has not come back"
        self._now = now
        order = self._in_order()
        plan = StepPlan(self.limits.tokens_per_step, self._alive)
        self._plan_decodes(plan, order)
        self._plan_prompts(plan)
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
                    plan.put(seq, 1, table, Price(1))

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
            plan.drop(victim)
            self._preempt(victim)
            if victim is seq:
                return None

    def _plan_prompts(self, plan: StepPlan) -> None:
        """First everybody's share, then who enters, then what is left for whoever has work."""
        order = self._in_order()
        self._prefills.start(plan, order, self._waiting)
        self._prefills.plan_all(plan, order, entering=self._waiting.has_long and len(self._running) < self._num_slots)
        plan.shares.clear()
        self._admit(plan)
        plan.open()
        if plan.budget > 0:
            self._prefills.plan_all(plan, self._in_order())
            self._admit(plan)

    def _plan_snapshots(self, chunks: tuple[Chunk, ...]) -> None:
        """Keep the states of chunks that end where a snapshot is wanted."""
        for chunk in chunks:
            if chunk.end == self.cache.next_mark(chunk.seq.seq_id, chunk.begin, chunk.seq.num_prompt):
                self.cache.snapshot(chunk.seq.seq_id, chunk.seq.tokens, chunk.end)

    def _admit(self, plan: StepPlan) -> None:
        """Let waiting sequences enter strictly in order: none overtakes one that does not fit yet, but for short ones that pass a long one."""
        passing = False
        while not plan.blocked and (plan.budget > 0 or len(self._running) >= self._num_slots):
            seq = self._waiting.head(self._now, lanes=() if passing else plan.lanes())
            if seq is None or seq.seq_id in plan.preempted:
                return
            entry = self._enter(seq, plan)
            if entry is not None:
                self._start(seq, plan, *entry)
            elif self._lets_by(seq):
                passing = True
            else:
                plan.blocked = True
                self._hold_back()

    def _start(self, seq: Sequence, plan: StepPlan, table: BlockTable, prefix: Prefix) -> None:
        self._waiting.leave(seq)
        self._running[seq.seq_id] = seq
        self._ranks[seq.seq_id] = self._policy(seq, self._now)
        seq.status = Status.RUNNING
        seq.num_computed = prefix.num_tokens
        self._totals["recomputed_tokens"] += max(0, seq.num_lost - prefix.num_tokens)
        seq.num_lost = 0
        if not seq.num_preemptions:
            self._prefills.force(seq, prefix.num_tokens)
            self._first_entry(seq, prefix)
        self._prefills.plan_one(plan, seq, table)
        # one that found no tokens may stand ready; more would only hold blocks
        plan.blocked = seq.seq_id not in plan.chunks

    def _hold_back(self) -> None:
        reason = "slots" if len(self._running) >= self._num_slots else "watermark" if self._room.kept_out else "memory"
        self._totals[f"held_back_{reason}"] += 1
        if self._room.kept_out:
            self._room.hold()

    def _lets_by(self, seq: Sequence) -> bool:
        """Whether short prompts may pass this one, which found no room: if it is long and has not waited too long."""
        return self._waiting.is_long(seq) and self._now - seq.queued_s < self.limits.fairness.patience_s

    def _first_entry(self, seq: Sequence, prefix: Prefix) -> None:
        seq.entered_s, seq.num_cached_tokens = self._now, prefix.num_tokens
        if not (seq.cold and seq.watched):  # a check of a hit is nobody's request
            self._totals["entered_tokens"] += seq.num_prompt
            self._totals["reached_tokens"] += prefix.match.rows_tokens
            self._totals["cached_tokens"] += prefix.num_tokens

    def _enter(self, seq: Sequence, plan: StepPlan) -> tuple[BlockTable, Prefix] | None:
        """Room for a waiting sequence, if need be taken from lower priorities. These give way, so the watermarks need not keep it out."""
        self._room.kept_out = False
        rank = self._policy(seq, self._now)
        victims = [
            other
            for other in reversed(self._running.values())
            if other.priority > seq.priority and self._ranks[other.seq_id] > rank and other.num_preemptions < MAX_PREEMPTIONS
        ]
        if len(self._running) < self._num_slots:
            entry = self._room.enter(seq, self._running, plan, bounded=bool(self._running) and not victims)
            if entry is not None:
                return entry
        return self._displace(seq, plan, victims) if victims else None

    def _displace(self, seq: Sequence, plan: StepPlan, victims: list[Sequence]) -> tuple[BlockTable, Prefix] | None:
        """Preempt running sequences of lower priority, the last in order first, if that lets this one enter."""
        times = min(seq.num_preemptions, MAX_PREEMPTIONS)
        stay = [other for other in self._running.values() if other not in victims]
        if not self.cache.fits(*(self._room.reach(other, times) for other in [*stay, seq])):
            return None
        for victim in sorted(victims, key=lambda other: self._ranks[other.seq_id], reverse=True):
            plan.drop(victim)
            self._preempt(victim)
            self._totals["displaced"] += 1
            if len(self._running) < self._num_slots:
                entry = self._room.enter(seq, self._running, plan, bounded=False)
                if entry is not None:
                    return entry
        return None

    def _wait(self, seq: Sequence) -> None:
        """Stand in line; what is cached of a prompt does not make it long."""
        long = self._prefills.is_long(len(seq.tokens), 0)
        if long and not seq.cold:
            prefix = self.cache.match(seq.tokens, salt=seq.salt, chain=seq.chain)
            seq.chain = prefix.match.chain
            long = self._prefills.is_long(len(seq.tokens) - prefix.num_tokens, prefix.num_tokens)
        self._waiting.join(seq, self._now, long=long)

    def check_room(self, seq: Sequence, name: str) -> None:
        """Raises CapacityError for what could never fit."""
        self._room.check(seq, name)

    def _in_order(self) -> list[Sequence]:
        return sorted(self._running.values(), key=lambda seq: self._ranks[seq.seq_id])

    def _preempt(self, seq: Sequence) -> None:
        del self._running[seq.seq_id], self._ranks[seq.seq_id]
        self.cache.release(seq.seq_id, tokens=seq.tokens)
        self._totals["preemptions"] += 1
        seq.num_lost = seq.num_computed
        seq.num_preemptions += 1
        seq.num_computed = 0
        self._wait(seq)

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
        if seq.collect or seq.seq_id in result.prompt_logprobs or (seq.watched and seq.seq_id in result.logits):
            self._tell_logits(seq, result, chunk)
        if token is not None:
            seq.append(token)
            if seq.first_token_s is None:
                seq.first_token_s = self._now
            finish = self._finish(seq, token)
            if finish is None:
                self._tell(seq, token, None, logprobs=result.logprobs.get(seq.seq_id))
            else:
                self._end(seq, finish, token=token, logprobs=result.logprobs.get(seq.seq_id))
        elif seq.collect and seq.num_computed >= seq.num_prompt:
            self._end(seq, "length")

    def _finish(self, seq: Sequence, token: int) -> str | None:
        sampling = seq.sampling
        stops = token in sampling.stop_token_ids or (token in seq.stop_ids and not sampling.ignore_eos)
        # What its structure ends is complete, whatever `min_tokens` asked for.
        if (stops and seq.num_generated >= sampling.min_tokens) or seq.complete:
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
        self._prefills.forget(seq.seq_id)
        del self._sequences[seq.seq_id]
        self._alive[seq.priority] -= 1
        seq.status, seq.finish, seq.error = Status.FINISHED, finish, error
        self._tell(seq, token, finish, error, logprobs)

    def _tell_logits(self, seq: Sequence, result: StepResult, chunk: Chunk) -> None:
        self._events.append(Event(
            seq.seq_id, None, None, logits=result.logits.get(seq.seq_id), begin=chunk.begin, watched=seq.watched,
            num_cached_tokens=seq.num_cached_tokens, prompt_logprobs=result.prompt_logprobs.get(seq.seq_id)))

    def _tell(self, seq: Sequence, token: int | None, finish: str | None, error: str | None = None, logprobs: object = None) -> None:
        self._events.append(Event(
            seq.seq_id, token, finish, error, logprobs, num_cached_tokens=seq.num_cached_tokens, num_preemptions=seq.num_preemptions,
            account=None if finish is None else seq.account(self._now)))
