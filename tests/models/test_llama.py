"""Llama from its config alone: exact numbers, every key read, every field matters, what is not implemented refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from firstlight.models.registry import read
from firstlight.spec.errors import ConfigError
from firstlight.spec.weights import Landing, Skip
from tests.models.llama_tiny import LLAMA3, make_llama

# meta-llama/Llama-3.1-8B-Instruct, the published spelling
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 128256,
}
# HuggingFaceTB/SmolLM2-135M-Instruct
SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664, "intermediate_size": 1536, "is_llama_config": True,
    "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30,
    "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
    "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 49152,
}


def test_published_numbers() -> None:
    large, small = read(LLAMA_8B).spec, read(SMOLLM2).spec
    assert (8_030_261_248, 134_515_008) == (large.num_params, small.num_params)
    # 32 layers of 8 keys and values of 128 channels in bf16; 30 of 3 of 64
    assert (131_072, 23_040) == (large.row_bytes_per_token, small.row_bytes_per_token)
    assert (0, 0) == (large.state_bytes_per_sequence, small.state_bytes_per_sequence)
    assert (131_072, 8_192) == (large.max_context, small.max_context)
    assert ((128001, 128008, 128009), (2,)) == (large.stop_ids, small.stop_ids)


def test_flops() -> None:
    """Per earlier token: 32 layers x 32 heads x 2 x (128 + 128)."""
    spec = read(LLAMA_8B).spec
    assert 32 * 32 * 2 * 256 * 1000 == spec.flops(1, 5_000) - spec.flops(1, 4_000)


@pytest.mark.parametrize("config", [LLAMA_8B, SMOLLM2])
def test_every_key_is_read(config: dict[str, Any]) -> None:
    found = read(config)
    assert () == found.unread
    assert all(found.ignored.values())


def test_framework_spelling_is_the_same_network() -> None:
    """transformers 5 writes `dtype` and puts both rope keys into `rope_parameters`."""
    theirs = {key: value for key, value in LLAMA_8B.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
    theirs |= {"rope_parameters": {**LLAMA_8B["rope_scaling"], "rope_theta": 500000.0}, "dtype": "bfloat16", "head_dim": 128}
    assert read(LLAMA_8B).spec == read(theirs).spec
    assert () == read(theirs).unread
    older = {**LLAMA_8B["rope_scaling"], "type": "llama3"}
    del older["rope_type"]
    assert read(LLAMA_8B).spec == read(LLAMA_8B | {"rope_scaling": older}).spec


def test_what_transformers_writes_is_read_to_the_end(tmp_path: Path) -> None:
    make_llama(tmp_path, rope_parameters=LLAMA3)
    assert () == read(tmp_path).unread


CHANGES: list[tuple[str, Any]] = [
    ("hidden_size", 2048), ("intermediate_size", 1024), ("num_hidden_layers", 4), ("num_attention_heads", 16), ("num_key_value_heads", 4),
    ("num_key_value_heads", None), ("head_dim", 64), ("max_position_embeddings", 4096), ("rms_norm_eps", 1e-6), ("vocab_size", 1000),
    ("tie_word_embeddings", True), ("torch_dtype", "float32"), ("bos_token_id", 1), ("eos_token_id", 2), ("eos_token_id", None),
    ("rope_theta", 10000.0), ("rope_scaling", None), ("rope_scaling", {"rope_type": "linear", "factor": 8.0}),
    *(("rope_scaling", {**LLAMA_8B["rope_scaling"], key: value}) for key, value in (
        ("factor", 4.0), ("low_freq_factor", 2.0), ("high_freq_factor", 8.0), ("original_max_position_embeddings", 4096))),
]


@pytest.mark.parametrize(("key", "value"), CHANGES, ids=lambda value: str(value)[:40])
def test_every_field_matters(key: str, value: Any) -> None:
    assert read(LLAMA_8B).spec != read(LLAMA_8B | {key: value}).spec


BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("hidden_size", {"hidden_size": None}), ("hidden_size", {"hidden_size": "4096"}), ("hidden_size", {"hidden_size": 4100}),
    ("num_key_value_heads", {"num_key_value_heads": 5}), ("num_key_value_heads", {"num_key_value_heads": 64}), ("head_dim", {"head_dim": 0}),
    ("turn in pairs", {"head_dim": 65}), ("hidden_act", {"hidden_act": "gelu"}), ("attention_bias", {"attention_bias": True}),
    ("mlp_bias", {"mlp_bias": True}), ("rope_interleaved", {"rope_interleaved": True}), ("rope_theta", {"rope_theta": -1.0}),
    ("yarn", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}), ("dynamic", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    ("factor", {"rope_scaling": {"rope_type": "linear"}}), ("low_freq_factor", {"rope_scaling": {**LLAMA_8B["rope_scaling"], "low_freq_factor": 4}}),
    ("partial_rotary_factor", {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    ("quantization_config", {"quantization_config": {"quant_method": "gptq"}}), ("eos_token_id", {"eos_token_id": "2"}),
    ("torch_dtype", {"torch_dtype": "float8"}), ("rms_norm_eps", {"rms_norm_eps": 0.0}),
]


@pytest.mark.parametrize(("named", "change"), BROKEN, ids=lambda value: str(value)[:40])
def test_broken_config_is_named(named: str, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(LLAMA_8B | change)
    assert named in caught.value.fact
    assert caught.value.fix


def test_unknown_keys_are_reported() -> None:
    found = read(LLAMA_8B | {"sliding_window": 4096, "use_sliding_window": False})
    assert ("sliding_window", "use_sliding_window") == found.unread
    assert ("sliding_window",) == found.active_unread
    assert ("rope_scaling.beta",) == read(LLAMA_8B | {"rope_scaling": {**LLAMA_8B["rope_scaling"], "beta": 3}}).active_unread


@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_of_transformers_lands(tied: bool) -> None:
    model = make_llama(None, tie_word_embeddings=tied)
    found = read({**model.config.to_dict(), "model_type": "llama"})
    wanted = {weight.name: weight.shape for weight in found.spec.weights()}
    landed = {}
    for name, tensor in model.named_parameters():
        landing = found.names.find(name)
        assert isinstance(landing, Landing), name
        landed[landing.param] = tuple(tensor.shape)
    assert wanted == landed
    assert isinstance(found.names.find("model.layers.7.self_attn.rotary_emb.inv_freq"), Skip)
    assert found.names.find("model.layers.7.self_attn.q_proj.bias") != found.names.find("model.rotary_emb.inv_freq")
