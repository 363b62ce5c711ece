"""The prefix cache in a simulated memory whose tokens come out of the blocks: warm = cold for every mix of shared prompts."""

from __future__ import annotations

import random
import subprocess
import sys
from functools import lru_cache

import pytest

from firstlight.cache.blocks import Group
from firstlight.cache.manager import CacheManager
from firstlight.engine.sim import SimMemory, SimRunner, VirtualClock
from firstlight.sched.limits import Limits
from firstlight.sched.scheduler import Scheduler
from firstlight.sched.sequence import Sequence
from firstlight.spec.sampling import SamplingParams

B = 4
HYBRID = (Group("mla", "rows", 60, B), Group("kda", "state", 10, num_kept=6))
ROWS = (Group("mla", "rows", 60, B), Group("index", "rows", 60, B))
STATES = (Group("kda", "state", 10, num_kept=6),)
TIGHT = (Group("mla", "rows", 14, B), Group("kda", "state", 3, num_kept=1))
LAYOUTS = {"hybrid": HYBRID, "rows": ROWS, "states": STATES, "tight": TIGHT}


class Site:
    """A scheduler over a cache with prefixes."""

    def __init__(self, layout: tuple[Group, ...], *, snapshot_tokens: int = 0, prefix_cache: bool = True, identity: bytes = b"m") -> None:
        self.cache = CacheManager(layout, identity=identity, prefix_cache=prefix_cache, snapshot_tokens=snapshot_tokens)
        self.scheduler = Scheduler(Limits(tokens_per_step=24, sequences_per_step=4, chunk_tokens=9), self.cache)
        clock = VirtualClock()
        self.runner = SimRunner(clock, memory=SimMemory(layout))
        self.clock, self.num = clock, 0

    def add(self, tokens: list[int], max_tokens: int = 3, *, salt: bytes = b"", split: tuple[int, ...] = ()) -> Sequence:
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        seq = Sequence(self.num, list(tokens), len(tokens), params, salt=salt, split=split, arrived_s=self.clock())
        self.num += 1
        self.scheduler.add(seq)
        return seq

    def step(self) -> None:
        batch = self.scheduler.schedule(self.clock())
        self.cache.check()
        result = self.runner.run(batch)
        assert {} == result.errors
        self.scheduler.update(batch, result, self.clock())
        self.cache.check()

    def drain(self) -> None:
        for _ in range(2_000):
            if self.scheduler.idle():
                break
            self.step()
        assert self.scheduler.idle()
        assert 0.0 == self.cache.usage()

    def answer(self, tokens: list[int], max_tokens: int = 3, **more: object) -> Sequence:
        seq = self.add(tokens, max_tokens, **more)  # type: ignore[arg-type]
        self.drain()
        return seq


