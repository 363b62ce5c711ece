"""Qwen3-Next and Qwen3.5 against transformers: logits however split and in any company, and a cost per token that does not grow.

Letters: T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from firstlight import LLM, SamplingParams
from tests.engine import test_nonfinite as nonfinite
from tests.engine.test_align import llm_for, splits
from tests.engine.test_flat import calls_per_token
from tests.models.hf_tiny import reference_logits
from tests.models.qwen_tiny import make_qwen, write_published

TOLERANCE = 1e-4
NUM_TOKENS = 330
LAYOUTS = ("qwen3_next", "qwen3_5_moe_text", "qwen3_5_moe", "published")
VARIANTS: dict[str, dict[str, Any]] = {
    "as many value heads as key heads": {"linear_num_value_heads": 3},
    "one key head": {"linear_num_key_heads": 1, "num_key_value_heads": 1},
    "a wide window": {"linear_conv_kernel_dim": 6},
    "raw expert weights": {"norm_topk_prob": False},
    "every second layer dense": {"mlp_only_layers": [], "decoder_sparse_step": 2},
    "tied": {"tie_word_embeddings": True},
    "all channels turn": {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 1.0}},
}

Made = tuple[Path, Any, list[int], Tensor]
"""Folder, transformers' model, prompt, its logits."""


def ids_of(length: int) -> list[int]:
    return torch.randint(3, 320, (length,), generator=torch.Generator().manual_seed(7)).tolist()


@pytest.fixture(scope="module", params=LAYOUTS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("qwen")
    published = request.param == "published"
    model = make_qwen("qwen3_5_moe" if published else request.param, None if published else folder)
    if published:
        write_published(model, folder)
    ids = ids_of(NUM_TOKENS)
    return folder, model, ids, reference_logits(model, ids)


@pytest.mark.parametrize("how", splits(1))
def test_logits(made: Made, how: str) -> None:
    folder, _, ids, want_TV = made
    with llm_for(folder, "portable") as llm:
        got_TV = llm.logits(ids, chunks=splits(len(ids))[how])
    assert want_TV.shape == got_TV.shape
    assert float((got_TV - want_TV).abs().max()) <= TOLERANCE


def test_recycled_slots(made: Made) -> None:
    folder, _, ids, _ = made
    with llm_for(folder, "portable") as llm:
        first, second = (llm.logits(ids, chunks=splits(len(ids))["chunks"]) for _ in range(2))
    assert torch.equal(first, second), "the second sequence in the same slots differs"


@pytest.mark.parametrize("how", ["one shot", "chunks"])
def test_logits_of_the_references(made: Made, how: str) -> None:
    folder, _, ids, want_TV = made
    with llm_for(folder, "reference") as llm:
        got_TV = llm.logits(ids, chunks=splits(len(ids))[how])
    assert float((got_TV - want_TV).abs().max()) <= TOLERANCE


def test_every_token_matters_to_the_last_one(made: Made) -> None:
    """Control: also those five chunks of 64 back, so a lost or stale state would show."""
    folder, _, ids, want_TV = made
    with llm_for(folder, "portable") as llm:
        for place in (0, 130):
            got_TV = llm.logits([*ids[:place], 3 + (ids[place] + 1) % 300, *ids[place + 1:]])
            assert float((got_TV[-1] - want_TV[-1]).abs().max()) > 10 * TOLERANCE


def test_batched_greedy_tokens_are_those_of_transformers(made: Made) -> None:
    """Unlike lengths in one batch, each token the argmax of what transformers computes over prompt and answer."""
    folder, model, ids, _ = made
    prompts = [ids[:length] for length in (1, 2, 65, 130)]
    with llm_for(folder, "portable") as llm:
        outs = llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    for given, out in zip(prompts, outs, strict=True):
        want_TV = reference_logits(model, [*given, *out.tokens])
        assert want_TV[len(given) - 1:-1].argmax(-1).tolist() == out.tokens


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(tmp_path: Path, variant: str) -> None:
    changes = VARIANTS[variant]
    model, ids = make_qwen("qwen3_next", tmp_path, **changes), ids_of(100)
    want_TV = reference_logits(model, ids)
    with llm_for(tmp_path, "portable") as llm:
        for chunks in ([100], [1, 7, 70, 2, 20]):
            assert float((llm.logits(ids, chunks=chunks) - want_TV).abs().max()) <= TOLERANCE


def test_what_is_left_out_is_said(made: Made) -> None:
    folder, model, _, _ = made
    with LLM(folder, dtype="float32", cache_bytes=8_000_000) as llm:
        assert llm.machine is not None
        skipped = llm.machine.report.num_skipped
    vision = sum(name.startswith("model.visual.") for name, _ in model.named_parameters())
    drafts = 2 if "mtp" in (folder / "config.json").read_text() else 0
    counts = {"image tower": vision, "multi-token prediction": drafts}
    assert {reason: count for reason, count in counts.items() if count} == {reason.split(":")[0]: count for reason, count in skipped.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen3_next")
    make_qwen("qwen3_next", made)
    return made


@pytest.mark.parametrize("place", [(0, "recurrent", math.nan), (3, "conv", math.inf), (1, "mixer", math.nan), (2, "ffn", math.inf)], ids=str)
def test_a_ruined_value_ends_its_request_alone(folder: Path, place: tuple[int, str, float]) -> None:
    """As for the other families, in tests/engine/test_nonfinite.py: seen in its step, scrubbed, nobody else touched."""
    with nonfinite.crowded(folder) as llm:
        lone = [llm.generate([prompt], nonfinite.GREEDY)[0].tokens for prompt in nonfinite.PROMPTS]
        nonfinite.check(nonfinite.Run(llm, nonfinite.LENGTHS[nonfinite.VICTIM] + 2, place), lone, 3)
        assert nonfinite.finite_memory(llm)


def test_calls_per_decoded_token_are_flat(folder: Path) -> None:
    with LLM(folder, dtype="float32", cache_bytes=64_000_000, max_sequences=2) as llm:
        short, long = calls_per_token(llm, 500), calls_per_token(llm, 3_600)
    assert short > 100, "nothing was counted"
    assert abs(long - short) <= 0.02 * short, f"{short:.0f} calls at 500, {long:.0f} at 3,600"
