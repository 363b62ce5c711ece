"""A tiny Kimi-Linear made by transformers: the witness for our Kimi-Linear, in both layouts that exist on disk.

Shapes: T tokens, V vocabulary, D hidden.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from firstlight.adapt.record import Trace, first_tensor, record

FULL_LAYERS = (4, 7, 8)  # 1-based as in Kimi's config; two MLA layers at the end, like K3
NUM_LAYERS = 8
NUM_DENSE = 1

_SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 144,
    "moe_intermediate_size": 40,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
_NUM_HEADS, _HEAD_DIM, _CONV = 3, 16, 4
_NUM_EXPERTS, _TOP_K, _NUM_SHARED, _MAX_CONTEXT = 8, 2, 2, 4096


def make_hf(folder: Path | None, *, seed: int = 0, **changes: Any) -> Any:
    """A seeded fp32 KimiLinearForCausalLM in eval mode, saved by save_pretrained when a folder is given; `changes` replace config fields."""
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    fields = _SHAPE | {
        "layer_types": ["full_attention" if i + 1 in FULL_LAYERS else "linear_attention" for i in range(NUM_LAYERS)],
        "mlp_layer_types": ["dense" if i < NUM_DENSE else "sparse" for i in range(NUM_LAYERS)],
        "linear_head_dim": _HEAD_DIM,
        "linear_num_heads": _NUM_HEADS,
        "linear_conv_kernel_dim": _CONV,
        "num_local_experts": _NUM_EXPERTS,
        "num_experts_per_tok": _TOP_K,
        "n_shared_experts": _NUM_SHARED,
        "n_group": 1,
        "norm_topk_prob": True,
        "max_position_embeddings": _MAX_CONTEXT,
    } | changes
    config = KimiLinearConfig(**fields)
    config._attn_implementation = "eager"
    model = KimiLinearForCausalLM(config).eval().float()
    _draw(model, seed)
    if folder is not None:
        model.save_pretrained(folder)
    return model


def write_original(model: Any, folder: Path, *, num_shards: int = 2) -> None:
    """Write the same weights as Moonshot published them: nested 1-based config, `mlp` for dense layers, one tensor per expert."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_original_config(model.config), indent=1), encoding="utf-8")
    tensors = _original_tensors(model)
    names = list(tensors)
    size = math.ceil(len(names) / num_shards)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: tensors[name].contiguous() for name in names[shard * size : (shard + 1) * size]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def reference_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Logits [T, V] in fp32 at every position, one shot, no cache."""
    with torch.no_grad():
        return model(torch.tensor([list(ids)]), use_cache=False).logits[0].float()


def reference_trace(model: Any, ids: Sequence[int], where: str = "*") -> Trace:
    """Outputs of the modules of one forward that mean what ours of that name mean; `ids` and `logits` are in `extra`."""
    with record(model, where, pick=_pick) as trace:
        logits = reference_logits(model, ids)
    trace.extra = {"ids": torch.tensor([list(ids)]), "logits": logits[None]}
    return trace


def _pick(name: str, output: object) -> torch.Tensor | None:
    """Routers return (logits, weights, ids): ids. `act_fn` is the gate's half of the product, ours is the whole: left out."""
    if name.endswith(".act_fn"):
        return None
    if name.endswith("mlp.gate") and isinstance(output, tuple):
        return output[2]
    return first_tensor(output)


def _draw(model: Any, seed: int) -> None:
    """Weights at which every branch matters: unit activations, norms off one, decay near 1, a router bias that changes choices."""
    generator = torch.Generator().manual_seed(seed)

    def normal(tensor: torch.Tensor, std: float, mean: float = 0.0) -> torch.Tensor:
        return mean + std * torch.randn(tensor.shape, generator=generator)

    def uniform(tensor: torch.Tensor, low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(tensor.shape, generator=generator)

    tensors = sorted(list(model.named_parameters()) + [(n, b) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")])
    with torch.no_grad():
        for name, tensor in tensors:
            if name.endswith("A_log"):
                tensor.copy_(uniform(tensor, 0.5, 2.0).log())
            elif name.endswith("dt_bias"):  # softplus(dt_bias) from 0.0016 to 0.025, so exp(g) lies around 0.99
                tensor.copy_(uniform(tensor, math.log(1.6e-3), math.log(2.5e-2)))
            elif name.endswith("e_score_correction_bias"):
                tensor.copy_(normal(tensor, 0.1))
            elif name.endswith("f_b_proj.weight"):  # half a unit of input-dependent decay
                tensor.copy_(normal(tensor, 0.5 * tensor.shape[-1] ** -0.5))
            elif "norm" in name:
                tensor.copy_(normal(tensor, 0.1, 1.0))
            elif "conv1d" in name:
                tensor.copy_(normal(tensor, 0.5))
            elif "embed_tokens" in name:
                tensor.copy_(normal(tensor, 1.0))
            else:
                tensor.copy_(normal(tensor, tensor.shape[-1] ** -0.5))


def _original_config(config: Any) -> dict[str, Any]:
    kinds = config.layer_types
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_kimi.KimiLinearConfig",
            "AutoModel": "modeling_kimi.KimiLinearModel",
            "AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM",
        },
        "dtype": "float32",
        "first_k_dense_replace": config.mlp_layer_types.count("dense"),
        "head_dim": config.hidden_size // config.num_attention_heads,
        "linear_attn_config": {
            "full_attn_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "full_attention"],
            "head_dim": config.linear_head_dim,
            "kda_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "linear_attention"],
            "num_heads": config.linear_num_heads,
            "short_conv_kernel_size": config.linear_conv_kernel_dim,
        },
        "mla_use_nope": True,
        "model_max_length": config.max_position_embeddings,
        "model_type": "kimi_linear",
        "moe_layer_freq": 1,
        "moe_renormalize": config.norm_topk_prob,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": config.n_group,
        "num_experts": config.num_local_experts,
        "num_experts_per_token": config.num_experts_per_tok,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": config.n_shared_experts,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "use_cache": True,
        "use_grouped_topk": True,
    } | {key: getattr(config, key) for key in _SHAPE}


def _original_tensors(model: Any) -> dict[str, torch.Tensor]:
    dense = {i for i, kind in enumerate(model.config.mlp_layer_types) if kind == "dense"}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        parts = name.split(".")
        if len(parts) > 3 and parts[3] == "mlp" and int(parts[2]) not in dense:
            parts[3] = "block_sparse_moe"
        name = ".".join(parts).replace(".forget_gate.", ".")
        head = name.rpartition(".conv1d.")[0]
        if head:
            for letter, rows in zip("qkv", tensor.chunk(3), strict=True):
                tensors[f"{head}.{letter}_conv1d.weight"] = rows
        elif name.endswith(".experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                stem = name.removesuffix("gate_up_proj")
                tensors[f"{stem}{expert}.w1.weight"], tensors[f"{stem}{expert}.w3.weight"] = gate, up
        elif name.endswith(".experts.down_proj"):
            for expert, down in enumerate(tensor):
                tensors[f"{name.removesuffix('down_proj')}{expert}.w2.weight"] = down
        else:
            tensors[name] = tensor
    return tensors
