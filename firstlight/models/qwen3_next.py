"""Qwen3-Next, and the text model inside Qwen3.5 and its successors: Gated DeltaNet beside gated attention, experts with a gated shared one.

The two differ in how the projections of a Gated DeltaNet layer are laid out; all else, the keys say.
Source: Qwen/Qwen3-Next-80B-A3B-Instruct and Qwen/Qwen3.6-35B-A3B config.json and tensor names.
"""

from __future__ import annotations

from collections.abc import Callable

from firstlight.parts.activation import Activation
from firstlight.parts.add import Add
from firstlight.parts.ffn import Ffn
from firstlight.parts.gdn import Gdn
from firstlight.parts.gqa import Gqa
from firstlight.parts.moe import Moe, Router
from firstlight.parts.rotation import Rotation
from firstlight.spec.config import ConfigReader
from firstlight.spec.errors import ConfigError
from firstlight.spec.model import LayerSpec, ModelSpec, PartSpec
from firstlight.spec.weights import NameMap, Reading, Rename, Skip

ALIASES = ("qwen3_5_moe_text",)
RESTORE = "Restore the value of the model's release."
THETA, PARTIAL = 10_000.0, 0.25
"""What a config without `rope_theta` and `partial_rotary_factor` means."""

EXPERT_KEYS = ("num_experts", "num_experts_per_tok", "norm_topk_prob", "moe_intermediate_size", "shared_expert_intermediate_size")
DRAFT_REASON = "multi-token prediction: a head that drafts further tokens; without speculative decoding nothing asks it"


def read(config: ConfigReader, inner: Callable[[ConfigReader, str], Reading]) -> Reading:
    """The facts of a text config; one without a model_type lies in an envelope of Qwen3.5."""
    name = config.take("model_type", str, "qwen3_5_moe_text")
    config.ignore_framework_keys()
    dim, num_layers, dtype = config.positive("hidden_size"), config.positive("num_hidden_layers"), config.take_dtype()
    eps = config.above_zero("rms_norm_eps", 1e-6)
    config.expect("hidden_act", ("silu",), "Add the activation to ops/activation.py.", "silu")
    mixers = _mixers(config, dim, num_layers, eps, dtype, interleaved=name == "qwen3_next")
    ffns = _ffns(config, dim, num_layers, dtype)
    add = Add(dtype=dtype)
    spec = ModelSpec(
        name=name, num_vocab=config.positive("vocab_size"), dim=dim, max_context=config.positive("max_position_embeddings", 32_768),
        layers=tuple(LayerSpec(i, mixers[i], ffns[i], add) for i in range(num_layers)), output=add, norm_eps=eps, norm_plus_one=True, dtype=dtype,
        tied=config.take("tie_word_embeddings", bool, False), bos_id=config.take("bos_token_id", int, None),
        stop_ids=config.take_ids("eos_token_id"))
    config.ignore("pad_token_id", "packed batches need no padding")
    for key in ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"):
        config.ignore(key, DRAFT_REASON)
    config.expect("quantization_config", (None,), "Use a checkpoint in bf16, fp16 or fp32.")
    return Reading(spec, NAMES)


def _mixers(config: ConfigReader, dim: int, num_layers: int, eps: float, dtype: str, *, interleaved: bool) -> list[PartSpec]:
    gdn, gqa = _gdn(config, dim, eps, dtype, interleaved), _gqa(config, dim, eps, dtype)
    if not config.has("layer_types"):
        interval = config.positive("full_attention_interval", 4)
        return [gdn if (i + 1) % interval else gqa for i in range(num_layers)]
    config.ignore("full_attention_interval", "layer_types decides")
    known: dict[str, PartSpec] = {"linear_attention": gdn, "full_attention": gqa}
    types = config.take_list("layer_types", str)
    if len(types) != num_layers or not set(types) <= set(known):
        raise ConfigError(f"{config.path}: `layer_types` has {len(types)} entries of {sorted(set(types))}", f"Give {num_layers} of {sorted(known)}.")
    return [known[kind] for kind in types]


