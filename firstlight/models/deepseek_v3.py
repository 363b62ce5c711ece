"""DeepSeek-V3 and V3.2: rotated latent attention, experts chosen within groups; with an indexer (V3.2) attention is sparse.

Source: deepseek-ai/DeepSeek-V3, DeepSeek-V3.2-Exp config.json and tensor names; arXiv 2412.19437.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from firstlight.parts.activation import Activation
from firstlight.parts.add import Add
from firstlight.parts.dsa import Dsa
from firstlight.parts.ffn import Ffn
from firstlight.parts.mla import Mla
from firstlight.parts.moe import Moe, Router
from firstlight.parts.rotation import Rotation, Yarn
from firstlight.spec.config import ConfigReader
from firstlight.spec.errors import ConfigError
from firstlight.spec.model import LayerSpec, ModelSpec, PartSpec
from firstlight.spec.weights import NameMap, Reading, Rename, Skip

ALIASES = ("deepseek_v32",)
RESTORE = "Restore the value of the model's release."
LATENT_NORM_EPS = 1e-6
"""The q_a and kv_a norms stand at their class default in the official code of this family, whatever rms_norm_eps says."""
MTP_REASON = "multi-token prediction: a draft of the next tokens, which the answer does not depend on"


def read(config: ConfigReader, inner: Callable[[ConfigReader, str], Reading]) -> Reading:
    """The facts of a config of this family; the keys of the indexer make attention sparse."""
    config.ignore_framework_keys()
    name = config.take("model_type", str, "deepseek_v3")
    dim, num_layers, dtype = config.positive("hidden_size"), config.positive("num_hidden_layers"), config.take_dtype()
    mixer = _mixer(config, dim, dtype, sparse=name != "deepseek_v3" or config.has("index_topk"))
    ffns, expert_format = _ffns(config, dim, num_layers, dtype)
    add = Add(dtype=dtype)
    spec = ModelSpec(
        name=name, num_vocab=config.positive("vocab_size"), dim=dim, max_context=config.positive("max_position_embeddings"),
        layers=tuple(LayerSpec(i, mixer, ffns[i], add) for i in range(num_layers)), output=add, norm_eps=config.above_zero("rms_norm_eps"),
        dtype=dtype, tied=config.take("tie_word_embeddings", bool, False), expert_format=expert_format,
        bos_id=config.take("bos_token_id", int, None), stop_ids=config.take_ids("eos_token_id"))
    config.ignore("pad_token_id", "packed batches need no padding")
    config.ignore("ep_size", "how training was spread over machines")
    config.expect("mlp_bias", (False,), "Feed-forwards with bias are not implemented.", False)
    num_drafts = config.natural("num_nextn_predict_layers", 0)
    if num_drafts > num_layers:
        raise ConfigError(f"{config.path}: {num_drafts} `num_nextn_predict_layers` after {num_layers} layers", RESTORE)
    drafts = (Skip(f"model.layers.{num_layers + i}.{{leaf*}}", MTP_REASON) for i in range(num_drafts))
    return Reading(spec, NAMES.with_skips(*drafts))


def _mixer(config: ConfigReader, dim: int, dtype: str, *, sparse: bool) -> Mla:
    config.ignore("num_key_value_heads", "latent attention has no key heads of its own")
    config.ignore("head_dim", "the width of what turns, qk_rope_head_dim, once more")
    config.ignore("qk_head_dim", "the sum of qk_nope_head_dim and qk_rope_head_dim")
    config.expect("attention_bias", (False,), "Projections of attention with bias are not implemented.", False)
    rope, q_rank = config.positive("qk_rope_head_dim"), config.positive("q_lora_rank", None)
    rotation, sharpness = _rotation(config, rope)
    fields: dict[str, Any] = {
        "dim": dim, "num_heads": config.positive("num_attention_heads"), "nope": config.positive("qk_nope_head_dim"), "rope": rope,
        "v_dim": config.positive("v_head_dim"), "q_rank": q_rank, "kv_rank": config.positive("kv_lora_rank"), "gated": False,
        "norm_eps": LATENT_NORM_EPS, "dtype": dtype, "rotation": rotation, "sharpness": sharpness,
    }
    if not sparse:
        return Mla(**fields)
    config.ignore("layer_types", "every layer is sparse")
    index_dim = config.positive("index_head_dim")
    if q_rank is None or index_dim < rope:
        fact = f"{config.path}: an indexer of {index_dim} channels, {rope} of them turning, over `q_lora_rank` {q_rank} is not possible"
        raise ConfigError(fact, RESTORE)
    return Dsa(**fields, top_k=config.positive("index_topk"), index_heads=config.positive("index_n_heads"), index_dim=index_dim)


def _rotation(config: ConfigReader, width: int) -> tuple[Rotation, float]:
    """How positions turn, and what YaRN multiplies the scores by."""
    if width % 2:
        raise ConfigError(f"{config.path}: `qk_rope_head_dim` {width} cannot turn in pairs", RESTORE)
    key = "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
    config.ignore("rope_scaling" if key == "rope_parameters" else "rope_parameters", "the other of two spellings was read, or nothing is scaled")
    scaling = config.child(key) if config.has(key) else ConfigReader({}, f"{config.path}: {key}")
    outer, inside = config, scaling.has("rope_theta")
    if inside:
        config.ignore("rope_theta", f"{key} decides")
        outer = scaling
    theta = outer.above_zero("rope_theta", 10_000.0)
    interleaved = config.take("rope_interleave", bool, True)
    scaling.expect("partial_rotary_factor", (1.0,), "The width of what turns is qk_rope_head_dim.", 1.0)
    spelling = "rope_type" if scaling.has("rope_type") else "type"
    if spelling == "rope_type":
        scaling.ignore("type", "rope_type is its newer spelling")
    kind = scaling.expect(spelling, ("default", "yarn"), "Add the rule to layers/leaves.py.", "default")
    if kind == "default":
        for leaf in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings"):
            scaling.ignore(leaf, "means nothing to rope_type default")
        return Rotation(width=width, theta=theta, interleaved=interleaved), 1.0
    scaling.expect("truncate", (True,), "Only a ramp with whole ends is implemented.", True)
    scaling.expect("attention_factor", (None,), "Give mscale and mscale_all_dim.")
    factor = scaling.above_zero("factor")
    yarn = Yarn(
        factor=factor, fast=scaling.above_zero("beta_fast", 32.0), slow=scaling.above_zero("beta_slow", 1.0),
        context=scaling.positive("original_max_position_embeddings"))
    one, both = (scaling.above_zero(leaf) if scaling.take(leaf, float, 0.0) else 0.0 for leaf in ("mscale", "mscale_all_dim"))
    magnitude = _mscale(factor, one) / _mscale(factor, both) if one and both else _mscale(factor, 1.0)
    sharpness = _mscale(factor, both) ** 2 if both else 1.0
    return Rotation(width=width, theta=theta, interleaved=interleaved, yarn=yarn, magnitude=magnitude), sharpness


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _ffns(config: ConfigReader, dim: int, num_layers: int, dtype: str) -> tuple[list[PartSpec], str]:
    config.expect("hidden_act", ("silu",), "Add the activation to ops/activation.py.", "silu")
    act, expert_format = Activation("silu"), _quantised_format(config)
    dense = Ffn(dim=dim, inner=config.positive("intermediate_size"), activation=act, dtype=dtype)
    inner, num_experts = config.positive("moe_intermediate_size"), config.positive("n_routed_experts")
    top_k, router = config.positive("num_experts_per_tok"), _router(config)
    kept = num_experts // router.num_groups * router.top_groups
    if num_experts % router.num_groups or router.top_groups > router.num_groups or top_k > kept:
        raise ConfigError(
            f"{config.path}: top {top_k} of {num_experts} experts in {router.num_groups} groups, {router.top_groups} kept, cannot be chosen", RESTORE)
    moe = Moe(
        dim=dim, inner=inner, num_experts=num_experts, top_k=top_k, router=router, shared_inner=config.natural("n_shared_experts", 0) * inner,
        activation=act, dtype=dtype, expert_format=expert_format)
    return [moe if is_sparse else dense for is_sparse in _sparse_layers(config, num_layers)], expert_format


def _router(config: ConfigReader) -> Router:
    config.expect("topk_method", ("noaux_tc",), "Only the bias-balanced choice is implemented.", "noaux_tc")
    config.expect("scoring_func", ("sigmoid",), "Only sigmoid scores are known for this family.", "sigmoid")
    config.expect("moe_router_dtype", ("float32",), "Routers compute in fp32.", "float32")
    return Router(
        num_groups=config.positive("n_group", 1), top_groups=config.positive("topk_group", 1),
        renormalize=config.take("norm_topk_prob", bool, True), scale=config.above_zero("routed_scaling_factor", 1.0))


def _sparse_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    """Which layers have experts: a list, or all from some layer on."""
    if config.has("mlp_layer_types"):
        for key in ("first_k_dense_replace", "moe_layer_freq"):
            config.ignore(key, "mlp_layer_types decides")
        types = config.take_list("mlp_layer_types", str)
        if len(types) != num_layers or not set(types) <= {"dense", "sparse"}:
            fact = f"{config.path}: `mlp_layer_types` has {len(types)} entries of {sorted(set(types))}"
            raise ConfigError(fact, f"Give {num_layers} of dense, sparse.")
        return [name == "sparse" for name in types]
    first, freq = config.natural("first_k_dense_replace", 0), config.positive("moe_layer_freq", 1)
    return [i >= first and i % freq == 0 for i in range(num_layers)]


def _quantised_format(config: ConfigReader) -> str:
    """What the config announces for the weights; the tensors decide when they are loaded. Raises ConfigError for other formats."""
    if not config.has("quantization_config"):
        return "dense"
    nested = config.child("quantization_config")
    why = "Convert the checkpoint to bf16, or use the release in fp8 (e4m3, blocks of 128 x 128)."
    nested.expect("quant_method", ("fp8",), why)
    nested.expect("fmt", ("e4m3",), why, "e4m3")
    nested.expect("weight_block_size", ([128, 128],), why)
    nested.ignore("activation_scheme", "activations are not rounded to eight bits here")
    nested.ignore("scale_fmt", "says how activations are rounded; scales of weights are read as numbers")
    for key in ("modules_to_not_convert", "ignored_layers"):
        nested.ignore(key, "which tensors are packed is read from the tensors")
    return "fp8"


_LAYER = "model.layers.{i}."
NAMES = NameMap(
    renames=(
        Rename("model.embed_tokens.weight", "embed.weight"),
        Rename("model.norm.weight", "norm.weight"),
        Rename("lm_head.weight", "head.weight"),
        Rename(_LAYER + "input_layernorm.weight", "layers.{i}.mixer_norm.weight"),
        Rename(_LAYER + "post_attention_layernorm.weight", "layers.{i}.ffn_norm.weight"),
        Rename(_LAYER + "self_attn.{leaf*}", "layers.{i}.mixer.{leaf*}"),
        Rename(_LAYER + "mlp.gate.weight", "layers.{i}.ffn.router.weight"),
        Rename(_LAYER + "mlp.gate.e_score_correction_bias", "layers.{i}.ffn.router.bias"),
        *(
            Rename(_LAYER + f"mlp.experts.{{e}}.{ours}_proj.weight{form}", f"layers.{{i}}.ffn.experts.{ours}{form}")
            for ours in ("gate", "up", "down") for form in ("", "_scale_inv")
        ),
        Rename(_LAYER + "mlp.{leaf*}", "layers.{i}.ffn.{leaf*}"),
    ),
    skips=(Skip(_LAYER + "self_attn.rotary_emb.inv_freq", "frequencies are computed from the config"),),
    modules=(
        ("model.embed_tokens", "embed"),
        ("model.norm", "norm"),
        ("lm_head", "head"),
        (_LAYER + "input_layernorm", "layers.{i}.mixer_norm"),
        (_LAYER + "post_attention_layernorm", "layers.{i}.ffn_norm"),
        (_LAYER + "self_attn", "layers.{i}.mixer"),
        (_LAYER + "self_attn.{leaf*}", "layers.{i}.mixer.{leaf*}"),
        (_LAYER + "mlp", "layers.{i}.ffn"),
        (_LAYER + "mlp.gate", "layers.{i}.ffn.router"),
        (_LAYER + "mlp.{leaf*}", "layers.{i}.ffn.{leaf*}"),
        ("model.layers.{i}", "layers.{i}"),
    ),
)
