"""Qwen3-Next and Qwen3.5 from their configs alone: published numbers, every key read, every field matters, the rest refused by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from firstlight.models.registry import ModelFile, read
from firstlight.spec.errors import ConfigError
from firstlight.spec.weights import Landing, Skip
from tests.models.qwen_tiny import KINDS, make_qwen

CONFIGS = Path(__file__).parents[1] / "data/configs"
NEXT = json.loads((CONFIGS / "qwen3_next_80b_a3b.json").read_text())
MOE = json.loads((CONFIGS / "qwen3_6_35b_a3b.json").read_text())
LARGE = json.loads((CONFIGS / "qwen3_8_2_4t.json").read_text())
TEXT = MOE["text_config"]

# totals of the published checkpoints, as their safetensors headers add up
NEXT_PUBLISHED_PARAMS = 81_324_862_720
MOE_PUBLISHED_PARAMS = 35_951_822_704


def draft_params(text: dict[str, Any]) -> int:
    """The drafting head beside the text: one layer of attention and experts, a product that joins two streams, five norms."""
    dim, head, heads, key_heads = (text[key] for key in ("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads"))
    attention = dim * head * (2 * heads + 2 * key_heads + heads) + 2 * head
    experts = 3 * dim * (text["num_experts"] * text["moe_intermediate_size"] + text["shared_expert_intermediate_size"])
    return int(attention + experts + text["num_experts"] * dim + dim + 2 * dim * dim + 5 * dim)


def test_published_numbers() -> None:
    small, large = read(NEXT).spec, read(LARGE).spec
    assert (79_674_391_296, 34_660_610_688, 2_419_804_697_984) == (small.num_params, read(MOE).spec.num_params, large.num_params)
    assert NEXT_PUBLISHED_PARAMS == small.num_params + draft_params(NEXT)
    assert 2_419_804_697_984 // 10**11 == 24  # published as 2.4T
    assert 95 == round((large.num_active_params + large.num_vocab * large.dim) / 1e9)  # and as A95B, embedding and head counted


def test_published_numbers_with_the_image_tower() -> None:
    """27 blocks of 1152 channels with biases, patches of 16 x 16 x 2, a merger of 2 x 2 patches into the text's width."""
    dim, inner, out = 1152, 4304, 2048
    block = (3 * dim * dim + 3 * dim) + (dim * dim + dim) + (2 * dim * inner + inner + dim) + 4 * dim
    ends = (3 * 2 * 16 * 16 * dim + dim) + 2304 * dim
    merger = 2 * dim + (4 * dim * 4 * dim + 4 * dim) + (4 * dim * out + out)
    assert MOE_PUBLISHED_PARAMS == read(MOE).spec.num_params + draft_params(TEXT) + 27 * block + ends + merger


@pytest.mark.parametrize("config", [NEXT, TEXT, LARGE], ids=["Qwen3-Next", "Qwen3.6", "Qwen3.8"])
def test_parameters_are_those_of_transformers(config: dict[str, Any]) -> None:
    """Name by name, at full size, on tensors without memory."""
    import transformers
    from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

    fields = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    with torch.device("meta"):
        if config is NEXT:
            model = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**fields))
        else:
            model = transformers.Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**fields))
    found = read(config)
    wanted = {weight.name: weight.num_elements for weight in found.spec.weights()}
    landed: dict[str, int] = {}
    for name, tensor in model.named_parameters():
        landing = found.names.find(name)
        assert isinstance(landing, Landing), name
        fused = landing.param.endswith("gate_up")
        for leaf in ("gate", "up") if fused else ("",):
            landed[landing.param.removesuffix("gate_up") + leaf] = tensor.numel() // (2 if fused else 1)
    assert wanted == landed


