"""Random workloads for the equality property: what a request gets must not depend on company, chunking, preemption or slots."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from firstlight import LLM, SamplingParams
from firstlight.cache.manager import CacheManager
from firstlight.engine.loop import Engine
from firstlight.spec.errors import FirstlightError

GAP = 2e-4
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Job:
    """One request and what happens to it on its way."""

    tokens: tuple[int, ...]
    max_tokens: int
    submit_step: int
    split: tuple[int, ...] = ()
    preempt_steps: tuple[int, ...] = ()
    cancel_step: int | None = None
    priority: str = "standard"


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs and the limits they meet."""

    jobs: tuple[Job, ...]
    max_sequences: int
    max_step_tokens: int
    chunk_tokens: int
    tokens_per_block: int
    num_blocks: int
    prefix_cache: bool


@dataclass(slots=True)
class Tally:
    """How often tokens were compared and how often a near tie decided differently."""

    num_tokens: int = 0
    near_ties: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    largest: float = 0.0
    failures: list[str] = field(default_factory=list)


def draw(seed: int, num_vocab: int) -> Workload:
    """A workload with prompts of 1 to 90 tokens, first chunks of 1 to 5, full slots, preemptions and cancellations."""
    rng = random.Random(seed)
    jobs = []
    for _ in range(rng.randint(3, 9)):
        length = rng.choice([1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 65, rng.randint(1, 90)])
        tokens = tuple(rng.randrange(3, num_vocab) for _ in range(length))
        if jobs and rng.random() < 0.4:  # the beginning of an earlier prompt
            earlier = rng.choice(jobs).tokens
            kept = len(earlier) if rng.random() < 0.6 else rng.randint(1, len(earlier))
            tokens = (*earlier[:kept], *tokens[: rng.randint(0, 20)])
            length = len(tokens)
        jobs.append(Job(
            tokens, rng.randint(1, 12), rng.randint(0, 12), _split(rng, length),
            tuple(sorted(rng.randint(1, 25) for _ in range(rng.choice([0, 0, 1, 2])))),
            rng.randint(1, 20) if rng.random() < 0.15 else None, rng.choice(["interactive", "standard", "background"])))
    per_block = rng.choice([4, 8, 16])
    longest = max(len(job.tokens) + job.max_tokens for job in jobs)
    num_blocks = -(-longest // per_block) + rng.choice([1, 3, 8, 40])
    return Workload(
        tuple(jobs), rng.choice([1, 2, 3, 5]), rng.choice([8, 24, 64, 256]), rng.choice([5, 16, 64]), per_block, num_blocks, rng.random() < 0.6)


def _split(rng: random.Random, length: int) -> tuple[int, ...]:
    """Forced chunks that begin with 1 to 5 tokens, or none."""
    if rng.random() < 0.4:
        return ()
    sizes, left = [], length
    while left:
        sizes.append(min(left, rng.randint(1, 5) if not sizes else rng.randint(1, 20)))
        left -= sizes[-1]
    return tuple(sizes)


def check(folder: Path, workload: Workload, lone: LLM, tally: Tally) -> None:
    """Run a workload and compare every request with its lone run: tokens, then teacher-forced logits."""
    with crowded(folder, workload, lone) as llm:
        results = drive(llm.engine, llm.machine.cache, workload, tally)  # type: ignore[union-attr]
        tally.num_preemptions += llm.stats()["preemptions"]
        llm.machine.cache.check()  # type: ignore[union-attr]
        used = {name: group["used"] for name, group in llm.stats()["groups"].items()}
        if any(used.values()):
            tally.failures.append(f"blocks are still held after the last request: {used}")
    for job, (got, finish) in zip(workload.jobs, results, strict=True):
        want_TV = forced(lone, job, got)
        compare(job, got, finish, want_TV, lone, tally)


def crowded(folder: Path, workload: Workload, lone: LLM) -> LLM:
    """An engine whose cache holds just the workload's blocks, all memory poisoned."""
    row_bytes = lone.spec.row_bytes_per_token * workload.tokens_per_block
    # half of the cache goes to states at most, so rows get what is left of twice the states
    states = lone.spec.state_bytes_per_sequence * workload.max_sequences
    least = 16 * lone.spec.state_bytes_per_sequence if workload.prefix_cache else 0  # a quarter of it holds four snapshots
    return LLM(
        folder, dtype="float32", cache_bytes=max(least, 2 * states, states + workload.num_blocks * row_bytes),
        tokens_per_block=workload.tokens_per_block,
        max_sequences=workload.max_sequences, max_step_tokens=workload.max_step_tokens, chunk_tokens=workload.chunk_tokens, poison_freed=True,
        prefix_cache=workload.prefix_cache, max_context=max(len(job.tokens) + job.max_tokens for job in workload.jobs))


def drive(engine: Engine, cache: CacheManager, workload: Workload, tally: Tally) -> list[tuple[list[int], str | None]]:
    """Step until everything has ended; every step is followed by a check of conservation."""
    ids: dict[int, int] = {}
    tokens: dict[int, list[int]] = {i: [] for i in range(len(workload.jobs))}
    finish: dict[int, str | None] = dict.fromkeys(tokens)
    bound = 200 + 40 * sum(len(job.tokens) + job.max_tokens for job in workload.jobs)
    for step in range(bound):
        for i, job in enumerate(workload.jobs):
            if step == job.submit_step:
                params = SamplingParams(max_tokens=job.max_tokens, temperature=0, ignore_eos=True)
                ids[engine.submit(list(job.tokens), params, priority=job.priority, split=job.split)] = i
        for seq_id, i in ids.items():
            if step - workload.jobs[i].submit_step in workload.jobs[i].preempt_steps:
                engine.preempt(seq_id)
            if step - workload.jobs[i].submit_step == workload.jobs[i].cancel_step:
                engine.cancel(seq_id)
        for event in engine.step():
            i = ids[event.seq_id]
            if event.finish is not None:
                tally.num_cached_tokens += event.num_cached_tokens
            if event.token is not None:
                tokens[i].append(event.token)
            finish[i] = event.finish or finish[i]
        cache.check()
        if len(ids) == len(workload.jobs) and engine.idle():
            return [(tokens[i], finish[i]) for i in range(len(workload.jobs))]
    raise FirstlightError(f"{bound} steps were not enough", "Look for a livelock.")


def forced(lone: LLM, job: Job, got: list[int]) -> Tensor:
    """Logits of prompt and answer, computed alone and in one shot."""
    return lone.logits([*job.tokens, *got])


def compare(job: Job, got: list[int], finish: str | None, want_TV: Tensor, lone: LLM, tally: Tally) -> None:
    """Greedy tokens are the lone argmax, or the first difference stands at a near tie: of logits, or of experts in a router."""
    if finish != "abort" and (finish != "length" or len(got) != job.max_tokens):
        tally.failures.append(f"ended with {finish} after {len(got)} of {job.max_tokens} tokens")
    for position, token in enumerate(got):
        row_V = want_TV[len(job.tokens) - 1 + position]
        tally.num_tokens += 1
        if int(row_V.argmax()) != token:
            top = torch.topk(row_V, 2)
            if token in top.indices.tolist() and float(top.values[0] - top.values[1]) < GAP:
                tally.near_ties += 1
                return
            if own_tie(lone, [*job.tokens, *got], len(job.tokens) - 1 + position, token):
                tally.near_ties += 1
                return
            tally.failures.append(f"token {position} of a prompt of {len(job.tokens)} is {token}, alone it is {int(row_V.argmax())}")
            return


def own_tie(lone: LLM, tokens: list[int], position: int, token: int) -> bool:
    """Whether the lone run differs from itself here when it is cut otherwise: two experts score equal to the last digits, and rounding
    decides which is chosen. Then the other cut yields the token, and logits before the tie agree."""
    whole_TV, cut_TV = lone.logits(tokens), lone.logits(tokens, chunks=[1] * len(tokens))
    apart_T = (whole_TV - cut_TV).abs().amax(-1) > 100 * TOLERANCE
    return token == int(cut_TV[position].argmax()) and bool(apart_T[: position + 1].any())
