"""Kimi-Linear, and the text model inside Kimi K3, which bears the same model_type.

KDA and MLA layers in any order, experts over the full width or a latent, plain or Attention Residuals: the keys decide.
Source: moonshotai/Kimi-Linear-48B-A3B-Instruct and Kimi-K3 config.json and tensor names; arXiv 2510.26692, 2607.24653.
"""

from __future__ import annotations

from collections.abc import Callable

from firstlight.parts.activation import Activation
from firstlight.parts.add import Add
from firstlight.parts.block_residual import BlockResidual
from firstlight.parts.ffn import Ffn
from firstlight.parts.kda import Kda
from firstlight.parts.latent_moe import LatentMoe
from firstlight.parts.mla import Mla
from firstlight.parts.moe import Moe, Router
from firstlight.spec.config import ConfigReader
from firstlight.spec.errors import ConfigError
from firstlight.spec.model import LayerSpec, ModelSpec, PartSpec
from firstlight.spec.weights import NameMap, Reading, Rename

EXPERT_KEYS = (
    "moe_intermediate_size", "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_token", "num_experts_per_tok",
    "num_shared_experts", "n_shared_experts", "topk_method", "use_grouped_topk", "moe_router_activation_func", "num_expert_group", "n_group",
    "topk_group", "moe_renormalize", "norm_topk_prob", "routed_scaling_factor", "routed_expert_hidden_size", "latent_moe_use_norm",
)
LATENT_NORM_EPS = 1e-6  # the official code leaves the q_a and kv_a norms at their class default, whatever rms_norm_eps says


def read(config: ConfigReader, inner: Callable[[ConfigReader, str], Reading]) -> Reading:
    """The facts of a Kimi-Linear config, flat or in the framework's own spelling."""
    config.ignore_framework_keys()
    dim, num_layers = config.positive("hidden_size"), config.positive("num_hidden_layers")
    dtype = config.take_dtype()
    block_size = config.positive("attn_res_block_size", None)
    eps = config.above_zero("rms_norm_eps", 1e-5)
    mixers = _mixers(config, dim, num_layers, eps, dtype)
    ffns, expert_format = _ffns(config, dim, num_layers, eps, dtype)

    def residual(index: int | None) -> PartSpec:
        if block_size is None:
            return Add(dtype=dtype)
        return BlockResidual(dim=dim, block_size=block_size, index=index, num_layers=num_layers, eps=eps, dtype=dtype)

    layers = tuple(LayerSpec(i, mixers[i], ffns[i], residual(i)) for i in range(num_layers))
    spec = ModelSpec(
        name="kimi_linear", num_vocab=config.positive("vocab_size"), dim=dim, max_context=_max_context(config), layers=layers,
        output=residual(None), norm_eps=eps, dtype=dtype, tied=config.take("tie_word_embeddings", bool, False), expert_format=expert_format,
        bos_id=config.take("bos_token_id", int, None), stop_ids=config.take_ids("eos_token_id"),
    )
    config.ignore("pad_token_id", "packed batches need no padding")
    config.expect("num_nextn_predict_layers", (0,), "Multi-token prediction layers are not implemented for this family.", 0)
    return Reading(spec, NAMES)


def few(numbers: set[int]) -> str:
    """The first eight of a set of numbers, for a message."""
    shown = sorted(numbers)
    return f"{shown[:8]}" + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")


def _max_context(config: ConfigReader) -> int:
    lengths = [config.positive(key, None) for key in ("model_max_length", "max_position_embeddings")]
    found = [length for length in lengths if length is not None]
    return min(found) if found else 1_048_576


