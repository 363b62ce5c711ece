"""Alone = batched = preempted = chunked = in recycled slots, on random workloads with all memory poisoned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from firstlight import LLM, SamplingParams
from tests.engine.workloads import TOLERANCE, Tally, check, draw
from tests.models.deepseek_tiny import FAMILIES, make_deepseek
from tests.models.hf_tiny import make_hf
from tests.models.llama_tiny import make_llama
from tests.models.qwen_tiny import make_qwen

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module", params=[
    "kimi_k3", "kimi_linear", "llama", "qwen3_next", pytest.param("qwen3_5_moe", marks=pytest.mark.slow), *FAMILIES])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, LLM]]:
    folder = DATA / "kimi_k3_long"
    if request.param == "kimi_linear":
        folder = tmp_path_factory.mktemp("kimi_linear")
        make_hf(folder)
    if request.param == "llama":
        folder = tmp_path_factory.mktemp("llama")
        make_llama(folder)
    if request.param.startswith("qwen"):
        folder = tmp_path_factory.mktemp(request.param)
        make_qwen(request.param, folder)
    if request.param in FAMILIES:
        folder = tmp_path_factory.mktemp(request.param)
        shared = {"indexer_types": ["full", "shared", "full"]} if request.param == "glm_moe_dsa" else {}
        make_deepseek(folder, request.param, num_hidden_layers=3, first_k_dense_replace=1, **shared)
    with LLM(folder, dtype="float32", cache_bytes=8_000_000, max_sequences=2) as lone:
        yield folder, lone


def equal_over(model: tuple[Path, LLM], seeds: range) -> Tally:
    folder, lone = model
    tally = Tally()
    for seed in seeds:
        check(folder, draw(seed, lone.spec.num_vocab), lone, tally)
        assert not tally.failures, f"workload {seed}: {tally.failures[:3]}"
    assert tally.num_preemptions > len(seeds) // 8, "preemption was not exercised"
    assert tally.num_cached_tokens > len(seeds), "no prefix was reused"
    assert tally.near_ties <= max(1, tally.num_tokens / 5_000), f"{tally.near_ties} near ties in {tally.num_tokens} tokens"
    return tally


def test_random_workloads(model: tuple[Path, LLM]) -> None:
    equal_over(model, range(8 if model[1].spec.name in FAMILIES else 25))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_random_workloads(model: tuple[Path, LLM]) -> None:
    equal_over(model, range(1_000, 1_150 if model[1].spec.name in FAMILIES else 1_300))


def test_logits_do_not_depend_on_company(model: tuple[Path, LLM]) -> None:
    """Teacher-forced logits beside running decodes, in forced chunks, equal the lone ones; a changed prompt is the control."""
    folder, lone = model
    prompt = [3 + 7 * i % 300 for i in range(75)]
    want_TV = lone.logits(prompt)
    with LLM(folder, dtype="float32", cache_bytes=8_000_000, max_sequences=6, poison_freed=True) as llm:
        for length in (1, 5, 40):
            llm.engine.submit(prompt[:length], SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))
        llm.engine.step()
        got_TV = llm.logits(prompt, chunks=[1, 2, 4, 68])
        assert float((got_TV - want_TV).abs().max()) <= TOLERANCE
        other_TV = llm.logits([prompt[0] + 1, *prompt[1:]], chunks=[1, 2, 4, 68])
    assert float((other_TV[-1] - want_TV[-1]).abs().max()) > 10 * TOLERANCE