def _shared_evenly(config: ConfigReader, heads: str, key_heads: str) -> tuple[int, int]:
    """Two counts of heads, of which the first is a multiple of the second."""
    num_heads, num_key_heads = config.positive(heads), config.positive(key_heads)
    if num_heads % num_key_heads:
        raise ConfigError(f"{config.path}: {num_heads} `{heads}` cannot share {num_key_heads} `{key_heads}` evenly", RESTORE)
    return num_heads, num_key_heads


def _gdn(config: ConfigReader, dim: int, eps: float, dtype: str, interleaved: bool) -> Gdn:
    num_heads, num_key_heads = _shared_evenly(config, "linear_num_value_heads", "linear_num_key_heads")
    config.expect("mamba_ssm_dtype", ("float32",), "States are kept in float32; leave the key out or restore it.", "float32")
    return Gdn(
        dim=dim, num_heads=num_heads, num_key_heads=num_key_heads, head_k=config.positive("linear_key_head_dim"),
        head_v=config.positive("linear_value_head_dim"), conv_width=config.positive("linear_conv_kernel_dim", 4), interleaved=interleaved,
        norm_eps=eps, dtype=dtype)


def _gqa(config: ConfigReader, dim: int, eps: float, dtype: str) -> Gqa:
    num_heads, num_key_heads = _shared_evenly(config, "num_attention_heads", "num_key_value_heads")
    head_dim = config.positive("head_dim")
    config.expect("attention_bias", (False,), "Projections of attention with bias are not implemented.", False)
    config.expect("attn_output_gate", (True,), "Attention of this family is gated.", True)
    config.expect("use_sliding_window", (False,), "Attention over a window is not part of this family.", False)
    for key in ("sliding_window", "max_window_layers"):
        config.ignore(key, "means nothing without use_sliding_window")
    return Gqa(
        dim=dim, num_heads=num_heads, num_key_heads=num_key_heads, head_k=head_dim, head_v=head_dim, rotation=_rotation(config, head_dim),
        dtype=dtype, normed=True, plus_one=True, gated=True, norm_eps=eps)


def _rotation(config: ConfigReader, head_dim: int) -> Rotation:
    """Base and share of the turning channels from `rope_parameters`, or from keys of their own."""
    nested = None
    for key in ("rope_parameters", "rope_scaling"):
        if nested is None and config.has(key):
            nested = config.child(key)
        else:
            config.ignore(key, "rope_parameters decides, or nothing is scaled")
    found = {"rope_theta": THETA, "partial_rotary_factor": PARTIAL}
    for key, default in found.items():
        inside = nested is not None and nested.has(key)
        if inside:
            config.ignore(key, "rope_parameters decides")
        found[key] = (nested if nested is not None and inside else config).above_zero(key, default)
    if nested is not None:
        spelling, other = ("rope_type", "type") if nested.has("rope_type") else ("type", "rope_type")
        nested.expect(spelling, ("default",), "Longer contexts by scaled rotation are not implemented.", "default")
        nested.ignore(other, "the other of two spellings was read")
        for key in ("mrope_section", "mrope_interleaved"):
            nested.ignore(key, "splits channels among the directions of an image; in text all directions have the same position")
    width = int(head_dim * found["partial_rotary_factor"])
    if width % 2 or not 0 < width <= head_dim:
        fact = f"{config.path}: {width} of {head_dim} channels (`partial_rotary_factor` {found['partial_rotary_factor']}) cannot turn in pairs"
        raise ConfigError(fact, RESTORE)
    return Rotation(width=width, theta=found["rope_theta"])


