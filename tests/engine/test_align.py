"""Logits of the whole sequence against references nobody here wrote: however split, with NaN in all memory that nobody wrote.

Letters: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from firstlight import LLM
from tests.models.hf_tiny import make_hf, reference_logits, write_original

DATA = Path(__file__).parents[1] / "data"
TOLERANCE = 1e-4
CACHE_BYTES = 8_000_000
ORDERS = {"portable": ("portable", "reference"), "reference": ("reference",)}


def splits(num_tokens: int) -> dict[str, list[int] | None]:
    """One shot, irregular chunks, token by token."""
    sizes, left = [], num_tokens
    for size in [1, 7, 3, 16, 2, 5, 64, 1, 47] * 20:
        sizes.append(min(size, left))
        left -= sizes[-1]
        if not left:
            break
    return {"one shot": [num_tokens], "chunks": sizes, "token by token": [1] * num_tokens, "engine's own": None}


def llm_for(folder: Path, order: str, **more: object) -> LLM:
    return LLM(folder, dtype="float32", backends=ORDERS[order], cache_bytes=CACHE_BYTES, poison_freed=True, max_sequences=4, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=["kimi_k3_tiny", "kimi_k3_long"])
def k3(request: pytest.FixtureRequest) -> tuple[Path, list[int], Tensor]:
    folder = DATA / request.param
    oracle = load_file(folder / "oracle.safetensors")
    return folder, oracle["ids"][0].tolist(), oracle["text_logits"][0]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("how", splits(1))
def test_k3_logits(k3: tuple[Path, list[int], Tensor], order: str, how: str) -> None:
    folder, ids, want_TV = k3
    with llm_for(folder, order) as llm:
        got_TV = llm.logits(ids, chunks=splits(len(ids))[how])
        again_TV = llm.logits(ids, chunks=splits(len(ids))[how])
    assert want_TV.shape == got_TV.shape
    assert float((got_TV - want_TV).abs().max()) <= TOLERANCE
    assert torch.equal(got_TV, again_TV), "the second sequence in the same slots differs"


def test_another_prompt_differs(k3: tuple[Path, list[int], Tensor]) -> None:
    """Control: changing the first token changes the last logits, so old state reaches the end."""
    folder, ids, want_TV = k3
    with llm_for(folder, "portable") as llm:
        got_TV = llm.logits([(ids[0] + 1) % 512, *ids[1:]])
    assert float((got_TV[-1] - want_TV[-1]).abs().max()) > 10 * TOLERANCE


@pytest.fixture(scope="module", params=["saved", "original"])
def kimi_linear(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[int], Tensor]]:
    folder = tmp_path_factory.mktemp(f"kimi_linear_{request.param}")
    model = make_hf(folder if request.param == "saved" else None)
    if request.param == "original":
        write_original(model, folder)
    ids = torch.randint(3, 320, (330,), generator=torch.Generator().manual_seed(7)).tolist()
    yield folder, ids, reference_logits(model, ids)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("how", splits(1))
def test_kimi_linear_logits(kimi_linear: tuple[Path, list[int], Tensor], order: str, how: str) -> None:
    folder, ids, want_TV = kimi_linear
    with llm_for(folder, order) as llm:
        got_TV = llm.logits(ids, chunks=splits(len(ids))[how])
    assert float((got_TV - want_TV).abs().max()) <= TOLERANCE


def test_greedy_tokens_are_those_of_the_logits(k3: tuple[Path, list[int], Tensor]) -> None:
    """Generated tokens are the argmax of logits computed in one shot over prompt and answer."""
    from firstlight import SamplingParams

    folder, ids, _ = k3
    with llm_for(folder, "portable") as llm:
        out = llm.generate([ids[:20]], SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))[0]
        want_TV = llm.logits([*ids[:20], *out.tokens])
    assert 24 == len(out.tokens)
    assert want_TV[19:-1].argmax(-1).tolist() == out.tokens
    assert "length" == out.finish_reason
