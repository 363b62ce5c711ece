"""Llama against transformers: logits however split, company, tied heads.

Letters: T tokens, V vocabulary.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from firstlight import LLM, SamplingParams
from firstlight.spec.errors import CheckpointError
from tests.models.hf_tiny import reference_logits
from tests.models.llama_tiny import LLAMA3, make_llama

TOLERANCE = 1e-4
NUM_TOKENS = 130
ORDERS = {"portable": ("portable", "reference"), "reference": ("reference",)}
FAMILY: dict[str, dict[str, Any]] = {
    "plain": {}, "llama3 rope": {"rope_parameters": LLAMA3},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}},
    "one key head": {"num_key_value_heads": 1}, "tied": {"tie_word_embeddings": True}, "narrow heads": {"head_dim": 4},
}
SPLITS = {"one shot": [NUM_TOKENS], "chunks": [1, 7, 3, 16, 2, 5, 64, 1, 31], "token by token": [1] * NUM_TOKENS, "engine's own": None}

Made = tuple[Path, Any, list[int], Tensor]
"""Folder, transformers' model, prompt, its logits."""


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(length)]


@pytest.fixture(scope="module", params=FAMILY)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("llama")
    model = make_llama(folder, **FAMILY[request.param])
    ids = prompt(7, NUM_TOKENS)
    return folder, model, ids, reference_logits(model, ids)


def llm_for(folder: Path, order: str = "portable", **more: Any) -> LLM:
    options: dict[str, Any] = {"cache_bytes": 8_000_000, "max_sequences": 4, "poison_freed": True} | more
    return LLM(folder, dtype="float32", backends=ORDERS[order], **options)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("how", SPLITS)
def test_logits(made: Made, order: str, how: str) -> None:
    folder, _, ids, want_TV = made
    with llm_for(folder, order) as llm:
        got_TV = llm.logits(ids, chunks=SPLITS[how])
    assert want_TV.shape == got_TV.shape
    assert float((got_TV - want_TV).abs().max()) <= TOLERANCE


def test_another_prompt_differs(made: Made) -> None:
    """Control: changing the first token changes the last logits."""
    folder, _, ids, want_TV = made
    with llm_for(folder) as llm:
        got_TV = llm.logits([(ids[0] + 1) % 300, *ids[1:]])
    assert float((got_TV[-1] - want_TV[-1]).abs().max()) > 10 * TOLERANCE


def test_batched_greedy_tokens_are_those_of_transformers(made: Made) -> None:
    """Unlike lengths in one batch, each token the argmax of what transformers computes over prompt and answer."""
    folder, model, ids, _ = made
    prompts = [ids[:length] for length in (1, 20, 33, 90)]
    with llm_for(folder) as llm:
        outs = llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    for given, out in zip(prompts, outs, strict=True):
        want_TV = reference_logits(model, [*given, *out.tokens])
        assert want_TV[len(given) - 1:-1].argmax(-1).tolist() == out.tokens


@pytest.mark.parametrize("damage", ["", "value", "dtype"])
def test_a_head_beside_a_tied_embedding(tmp_path: Path, damage: str) -> None:
    """Taken when it is the embedding byte for byte, refused with the fact when it is not."""
    model = make_llama(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    if damage == "value":
        head[5, 7] += 1.0
    save_file(tensors | {"lm_head.weight": head.bfloat16() if damage == "dtype" else head}, tmp_path / "model.safetensors")
    if damage:
        with pytest.raises(CheckpointError, match=r"untied \(1\): lm_head.weight") as caught:
            llm_for(tmp_path)
        told = {"value": "differ in", "dtype": "is bfloat16 [320, 48], model.embed_tokens.weight is float32 [320, 48]"}[damage]
        assert told in caught.value.fact
        return
    with llm_for(tmp_path) as llm:
        assert llm.machine is not None
        assert "repeats embed.weight, which the head is tied to" in llm.machine.report.num_skipped
        assert float((llm.logits(prompt(2, 9)) - reference_logits(model, prompt(2, 9))).abs().max()) <= TOLERANCE
