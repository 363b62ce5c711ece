"""Workloads through the real scheduler and cache without a model, and the same through a plain LRU cache to compare with."""

from __future__ import annotations

import gzip
import json
import random
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from firstlight.cache.blocks import Group
from firstlight.cache.keys import Chain, root_key
from firstlight.cache.manager import CacheManager
from firstlight.engine.sim import SimRunner, VirtualClock
from firstlight.sched.limits import Limits
from firstlight.sched.scheduler import Scheduler
from firstlight.sched.sequence import Sequence
from firstlight.spec.sampling import SamplingParams

TRACE = Path(__file__).parents[1] / "data" / "traces" / "mooncake" / "conversation_trace.jsonl.gz"
SCALE = 32
TRACE_BLOCK = 512
BLOCK = TRACE_BLOCK // SCALE
STATE_BLOCKS = 16_253 / SCALE / BLOCK  # a state of Kimi K3 takes the bytes of 16,253 tokens of rows
MOST_ANSWER = 4
MANY = 1 << 18  # more than the whole trace needs
SOME = 1 << 16  # more than its first part needs


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and how many tokens it asks for."""

    tokens: tuple[int, ...]
    max_tokens: int


@lru_cache(maxsize=2)
def conversations(count: int | None = None) -> tuple[Request, ...]:
    """The trace at 1/32: a full trace block becomes one block of ours, what is left of the prompt is nobody else's."""
    with gzip.open(TRACE, "rt", encoding="ascii") as lines:
        return tuple(_request(number, json.loads(line)) for number, line in enumerate(lines) if count is None or number < count)