@lru_cache(maxsize=4096)
def cold(kind: str, tokens: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    layout = tuple(Group(group.name, group.kind, 200 if group.kind == "rows" else 2, group.tokens_per_block) for group in LAYOUTS[kind])
    return tuple(Site(layout, prefix_cache=False).answer(list(tokens), max_tokens).tokens[len(tokens) :])


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("grid", [0, 4, 6])
@pytest.mark.parametrize("seed", range(6))
def test_warm_is_cold(kind: str, grid: int, seed: int) -> None:
    """Prompts that share beginnings, in any company, with preemptions, cancellations and resets between them."""
    rng = random.Random(1000 * seed + grid)
    site = Site(LAYOUTS[kind], snapshot_tokens=grid)
    stems = [prompt(n, rng.randint(1, 22)) for n in range(3)]
    done: list[Sequence] = []
    for _ in range(60):
        tokens = rng.choice(stems)[: rng.randint(1, 22)] + prompt(rng.randrange(4), rng.choice([0, 1, 2, 5, 9]))
        if done and rng.random() < 0.3:
            tokens = (done[-1].tokens + prompt(rng.randrange(9), rng.randint(0, 4)))[:40]
        seq = site.add(tokens, rng.randint(1, 8), split=(1, 2) if len(tokens) > 3 and rng.random() < 0.2 else ())
        done.append(seq)
        for _ in range(rng.randint(0, 6)):
            site.step()
        if rng.random() < 0.15:
            site.scheduler.preempt(rng.choice(done).seq_id)
        if rng.random() < 0.05:
            site.scheduler.cancel(rng.choice(done).seq_id)
        if rng.random() < 0.03:
            site.cache.reset()
    site.drain()
    for seq in done:
        got = tuple(seq.tokens[seq.num_prompt :])
        want = cold(kind, tuple(seq.tokens[: seq.num_prompt]), seq.sampling.max_tokens)
        assert want[: len(got)] == got, f"request {seq.seq_id} ({seq.num_cached_tokens} of {seq.num_prompt} cached)"
        assert seq.finish == "abort" or len(want) == len(got)
        assert seq.num_cached_tokens < seq.num_prompt
    assert kind == "tight" or sum(seq.num_cached_tokens for seq in done) > 0, "nothing was ever reused"


@pytest.mark.parametrize("length", [2, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1, 3 * B, 21])
def test_documented_lengths(length: int) -> None:
    """Hybrid: a prompt seen before is reused but for its last token; an extended one up to where the first one's states end."""
    site, tokens = Site(HYBRID), prompt(7, length)
    first = site.answer(tokens)
    assert 0 == first.num_cached_tokens
    assert length - 1 == site.answer(tokens).num_cached_tokens
    assert length - 1 == site.answer([*tokens, 5, 6, 7]).num_cached_tokens
    # prompt and answer together: states stand behind all but the last token of the answer
    assert len(first.tokens) - 1 == site.answer([*first.tokens, 1, 2, 3]).num_cached_tokens


@pytest.mark.parametrize("length", [2, B - 1, B, B + 1, 2 * B, 2 * B + 1, 21])
def test_documented_lengths_of_rows(length: int) -> None:
    """Rows alone resume at block edges."""
    site, tokens = Site(ROWS), prompt(7, length)
    site.answer(tokens, 1)
    assert (length - 1) // B * B == site.answer(tokens, 1).num_cached_tokens


def test_a_branch_is_kept_when_seen_again() -> None:
    """Two prompts share a stem that no prompt ended at: the second leaves a snapshot there, the third starts from it."""
    site, stem = Site(HYBRID), prompt(3, 4 * B)
    assert 0 == site.answer([*stem, 1, 2, 3]).num_cached_tokens
    assert 0 == site.answer([*stem, 4, 5, 6]).num_cached_tokens
    assert len(stem) == site.answer([*stem, 7, 8, 9]).num_cached_tokens
    assert 0 == site.answer([1, *stem, 7, 8, 9]).num_cached_tokens


def test_controls_do_not_hit() -> None:
    site, tokens = Site(HYBRID), prompt(5, 17)
    site.answer(tokens, salt=b"a")
    assert 0 == site.answer(tokens, salt=b"b").num_cached_tokens
    assert 16 == site.answer(tokens, salt=b"a").num_cached_tokens
    assert 0 == site.answer([tokens[0] + 1, *tokens[1:]], salt=b"a").num_cached_tokens
    site.cache.reset()
    assert 0 == site.answer(tokens, salt=b"a").num_cached_tokens


def test_keys_do_not_depend_on_the_process() -> None:
    code = (
        "from firstlight.cache.keys import Chain, root_key; c = Chain(root_key(b'model', b'salt'), 4); t = list(range(18)); "
        "c.extend(t, 18); print([k.hex() for k in c.keys], c.key(t, 18).hex())")
    runs = [
        subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True,
                       check=True).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1]
    assert len(runs[0]) > 5 * 32


def test_a_failed_sequence_withdraws_what_it_published() -> None:
    site, tokens = Site(HYBRID), prompt(5, 17)
    seq = site.add(tokens, 20)
    for _ in range(6):
        site.step()
    batch = site.scheduler.schedule(site.clock())
    site.scheduler.fail(batch, "planted", site.clock())
    assert "error" == seq.finish
    site.cache.check()
    assert 0 == site.answer(tokens).num_cached_tokens


def test_explain_names_the_group_that_falls_short() -> None:
    site, stem = Site(HYBRID), prompt(3, 4 * B)
    site.answer([*stem, 1, 2, 3])
    told = site.cache.explain([*stem, 4, 5, 6])
    assert 0 == told["matched_tokens"]
    assert {"mla": 16, "kda": 0} == told["by_group"]
    assert "no state is kept" in told["reason"]
    assert "nothing" in site.cache.explain([1, 2, 3])["reason"]
    assert "one token is always computed" in site.cache.explain([*stem, 1, 2, 3])["reason"]