def _ffns(config: ConfigReader, dim: int, num_layers: int, dtype: str) -> list[PartSpec]:
    """Experts in every `decoder_sparse_step`-th layer that is not named as dense."""
    sparse_step = config.positive("decoder_sparse_step", 1)
    dense_layers = set(config.take_list("mlp_only_layers", int)) if config.has("mlp_only_layers") else set()
    sparse = [i not in dense_layers and (i + 1) % sparse_step == 0 for i in range(num_layers)]
    moe: PartSpec | None = None
    dense: PartSpec | None = None
    if any(sparse):
        moe = _moe(config, dim, dtype)
    if not all(sparse):
        dense = Ffn(dim=dim, inner=config.positive("intermediate_size"), activation=Activation("silu"), dtype=dtype)
    for key in ("intermediate_size",) if dense is None else () if moe is not None else EXPERT_KEYS:
        config.ignore(key, "no layer is dense" if dense is None else "no layer has experts")
    return [part for is_sparse in sparse if (part := moe if is_sparse else dense) is not None]


def _moe(config: ConfigReader, dim: int, dtype: str) -> Moe:
    num_experts, top_k = config.positive("num_experts"), config.positive("num_experts_per_tok")
    if top_k > num_experts:
        raise ConfigError(f"{config.path}: {top_k} `num_experts_per_tok` cannot be chosen from {num_experts} `num_experts`", RESTORE)
    return Moe(
        dim=dim, inner=config.positive("moe_intermediate_size"), num_experts=num_experts, top_k=top_k,
        router=Router(score="softmax", renormalize=config.take("norm_topk_prob", bool, True), biased=False),
        shared_inner=config.positive("shared_expert_intermediate_size"), shared_gated=True, activation=Activation("silu"), dtype=dtype)


_LAYER = "model.layers.{i}."
_EXPERTS = (("gate_proj", "gate"), ("up_proj", "up"), ("down_proj", "down"))
NAMES = NameMap(
    renames=(
        Rename("model.embed_tokens.weight", "embed.weight"),
        Rename("model.norm.weight", "norm.weight"),
        Rename("lm_head.weight", "head.weight"),
        Rename(_LAYER + "input_layernorm.weight", "layers.{i}.mixer_norm.weight"),
        Rename(_LAYER + "post_attention_layernorm.weight", "layers.{i}.ffn_norm.weight"),
        Rename(_LAYER + "self_attn.{leaf*}", "layers.{i}.mixer.{leaf*}"),
        Rename(_LAYER + "linear_attn.conv1d.weight", "layers.{i}.mixer.conv1d.weight", "squeeze"),
        Rename(_LAYER + "linear_attn.{leaf*}", "layers.{i}.mixer.{leaf*}"),
        Rename(_LAYER + "mlp.gate.weight", "layers.{i}.ffn.router.weight"),
        *(Rename(_LAYER + f"mlp.experts.{{e}}.{theirs}.weight", f"layers.{{i}}.ffn.experts.{ours}") for theirs, ours in _EXPERTS),
        Rename(_LAYER + "mlp.experts.gate_up_proj", "layers.{i}.ffn.experts.gate_up"),
        Rename(_LAYER + "mlp.experts.down_proj", "layers.{i}.ffn.experts.down"),
        Rename(_LAYER + "mlp.shared_expert.{leaf*}", "layers.{i}.ffn.shared_experts.{leaf*}"),
        Rename(_LAYER + "mlp.{leaf*}", "layers.{i}.ffn.{leaf*}"),
    ),
    skips=(Skip("mtp.{leaf*}", DRAFT_REASON),),
    modules=(
        ("model.embed_tokens", "embed"),
        ("model.norm", "norm"),
        ("lm_head", "head"),
        (_LAYER + "input_layernorm", "layers.{i}.mixer_norm"),
        (_LAYER + "post_attention_layernorm", "layers.{i}.ffn_norm"),
        *((_LAYER + theirs + rest, "layers.{i}.mixer" + rest) for theirs in ("self_attn", "linear_attn") for rest in ("", ".{leaf*}")),
        (_LAYER + "mlp.gate", "layers.{i}.ffn.router"),
        *((_LAYER + "mlp.shared_expert" + rest, "layers.{i}.ffn.shared_experts" + rest) for rest in ("", ".{leaf*}")),
        *((_LAYER + "mlp" + rest, "layers.{i}.ffn" + rest) for rest in ("", ".{leaf*}")),
        ("model.layers.{i}", "layers.{i}"),
    ),
)
