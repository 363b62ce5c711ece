"""Filters and penalties against transformers, frequencies against probabilities, and the same draw whatever the company.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

import gc
import math
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from firstlight import LLM, SamplingParams
from firstlight.engine import sampler as sampler_file
from firstlight.engine.sampler import Sampler, describe, pick, uniform, weights
from firstlight.sched.sequence import Sequence, Status

K3 = Path(__file__).parents[1] / "data/kimi_k3_tiny"
NUM_VOCAB = 300
EVERYTHING = {
    "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3, "presence_penalty": 0.4,
    "frequency_penalty": -0.2, "logit_bias": {3: 1.5, 4: -2.0}, "min_tokens": 30, "max_tokens": 60, "seed": 11, "logprobs": 3,
}


def rows(count: int, *, num_vocab: int = NUM_VOCAB, seed: int = 0, scale: float = 3.0) -> Tensor:
    """Random logits."""
    return torch.randn(count, num_vocab, generator=torch.Generator().manual_seed(seed)) * scale


def sequence(seq_id: int = 0, prompt: list[int] | None = None, answer: list[int] | None = None, **params: Any) -> Sequence:
    """A sequence on its way."""
    prompt = [1, 2, 3] if prompt is None else prompt
    return Sequence(seq_id, [*prompt, *(answer or [])], len(prompt), SamplingParams(**params), stop_ids=frozenset({7}))


def normal(weights_V: Tensor) -> Tensor:
    """Weights as a distribution."""
    return weights_V / weights_V.sum()


FILTERS: list[dict[str, Any]] = [
    *({"temperature": value} for value in (0.05, 0.7, 1.0, 5.0)),
    *({"top_k": value} for value in (1, 2, 50, NUM_VOCAB - 1, NUM_VOCAB, NUM_VOCAB + 1, 2**31 - 1)),
    *({"top_p": value} for value in (0.0, 0.01, 0.5, 0.95, 0.9999, 1.0)),
    *({"min_p": value} for value in (0.0, 0.001, 0.1, 0.7, 1.0)),
    {"top_k": 20, "top_p": 0.8}, {"top_k": 5, "min_p": 0.2}, {"top_p": 0.9, "min_p": 0.05},
    {"temperature": 0.6, "top_k": 30, "top_p": 0.7, "min_p": 0.02}, {"temperature": 2.0, "top_k": 100, "top_p": 0.99, "min_p": 0.001},
]


@pytest.mark.parametrize("given", FILTERS, ids=str)
def test_filters_are_those_of_transformers(given: dict[str, Any]) -> None:
    """Same tokens left, same probabilities; transformers applies temperature, top_k, top_p and min_p in this order."""
    from transformers.generation import logits_process as theirs

    steps = [theirs.TemperatureLogitsWarper(given["temperature"])] if "temperature" in given else []
    steps += [theirs.TopKLogitsWarper(given["top_k"])] if "top_k" in given else []
    steps += [theirs.TopPLogitsWarper(given["top_p"])] if "top_p" in given else []
    steps += [theirs.MinPLogitsWarper(given["min_p"])] if "min_p" in given else []
    for row_V in rows(20):
        want_V = row_V.double()[None]
        for step in steps:
            want_V = step(torch.zeros(1, 1, dtype=torch.int64), want_V)
        want_V = torch.softmax(want_V[0], dim=-1)
        got_V = normal(weights(row_V, SamplingParams(**given)))
        assert (want_V > 0).tolist() == (got_V > 0).tolist()
        assert float((want_V - got_V).abs().max()) < 1e-12


@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_a_cut_found_among_candidates_is_the_cut_of_a_sort(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat and steep distributions over more tokens than candidates, with many ties."""
    for row_V in rows(6, num_vocab=5_000, scale=scale):
        row_V = row_V.bfloat16().float()
        for given in ({"top_p": 0.1}, {"top_p": 0.9}, {"min_p": 0.3}, {"min_p": 0.999}, {"top_k": 3_000}, {"top_k": 3_000, "top_p": 0.5}):
            params = SamplingParams(**given)  # type: ignore[arg-type]
            found = []
            for size in (2, 1024, 5_000):
                monkeypatch.setattr(sampler_file, "NUM_CANDIDATES", size)
                found.append(weights(row_V, params))
            assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[2])
            probs_V, order_V = torch.sort(torch.softmax((row_V - row_V.max()).double(), -1), descending=True, stable=True)
            kept = [*order_V[: int((found[2] > 0).sum())].tolist()]
            assert sorted(kept) == (found[2] > 0).nonzero().flatten().tolist(), "of equal tokens at the edge, others than the lowest stayed"
            assert "top_k" not in given or len(kept) <= 3_000
            if [*given] == ["top_p"]:
                assert float(probs_V[: len(kept) - 1].sum()) < given["top_p"] <= float(probs_V[: len(kept)].sum())


