"""Kimi K3 and Kimi-Linear from their configs alone: exact numbers, every key read, every field matters."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from firstlight.models.registry import ModelFile, model_types, read
from firstlight.spec.errors import ConfigError, FirstlightError
from firstlight.spec.weights import Landing, Skip

DATA = Path(__file__).parents[1] / "data"
K3 = json.loads((DATA / "configs/kimi_k3.json").read_text())
LINEAR = json.loads((DATA / "configs/kimi_linear_48b.json").read_text())
TABLE = json.loads((DATA / "configs/k3_tensors.json").read_text())

# published text totals count the products, convolutions, dt_bias and two vectors per KDA head; no norm, residual mix or router bias
K3_PUBLISHED_TEXT_PARAMS = 2_779_479_991_232
K3_PUBLISHED_ACTIVE_PARAMS = 104_185_127_872


@pytest.fixture(scope="module")
def k3() -> ModelFile:
    return read(K3)


def test_k3_layer_map(k3: ModelFile) -> None:
    kinds = [layer.mixer.kind for layer in k3.spec.layers]
    assert (93, 69, 24) == (len(kinds), kinds.count("kda"), kinds.count("mla"))
    assert [*range(3, 92, 4), 92] == [i for i, kind in enumerate(kinds) if kind == "mla"]
    assert ["ffn", *["latent_moe"] * 92] == [layer.ffn.kind for layer in k3.spec.layers]
    assert [0, 12, 24, 36, 48, 60, 72, 84] == [layer.index for layer in k3.spec.layers if layer.residual.starts_block]
    assert 9 == k3.spec.output.num_sources("output")


def test_k3_numbers(k3: ModelFile) -> None:
    spec = k3.spec
    assert 27_648 == spec.row_bytes_per_token
    assert 449_372_160 == spec.state_bytes_per_sequence
    assert 1_048_576 == spec.max_context
    # 69 layers store A_log padded from 96 heads to 128
    text_in_table = sum(_elements(row) for row in TABLE["tensors"] if row["name"].startswith("language_model."))
    assert text_in_table == spec.num_text_params + 69 * 32
    assert TABLE["derived"]["logical_params"] == text_in_table + sum(
        _elements(row) for row in TABLE["tensors"] if not row["name"].startswith("language_model."))


def test_k3_published_totals_are_explained(k3: ModelFile) -> None:
    uncounted = sum(w.num_elements for w in k3.spec.weights() if _uncounted(w.name))
    doubled = sum(w.num_elements for w in k3.spec.weights() if w.name.endswith("A_log"))
    assert K3_PUBLISHED_TEXT_PARAMS == k3.spec.num_text_params - uncounted + doubled == k3.spec.num_published_params
    assert K3_PUBLISHED_ACTIVE_PARAMS == k3.spec.num_active_params - uncounted + doubled


def _uncounted(name: str) -> bool:
    return "norm" in name or ".residual." in name or name.startswith("output.") or name.endswith("router.bias")


def test_k3_flops(k3: ModelFile) -> None:
    """Absorbed decode at a million tokens: 24 layers x 96 heads x 2 x (576 + 512) per earlier token."""
    last = k3.spec.flops(1, 1_048_575) - k3.spec.flops(1, 4_095)
    assert 24 * 96 * 2 * (576 + 512) * 1_044_480 == last


def test_k3_reads_every_key(k3: ModelFile) -> None:
    assert () == k3.unread
    assert all(why for why in k3.ignored.values())
    assert "text_config.num_key_value_heads" in k3.ignored
    assert () == read(LINEAR).unread


def test_every_tensor_of_the_table_lands(k3: ModelFile) -> None:
    wanted = {weight.name: weight for weight in k3.spec.weights()}
    landed: set[str] = set()
    for row in TABLE["tensors"]:
        for name in _examples(row):
            found = k3.names.find(name)
            if name.startswith(("vision_tower.", "mm_projector.")):
                assert isinstance(found, Skip) and found.reason
                continue
            assert isinstance(found, Landing), name
            param = found.param.removesuffix(".packed").removesuffix(".scale")
            assert param in wanted, name
            landed.add(param.split(".")[-2] if param.startswith("layers.") else param)
    assert {name.split(".")[-2] if name.startswith("layers.") else name for name in wanted} <= landed


def _examples(row: dict[str, Any]) -> list[str]:
    """Names of one table row, over a KDA, an MLA and the dense layer where it can be any."""
    layer = {"69 KDA": 1, "24 MLA": 92, "layer 0": 0, "92 MoE": 1}
    index = next((i for start, i in layer.items() if str(row["count"]).startswith(start)), 5)
    return [row["name"].replace("{i}", str(index)).replace("{e}", "895").replace("{b}", "3")]


def _elements(row: dict[str, Any]) -> int:
    """Logical elements of a row of the table: packed nibbles count twice, scales not at all."""
    words = str(row["count"]).replace("all ", "").split()
    number = 1 if words[0] == "layer" else int(words[0])
    if "x896" in str(row["count"]):
        number *= 896
    if row["name"].endswith("weight_scale"):
        return 0
    size = math.prod(row["shape"]) * number
    return 2 * size if row["name"].endswith("weight_packed") else size


TEXT_CHANGES: list[tuple[str, Any]] = [
    ("hidden_size", 7200), ("num_attention_heads", 64), ("intermediate_size", 1024), ("moe_intermediate_size", 1024), ("kv_lora_rank", 256),
    ("q_lora_rank", None), ("qk_nope_head_dim", 64), ("qk_rope_head_dim", 0), ("v_head_dim", 64), ("num_experts", 448), ("num_experts_per_token", 8),
    ("num_shared_experts", 1), ("routed_scaling_factor", 2.5), ("moe_renormalize", False), ("moe_router_activation_func", "softmax"),
    ("num_expert_group", 8), ("first_k_dense_replace", 2), ("moe_layer_freq", 2), ("hidden_act", "silu"), ("activation_situ_beta", 3.0),
    ("activation_situ_linear_beta", None), ("attn_res_block_size", 6), ("latent_moe_use_norm", False), ("routed_expert_hidden_size", None),
    ("mla_use_output_gate", False), ("rms_norm_eps", 1e-6), ("vocab_size", 1000), ("tie_word_embeddings", True), ("dtype", "float32"),
    ("max_position_embeddings", 4096), ("bos_token_id", 1), ("eos_token_id", [1, 2]), ("quantization_config", None), ("topk_group", None),
]
LINEAR_CHANGES: list[tuple[str, Any]] = [
    ("head_dim", 64), ("num_heads", 64), ("short_conv_kernel_size", 3), ("gate_lower_bound", None), ("gate_lower_bound", -4.0),
    ("use_full_rank_gate", False),
]


@pytest.mark.parametrize("key", ["activation_situ_beta", "activation_situ_linear_beta"])
@pytest.mark.parametrize("value", [0.0, -1.0])
def test_a_bound_of_situ_is_above_zero(key: str, value: float) -> None:
    changed = copy.deepcopy(K3)
    changed["text_config"][key] = value
    with pytest.raises(ConfigError, match=key):
        read(changed)


@pytest.mark.parametrize(("key", "value"), TEXT_CHANGES)
def test_every_text_field_matters(k3: ModelFile, key: str, value: Any) -> None:
    changed = copy.deepcopy(K3)
    changed["text_config"][key] = value
    if key == "topk_group":
        changed["text_config"] |= {"num_expert_group": 8, "topk_group": 2}
    assert k3.spec != read(changed).spec


@pytest.mark.parametrize(("key", "value"), LINEAR_CHANGES)
def test_every_linear_field_matters(k3: ModelFile, key: str, value: Any) -> None:
    changed = copy.deepcopy(K3)
    changed["text_config"]["linear_attn_config"][key] = value
    assert k3.spec != read(changed).spec


def test_layer_map_follows_the_lists(k3: ModelFile) -> None:
    changed = copy.deepcopy(K3)
    lists = changed["text_config"]["linear_attn_config"]
    lists["kda_layers"], lists["full_attn_layers"] = lists["kda_layers"][1:], [1, *lists["full_attn_layers"]]
    assert "mla" == read(changed).spec.layers[0].mixer.kind


def _broken(change: dict[str, Any], part: str = "text") -> dict[str, Any]:
    config = copy.deepcopy(K3)
    target = {"text": config["text_config"], "linear": config["text_config"]["linear_attn_config"], "top": config,
              "quant": config["text_config"]["quantization_config"]}[part]
    target.update(change)
    return config


BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("model_type", _broken({"model_type": "no_such_model"}, "top")),
    ("hidden_size", _broken({"hidden_size": None})),
    ("hidden_size", _broken({"hidden_size": -1})),
    ("hidden_size", _broken({"hidden_size": "7168"})),
    ("kda_layers", _broken({"kda_layers": [1, 2, 3]}, "linear")),
    ("twice [4]", _broken({"kda_layers": [*K3["text_config"]["linear_attn_config"]["kda_layers"], 4]}, "linear")),
    ("gate_lower_bound", _broken({"gate_lower_bound": 5.0}, "linear")),
    ("gate_lower_bound", _broken({"gate_lower_bound": -50.0}, "linear")),
    ("hidden_size", _broken({"hidden_size": 10**30})),
    ("num_shared_experts", _broken({"num_shared_experts": -1})),
    ("qk_rope_head_dim", _broken({"qk_rope_head_dim": -8})),
    ("first_k_dense_replace", _broken({"first_k_dense_replace": -1})),
    ("rms_norm_eps", _broken({"rms_norm_eps": float("nan")})),
    ("rms_norm_eps", _broken({"rms_norm_eps": -1e-5})),
    ("routed_scaling_factor", _broken({"routed_scaling_factor": float("inf")})),
    ("hidden_act", _broken({"hidden_act": "gelu"})),
    ("cannot be chosen", _broken({"num_experts_per_token": 1000})),
    ("mla_use_nope", _broken({"mla_use_nope": False})),
    ("num_nextn_predict_layers", _broken({"num_nextn_predict_layers": 1})),
    ("moe_router_activation_func", _broken({"moe_router_activation_func": "relu"})),
    ("quant_method", _broken({"quant_method": "gptq"}, "quant")),
    ("eos_token_id", _broken({"eos_token_id": "2"})),
    ("dtype", _broken({"dtype": "float8"})),
    ("text_config", _broken({"text_config": [1]}, "top")),
]


@pytest.mark.parametrize(("named", "config"), BROKEN)
def test_broken_config_is_named(named: str, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(config)
    assert named in str(caught.value)
    assert caught.value.fix


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', "\x00\x01"])
def test_broken_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(FirstlightError) as caught:
        read(tmp_path)
    assert "config.json" in str(caught.value)


def test_a_model_without_experts_is_dense() -> None:
    config = _broken({"first_k_dense_replace": 93})
    found = read(config)
    assert {"ffn"} == {layer.ffn.kind for layer in found.spec.layers}
    assert () == found.unread


def test_groups_are_off_when_the_config_says_so() -> None:
    grouped = {"num_expert_group": 8, "topk_group": 2}
    assert 8 == read(_broken(grouped)).spec.layers[1].ffn.router.num_groups  # type: ignore[attr-defined]
    assert 1 == read(_broken(grouped | {"use_grouped_topk": False})).spec.layers[1].ffn.router.num_groups  # type: ignore[attr-defined]


def test_a_long_list_of_layers_makes_a_short_message() -> None:
    with pytest.raises(ConfigError) as caught:
        read(_broken({"num_hidden_layers": 1_000_000}))
    assert len(str(caught.value)) < 1_000


def test_unknown_active_key_is_reported() -> None:
    found = read(_broken({"brand_new_gate": 3, "brand_new_off": False}))
    assert ("text_config.brand_new_gate", "text_config.brand_new_off") == found.unread
    assert ("text_config.brand_new_gate",) == found.active_unread


def test_framework_spelling_is_the_same_network() -> None:
    """The framework's flat spelling (layer_types, linear_num_heads, ...) reads as the published nested one."""
    own = {key: value for key, value in LINEAR.items() if key not in ("linear_attn_config", "first_k_dense_replace", "moe_layer_freq")}
    full = set(LINEAR["linear_attn_config"]["full_attn_layers"])
    own |= {
        "layer_types": ["full_attention" if i + 1 in full else "linear_attention" for i in range(27)],
        "mlp_layer_types": ["dense", *["sparse"] * 26], "linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4,
        "qk_head_dim": 192,
    }
    assert read(LINEAR).spec == read(own).spec
    assert () == read(own).unread


def test_no_torch_is_imported() -> None:
    code = "import sys; from firstlight.models.registry import read; read(sys.argv[1]); assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code, str(DATA / "configs/kimi_k3.json")], check=True)


def test_model_types_are_found_by_file_name() -> None:
    assert {"kimi_k3", "kimi_linear"} <= set(model_types())