def _linear_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    """Which layers are KDA: from 1-based lists, or from layer_types."""
    if config.has("linear_attn_config") and config.child("linear_attn_config").has("kda_layers"):
        lists = config.child("linear_attn_config")
        kda, full = set(lists.take_list("kda_layers", int)), set(lists.take_list("full_attn_layers", int))
        wanted = set(range(1, num_layers + 1))
        if kda & full or kda | full != wanted:
            twice, absent, beyond = (few(each) for each in (kda & full, wanted - kda - full, (kda | full) - wanted))
            raise ConfigError(
                f"{lists.path}: kda_layers and full_attn_layers (1-based) must name each of {num_layers} layers once; "
                f"twice {twice}, absent {absent}, beyond {beyond}",
                "Restore the lists of the model's release.")
        config.ignore("layer_types", "the 1-based lists of linear_attn_config decide")
        return [i + 1 in kda for i in range(num_layers)]
    types = config.take_list("layer_types", str)
    known = {"linear_attention": True, "full_attention": False}
    if len(types) != num_layers or not set(types) <= set(known):
        raise ConfigError(f"{config.path}: `layer_types` has {len(types)} entries of {sorted(set(types))}", f"Give {num_layers} of {sorted(known)}.")
    return [known[name] for name in types]


def _mixers(config: ConfigReader, dim: int, num_layers: int, eps: float, dtype: str) -> list[PartSpec]:
    linear = _linear_layers(config, num_layers)
    kda, mla = _kda(config, dim, eps, dtype), _mla(config, dim, dtype)
    return [kda if is_linear else mla for is_linear in linear]


def _kda(config: ConfigReader, dim: int, eps: float, dtype: str) -> Kda:
    own = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    if config.has("linear_attn_config"):
        nested = config.child("linear_attn_config")
        num_heads, head_dim = nested.positive("num_heads"), nested.positive("head_dim")
        width = nested.positive("short_conv_kernel_size", 4)
        bound, full_rank = nested.take("gate_lower_bound", float, None), nested.take("use_full_rank_gate", bool, False)
        for key in own:
            config.ignore(key, "linear_attn_config decides")
    else:
        num_heads, head_dim, width = (config.positive(key) for key in own)
        bound, full_rank = None, False
    if bound is not None and not -5 <= bound < 0:
        raise ConfigError(f"{config.path}: `gate_lower_bound` is {bound}, it must be in [-5, 0)", "Restore the value of the model's release.")
    return Kda(
        dim=dim, num_heads=num_heads, head_k=head_dim, head_v=head_dim, conv_width=width, decay_rank=head_dim, lower_bound=bound,
        gate_rank=None if full_rank else head_dim, norm_eps=eps, dtype=dtype)


def _mla(config: ConfigReader, dim: int, dtype: str) -> Mla:
    config.ignore("num_key_value_heads", "MLA has no key heads of its own; the resolved value is meaningless")
    config.ignore("head_dim", "derived by the framework and meaningless for MLA")
    config.expect("attention_bias", (False,), "MLA projections with bias are not implemented.", False)
    config.expect("mla_use_nope", (True,), "Rotated MLA is not part of this family.", True)
    for key in ("rope_theta", "rope_scaling", "rope_parameters", "rope_interleave", "qk_head_dim"):
        config.ignore(key, "no rotation: MLA of this family is NoPE")
    return Mla(
        dim=dim, num_heads=config.positive("num_attention_heads"), nope=config.positive("qk_nope_head_dim"),
        rope=config.natural("qk_rope_head_dim", 0), v_dim=config.positive("v_head_dim"), q_rank=config.positive("q_lora_rank", None),
        kv_rank=config.positive("kv_lora_rank"), gated=config.take("mla_use_output_gate", bool, False), norm_eps=LATENT_NORM_EPS, dtype=dtype)


def _activation(config: ConfigReader) -> Activation:
    kind = str(config.expect("hidden_act", ("silu", "situ"), "Add the activation to ops/activation.py.", "silu"))
    beta = config.above_zero("activation_situ_beta", 1.0)
    linear_beta = config.take("activation_situ_linear_beta", float, None)
    if linear_beta is not None:
        linear_beta = config.above_zero("activation_situ_linear_beta", 1.0)
    return Activation("silu") if kind == "silu" else Activation("situ", beta, linear_beta)


