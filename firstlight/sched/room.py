"""Whether there is room for one more: blocks now, growth of those who run, and the watermarks of cache use."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from firstlight.cache.blocks import BlockTable
from firstlight.cache.holding import Prefix
from firstlight.cache.manager import CacheManager
from firstlight.sched.budget import StepPlan
from firstlight.sched.fairness import held_back
from firstlight.sched.limits import LOOKAHEAD_TOKENS, MAX_PREEMPTIONS, Fairness
from firstlight.sched.sequence import Sequence
from firstlight.spec.errors import CapacityError


class Room:
    """Lets sequences into the cache. `held`: somebody was kept out by the high watermark, and the low one has not been reached since.

    `kept_out`: whether the watermarks alone, not want of blocks, kept out who asked last.
    """

    def __init__(self, cache: CacheManager, fairness: Fairness, max_context: int | None) -> None:
        self._cache, self._fairness = cache, fairness
        self.max_context = sys.maxsize if max_context is None else max_context
        self._num_rows = {name: int(count["total"]) for name, count in cache.counts().items() if count["kind"] == "rows"}
        self.held = self.kept_out = False
        self.num_holds = 0

    def enter(self, seq: Sequence, running: Mapping[int, Sequence], plan: StepPlan, *, bounded: bool) -> tuple[BlockTable, Prefix] | None:
        """Blocks for a waiting sequence and what it resumes from; matched anew each time, as a preemption may have evicted something.

        `bounded`: it stays out where the watermarks say so.
        """
        prefix = self._cache.match(seq.tokens, salt=seq.salt, chain=seq.chain)
        seq.chain = prefix.match.chain
        times = min(seq.num_preemptions, MAX_PREEMPTIONS)
        if times not in plan.spare:
            plan.spare[times] = self._cache.growth({other.seq_id: self.reach(other, times) for other in running.values()})
        upto, spare = self.reach(seq, times), plan.spare[times]
        self.kept_out = False
        # second, cold: what is cached may stand in the way of what must be computed
        for begin in (prefix.cold(),) if seq.cold else (prefix, prefix.cold()):
            if bounded and self._held_back(seq, begin):
                self.kept_out = True
                continue
            table = self._cache.reserve(seq.seq_id, len(seq.tokens), prefix=begin, upto=upto, spare=spare)
            if table is not None:
                for level, room in plan.spare.items():
                    for name, count in self._cache.growth({seq.seq_id: self.reach(seq, level)}).items():
                        room[name] += count
                self.held, self.kept_out = self.held and not bounded, False
                return table, begin
        return None

    def hold(self) -> None:
        """Keep everybody out until the low watermark."""
        self.num_holds += not self.held
        self.held = True

    def reach(self, seq: Sequence, times: int) -> int:
        """How far a sequence should be able to grow for one to enter that was preempted so many times."""
        need = self._need(seq)
        return need if times >= MAX_PREEMPTIONS else min(need, len(seq.tokens) + LOOKAHEAD_TOKENS[times])

    def check(self, seq: Sequence, name: str) -> None:
        """Raises CapacityError for a sequence that an empty cache could not hold to its end."""
        most = self.max_context - (0 if seq.collect else 1)
        if seq.num_prompt > most:
            fact = f"{name} has a prompt of {seq.num_prompt} tokens, the context of {self.max_context} leaves {most} for it"
            raise CapacityError(fact, "Shorten the prompt, or raise max_context.")
        need = self._need(seq)
        if not self._cache.fits(need):
            capacity = self._cache.capacity_tokens
            fact = f"{name} needs {need} tokens of cache (prompt {seq.num_prompt}), an empty cache holds {capacity}"
            assert capacity is not None, "only rows can be too few for one sequence"
            spare = capacity + 1 - seq.num_prompt
            lower = f"Lower max_tokens to {spare} or less" if spare > 0 and not seq.collect else "Shorten the prompt"
            raise CapacityError(fact, f"{lower}, or raise cache_bytes.")

    def _need(self, seq: Sequence) -> int:
        """Rows at its end; the last sampled token is never computed."""
        if seq.collect:
            return seq.num_prompt
        return min(seq.num_prompt + seq.sampling.max_tokens, self.max_context) - 1

    def _held_back(self, seq: Sequence, begin: Prefix) -> bool:
        """States do not count: a sequence has one from its first token to its last. Nor does what is cached and not in use."""
        if self._fairness.high_water == 1.0:
            return False
        shared = sum(1 for rows in begin.match.rows if rows.num_users)
        lacking = self._cache.growth({seq.seq_id: len(seq.tokens)})
        extra = max((lacking[name] - shared) / count for name, count in self._num_rows.items()) if self._num_rows else 0.0
        return held_back(self._cache.usage("rows"), extra, self.held, self._fairness)
