"""Cold = warm where a cache has rows only, in one group or two: logits after a hit, chats, forks, preemption; all memory poisoned.

Letters: T tokens, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from firstlight import LLM, SamplingParams
from tests.models.deepseek_tiny import make_deepseek
from tests.models.llama_tiny import make_llama

TOLERANCE = 1e-4
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
GROUPS = {"llama": {"gqa"}, "deepseek_v32": {"mla", "index"}, "glm_moe_dsa": {"mla", "index"}}
"""Model -> its cache groups, all of rows."""


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(length)]


@pytest.fixture(scope="module", params=GROUPS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp(request.param)
    if request.param == "llama":
        make_llama(made)
    else:
        make_deepseek(made, request.param)
    return made


def llm_for(folder: Path, **more: Any) -> LLM:
    options: dict[str, Any] = {"cache_bytes": 8_000_000, "max_sequences": 4, "poison_freed": True} | more
    return LLM(folder, dtype="float32", **options)


@pytest.fixture(scope="module")
def cold(folder: Path) -> Iterator[LLM]:
    with llm_for(folder, prefix_cache=False) as llm:
        yield llm


def warm(folder: Path, **more: Any) -> LLM:
    return llm_for(folder, **{"tokens_per_block": 4, "chunk_tokens": 8, "max_sequences": 6} | more)


def resumed(cold: LLM, llm: LLM, tokens: list[int], **more: Any) -> int:
    """Logits of the computed tail equal the cold ones; returns where the tail began."""
    want_TV = cold.logits(tokens)
    got_TV, first = llm.logits(tokens, cached=True, **more)
    assert len(tokens) == first + len(got_TV)
    apart_T = (got_TV - want_TV[first:]).abs().amax(-1) > TOLERANCE
    assert not bool(apart_T.any()) or first + int(apart_T.int().argmax()) >= first_tie(cold, tokens, want_TV)
    return first


def first_tie(cold: LLM, tokens: list[int], want_TV: Tensor) -> int:
    """From where on the cold run differs from itself when it is cut otherwise: two rows score equal for an indexer, or two experts for a router,
    and rounding decides which is chosen."""
    apart_T = (cold.logits(tokens, chunks=[1] * len(tokens)) - want_TV).abs().amax(-1) > 100 * TOLERANCE
    return int(apart_T.int().argmax()) if bool(apart_T.any()) else len(tokens)


def test_prefixes_resume_at_every_block_edge(folder: Path, cold: LLM) -> None:
    """There is no state group: no snapshot is kept, and any cut of what was computed is found up to the last full block."""
    with warm(folder) as llm:
        llm.generate([prompt(1, 41)], GREEDY)
        assert llm.machine is not None
        assert (GROUPS[llm.machine.spec.name], 0) == (set(llm.stats()["groups"]), llm.machine.cache.index.num_snapshots)
        for length in range(2, 42):
            cut = prompt(1, 41)[:length]
            match = llm.explain([*cut, 3, 5])
            assert length // 4 * 4 == match["matched_tokens"], match
            assert length // 4 * 4 == resumed(cold, llm, [*cut, 299 - cut[0], 5, 6])


def test_lengths_around_every_block(folder: Path, cold: LLM) -> None:
    """All but the last token at most, in full blocks."""
    for length in (3, 4, 5, 7, 8, 9, 15, 16, 17, 39, 40, 41):
        with warm(folder) as llm:
            llm.generate([prompt(length, length)], GREEDY)
            assert (length - 1) // 4 * 4 == resumed(cold, llm, prompt(length, length))
            assert length // 4 * 4 == resumed(cold, llm, [*prompt(length, length), 5, 6, 7, 8, 9], chunks=(1, 2, 1, 1))


def test_chats_forks_and_controls(folder: Path, cold: LLM) -> None:
    with warm(folder) as llm:
        history: list[int] = []
        for turn in range(5):
            history = history + prompt(100 + turn, 7 + turn)
            out = llm.generate([history], GREEDY)[0]
            assert out.tokens == cold.generate([history], GREEDY)[0].tokens
            assert (turn > 0) == (out.num_cached_tokens > 0)
            history = history + out.tokens
        forks = [history + prompt(10 + n, 3 + n) for n in range(4)]
        outs = llm.generate(forks, GREEDY)
        assert [cold.generate([fork], GREEDY)[0].tokens for fork in forks] == [out.tokens for out in outs]
        assert all(out.num_cached_tokens >= len(history) // 4 * 4 - 4 for out in outs)
        assert 0 == resumed(cold, llm, history, salt="other")
        assert 0 == resumed(cold, llm, [history[0] + 1, *history[1:]])


def test_preempted_and_resumed(folder: Path, cold: LLM) -> None:
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    want = cold.generate([prompt(3, 30)], params)[0].tokens
    with warm(folder) as llm:
        seq_id, got = llm.engine.submit(prompt(3, 30), params), list[int]()
        for step in range(60):
            if step in (2, 9, 15):
                llm.engine.preempt(seq_id)
            got += [event.token for event in llm.engine.step() if event.token is not None]
        assert (want, 3) == (got, llm.stats()["preemptions"])


@pytest.mark.parametrize("field", ["latent", "index_key"])
def test_every_group_is_part_of_what_is_cached(tmp_path: Path, field: str) -> None:
    """Control: with other rows in one group, of latents or of the indexer's keys, what follows a hit differs."""
    make_deepseek(tmp_path, "deepseek_v32")
    tokens = prompt(7, 40)
    with llm_for(tmp_path, prefix_cache=False) as llm:
        want_TV = llm.logits([*tokens, *prompt(8, 9)])
    with warm(tmp_path) as llm:
        llm.generate([tokens], GREEDY)
        assert llm.machine is not None
        for layer in llm.machine.spec.layers:
            rows = llm.machine.pool.layer(layer.index)[field]
            rows.copy_(rows.roll(1, dims=1))
        got_TV, first = llm.logits([*tokens, *prompt(8, 9)], cached=True)
    assert 40 == first
    assert float((got_TV - want_TV[first:]).abs().max()) > 10 * TOLERANCE
