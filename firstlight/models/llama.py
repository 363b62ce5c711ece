"""Llama and what bears its model_type: dense layers of grouped-query attention with rotary positions.

Source: meta-llama/Llama-3.1-8B and HuggingFaceTB/SmolLM2-135M-Instruct config.json and tensor names.
"""

from __future__ import annotations

from collections.abc import Callable

from firstlight.parts.activation import Activation
from firstlight.parts.add import Add
from firstlight.parts.ffn import Ffn
from firstlight.parts.gqa import Gqa
from firstlight.parts.rotation import Rotation, Slowdown
from firstlight.spec.config import ConfigReader
from firstlight.spec.errors import ConfigError
from firstlight.spec.model import LayerSpec, ModelSpec
from firstlight.spec.weights import NameMap, Reading, Rename, Skip

RESTORE = "Restore the value of the model's release."
THETA = 10_000.0
"""What a config without `rope_theta` means: the first Llama left it out."""


def read(config: ConfigReader, inner: Callable[[ConfigReader, str], Reading]) -> Reading:
    """The facts of a Llama config, in its published spelling or with the framework's `rope_parameters`."""
    config.ignore_framework_keys()
    dim, num_layers, dtype = config.positive("hidden_size"), config.positive("num_hidden_layers"), config.take_dtype()
    max_context = config.positive("max_position_embeddings", 2048)
    mixer = _attention(config, dim, max_context, dtype)
    ffn = _ffn(config, dim, dtype)
    add = Add(dtype=dtype)
    spec = ModelSpec(
        name="llama", num_vocab=config.positive("vocab_size"), dim=dim, max_context=max_context,
        layers=tuple(LayerSpec(i, mixer, ffn, add) for i in range(num_layers)), output=add, norm_eps=config.above_zero("rms_norm_eps", 1e-6),
        dtype=dtype, tied=config.take("tie_word_embeddings", bool, False), bos_id=config.take("bos_token_id", int, None),
        stop_ids=config.take_ids("eos_token_id"))
    config.ignore("pad_token_id", "packed batches need no padding")
    config.ignore("transformers.js_config", "for another program")
    config.expect("quantization_config", (None,), "Use a checkpoint in bf16, fp16 or fp32; a GGUF file is converted by `firstlight fetch`.")
    return Reading(spec, NAMES)


def _attention(config: ConfigReader, dim: int, max_context: int, dtype: str) -> Gqa:
    num_heads = config.positive("num_attention_heads")
    num_key_heads = config.positive("num_key_value_heads", num_heads)
    if num_heads % num_key_heads:
        raise ConfigError(f"{config.path}: {num_heads} heads cannot share {num_key_heads} `num_key_value_heads` evenly", RESTORE)
    if not config.has("head_dim") and dim % num_heads:
        raise ConfigError(f"{config.path}: `hidden_size` {dim} is no multiple of {num_heads} heads and there is no `head_dim`", RESTORE)
    head_dim = config.positive("head_dim", dim // num_heads)
    config.expect("attention_bias", (False,), "Projections of attention with bias are not implemented.", False)
    return Gqa(
        dim=dim, num_heads=num_heads, num_key_heads=num_key_heads, head_k=head_dim, head_v=head_dim,
        rotation=_rotation(config, head_dim, max_context), dtype=dtype)


def _rotation(config: ConfigReader, head_dim: int, max_context: int) -> Rotation:
    """`rope_theta` and `rope_scaling`, or both in `rope_parameters`."""
    if head_dim % 2:
        raise ConfigError(f"{config.path}: heads of {head_dim} channels cannot turn in pairs", RESTORE)
    config.expect("rope_interleaved", (False,), "Only half-split pairs are known for this family.", False)
    scaling = None
    for key in ("rope_parameters", "rope_scaling"):
        if scaling is None and config.has(key):
            scaling = config.child(key)
        else:
            config.ignore(key, "rope_parameters decides, or nothing is scaled")
    inside = scaling is not None and scaling.has("rope_theta")
    if inside:
        config.ignore("rope_theta", "rope_parameters decides")
    theta = (scaling if scaling is not None and inside else config).above_zero("rope_theta", THETA)
    if scaling is None:
        return Rotation(width=head_dim, theta=theta)
    scaling.expect("partial_rotary_factor", (1.0,), "Heads of this family turn as a whole.", 1.0)
    if scaling.has("rope_type"):
        scaling.ignore("type", "rope_type is its newer spelling")
    kind = scaling.expect(
        "rope_type" if scaling.has("rope_type") else "type", ("default", "linear", "llama3"), "Add the rule to layers/leaves.py.", "default")
    if kind == "llama3":
        return Rotation(width=head_dim, theta=theta, slowdown=_slowdown(scaling, max_context))
    for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings", *(("factor",) if kind == "default" else ())):
        scaling.ignore(key, f"means nothing to rope_type {kind}")
    return Rotation(width=head_dim, theta=theta, factor=1.0 if kind == "default" else scaling.above_zero("factor"))


def _slowdown(scaling: ConfigReader, max_context: int) -> Slowdown:
    low, high = scaling.above_zero("low_freq_factor", 1.0), scaling.above_zero("high_freq_factor", 4.0)
    if low >= high:
        raise ConfigError(f"{scaling.path}: `low_freq_factor` {low} is not below `high_freq_factor` {high}", RESTORE)
    context = scaling.positive("original_max_position_embeddings", max_context)
    return Slowdown(factor=scaling.above_zero("factor"), low=low, high=high, context=context)


def _ffn(config: ConfigReader, dim: int, dtype: str) -> Ffn:
    config.expect("hidden_act", ("silu",), "Add the activation to ops/activation.py.", "silu")
    config.expect("mlp_bias", (False,), "Feed-forwards with bias are not implemented.", False)
    return Ffn(dim=dim, inner=config.positive("intermediate_size"), activation=Activation("silu"), dtype=dtype)


_LAYER = "model.layers.{i}."
NAMES = NameMap(
    renames=(
        Rename("model.embed_tokens.weight", "embed.weight"),
        Rename("model.norm.weight", "norm.weight"),
        Rename("lm_head.weight", "head.weight"),
        Rename(_LAYER + "input_layernorm.weight", "layers.{i}.mixer_norm.weight"),
        Rename(_LAYER + "post_attention_layernorm.weight", "layers.{i}.ffn_norm.weight"),
        Rename(_LAYER + "self_attn.{leaf*}", "layers.{i}.mixer.{leaf*}"),
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
        (_LAYER + "mlp.{leaf*}", "layers.{i}.ffn.{leaf*}"),
        ("model.layers.{i}", "layers.{i}"),
    ),
)
