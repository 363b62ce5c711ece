"""DeepSeek-V3, V3.2 and GLM-5 from their configs alone: exact numbers, every key read, every field matters, what is not implemented refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from firstlight.models.registry import read
from firstlight.parts.dsa import Dsa
from firstlight.spec.errors import ConfigError
from firstlight.spec.weights import Landing, Skip
from tests.models.deepseek_tiny import FAMILIES, YARN, make_deepseek

DATA = Path(__file__).parents[1] / "data" / "configs"
V32 = json.loads((DATA / "deepseek_v3_2.json").read_text())
GLM5 = json.loads((DATA / "glm_5.json").read_text())
GLM52 = json.loads((DATA / "glm_5_2.json").read_text())
V3 = {key: value for key, value in V32.items() if not key.startswith("index_")} | {"model_type": "deepseek_v3"}
CONFIGS = {"v3": V3, "v3.2": V32, "glm-5": GLM5, "glm-5.2": GLM52}
# logical parameters without draft layers
NUM_PARAMS = {"v3": 671_026_419_200, "v3.2": 671_877_944_064, "glm-5": 743_911_218_432, "glm-5.2": 743_377_019_904}
PUBLISHED = {"v3": (671, 37), "v3.2": (671, 37), "glm-5": (744, 40), "glm-5.2": (744, 40)}
"""Billions in all and per token, as the releases round them."""
ROW_BYTES = {"v3": 61 * 576 * 2, "v3.2": 61 * (576 + 128) * 2, "glm-5": 78 * (576 + 128) * 2, "glm-5.2": (78 * 576 + 21 * 128) * 2}


@pytest.mark.parametrize("name", CONFIGS)
def test_numbers(name: str) -> None:
    spec = read(CONFIGS[name]).spec
    assert (NUM_PARAMS[name], ROW_BYTES[name], 0) == (spec.num_params, spec.row_bytes_per_token, spec.state_bytes_per_sequence)
    total, active = PUBLISHED[name]
    assert abs(spec.num_params / 1e9 - total) < 1
    assert abs(spec.num_active_params / 1e9 - active) < 1


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_counts_the_same(name: str) -> None:
    """Its modules at full size, without memory; router biases are buffers there."""
    import transformers

    kind = {"v3": "DeepseekV3", "v3.2": "DeepseekV32"}.get(name, "GlmMoeDsa")
    fields = copy.deepcopy({key: value for key, value in CONFIGS[name].items() if key != "quantization_config"})  # it writes into them
    config = getattr(transformers, f"{kind}Config")(**fields)
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    biases = sum(tensor.numel() for key, tensor in model.named_buffers() if key.endswith("e_score_correction_bias"))
    assert NUM_PARAMS[name] == biases + sum(tensor.numel() for tensor in model.parameters())


def test_released_totals_with_the_draft_layer() -> None:
    """685 billion on disk: one more layer, its norms and projection, an embedding and a head of its own."""
    for config, billions in ((V3, 684.5), (V32, 685.4)):
        spec = read(config).spec
        layer = 2 * spec.dim + sum(weight.num_elements for _, each in spec.layers[-1].parts() for weight in each.weights())
        draft = layer + 3 * spec.dim + 2 * spec.dim**2 + 2 * spec.dim * spec.num_vocab
        assert billions == round((spec.num_params + draft) / 1e9, 1)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_key_is_read(name: str) -> None:
    found = read(CONFIGS[name])
    assert () == found.unread
    assert all(found.ignored.values())


def test_layers() -> None:
    dense = ["ffn"] * 3
    assert [[*dense, *["moe"] * (n - 3)] for n in (61, 78)] == [[layer.ffn.kind for layer in read(config).spec.layers] for config in (V32, GLM5)]
    assert {"mla"} == {layer.mixer.kind for layer in read(V3).spec.layers}
    own = [layer.index for layer in read(GLM52).spec.layers if not layer.mixer.shared]  # type: ignore[attr-defined]
    assert [0, 1, *range(2, 78, 4)] == own
    assert {"mla": 78, "index": 21} == {name: len(members) for name, members in read(GLM52).spec.groups().items()}
    assert ["deepseek_v3", "deepseek_v32", "glm_moe_dsa"] == [read(config).spec.name for config in (V3, V32, GLM5)]


def test_rotations() -> None:
    """DeepSeek slows down by 40 and sharpens scores; its indexer turns halves, that of GLM neighbours."""
    deep, glm = mixer(V32), mixer(GLM5)
    assert deep.rotation is not None and glm.rotation is not None and deep.rotation.yarn is not None
    assert (40.0, 1.0) == (deep.rotation.yarn.factor, deep.rotation.magnitude)
    assert deep.scale == pytest.approx(192**-0.5 * 1.3688879454113936**2, rel=1e-12)
    assert ((True, False), (True, True)) == tuple((each.rotation.interleaved, each.index_rotation.interleaved) for each in (deep, glm))  # type: ignore[union-attr]
    assert (None, 256**-0.5) == (glm.rotation.yarn, glm.scale)


def mixer(config: dict[str, Any]) -> Dsa:
    found = read(config).spec.layers[0].mixer
    assert isinstance(found, Dsa)
    return found


def test_flops_grow_by_the_indexer_only() -> None:
    """Beyond top_k rows: 2 H (K + 1) per earlier token and indexer; up to there attention is dense."""
    per_row = {"v3.2": 61 * 2 * 64 * 129, "glm-5": 78 * 2 * 32 * 129, "glm-5.2": 21 * 2 * 32 * 129}
    for name, want in per_row.items():
        spec = read(CONFIGS[name]).spec
        assert want * 100_000 == spec.flops(1, 150_000) - spec.flops(1, 50_000)
    assert mixer(V32).flops(1, 100) == read(V3).spec.layers[0].mixer.flops(1, 100) + 2 * sum(i * o for _, i, o in mixer(V32).index_linears())
    for num_tokens, context in ((3000, 0), (10, 2040), (2049, 0), (7, 5000)):
        steps = sum(mixer(V32).flops(1, context + i) for i in range(num_tokens))
        assert mixer(V32).flops(num_tokens, context) == pytest.approx(steps, rel=0.2)


def test_the_policy_of_precision() -> None:
    """Data of the part: what a cast to another dtype leaves alone."""
    found = read(V32).spec.with_dtype("float16").layers[0].mixer
    kept = {weight.name for weight in found.weights() if weight.dtype == "float32"}
    assert {"indexer.weights_proj.weight", "indexer.k_norm.weight", "indexer.k_norm.bias"} == kept
    assert {"float16"} == {field.dtype for cache in found.cache() for field in cache.fields}


CHANGES: list[tuple[str, Any]] = [
    ("hidden_size", 2048), ("intermediate_size", 1024), ("moe_intermediate_size", 1024), ("num_hidden_layers", 5), ("num_attention_heads", 16),
    ("q_lora_rank", 512), ("kv_lora_rank", 256), ("qk_nope_head_dim", 64), ("qk_rope_head_dim", 32), ("v_head_dim", 64), ("n_routed_experts", 64),
    ("n_shared_experts", 2), ("num_experts_per_tok", 4), ("n_group", 4), ("topk_group", 2), ("norm_topk_prob", False), ("routed_scaling_factor", 1.0),
    ("first_k_dense_replace", 1), ("moe_layer_freq", 2), ("max_position_embeddings", 4096), ("rms_norm_eps", 1e-5), ("vocab_size", 1000),
    ("tie_word_embeddings", True), ("torch_dtype", "float32"), ("bos_token_id", 5), ("eos_token_id", [1, 2]), ("rope_theta", 1e6),
    ("rope_scaling", None), ("rope_interleave", False), ("index_topk", 1024), ("index_n_heads", 32), ("index_head_dim", 64),
    ("quantization_config", None), ("num_nextn_predict_layers", 0), ("mlp_layer_types", ["sparse"] * 61), ("model_type", "glm_moe_dsa"),
    *(("rope_scaling", {**V32["rope_scaling"], key: value}) for key, value in (
        ("factor", 20), ("beta_fast", 16), ("beta_slow", 2), ("mscale", 0.7), ("mscale_all_dim", 0.7), ("mscale_all_dim", 0),
        ("original_max_position_embeddings", 8192), ("type", "default"))),
]
GLM_CHANGES: list[tuple[str, Any]] = [
    ("indexer_types", ["full"] * 78), ("indexer_types", None), ("indexer_rope_interleave", False),
    ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4}),
]


@pytest.mark.parametrize(("config", "key", "value"), [*((V32, *each) for each in CHANGES), *((GLM52, *each) for each in GLM_CHANGES)],
                         ids=lambda value: str(value)[:40])
def test_every_field_matters(config: dict[str, Any], key: str, value: Any) -> None:
    if key == "indexer_types" and value is None:
        config = config | {"index_topk_freq": 2}
    found, changed = read(config), read(config | {key: value})
    assert (found.spec, found.names) != (changed.spec, changed.names)


def test_ways_to_say_which_layers_choose() -> None:
    """A list, a pattern of letters and a schedule; the schedule of GLM-5.2 is its list, and without any all choose."""
    bare = {key: value for key, value in GLM52.items() if key != "indexer_types"}
    pattern = "".join(kind[0].upper() for kind in GLM52["indexer_types"])
    assert read(GLM52).spec == read(bare).spec == read(bare | {"index_topk_pattern": pattern}).spec
    assert read(GLM52 | {"indexer_types": ["full"] * 78}).spec == read(bare | {"index_topk_freq": 1}).spec
    assert () == read(bare).unread == read(bare | {"index_topk_pattern": pattern}).unread


def test_spellings_of_rope() -> None:
    """transformers 5 puts both keys into one; `rope_type` is the newer name of `type`."""
    newer = {key: value for key, value in V32.items() if key not in ("rope_scaling", "rope_theta")}
    inside = {**{key: value for key, value in V32["rope_scaling"].items() if key != "type"}, "rope_type": "yarn", "rope_theta": 10000}
    assert read(V32).spec == read(newer | {"rope_parameters": inside}).spec
    assert () == read(newer | {"rope_parameters": inside}).unread


BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("hidden_size", {"hidden_size": None}), ("hidden_size", {"hidden_size": "7168"}), ("max_position_embeddings", {"max_position_embeddings": None}),
    ("rms_norm_eps", {"rms_norm_eps": None}), ("cannot be chosen", {"num_experts_per_tok": 300}), ("cannot be chosen", {"n_group": 7}),
    ("cannot be chosen", {"topk_group": 9}), ("cannot be chosen", {"num_experts_per_tok": 129}), ("attention_bias", {"attention_bias": True}),
    ("mlp_bias", {"mlp_bias": True}), ("hidden_act", {"hidden_act": "gelu"}), ("scoring_func", {"scoring_func": "softmax"}),
    ("topk_method", {"topk_method": "greedy"}), ("moe_router_dtype", {"moe_router_dtype": "bfloat16"}), ("index_topk", {"index_topk": 0}),
    ("index_topk", {"index_topk": None}), ("index_n_heads", {"index_n_heads": None}), ("is not possible", {"index_head_dim": 32}),
    ("is not possible", {"q_lora_rank": None}), ("qk_rope_head_dim", {"qk_rope_head_dim": 63}), ("mlp_layer_types", {"mlp_layer_types": ["sparse"]}),
    ("mlp_layer_types", {"mlp_layer_types": ["moe"] * 61}), ("num_nextn_predict_layers", {"num_nextn_predict_layers": 62}),
    ("longrope", {"rope_scaling": {"type": "longrope"}}), ("factor", {"rope_scaling": {"type": "yarn"}}),
    ("mscale", {"rope_scaling": {**V32["rope_scaling"], "mscale": -1.0}}), ("truncate", {"rope_scaling": {**V32["rope_scaling"], "truncate": False}}),
    ("attention_factor", {"rope_scaling": {**V32["rope_scaling"], "attention_factor": 2.0}}),
    ("partial_rotary_factor", {"rope_scaling": {**V32["rope_scaling"], "partial_rotary_factor": 0.5}}),
    ("quant_method", {"quantization_config": {"quant_method": "gptq"}}),
    ("weight_block_size", {"quantization_config": {**V32["quantization_config"], "weight_block_size": [64, 64]}}),
    ("weight_block_size", {"quantization_config": {"quant_method": "fp8"}}), ("fmt", {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}),
]
GLM_BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("indexers of 3 layers", {"indexer_types": ["full"] * 3}), ("begin with full", {"indexer_types": ["shared", *["full"] * 77]}),
    ("half", {"indexer_types": ["full", *["half"] * 77]}), ("index_topk_freq", {"indexer_types": None, "index_topk_freq": 0}),
    ("X", {"indexer_types": None, "index_topk_pattern": "FX" * 39}),
]


@pytest.mark.parametrize(("config", "named", "change"), [*((V32, *each) for each in BROKEN), *((GLM52, *each) for each in GLM_BROKEN)],
                         ids=lambda value: str(value)[:40])
def test_broken_config_is_named(config: dict[str, Any], named: str, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(config | change)
    assert named in str(caught.value)
    assert caught.value.fix


def test_unknown_keys_are_reported() -> None:
    assert ("index_kpool_size",) == read(GLM5 | {"index_kpool_size": 16}).active_unread
    assert ("rope_scaling.beta",) == read(V32 | {"rope_scaling": {**V32["rope_scaling"], "beta": 3}}).active_unread
    assert ("kv_cache",) == read(V3 | {"kv_cache": "x"}).active_unread


def test_draft_layers_are_skipped_by_number() -> None:
    names = read(V32).names
    for tensor in ("embed_tokens.weight", "self_attn.indexer.wk.weight", "mlp.experts.255.up_proj.weight_scale_inv", "shared_head.head.weight"):
        found = names.find(f"model.layers.61.{tensor}")
        assert isinstance(found, Skip) and "multi-token prediction" in found.reason
    assert isinstance(names.find("model.layers.60.self_attn.indexer.wk.weight"), Landing)
    assert isinstance(names.find("model.layers.6.self_attn.kv_b_proj.weight_scale_inv"), Landing)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_transformers_lands(tmp_path: Path, family: str) -> None:
    from safetensors import safe_open

    make_deepseek(tmp_path, family, rope_parameters=YARN)
    found = read(tmp_path)
    assert () == found.unread
    wanted = {weight.name: weight.shape for weight in found.spec.weights()}
    landed: dict[str, tuple[int, ...]] = {}
    with safe_open(tmp_path / "model.safetensors", "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            landing = found.names.find(name)
            assert isinstance(landing, Landing), name
            shape = tuple(tensors.get_slice(name).get_shape())
            landed[landing.param] = shape if landing.expert is None else (16, *shape)
    assert wanted == landed