def _request(number: int, line: dict[str, Any]) -> Request:
    num_full, rest = divmod(line["input_length"], TRACE_BLOCK)
    tokens = [token for name in line["hash_ids"][:num_full] for token in range(name * BLOCK, (name + 1) * BLOCK)]
    own = (1 << 31) + number * BLOCK
    tokens += range(own, own + max(rest // SCALE, 0 if tokens else 1))
    return Request(tuple(tokens), max(1, min(MOST_ANSWER, line["output_length"] // SCALE)))


@dataclass(slots=True)
class Replay:
    """What became of a workload."""

    cache: CacheManager
    sequences: list[Sequence]

    @property
    def hit(self) -> float:
        """Share of prompt tokens that were cached, in percent."""
        return 100 * sum(seq.num_cached_tokens for seq in self.sequences) / sum(seq.num_prompt for seq in self.sequences)

    @property
    def working_set(self) -> float:
        """Bytes of all that is listed, in blocks of rows."""
        return self.cache.index.num_rows + STATE_BLOCKS * self.cache.index.num_snapshots


class Site:
    """A scheduler over a cache of so many blocks of rows; `num_kept` None: a model without states."""

    def __init__(self, num_blocks: int, num_kept: int | None = None, *, grid: int = 0, together: int = 1) -> None:
        groups = [Group("mla", "rows", num_blocks, BLOCK)]
        if num_kept is not None:
            groups.append(Group("kda", "state", num_kept + together, num_kept=num_kept))
        self.together = together
        self.cache = CacheManager(groups, identity=b"m", prefix_cache=True, snapshot_tokens=grid)
        self.scheduler = Scheduler(Limits(tokens_per_step=8192, sequences_per_step=together, chunk_tokens=512), self.cache)
        self.runner = SimRunner(VirtualClock())
        self.sequences: list[Sequence] = []

    def add(self, tokens: Iterable[int], max_tokens: int) -> Sequence:
        """Queue a prompt behind all before it."""
        known, number = list(tokens), len(self.sequences)
        seq = Sequence(number, known, len(known), SamplingParams(max_tokens=max_tokens, temperature=0), arrived_s=float(number))
        self.sequences.append(seq)
        self.scheduler.add(seq)
        return seq

    def step(self) -> int:
        """One step; how many sequences have ended."""
        batch = self.scheduler.schedule(0.0)
        events = self.scheduler.update(batch, self.runner.run(batch), 0.0)
        return sum(event.finish is not None for event in events)

    def run(self, requests: Iterable[Request]) -> Replay:
        """All requests in their order, `together` at a time."""
        waiting, alive = iter(requests), 0
        while True:
            for request in _some(waiting, self.together - alive):
                self.add(request.tokens, request.max_tokens)
                alive += 1
            if not alive:
                break
            alive -= self.step()
        assert self.scheduler.idle()
        assert 0.0 == self.cache.usage()
        self.cache.check()
        return Replay(self.cache, self.sequences)


def _some(requests: Iterator[Request], count: int) -> Iterator[Request]:
    for _ in range(count):
        request = next(requests, None)
        if request is None:
            return
        yield request


def replay(requests: Iterable[Request], num_blocks: int = MANY, num_kept: int | None = None, *, grid: int = 0, together: int = 1) -> Replay:
    """Serve a workload from an empty cache."""
    return Site(num_blocks, num_kept, grid=grid, together=together).run(requests)


def sessions(site: Site, *, num_sessions: int, num_turns: int, seed: int) -> Replay:
    """Chats that go on where they were left, a few at a time in random order; four system prompts are shared."""
    rng, fresh = random.Random(seed), iter(range(1 << 20, 1 << 30))
    history = [[1000 * (number % 4) + place for place in range(100)] for number in range(num_sessions)]
    left = dict.fromkeys(range(num_sessions), num_turns)
    while left:
        turn = {}
        for number in rng.sample(sorted(left), min(site.together, len(left))):
            history[number] += [next(fresh) for _ in range(rng.randint(5, 60))]
            turn[number] = site.add(history[number], rng.randint(3, 12))
        while not site.scheduler.idle():
            site.step()
        for number, seq in turn.items():
            history[number] = list(seq.tokens)
            left[number] -= 1
            if not left[number]:
                del left[number]
    site.cache.check()
    return Replay(site.cache, site.sequences)


class Lru:
    """Rows and snapshots by their last use alone, under the same rules of what is published, kept and resumed from."""

    def __init__(self, num_blocks: int, num_kept: int | None, grid: int) -> None:
        self.num_blocks, self.num_kept, self.grid = num_blocks, num_kept, grid
        self.rows: OrderedDict[bytes, None] = OrderedDict()
        self.kept: OrderedDict[bytes, None] = OrderedDict()
        self.ends: dict[bytes, set[int]] = {}  # key of the full blocks -> how far behind them a snapshot was ever taken

    def serve(self, seq: Sequence) -> int:
        """Cached tokens of a prompt; afterwards all of the sequence is cached."""
        num_tokens, chain = len(seq.tokens) - 1, Chain(root_key(b"m", b""), BLOCK)
        chain.extend(seq.tokens, num_tokens)
        limit = seq.num_prompt - 1
        depth = 0
        while depth < limit // BLOCK and chain.keys[depth] in self.rows:
            depth += 1
        found = depth * BLOCK
        if self.num_kept is not None:
            found = self._resume(chain, seq.tokens, depth, limit)
            self._keep(chain, seq, found, depth * BLOCK)
        for key in reversed(chain.keys):
            self.rows[key] = None
            self.rows.move_to_end(key)
        while len(self.rows) > self.num_blocks:
            self.rows.popitem(last=False)
        return found

    def _resume(self, chain: Chain, tokens: list[int], depth: int, limit: int) -> int:
        for num_blocks in range(depth, -1, -1):
            for rest in sorted(self.ends.get(chain.at(num_blocks), ()), reverse=True):
                end = num_blocks * BLOCK + rest
                if 0 < end <= limit and chain.key(tokens, end) in self.kept:
                    self.kept.move_to_end(chain.key(tokens, end))
                    return end
        return 0

    def _keep(self, chain: Chain, seq: Sequence, found: int, covered: int) -> None:
        marks = {seq.num_prompt - 1, len(seq.tokens) - 1, covered}
        if self.grid:
            marks.update(range(found - found % self.grid + self.grid, seq.num_prompt, self.grid))
        for mark in sorted(mark for mark in marks if mark > found):
            key = chain.key(seq.tokens, mark)
            self.ends.setdefault(chain.at(mark // BLOCK), set()).add(mark % BLOCK)
            self.kept[key] = None
            self.kept.move_to_end(key)
            if len(self.kept) > (self.num_kept or 0):
                self.kept.popitem(last=False)


def lru_hit(sequences: Iterable[Sequence], num_blocks: int, num_kept: int | None = None, *, grid: int = 0) -> float:
    """Share of prompt tokens that a plain LRU cache of the same size would have had, in percent."""
    cache, num_found, num_prompt = Lru(num_blocks, num_kept, grid), 0, 0
    for seq in sequences:
        num_found += cache.serve(seq)
        num_prompt += seq.num_prompt
    return 100 * num_found / num_prompt