def _either(config: ConfigReader, *keys: str) -> str:
    """The first spelling that is there; the others are set aside."""
    found = next((key for key in keys if config.has(key)), keys[0])
    for key in keys:
        if key != found:
            config.ignore(key, f"another spelling of {found}")
    return found


def _router(config: ConfigReader) -> Router:
    config.expect("topk_method", ("noaux_tc",), "Only the bias-balanced choice is implemented.", "noaux_tc")
    grouped = config.take("use_grouped_topk", bool, True)
    score = config.expect("moe_router_activation_func", ("sigmoid", "softmax"), "Add the score to ops/route.py.", "sigmoid")
    num_groups, top_groups = config.positive(_either(config, "num_expert_group", "n_group"), 1), config.positive("topk_group", 1)
    return Router(
        score=str(score), num_groups=num_groups if grouped else 1, top_groups=top_groups if grouped else 1,
        renormalize=config.take(_either(config, "moe_renormalize", "norm_topk_prob"), bool, True),
        scale=config.above_zero("routed_scaling_factor", 1.0))


def _sparse_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    if config.has("mlp_layer_types") and not config.has("first_k_dense_replace"):
        types = config.take_list("mlp_layer_types", str)
        if len(types) != num_layers or not set(types) <= {"dense", "sparse"}:
            fact = f"{config.path}: `mlp_layer_types` has {len(types)} entries of {sorted(set(types))}"
            raise ConfigError(fact, f"Give {num_layers} of dense, sparse.")
        return [name == "sparse" for name in types]
    config.ignore("mlp_layer_types", "first_k_dense_replace decides")
    first, freq = config.natural("first_k_dense_replace", 0), config.positive("moe_layer_freq", 1)
    return [i >= first and i % freq == 0 for i in range(num_layers)]


def _ffns(config: ConfigReader, dim: int, num_layers: int, eps: float, dtype: str) -> tuple[list[PartSpec], str]:
    act, sparse = _activation(config), _sparse_layers(config, num_layers)
    dense = Ffn(dim=dim, inner=config.positive("intermediate_size"), activation=act, dtype=dtype)
    expert_format = quantised_format(config)
    moe: PartSpec = dense
    if any(sparse):
        moe = _experts(config, dim, act, eps, dtype, expert_format)
    for key in EXPERT_KEYS if not any(sparse) else ():
        config.ignore(key, "no layer has experts")
    return [moe if is_sparse else dense for is_sparse in sparse], expert_format


def _experts(config: ConfigReader, dim: int, act: Activation, eps: float, dtype: str, expert_format: str) -> PartSpec:
    inner = config.positive("moe_intermediate_size")
    num_experts = config.positive(_either(config, "num_experts", "num_local_experts", "n_routed_experts"))
    top_k = config.positive(_either(config, "num_experts_per_token", "num_experts_per_tok"))
    num_shared = config.natural(_either(config, "num_shared_experts", "n_shared_experts"), 0)
    router = _router(config)
    if top_k > num_experts or num_experts % router.num_groups or router.top_groups > router.num_groups:
        raise ConfigError(
            f"{config.path}: top {top_k} of {num_experts} experts in {router.num_groups} groups, {router.top_groups} kept, cannot be chosen",
            "Restore the values of the model's release.")
    latent, normed = config.positive("routed_expert_hidden_size", None), config.take("latent_moe_use_norm", bool, False)
    if latent is None:
        return Moe(dim=dim, inner=inner, num_experts=num_experts, top_k=top_k, router=router, shared_inner=num_shared * inner, activation=act,
                   dtype=dtype, expert_format=expert_format)
    return LatentMoe(dim=dim, latent=latent, inner=inner, num_experts=num_experts, top_k=top_k, router=router, shared_inner=num_shared * inner,
                     activation=act, normed=normed, norm_eps=eps, dtype=dtype, expert_format=expert_format)