def test_penalties_are_those_of_transformers() -> None:
    """Repetition over prompt and answer, bias, and ends that may not come yet; presence and frequency against a plain count."""
    from transformers.generation import logits_process as theirs

    rng = random.Random(0)
    for row_V in rows(10):
        prompt, answer = rng.choices(range(NUM_VOCAB), k=40), rng.choices(range(NUM_VOCAB), k=30)
        ids = torch.tensor([[*prompt, *answer]])
        counts = Counter(answer)
        want_V = theirs.RepetitionPenaltyLogitsProcessor(1.7)(ids, row_V[None].clone())[0]
        assert torch.equal(want_V, Sampler().adjusted(row_V, sequence(0, prompt, answer, repetition_penalty=1.7)))
        want_V = torch.tensor([value - 0.3 * counts[token] - 0.9 * (token in counts) for token, value in enumerate(row_V.tolist())])
        got_V = Sampler().adjusted(row_V, sequence(0, prompt, answer, frequency_penalty=0.3, presence_penalty=0.9))
        assert float((want_V - got_V).abs().max()) < 1e-5
        want_V = theirs.SequenceBiasLogitsProcessor([[[5], 2.5], [[9], -1e30]])(ids, row_V[None])[0]
        assert torch.equal(want_V, Sampler().adjusted(row_V, sequence(0, prompt, answer, logit_bias={5: 2.5, 9: -1e30})))
        for min_tokens in (30, 31):
            want_V = theirs.MinNewTokensLengthLogitsProcessor(len(prompt), min_tokens, [7, 8])(ids, row_V[None])[0]
            got_V = Sampler().adjusted(row_V, sequence(0, prompt, answer, min_tokens=min_tokens, max_tokens=50, stop_token_ids=(8,)))
            assert torch.equal(torch.softmax(want_V, -1), torch.softmax(got_V, -1))
            assert (min_tokens > 30) == (float(torch.softmax(got_V, -1)[7]) == 0)


def test_ends_that_do_not_end_are_not_banned() -> None:
    row_V = rows(1)[0]
    got_V = Sampler().adjusted(row_V, sequence(min_tokens=5, ignore_eos=True, stop_token_ids=(8,)))
    assert [8] == (got_V != row_V).nonzero().flatten().tolist()


