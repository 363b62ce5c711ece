"""The embedded default model: made from its script to the byte, and in K3's layout."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "firstlight" / "assets" / "default"
TINY = ROOT / "tests" / "data" / "kimi_k3_tiny"
MAX_BYTES = 2_000_000
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@pytest.fixture(scope="module")
def tensors():
    return load_file(FOLDER / "model.safetensors")


@pytest.fixture(scope="module")
def config():
    return json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))


def _kinds(tensors):
    """Name with the numbers of layers and experts taken out -> dtypes and ranks."""
    found = {}
    for name, tensor in tensors.items():
        found.setdefault(re.sub(r"\.\d+\.", ".*.", name), set()).add((str(tensor.dtype), tensor.ndim))
    return found


def test_regenerating_gives_the_same_bytes(tmp_path, tensors):
    for name in ("one", "two"):
        subprocess.run([sys.executable, ROOT / "train" / "make_default.py", tmp_path / name], check=True, timeout=120)
    files = sorted(path.name for path in FOLDER.iterdir())
    assert files == sorted(path.name for path in (tmp_path / "one").iterdir())
    for name in files:
        made = (tmp_path / "one" / name).read_bytes()
        assert (tmp_path / "two" / name).read_bytes() == made, name
        # Another version of safetensors may lay the same tensors out differently.
        assert name == "model.safetensors" or (FOLDER / name).read_bytes() == made, name
    made = load_file(tmp_path / "one" / "model.safetensors")
    assert list(tensors) == list(made)
    assert [] == [name for name, tensor in tensors.items() if not torch.equal(tensor, made[name])]


def test_it_is_small_and_says_that_it_knows_nothing():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= MAX_BYTES
    assert "The weights are random" in (FOLDER / "README.md").read_text(encoding="utf-8")


def test_names_dtypes_and_ranks_are_those_of_k3(tensors):
    k3 = {}
    for shard in sorted(TINY.glob("model-*.safetensors")):
        k3.update(load_file(shard))
    assert _kinds({name: tensor for name, tensor in k3.items() if name.startswith("language_model.")}) == _kinds(tensors)


def test_config_keys_are_those_of_k3(config):
    k3 = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    assert set() == set(k3) - set(config) - {"image_placeholder"}
    assert set() == set(k3["text_config"]) - set(config["text_config"])
    assert k3["text_config"]["quantization_config"] == config["text_config"]["quantization_config"]
    assert {} == config["vision_config"]


def test_layers_are_irregular_and_sizes_distinct(config):
    text = config["text_config"]
    linear = text["linear_attn_config"]
    assert [4, 7, 8] == linear["full_attn_layers"]
    assert list(range(1, 9)) == sorted(linear["full_attn_layers"] + linear["kda_layers"])
    assert text["v_head_dim"] != text["qk_nope_head_dim"]
    assert text["num_hidden_layers"] % text["attn_res_block_size"]


def test_a_log_is_zero_padded_and_decay_is_near_one(tensors, config):
    linear = config["text_config"]["linear_attn_config"]
    num_heads, head_dim = linear["num_heads"], linear["head_dim"]
    for layer in linear["kda_layers"]:
        prefix = f"language_model.model.layers.{layer - 1}.self_attn."
        a_log = tensors[prefix + "A_log"]
        assert (head_dim,) == a_log.shape
        assert a_log[:num_heads].abs().min() > 0
        assert 0 == a_log[num_heads:].abs().max()
        bias = tensors[prefix + "dt_bias"].view(num_heads, head_dim)
        decay = torch.exp(linear["gate_lower_bound"] * torch.sigmoid(a_log[:num_heads, None].exp() * bias))
        assert 0.97 < decay.mean() < 0.995
        assert decay.min() < 0.97 < 0.998 < decay.max()


def test_experts_hold_the_values_they_were_packed_from(tensors):
    """Unpacked here independently: low nibble first, one exponent per 32 columns; a unit input gives a unit output."""
    for name in ("w1", "w2", "w3"):
        stem = f"language_model.model.layers.1.block_sparse_moe.experts.0.{name}."
        packed, scale = tensors[stem + "weight_packed"], tensors[stem + "weight_scale"]
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1).long()
        signed = E2M1[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
        assert scale.shape == (signed.shape[0], signed.shape[1] // 32)
        weight = signed * torch.exp2(scale.float() - 127).repeat_interleave(32, 1)
        assert 1.0 == pytest.approx(weight.pow(2).sum(1).mean().item(), abs=0.15)
        assert 4.0 <= signed.view(-1, 32).abs().amax(1).min()


def test_tokens_that_end_and_the_vocabulary_agree(config, tensors):
    added = json.loads((FOLDER / "tokenizer_config.json").read_text(encoding="utf-8"))["added_tokens_decoder"]
    ids = {entry["content"]: int(token_id) for token_id, entry in added.items()}
    generation = json.loads((FOLDER / "generation_config.json").read_text(encoding="utf-8"))
    assert [ids["<|end_of_msg|>"], ids["[EOS]"]] == generation["eos_token_id"]
    assert ids["<|end_of_msg|>"] == config["eos_token_id"] == config["text_config"]["eos_token_id"]
    assert ids["<|media_pad|>"] == config["media_placeholder_token_id"]
    assert config["text_config"]["vocab_size"] == tensors["language_model.lm_head.weight"].shape[0] == 288
    assert max(ids.values()) < 288
    assert 256 == len((FOLDER / "tiktoken.model").read_text(encoding="ascii").splitlines())
