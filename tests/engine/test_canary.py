"""The canary: silent while hits are right, loud once one is wrong, and then no prefix is used any more."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from firstlight import LLM, SamplingParams
from firstlight.spec.errors import ConfigError

FOLDER = Path(__file__).parents[1] / "data/kimi_k3_long"
GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
PROMPT = [3 + 7 * i % 400 for i in range(40)]


@pytest.fixture
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    dtype = getattr(request, "param", "float32")
    with LLM(FOLDER, dtype=dtype, cache_bytes=8_000_000, max_sequences=4, verify_hits=1.0, poison_freed=True) as llm:
        yield llm


def settle(llm: LLM) -> None:
    while not llm.engine.idle():
        assert [] == llm.engine.step(), "a client heard of a check"


@pytest.mark.parametrize("llm", ["float32", "bfloat16"], indirect=True)
def test_right_hits_are_checked_in_silence(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    first = llm.generate([PROMPT], GREEDY)[0]
    for n in range(3):
        out = llm.generate([PROMPT, [*PROMPT, 9, 8, 7 + n]], GREEDY)
        assert first.tokens == out[0].tokens
        assert all(each.num_cached_tokens > 0 for each in out)
        settle(llm)
    told = llm.stats()["canary"]
    assert (6, 0) == (told["checked"], told["mismatches"])
    assert told["largest"] <= (1e-5 if llm.spec.dtype == "float32" else 0.15), "the tolerance is too close"
    assert [] == caplog.records
    assert llm.stats()["prefix"]["on"]


@pytest.mark.parametrize("harm", ["state", "rows"])
@pytest.mark.parametrize("llm", ["float32", "bfloat16"], indirect=True)
def test_a_wrong_hit_turns_the_cache_off(llm: LLM, harm: str, caplog: pytest.LogCaptureFixture) -> None:
    want = llm.generate([PROMPT], GREEDY)[0].tokens
    machine = llm.machine
    assert machine is not None
    for layer in machine.spec.layers:
        for name, tensor in machine.pool.layer(layer.index).items():
            if (name == "latent") == (harm == "rows"):
                tensor.nan_to_num_().mul_(-1.0)
    llm.generate([PROMPT], GREEDY)
    with caplog.at_level(logging.ERROR, logger="firstlight"):
        settle(llm)
    told = llm.stats()
    assert 1 == told["canary"]["mismatches"]
    assert not told["prefix"]["on"]
    assert "resumed from a cached prefix" in caplog.text
    again = llm.generate([PROMPT], GREEDY)[0]
    assert 0 == again.num_cached_tokens
    assert machine.spec.dtype != "float32" or want == again.tokens


def test_only_a_share_is_checked() -> None:
    with LLM(FOLDER, dtype="float32", cache_bytes=8_000_000, max_sequences=4, verify_hits=0.3) as llm:
        llm.generate([PROMPT], GREEDY)
        llm.generate([PROMPT] * 30, GREEDY)
        settle(llm)
        assert 3 <= llm.stats()["canary"]["checked"] <= 17


def test_a_share_beyond_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="verify_hits"):
        LLM(FOLDER, verify_hits=1.5)