def test_counts_follow_the_sequence() -> None:
    """Token by token, through a preemption, and beside others: the same as counted afresh."""
    given = {key: EVERYTHING[key] for key in ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")}
    grown, other, sampler = sequence(0, [4, 5, 4], **given), sequence(1, [5, 9], **given), Sampler()
    for step, row_V in enumerate(rows(60)):
        fresh = sequence(2, grown.tokens[:3], grown.tokens[3:], **given)
        before_V = row_V.clone()
        assert torch.equal(Sampler().adjusted(row_V, fresh), sampler.adjusted(row_V, grown))
        assert torch.equal(before_V, row_V), "the logits themselves were changed"
        if step == 20:
            grown.status, grown.num_computed = Status.WAITING, 0  # preempted: drawn again only when its tokens have caught up
            continue
        grown.tokens.append(step % 7)
        other.tokens.append(step % 5)
        sampler.draw(row_V[None], [other])


def chi_square(counts: Tensor, probs: Tensor) -> tuple[float, float]:
    """The statistic, and the value that one in a thousand honest samples exceeds (Wilson and Hilferty, 1931)."""
    expected = probs * counts.sum()
    kept = expected > 0
    assert 0 == int(counts[~kept].sum()), "a token that was filtered out was drawn"
    freedom = int(kept.sum()) - 1
    statistic = float(((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum())
    return statistic, freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("given", [{}, {"temperature": 0.5}, {"temperature": 3.0, "top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}], ids=str)
def test_frequencies(given: dict[str, Any]) -> None:
    row_V = rows(1, num_vocab=12, seed=5, scale=1.0)[0]
    weights_V = weights(row_V, SamplingParams(**given))
    over_positions = torch.bincount(torch.tensor([pick(weights_V, uniform(3, position)) for position in range(8_000)]), minlength=12)
    statistic, limit = chi_square(over_positions.double(), normal(weights_V))
    assert statistic < limit
    other_V = normal(weights(row_V, SamplingParams(temperature=given.get("temperature", 1.0) * 1.15)))
    assert chi_square(over_positions.double(), other_V)[0] > limit, "control: the test cannot tell a wrong temperature"
    seqs = [sequence(seed, seed=seed, **given) for seed in range(3_000)]
    tokens, _ = Sampler().draw(row_V.expand(3_000, 12), seqs)
    statistic, limit = chi_square(torch.bincount(torch.tensor(tokens), minlength=12).double(), normal(weights_V))
    assert statistic < limit


def test_requests_without_a_seed_draw_apart() -> None:
    """By id and by the engine's seed; and again the same in another process, because nothing is hashed by Python."""
    row_V = rows(1, num_vocab=12, seed=5, scale=1.0)[0]
    seqs = [sequence(number) for number in range(3_000)]
    tokens, _ = Sampler(0).draw(row_V.expand(3_000, 12), seqs)
    assert chi_square(torch.bincount(torch.tensor(tokens), minlength=12).double(), normal(weights(row_V, SamplingParams())))[0] < 31.3
    assert tokens == Sampler(0).draw(row_V.expand(3_000, 12), seqs)[0]
    others, _ = Sampler(1).draw(row_V.expand(3_000, 12), seqs)
    assert 0.05 < sum(map(int.__eq__, tokens, others)) / 3_000 < 0.4
    assert [0.3859926107094097, 0.4739262263143176, 0.9169166254329428, 0.885570399932476] == [
        uniform(0, 0), uniform(1, 17), uniform("0/3", 5), uniform(-5, 10**6)]


def test_the_draw_is_the_inverse_of_the_cumulative_distribution() -> None:
    weights_V = torch.tensor([0.0, 0.25, 0.0, 0.125, 0.125, 0.0], dtype=torch.float64)
    edges = {0.0: 1, 0.25: 1, 0.5 - 2**-53: 1, 0.5: 3, 0.75 - 2**-53: 3, 0.75: 4, 1 - 2**-53: 4}
    assert edges == {draw: pick(weights_V, draw) for draw in edges}


LIKELIEST = 17
TIES = [5, 9, 20, 30]


def extreme_row() -> Tensor:
    row_V = rows(1, num_vocab=40)[0].clamp(max=4.0)
    row_V[LIKELIEST] = 9.0
    return row_V


@pytest.mark.parametrize(
    "given", [{"temperature": 1e-6}, {"temperature": 5e-324}, {"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-9}, {"min_p": 1.0}], ids=str)
def test_extremes_leave_the_likeliest(given: dict[str, Any]) -> None:
    seqs = [sequence(number, **given) for number in range(200)]
    assert {LIKELIEST} == set(Sampler().draw(extreme_row().expand(200, 40), seqs)[0])


@pytest.mark.parametrize("given", [{"temperature": 100.0}, {"temperature": 100.0, "top_k": 41}, {"temperature": 100.0, "top_p": 1.0}], ids=str)
def test_extremes_leave_everything(given: dict[str, Any]) -> None:
    seqs = [sequence(number, **given) for number in range(2_000)]
    assert set(range(40)) == set(Sampler().draw(extreme_row().expand(2_000, 40), seqs)[0])


@pytest.mark.parametrize(
    "given", [{"temperature": 0}, {}, {"temperature": 1e-6}, {"temperature": 100.0}, {"top_p": 0.5, "repetition_penalty": 100.0}], ids=str)
def test_a_bias_leaves_one_token(given: dict[str, Any]) -> None:
    for bias in ({token: -1e30 for token in range(40) if token != 3}, {3: 1e30}):
        seqs = [sequence(number, logit_bias=bias, **given) for number in range(50)]
        assert {3} == set(Sampler().draw(extreme_row().expand(50, 40), seqs)[0])


@pytest.mark.parametrize("temperature", [0, 1e-6, 1.0])
def test_everything_banned_still_gives_a_token(temperature: float) -> None:
    seqs = [sequence(number, temperature=temperature, min_tokens=2, stop_token_ids=tuple(range(40))) for number in range(50)]
    assert set(Sampler().draw(extreme_row().expand(50, 40), seqs)[0]) <= set(range(40))


def test_of_equal_tokens_the_lower_ids_stay() -> None:
    row_V = torch.zeros(40)
    row_V[TIES] = 2.0
    assert TIES == (weights(row_V, SamplingParams(min_p=1.0)) > 0).nonzero().flatten().tolist()
    assert TIES[:2] == (weights(row_V, SamplingParams(top_k=2)) > 0).nonzero().flatten().tolist()
    assert [0, 1, 2, 3, 4, 5, 6, 7, 9, 20, 30] == (weights(row_V, SamplingParams(top_k=11)) > 0).nonzero().flatten().tolist()
    assert TIES[:1] == Sampler().draw(row_V[None], [sequence(temperature=0)])[0]
    assert TIES[:1] == Sampler().draw(row_V[None], [sequence(temperature=0, logit_bias={1: 0.5})])[0]
    assert [*TIES, 0, 1] == [token for token, _ in describe(row_V, 0, 6).top]


def test_logprobs_are_of_the_unmodified_distribution() -> None:
    for row_V in rows(5):
        seq = sequence(temperature=0.3, top_k=2, logit_bias={250: 1e30}, repetition_penalty=2.0, logprobs=5)
        tokens, found = Sampler().draw(row_V[None], [seq])
        want_V = torch.log_softmax(row_V.double(), -1)
        assert [250] == tokens
        assert found[0] is not None
        assert (250, float(want_V[250])) == (found[0].token, found[0].logprob)
        assert torch.topk(want_V, 5).indices.tolist() == [token for token, _ in found[0].top]
        assert torch.topk(want_V, 5).values.tolist() == [logprob for _, logprob in found[0].top]
    assert () == describe(row_V, 3, 0).top
    assert NUM_VOCAB == len(describe(row_V, 3, 2**31 - 1).top)


MIXTURE: list[dict[str, Any]] = [
    {"temperature": 0}, {}, EVERYTHING, {"temperature": 0, "logprobs": 2}, {"top_p": 0.7}, {"top_k": 3, "seed": 5}, {"min_p": 0.1, "logprobs": 0},
    {"temperature": 0, "repetition_penalty": 2.0}, {"temperature": 0, "logit_bias": {12: 8.0}}, {"temperature": 0, "min_tokens": 9, "logprobs": 1},
    {"presence_penalty": 2.0, "temperature": 3.0}, {"frequency_penalty": -2.0, "seed": 2**64 - 1},
]


def test_company_changes_nothing() -> None:
    """Greedy, sampled and penalised rows together, in any order, give exactly what each gives alone."""
    logits_RV = rows(len(MIXTURE) * 4)
    seqs = [sequence(number, [number, 2], [3, number % 9, 3], **MIXTURE[number % len(MIXTURE)]) for number in range(len(logits_RV))]
    alone = [Sampler(4).draw(row_V[None], [seq]) for row_V, seq in zip(logits_RV, seqs, strict=True)]
    order = random.Random(1).sample(range(len(seqs)), len(seqs))
    tokens, logprobs = Sampler(4).draw(logits_RV[order], [seqs[number] for number in order])
    assert [alone[number][0][0] for number in order] == tokens
    assert [alone[number][1][0] for number in order] == logprobs


class OpCount(TorchDispatchMode):
    """Counts tensor operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_plain_greedy_rows_are_one_argmax() -> None:
    with OpCount() as count:
        tokens, _ = Sampler().draw(rows(64), [sequence(number, temperature=0) for number in range(64)])
    assert rows(64).argmax(-1).tolist() == tokens
    assert ["aten.argmax.default"] == [name for name in count.names if name not in ("aten.randn.generator", "aten.mul.Tensor")]


class Watched(list[int]):
    """Tokens that say how many of them were read."""

    num_read = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.num_read += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self) -> Iterator[int]:
        self.num_read += len(self)
        return super().__iter__()


@pytest.mark.parametrize("length", [1_000, 100_000])
def test_work_per_token_does_not_grow_with_the_sequence(length: int) -> None:
    seq = sequence(0, [token % NUM_VOCAB for token in range(length)], **EVERYTHING)
    seq.tokens, sampler, logits_RV = Watched(seq.tokens), Sampler(), rows(1)
    seq.tokens.append(sampler.draw(logits_RV, [seq])[0][0])
    counts = []
    for _ in range(3):
        before = seq.tokens.num_read  # type: ignore[attr-defined]
        with OpCount() as count:
            seq.tokens.append(sampler.draw(logits_RV, [seq])[0][0])
        counts.append((seq.tokens.num_read - before, len(count.names)))  # type: ignore[attr-defined]
    assert 1 == len(set(counts))
    assert counts[0][0] <= 2 and counts[0][1] < 100


def num_sequences() -> int:
    """Sequences that are alive."""
    return sum(type(item) is Sequence for item in gc.get_objects())


def test_what_has_ended_is_forgotten() -> None:
    sampler, before = Sampler(), num_sequences()
    for number in range(20):
        seq = sequence(number, repetition_penalty=2.0)
        sampler.draw(rows(1), [seq])
        seq.status = Status.FINISHED
        del seq
    sampler.draw(rows(1), [sequence(99, temperature=0)])
    assert before == num_sequences()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(K3, dtype="float32", cache_bytes=4_000_000, max_sequences=8) as llm:
        yield llm


def drive(llm: LLM, jobs: dict[int, SamplingParams], prompts: list[list[int]], preempted: frozenset[int]) -> dict[int, list[int]]:
    """Tokens per job of all jobs together; some are preempted twice."""
    ids = {llm.engine.submit(prompts[job], params): job for job, params in jobs.items()}
    tokens: dict[int, list[int]] = {job: [] for job in jobs}
    for step in range(400):
        for seq_id, job in ids.items():
            if job in preempted and step in (4, 6 + job):
                llm.engine.preempt(seq_id)
        for event in llm.engine.step():
            if event.token is not None:
                tokens[ids[event.seq_id]].append(event.token)
        if llm.engine.idle():
            return tokens
    raise AssertionError("not idle after 400 steps")


def test_seeded_requests_repeat_alone_in_company_and_preempted(llm: LLM) -> None:
    prompts = [[3 + 5 * job, 40, 7 * job + 2, 11] * 3 for job in range(7)]
    plain = {"max_tokens": 14, "ignore_eos": True}
    jobs = {job: SamplingParams(**{**MIXTURE[job + 5], **plain, "seed": job}) for job in range(6)}
    jobs[6] = SamplingParams(**{**EVERYTHING, **plain, "min_tokens": 7})
    alone = {}
    for job, params in jobs.items():
        alone |= drive(llm, {job: params}, prompts, frozenset())
    before = llm.stats()["preemptions"]
    assert alone == drive(llm, jobs, prompts, frozenset())
    assert alone == drive(llm, jobs, prompts, frozenset({1, 3, 5, 6}))
    assert llm.stats()["preemptions"] >= before + 6
    reseeded = {job: SamplingParams(max_tokens=14, ignore_eos=True, seed=100 + job) for job in jobs}
    assert all(alone[job] != tokens for job, tokens in drive(llm, reseeded, prompts, frozenset()).items())


@pytest.mark.parametrize("stop", ["model", "request"])
def test_an_end_waits_for_min_tokens(llm: LLM, stop: str) -> None:
    end = min(llm.engine.stop_ids) if stop == "model" else 33
    more = {"logit_bias": {end: 100.0}, "temperature": 0, "max_tokens": 9, "stop_token_ids": (end,) if stop == "request" else ()}
    at_once, later, never = llm.generate([[5, 6, 7]] * 3, [
        SamplingParams(**more), SamplingParams(min_tokens=4, **more), SamplingParams(min_tokens=9, **more)])
    assert ([end], "stop") == (at_once.tokens, at_once.finish_reason)
    assert (5, end, "stop") == (len(later.tokens), later.tokens[-1], later.finish_reason)
    assert (9, 0, "length") == (len(never.tokens), never.tokens.count(end), never.finish_reason)


def test_logprobs_of_the_engine_are_those_of_its_logits(llm: LLM) -> None:
    prompt = [9, 30, 200, 4]
    params = SamplingParams(max_tokens=12, temperature=2.0, seed=1, logprobs=4, logit_bias={44: 3.0}, repetition_penalty=1.5, ignore_eos=True)
    out = llm.generate([prompt], params)[0]
    want_TV = torch.log_softmax(llm.logits([*prompt, *out.tokens]).double(), -1)[len(prompt) - 1 : -1]
    assert out.logprobs is not None
    assert out.tokens == [found.token for found in out.logprobs]
    for want_V, found in zip(want_TV, out.logprobs, strict=True):
        assert abs(found.logprob - float(want_V[found.token])) < 1e-4
        assert 4 == len(found.top)
        for (token, logprob), want in zip(found.top, torch.topk(want_V, 4).values.tolist(), strict=True):
            assert abs(logprob - want) < 1e-4 and abs(logprob - float(want_V[token])) < 1e-4