def test_layers_and_memory() -> None:
    spec = read(NEXT).spec
    kinds = [layer.mixer.kind for layer in spec.layers]
    assert (48, 36, list(range(3, 48, 4))) == (len(kinds), kinds.count("gdn"), [i for i, kind in enumerate(kinds) if kind == "gqa"])
    assert 12 * 2 * 2 * 256 * 2 == spec.row_bytes_per_token
    assert 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2) == spec.state_bytes_per_sequence
    assert (64, 1e7, False) == (spec.layers[3].mixer.rotation.width, spec.layers[3].mixer.rotation.theta, spec.tied)  # type: ignore[attr-defined]
    assert spec.norm_plus_one
    assert [True, False] == [read(config).spec.layers[0].mixer.interleaved for config in (NEXT, MOE)]  # type: ignore[attr-defined]


def test_flops() -> None:
    """Per earlier token: 12 layers x 16 heads x 2 x (256 + 256); linear layers do not look back."""
    spec = read(NEXT).spec
    assert 12 * 16 * 2 * 512 * 1000 == spec.flops(1, 5_000) - spec.flops(1, 4_000)


@pytest.mark.parametrize("config", [NEXT, MOE, LARGE], ids=["Qwen3-Next", "Qwen3.6", "Qwen3.8"])
def test_every_key_is_read(config: dict[str, Any]) -> None:
    found = read(config)
    assert () == found.unread
    assert all(found.ignored.values())


@pytest.mark.parametrize("kind", KINDS)
def test_what_transformers_writes_is_read_to_the_end(tmp_path: Path, kind: str) -> None:
    make_qwen(kind, tmp_path)
    found = read(tmp_path)
    assert () == found.unread
    assert (kind, "float32") == (found.spec.name, found.spec.dtype)


def test_the_envelope_changes_nothing_of_the_text() -> None:
    whole, text = read(MOE), read(TEXT)
    assert text.spec.layers == whole.spec.layers
    assert list(text.spec.weights()) == list(whole.spec.weights())
    assert text.spec.layers == read({**TEXT, "model_type": "qwen3_5_moe_text", "layer_types": None}).spec.layers
    lone = read({"model_type": "qwen3_5_moe", "text_config": {key: value for key, value in TEXT.items() if key != "model_type"}})
    assert text.spec.layers == lone.spec.layers
    outside = {key: value for key, value in TEXT.items() if key not in ("dtype", "tie_word_embeddings")}
    moved = read({**MOE, "text_config": outside, "dtype": "float16", "tie_word_embeddings": True, "image_token_id": 5})
    assert ("float16", True, 5, ()) == (moved.spec.dtype, moved.spec.tied, moved.spec.media_id, moved.unread)


@pytest.mark.parametrize(("name", "reason"), [
    ("mtp.layers.0.mlp.experts.3.up_proj.weight", "multi-token"), ("mtp.pre_fc_norm_hidden.weight", "multi-token"), ("mtp.fc.weight", "multi-token"),
    ("model.visual.blocks.0.attn.qkv.bias", "image tower"),
])
def test_tensors_that_are_set_aside(name: str, reason: str) -> None:
    found = read(MOE).names.find(name)
    assert isinstance(found, Skip) and reason in found.reason
    if reason == "multi-token":
        assert isinstance(read(NEXT).names.find(name), Skip)


def test_framework_spelling_is_the_same_network() -> None:
    """transformers 5 lists layer types and puts rotary keys into `rope_parameters`."""
    gone = ("full_attention_interval", "rope_theta", "rope_scaling", "partial_rotary_factor")
    theirs = {key: value for key, value in NEXT.items() if key not in gone}
    theirs |= {
        "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(48)],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
    }
    assert read(NEXT).spec == read(theirs).spec
    assert () == read(theirs).unread


