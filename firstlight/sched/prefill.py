"""Which tokens of which prompts are computed in a step, beside the decodes."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

from firstlight.cache.blocks import BlockTable
from firstlight.cache.manager import CacheManager
from firstlight.sched.budget import NOBODY, Price, StepPlan
from firstlight.sched.fairness import affordable, divide, worth
from firstlight.sched.limits import LANE_SEQUENCES, LONG_CHUNKS, Limits
from firstlight.sched.queue import WaitingQueue
from firstlight.sched.sequence import Priority, Sequence


class Prefills:
    """Cuts chunks: by the settings, at the marks of snapshots, or at the lengths that a request forces."""

    def __init__(self, limits: Limits, cache: CacheManager) -> None:
        self._limits, self._cache = limits, cache
        self._double = limits.fairness.double_tokens
        self._splits: dict[int, list[int]] = {}

    def is_long(self, num_tokens: int, begin: int) -> bool:
        """Whether tokens from a position on are too many to count as one of the short ones."""
        return worth(num_tokens, begin, self._double) > LONG_CHUNKS * self._limits.chunk_tokens

    def force(self, seq: Sequence, begin: int = 0) -> None:
        """Cut the chunks of a sequence as it asks, from a position on."""
        if seq.split:
            self._splits[seq.seq_id] = [begin + end for end in accumulate(seq.split)]

    def forget(self, seq_id: int) -> None:
        """A sequence has ended."""
        self._splits.pop(seq_id, None)

    def start(self, plan: StepPlan, running: Iterable[Sequence], waiting: WaitingQueue) -> None:
        """Divide what the decodes have left: between priorities, and between long prefills and short ones."""
        wanted = {priority: sum(waiting.num_tokens(priority, long=long) for long in (False, True)) for priority in Priority}
        counts = waiting.counts()
        urgent = min((priority for priority, count in counts.items() if count), default=NOBODY)
        for seq in running:
            if seq.num_pending > 1:
                wanted[seq.priority] += worth(seq.num_pending, seq.num_computed, self._double)
                if seq.priority < urgent and not self.is_long(seq.num_pending, seq.num_computed):
                    urgent = seq.priority
        if sum(count > 0 for count in wanted.values()) > 1:
            plan.shares = divide(plan.budget, self._limits.fairness.shares, wanted)
        plan.lane = min(self._limits.fairness.lane_tokens, self._limits.chunk_tokens, -(-plan.budget // 2))
        plan.urgent = urgent

    def plan_all(self, plan: StepPlan, order: Iterable[Sequence], *, entering: bool = False) -> None:
        """Chunks for running prefills, as large as they may be now; long ones first.

        The first few long ones divide the lane evenly, so that one of some thousand tokens does not wait for one of a hundred thousand;
        `entering`: with a waiting one, if they are not enough.
        """
        prefills = [seq for seq in order if seq.num_pending > 1]
        longs = [seq for seq in prefills if self.is_long(seq.num_pending, seq.num_computed)]
        num_sharing = min(LANE_SEQUENCES, len(longs) + entering)
        for seq in longs:
            self._plan_running(plan, seq, num_sharing if plan.urgent <= seq.priority else 1)
            num_sharing = max(1, num_sharing - 1)
        for seq in prefills:
            if seq not in longs:
                self._plan_running(plan, seq)

    def _plan_running(self, plan: StepPlan, seq: Sequence, num_sharing: int = 1) -> None:
        table = self._cache.reserve(seq.seq_id, len(seq.tokens))
        assert table is not None, "a prefill lost blocks that it had"
        self.plan_one(plan, seq, table, num_sharing)

    def plan_one(self, plan: StepPlan, seq: Sequence, table: BlockTable, num_sharing: int = 1) -> None:
        """The next chunk of a prompt, or a larger one than before if there is room; `num_sharing` divide what is left evenly."""
        begin, long = seq.num_computed, self.is_long(seq.num_pending, seq.num_computed)
        forced = self._forced_end(seq)
        if forced is None:
            had = plan.undo(seq)
            room = plan.room(seq.priority, long=long)
            most = min(room, had - (had - room) // num_sharing)
            # who comes next waits for what was begun when nobody was there
            coarse = max(self._limits.chunk_tokens, self._limits.tokens_per_step // 2)
            most = min(most, coarse if long and plan.alone(seq.priority) else self._limits.chunk_tokens)
            mark = self._cache.next_mark(seq.seq_id, begin, seq.num_prompt)
            size = min(seq.num_pending, affordable(most, begin, self._double), sys.maxsize if mark is None else mark - begin)
        else:
            # A forced chunk is never cut: it waits for room, or goes first and beyond the budget.
            size = forced - begin
            if seq.seq_id in plan.chunks or (size > plan.room(seq.priority, long=long) and plan.prefilling):
                return
        if size > 0:
            plan.prefilling = True
            plan.first_short = plan.first_short if long else min(plan.first_short, seq.priority)
            plan.put(seq, size, table, Price(worth(size, begin, self._double), long))

    def _forced_end(self, seq: Sequence) -> int | None:
        ends = self._splits.get(seq.seq_id)
        if ends is None or ends[-1] <= seq.num_computed:
            return None
        return min(ends[bisect_left(ends, seq.num_computed + 1)], len(seq.tokens))
