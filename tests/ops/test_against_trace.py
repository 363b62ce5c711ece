"""Operators against what the official modelling code of Kimi K3 computed: a tiny checkpoint in fp32, module by module."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from firstlight.backends.portable.experts import experts as portable_experts
from firstlight.backends.portable.short_conv import short_conv as portable_conv
from firstlight.ops.activation import activation
from firstlight.ops.block_residual import block_residual
from firstlight.ops.experts import Bank
from firstlight.ops.experts import experts as reference_experts
from firstlight.ops.linear import linear
from firstlight.ops.rms_norm import rms_norm
from firstlight.ops.route import route
from firstlight.ops.short_conv import short_conv as reference_conv

FOLDER = Path(__file__).parent.parent / "data" / "kimi_k3_text_trace"
CONFIG = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
EPS = CONFIG["rms_norm_eps"]
MOE_LAYERS = range(CONFIG["first_k_dense_replace"], CONFIG["num_hidden_layers"])
KDA_LAYERS = [number - 1 for number in CONFIG["linear_attn_config"]["kda_layers"]]


@pytest.fixture(scope="module")
def trace() -> dict[str, Tensor]:
    """Module -> output, without the batch dim."""
    recorded = load_file(FOLDER / "trace.safetensors")
    return {name.removeprefix("trace.model."): value[0] if value.shape[0] == 1 else value for name, value in recorded.items()}


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return {name.removeprefix("model."): value for name, value in load_file(FOLDER / "model.safetensors").items()}


def distance(got: Tensor, want: Tensor) -> float:
    """Largest difference relative to the largest value."""
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("form", [reference_conv, portable_conv], ids=["reference", "portable"])
@pytest.mark.parametrize("layer", KDA_LAYERS)
def test_short_conv(trace: dict[str, Tensor], weights: dict[str, Tensor], layer: int, form: Callable[..., Tensor]) -> None:
    for name in "qkv":
        prefix = f"layers.{layer}.self_attn.{name}"
        x, weight = trace[f"{prefix}_proj"], weights[f"{prefix}_conv1d.weight"][:, 0]
        window = torch.full((1, weight.shape[1] - 1, x.shape[1]), torch.nan)
        got = form(x, weight, window, torch.tensor([0]), torch.tensor([0, len(x)]), torch.tensor([0]))
        assert distance(got, trace[f"{prefix}_conv1d"]) < 1e-6


def test_situ_and_linear(trace: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    modules = ["layers.0.mlp", *(f"layers.{layer}.block_sparse_moe.shared_experts" for layer in MOE_LAYERS)]
    for module in modules:
        gate, up, inner = (trace[f"{module}.{name}"] for name in ("gate_proj", "up_proj", "act_fn"))
        got = activation(gate, up, kind="situ", beta=CONFIG["activation_situ_beta"], linear_beta=CONFIG["activation_situ_linear_beta"])
        assert distance(got, inner) < 1e-6
        assert distance(linear(inner, weights[f"{module}.down_proj.weight"]), trace[f"{module}.down_proj"]) < 1e-6


def test_block_residual_and_rms_norm(trace: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    """Layer 0 reads the embedding alone, then its feed-forward mixes the embedding and the attention's output."""
    embedding, attention, prefix = trace["embed_tokens"], trace["layers.0.self_attn"], "layers.0"
    assert distance(rms_norm(embedding, weights[f"{prefix}.input_layernorm.weight"], eps=EPS), trace[f"{prefix}.input_layernorm"]) < 1e-6
    norm, proj = weights[f"{prefix}.mlp_res_norm.weight"], weights[f"{prefix}.mlp_res_proj.weight"][0]
    mixed = block_residual(torch.stack((embedding, attention)), norm, proj, eps=EPS)
    got = rms_norm(mixed, weights[f"{prefix}.post_attention_layernorm.weight"], eps=EPS)
    assert distance(got, trace[f"{prefix}.post_attention_layernorm"]) < 2e-6


@pytest.mark.parametrize("form", [reference_experts, portable_experts], ids=["reference", "portable"])
@pytest.mark.parametrize("layer", MOE_LAYERS)
def test_route_and_experts(trace: dict[str, Tensor], weights: dict[str, Tensor], layer: int, form: Callable[..., Tensor]) -> None:
    """The same experts for every token, and the same latent after the norm that follows the weighted sum."""
    prefix = f"layers.{layer}.block_sparse_moe"
    gate, bias = weights[f"{prefix}.gate.weight"], weights[f"{prefix}.gate.e_score_correction_bias"]
    top_k, scale = CONFIG["num_experts_per_token"], CONFIG["routed_scaling_factor"]
    shares, ids = route(trace[f"layers.{layer}.post_attention_layernorm"], gate, bias, top_k=top_k, score="sigmoid", scale=scale)
    assert [sorted(row) for row in trace[f"{prefix}.gate"].tolist()] == [sorted(row) for row in ids.tolist()]
    parts = [tuple(weights[f"{prefix}.experts.{e}.{name}.weight"] for e in range(CONFIG["num_experts"])) for name in ("w1", "w3", "w2")]
    situ = {"kind": "situ", "beta": CONFIG["activation_situ_beta"], "linear_beta": CONFIG["activation_situ_linear_beta"]}
    latent = form(trace[f"{prefix}.routed_expert_down_proj"], Bank("dense", *parts), ids, shares, **situ)
    got = rms_norm(latent, weights[f"{prefix}.routed_expert_norm.weight"], eps=EPS)
    assert distance(got, trace[f"{prefix}.routed_expert_norm"]) < 5e-6