CHANGES: list[tuple[str, Any]] = [
    ("hidden_size", 1024), ("num_hidden_layers", 4), ("vocab_size", 1000), ("max_position_embeddings", 4096), ("rms_norm_eps", 1e-5),
    ("dtype", "float32"), ("tie_word_embeddings", True), ("bos_token_id", 1), ("eos_token_id", [1, 2]), ("full_attention_interval", 3),
    ("layer_types", ["full_attention"] * 48), ("head_dim", 128), ("num_attention_heads", 8), ("num_key_value_heads", 4), ("rope_theta", 1e6),
    ("partial_rotary_factor", 0.5), ("rope_parameters", {"rope_theta": 1e6}), ("linear_num_key_heads", 8), ("linear_num_value_heads", 16),
    ("linear_key_head_dim", 64), ("linear_value_head_dim", 64), ("linear_conv_kernel_dim", 3), ("num_experts", 256), ("num_experts_per_tok", 8),
    ("moe_intermediate_size", 256), ("shared_expert_intermediate_size", 256), ("norm_topk_prob", False), ("decoder_sparse_step", 2),
    ("mlp_only_layers", [3]), ("model_type", "qwen3_5_moe_text"),
]


@pytest.mark.parametrize(("key", "value"), CHANGES, ids=lambda value: str(value)[:40])
def test_every_field_matters(key: str, value: Any) -> None:
    assert read(NEXT).spec != read(NEXT | {key: value}).spec


def test_dense_layers_have_their_own_width() -> None:
    dense = NEXT | {"mlp_only_layers": [3, 5]}
    assert ["ffn" if i in (3, 5) else "moe" for i in range(48)] == [layer.ffn.kind for layer in read(dense).spec.layers]
    assert read(dense).spec != read(dense | {"intermediate_size": 1024}).spec
    assert {"ffn"} == {layer.ffn.kind for layer in read(NEXT | {"decoder_sparse_step": 100, "num_experts": 0}).spec.layers}
    assert "no layer has experts" == read(NEXT | {"decoder_sparse_step": 100}).ignored["num_experts"]


BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("hidden_size", {"hidden_size": None}), ("linear_num_value_heads", {"linear_num_value_heads": 24}),
    ("num_key_value_heads", {"num_key_value_heads": 3}),
    ("layer_types", {"layer_types": ["full_attention"] * 47}), ("layer_types", {"layer_types": ["sliding_attention"] * 48}),
    ("cannot turn in pairs", {"partial_rotary_factor": 0.02}), ("cannot turn in pairs", {"partial_rotary_factor": 2.0}),
    ("partial_rotary_factor", {"partial_rotary_factor": 0.0}), ("yarn", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    ("yarn", {"rope_scaling": {"type": "yarn", "factor": 4.0}}), ("attention_bias", {"attention_bias": True}),
    ("attn_output_gate", {"attn_output_gate": False}), ("use_sliding_window", {"use_sliding_window": True}), ("hidden_act", {"hidden_act": "gelu"}),
    ("mamba_ssm_dtype", {"mamba_ssm_dtype": "bfloat16"}), ("cannot be chosen", {"num_experts_per_tok": 513}), ("num_experts", {"num_experts": 0}),
    ("shared_expert_intermediate_size", {"shared_expert_intermediate_size": 0}), ("mlp_only_layers", {"mlp_only_layers": 3}),
    ("intermediate_size", {"mlp_only_layers": [1], "intermediate_size": None}),
    ("quantization_config", {"quantization_config": {"quant_method": "fp8"}}),
    ("decoder_sparse_step", {"decoder_sparse_step": 0}), ("dtype", {"dtype": "float8"}),
]


@pytest.mark.parametrize(("named", "change"), BROKEN, ids=lambda value: str(value)[:40])
def test_broken_config_is_named(named: str, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(NEXT | change)
    assert named in caught.value.fact
    assert caught.value.fix


def test_a_quantised_envelope_is_named() -> None:
    with pytest.raises(ConfigError, match="quantization_config"):
        read(MOE | {"quantization_config": {"quant_method": "fp8"}})


def test_unknown_keys_are_reported() -> None:
    changed: dict[str, Any] = copy.deepcopy(MOE) | {"brand_new": 1}
    changed["text_config"]["brand_new_gate"] = 3
    found: ModelFile = read(changed)
    assert ("brand_new", "text_config.brand_new_gate") == found.active_unread
