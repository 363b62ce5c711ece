"""What a model folder says about sampling and about the end of a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from firstlight.spec.errors import ConfigError, RequestError
from firstlight.spec.sampling import SamplingParams
from firstlight.text.generation import GenerationDefaults


def read(folder: Path, generation: Any = None, config: Any = None) -> GenerationDefaults:
    """Defaults of a folder with these files."""
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return GenerationDefaults.read(folder)


def test_an_empty_folder_says_nothing(tmp_path: Path) -> None:
    assert GenerationDefaults() == read(tmp_path)
    assert SamplingParams() == read(tmp_path).params()


@pytest.mark.parametrize(("generation", "config", "eos_ids", "bos_id"), [
    ({"eos_token_id": 7}, {}, (7,), None),
    ({"eos_token_id": [7, 8]}, {"eos_token_id": 8}, (7, 8), None),
    ({"eos_token_id": 163586}, {"eos_token_id": 163585, "bos_token_id": 163584}, (163586, 163585), 163584),
    (None, {"eos_token_id": [3, 4], "bos_token_id": 1}, (3, 4), 1),
    (None, {"text_config": {"eos_token_id": 2, "bos_token_id": 1}}, (2,), 1),
    ({}, {"eos_token_id": None, "text_config": {"eos_token_id": [5]}}, (5,), None),
    ({"bos_token_id": 0}, {"bos_token_id": 9}, (), 0),
])
def test_ids(tmp_path: Path, generation: Any, config: Any, eos_ids: tuple[int, ...], bos_id: int | None) -> None:
    defaults = read(tmp_path, generation, config)
    assert (eos_ids, bos_id) == (defaults.eos_ids, defaults.bos_id)


def test_sampling(tmp_path: Path) -> None:
    defaults = read(tmp_path, {
        "do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.05, "max_new_tokens": 2048,
        "transformers_version": "4.51.0", "pad_token_id": 0, "num_beams": 4, "guidance_scale": 2.0,
    })
    assert ("num_beams", "guidance_scale") == defaults.unread
    assert SamplingParams(
        temperature=0.6, top_p=0.95, top_k=20, min_p=0.01, repetition_penalty=1.05, max_tokens=2048) == defaults.params()
    assert SamplingParams(
        temperature=0, top_p=0.95, top_k=20, min_p=0.01, repetition_penalty=1.05, max_tokens=5, seed=3) == defaults.params(
            temperature=0, max_tokens=5, seed=3, top_p=None)


def test_no_sampling_means_the_likeliest_token(tmp_path: Path) -> None:
    assert read(tmp_path, {"do_sample": False, "temperature": 0.6}).params().greedy
    assert not read(tmp_path, {"do_sample": False}).params(temperature=0.5).greedy
    assert not read(tmp_path, {"temperature": 0.6}).params().greedy


def test_minus_one_switches_top_k_off(tmp_path: Path) -> None:
    assert 0 == read(tmp_path, {"top_k": -1}).params().top_k


@pytest.mark.parametrize(("generation", "message"), [
    ("{", "cannot be read as JSON"), ("[]", "holds a list"), ('{"temperature": NaN}', "`temperature` is nan"),
    ({"temperature": -1}, "`temperature` is -1"), ({"temperature": "hot"}, "`temperature` is 'hot'"), ({"top_p": 2}, "`top_p` is 2"),
    ({"top_k": 1.5}, "`top_k` is 1.5"), ({"eos_token_id": "</s>"}, "neither an id nor a list"), ({"eos_token_id": [1, -1]}, "neither an id"),
    ({"eos_token_id": True}, "neither an id"), ({"bos_token_id": 1.0}, "neither an id"), ({"do_sample": "no"}, "`do_sample` is 'no'"),
    ({"max_new_tokens": 0}, "`max_tokens` is 0"),
])
def test_damage(tmp_path: Path, generation: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json") as raised:
        read(tmp_path, generation)
    assert message in raised.value.fact
    assert raised.value.fix


@pytest.mark.parametrize(("field", "values"), [
    ("max_tokens", [0, -1, 1.5, "9", None, True, 10**30]),
    ("temperature", [-0.1, float("nan"), float("inf"), 10**400, "1", None, True]),
    ("top_p", [-0.1, 1.1, float("nan"), None]),
    ("top_k", [-1, 2.5, float("nan"), None]),
    ("min_p", [-0.1, 1.1, float("nan")]),
    ("min_tokens", [-1, 0.5]),
    ("seed", [1.5, "x", 2**70, True]),
    ("logprobs", [-1, 1.5, True]),
    ("presence_penalty", [-2.1, 2.1, float("nan")]),
    ("frequency_penalty", [-2.1, 2.1, None]),
    ("repetition_penalty", [0, -1, float("nan")]),
    ("stop", [("",), (5,), 5, {"a": 1}]),
    ("stop_token_ids", [(-1,), ("a",), (1.0,), (True,), 5]),
    ("ignore_eos", [None, 1, "yes"]),
    ("logit_bias", [{1: float("nan")}, {1: float("inf")}, {"1": 1.0}, {-1: 1.0}, {1: "a"}, {1: True}, [1], 5, {1: 10**400}]),
])
def test_sampling_params_refuse(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RequestError, match=f"`{field}`"):
            SamplingParams(**{field: value})


def test_sampling_params_accept() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[1, 2], logit_bias={5: -100}, top_k=0, seed=None, logprobs=None)  # type: ignore[arg-type]
    assert (("x",), (1, 2)) == (params.stop, params.stop_token_ids)
    assert () == SamplingParams(stop=None).stop  # type: ignore[arg-type]
