"""Cold = warm with real models: logits after a hit, multi-turn chats, forks, tails, preemption, resets; all memory poisoned.

Letters: T tokens, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from firstlight import LLM, SamplingParams
from tests.models.hf_tiny import make_hf
from tests.models.qwen_tiny import make_qwen

DATA = Path(__file__).parents[1] / "data"
TOLERANCE = 1e-4
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
GRIDS: dict[str, int | str] = {"auto": "auto", "grid of 8": 8}


@pytest.fixture(scope="module", params=["kimi_k3", "kimi_linear", "qwen3_next"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "kimi_k3":
        return DATA / "kimi_k3_long"
    made = tmp_path_factory.mktemp(request.param)
    if request.param == "qwen3_next":
        make_qwen("qwen3_next", made)
    else:
        make_hf(made)
    return made


@pytest.fixture(scope="module")
def cold(folder: Path) -> Iterator[LLM]:
    with LLM(folder, dtype="float32", cache_bytes=8_000_000, max_sequences=2, prefix_cache=False) as llm:
        yield llm


def warm(folder: Path, **more: Any) -> LLM:
    options: dict[str, Any] = {"tokens_per_block": 4, "chunk_tokens": 8, "max_sequences": 6, "snapshot_tokens": 8, "cache_bytes": 16_000_000} | more
    return LLM(folder, dtype="float32", poison_freed=True, **options)


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(length)]


def assert_equal(cold: LLM, llm: LLM, tokens: list[int], *, hit: bool, chunks: tuple[int, ...] = (), salt: str | None = None) -> int:
    """Logits of the computed tail equal the cold ones; returns where the tail began."""
    want_TV = cold.logits(tokens)
    got_TV, first = llm.logits(tokens, cached=True, chunks=chunks, salt=salt)
    assert len(tokens) == first + len(got_TV)
    assert (first > 0) == hit, f"{first} of {len(tokens)} tokens were cached"
    assert float((got_TV - want_TV[first:]).abs().max()) <= TOLERANCE
    return first


@pytest.mark.parametrize("grid", GRIDS)
def test_lengths_around_every_grid(folder: Path, cold: LLM, grid: str) -> None:
    """B - 1, B, B + 1, 2B - 1, ... around blocks of 4, a grid of 8, and chunks of 8."""
    with warm(folder, snapshot_tokens=GRIDS[grid]) as llm:
        for length in sorted({n + d for n in (4, 8, 12, 16, 24, 32, 40) for d in (-1, 0, 1)}):
            tokens = prompt(length, length)
            llm.generate([tokens], GREEDY)
            assert length - 1 == assert_equal(cold, llm, tokens, hit=True)
            # the request for logits went through the whole prompt and left its states behind the last token
            assert length == assert_equal(cold, llm, [*tokens, 5, 6, 7, 8, 9], hit=True, chunks=(1, 2, 1, 1))


def test_chats_with_an_edited_and_a_regenerated_turn(folder: Path, cold: LLM) -> None:
    with warm(folder, snapshot_tokens="auto") as llm:
        history: list[int] = []
        turns = []
        for turn in range(6):
            history = history + prompt(100 + turn, 7 + turn)
            out = llm.generate([history], GREEDY)[0]
            assert out.tokens == cold.generate([history], GREEDY)[0].tokens
            assert (turn > 0) == (out.num_cached_tokens > 0)
            turns.append(list(history))
            history = history + out.tokens
        again = llm.generate([turns[4]], GREEDY)[0]
        assert len(turns[4]) - 1 == again.num_cached_tokens
        assert again.tokens == cold.generate([turns[4]], GREEDY)[0].tokens
        edited = turns[2] + prompt(999, 9)
        assert len(turns[2]) - 1 == assert_equal(cold, llm, edited, hit=True)
        assert_equal(cold, llm, turns[5], hit=True)


def test_forks_beside_running_decodes(folder: Path, cold: LLM) -> None:
    """Four forks of one prefix at once, then again: what is stored is never written."""
    stem = prompt(1, 21)
    forks = [stem + prompt(10 + n, 3 + n) for n in range(4)]
    want = [cold.generate([fork], GREEDY)[0].tokens for fork in forks]
    with warm(folder, snapshot_tokens="auto") as llm:
        llm.generate([stem], GREEDY)
        before = stored(llm)
        running = llm.engine.submit(prompt(77, 9), SamplingParams(max_tokens=80, temperature=0, ignore_eos=True))
        llm.engine.step()
        for _ in range(2):
            outs = llm.generate(forks, GREEDY)
            assert want == [out.tokens for out in outs]
            assert all(out.num_cached_tokens >= len(stem) - 1 for out in outs)
        after = stored(llm)
        llm.engine.cancel(running)
    assert before and before.items() <= after.items(), "a stored block has changed"


def stored(llm: LLM) -> dict[tuple[str, bytes], tuple[float, ...]]:
    """Sums over the bytes of everything that is published, by key."""
    machine = llm.machine
    assert machine is not None
    index, found = machine.cache.index, {}
    for rows in index.rows():
        found["rows", rows.key] = content(llm, "rows", rows.blocks)
    for snapshot in index.snapshots():
        found["state", snapshot.key] = content(llm, "state", snapshot.slots)
    return found


def content(llm: LLM, kind: str, blocks: tuple[int, ...]) -> tuple[float, ...]:
    machine = llm.machine
    assert machine is not None
    names = [name for name, group in machine.pool.groups.items() if group.kind == kind]
    sums = []
    for name, block in zip(names, blocks, strict=True):
        for layer in machine.spec.layers:
            if any(cache.group == name for cache in layer.mixer.cache()):
                sums += [float(tensor[block].double().sum()) for tensor in machine.pool.layer(layer.index).values()]
    return tuple(sums)


@pytest.mark.parametrize("tail", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_short_tails_in_short_chunks(folder: Path, cold: LLM, tail: int, size: int) -> None:
    with warm(folder) as llm:
        stem = prompt(5, 18)
        llm.generate([stem], GREEDY)
        assert_equal(cold, llm, stem + prompt(tail, tail), hit=True, chunks=(size,) * (tail // size))


def test_preempted_and_resumed_from_its_own_states(folder: Path, cold: LLM) -> None:
    tokens = prompt(3, 30)
    want = cold.generate([tokens], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))[0].tokens
    with warm(folder, snapshot_tokens="auto") as llm:
        seq_id = llm.engine.submit(tokens, SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
        got = []
        for step in range(60):
            if step in (2, 9, 15):
                llm.engine.preempt(seq_id)
            got += [event.token for event in llm.engine.step() if event.token is not None]
        assert want == got
        assert 3 == llm.stats()["preemptions"]
        assert 0 == llm.stats()["recomputed_tokens"], "states were kept, nothing had to be computed again"


def test_reset_while_decoding(folder: Path, cold: LLM) -> None:
    tokens = prompt(4, 25)
    want = cold.generate([tokens], GREEDY)[0].tokens
    with warm(folder) as llm:
        llm.generate([tokens], GREEDY)
        llm.engine.submit(tokens, GREEDY)
        got = [event.token for event in llm.engine.step() if event.token is not None]
        llm.reset_prefix_cache()
        assert_equal(cold, llm, tokens, hit=False)
        while not llm.engine.idle():
            got += [event.token for event in llm.engine.step() if event.token is not None]
        assert want == got


def test_shared_beginning_of_two_is_used_by_a_third(folder: Path, cold: LLM) -> None:
    stem = prompt(6, 24)
    with warm(folder, snapshot_tokens="auto") as llm:
        for n in range(2):
            llm.generate([stem + prompt(50 + n, 7)], GREEDY)
        assert 24 == assert_equal(cold, llm, stem + prompt(60, 7), hit=True)


def test_controls(folder: Path, cold: LLM) -> None:
    tokens = prompt(8, 30)
    with warm(folder) as llm:
        llm.generate([tokens], GREEDY, salt="a")
        assert 29 == assert_equal(cold, llm, tokens, hit=True, salt="a")
        assert_equal(cold, llm, tokens, hit=False, salt="b")
        assert_equal(cold, llm, [tokens[0] + 1, *tokens[1:]], hit=False, salt="a")
    with warm(folder, prefix_cache=False) as llm:
        llm.generate([tokens], GREEDY)
        assert_equal(cold, llm, tokens, hit=False)


def test_another_dtype_has_other_keys(folder: Path) -> None:
    keys = set()
    for dtype in ("float32", "bfloat16"):
        with LLM(folder, dtype=dtype, cache_bytes=4_000_000, max_sequences=2) as llm:
            assert llm.machine is not None
            keys.add(llm.machine.cache.identity)
    assert 2 == len(keys)


def test_random_histories(folder: Path, cold: LLM) -> None:
    """Prompts cut from each other, several at once, in a cache that must evict."""
    rng = random.Random(9)
    with warm(folder, cache_bytes=3_000_000, max_sequences=3, snapshot_tokens="auto", max_context=120) as llm:
        pool = [prompt(n, 40) for n in range(3)]
        hits = 0
        for _ in range(12):
            batch = [rng.choice(pool)[: rng.randint(1, 40)] + prompt(rng.randrange(50), rng.randint(0, 6)) for _ in range(3)]
            for tokens, out in zip(batch, llm.generate(batch, GREEDY), strict=True):
                want_TV = cold.logits([*tokens, *out.tokens])
                for position, token in enumerate(out.tokens):
                    row_V: Tensor = want_TV[len(tokens) - 1 + position]
                    top = torch.topk(row_V, 2).values
                    assert token == int(row_V.argmax()) or float(top[0] - top[1]) < 2e-4
                hits += out.num_cached_tokens
            pool.append(batch[0])
            assert llm.machine is not None
            llm.machine.cache.check()
        assert hits > 0