def quantised_format(config: ConfigReader) -> str:
    """What the config announces for experts; the tensors decide when they are loaded. Raises ConfigError for other formats."""
    if not config.has("quantization_config"):
        return "dense"
    nested = config.child("quantization_config")
    why = "Convert the checkpoint to MXFP4 (compressed-tensors) or bf16."
    nested.expect("quant_method", ("compressed-tensors",), why)
    nested.expect("format", ("mxfp4-pack-quantized",), why)
    nested.ignore("ignore", "which tensors are packed is read from the tensors; published lists were wrong")
    nested.expect("kv_cache_scheme", (None,), "Quantised caches are not announced by any published checkpoint of this family.")
    for key in ("config_groups", "quantization_status", "global_compression_ratio", "sparsity_config", "transform_config", "version"):
        nested.ignore(key, "the tensors' own shapes and dtypes say it")
    return "mxfp4"


_LAYER = "model.layers.{i}."
NAMES = NameMap(
    renames=(
        Rename("model.embed_tokens.weight", "embed.weight"),
        Rename("model.norm.weight", "norm.weight"),
        Rename("lm_head.weight", "head.weight"),
        Rename("model.output_attn_res_{leaf*}", "output.output_{leaf*}"),
        Rename(_LAYER + "input_layernorm.weight", "layers.{i}.mixer_norm.weight"),
        Rename(_LAYER + "post_attention_layernorm.weight", "layers.{i}.ffn_norm.weight"),
        Rename(_LAYER + "self_attention_res_{leaf*}", "layers.{i}.residual.mixer_{leaf*}"),
        Rename(_LAYER + "mlp_res_{leaf*}", "layers.{i}.residual.ffn_{leaf*}"),
        Rename(_LAYER + "self_attn.A_log", "layers.{i}.mixer.A_log", "pad"),
        Rename(_LAYER + "self_attn.{conv}_conv1d.weight", "layers.{i}.mixer.{conv}_conv1d.weight", "squeeze"),
        Rename(_LAYER + "self_attn.{leaf*}", "layers.{i}.mixer.{leaf*}"),
        Rename(_LAYER + "mlp.{leaf*}", "layers.{i}.ffn.{leaf*}"),
        Rename(_LAYER + "block_sparse_moe.gate.weight", "layers.{i}.ffn.router.weight"),
        Rename(_LAYER + "block_sparse_moe.gate.e_score_correction_bias", "layers.{i}.ffn.router.bias"),
        *(
            Rename(_LAYER + f"block_sparse_moe.experts.{{e}}.{theirs}.weight{form}", f"layers.{{i}}.ffn.experts.{ours}{place}")
            for theirs, ours in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
            for form, place in (("", ""), ("_packed", ".packed"), ("_scale", ".scale"))
        ),
        Rename(_LAYER + "block_sparse_moe.{leaf*}", "layers.{i}.ffn.{leaf*}"),
    ),
    modules=(
        ("model.embed_tokens", "embed"),
        ("model.norm", "norm"),
        ("lm_head", "head"),
        (_LAYER + "input_layernorm", "layers.{i}.mixer_norm"),
        (_LAYER + "post_attention_layernorm", "layers.{i}.ffn_norm"),
        (_LAYER + "self_attn", "layers.{i}.mixer"),
        (_LAYER + "self_attn.forget_gate.{leaf}", "layers.{i}.mixer.{leaf}"),
        (_LAYER + "self_attn.{leaf*}", "layers.{i}.mixer.{leaf*}"),
        (_LAYER + "mlp", "layers.{i}.ffn"),
        (_LAYER + "mlp.gate", "layers.{i}.ffn.router"),
        (_LAYER + "mlp.{leaf*}", "layers.{i}.ffn.{leaf*}"),
        (_LAYER + "block_sparse_moe", "layers.{i}.ffn"),
        (_LAYER + "block_sparse_moe.gate", "layers.{i}.ffn.router"),
        (_LAYER + "block_sparse_moe.{leaf*}", "layers.{i}.ffn.{leaf*}"),
        ("model.layers.{i}", "layers.{i}"),
    ),
)
