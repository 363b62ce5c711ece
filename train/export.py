"""A checkpoint folder in K3's layout from trained masters, and back: bf16, experts in MXFP4, byte tokenizer, configuration.

    python -m train.export STATE FOLDER
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from train import make_byte_tokenizer
from train.quantise import GROUP, pack, unpack
from train.shape import CONV_WIDTH, LOWER_BOUND, NORM_EPS, SITU_BETA, SITU_LINEAR_BETA, Shape

PREFIX = "language_model."
WIDE = ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias")
"""Ends of the names that stay fp32."""


def token_ids(num_vocab: int) -> dict[str, int]:
    """Control token -> id."""
    added = make_byte_tokenizer.settings(num_vocab)["added_tokens_decoder"]
    return {entry["content"]: int(token_id) for token_id, entry in added.items()}


def config(shape: Shape) -> dict[str, Any]:
    """The content of config.json."""
    ids = token_ids(shape.vocab)
    ends = {"bos_token_id": ids["[BOS]"], "eos_token_id": ids["<|end_of_msg|>"], "pad_token_id": ids["[PAD]"]}
    return {
        "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "bfloat16", **ends,
        "media_placeholder_token_id": ids["<|media_pad|>"], "ignore_index": -100, "tie_word_embeddings": False,
        "text_config": _text(shape) | ends, "vision_config": {},
    }


def _text(shape: Shape) -> dict[str, Any]:
    return {
        "model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "dtype": "bfloat16",
        "vocab_size": shape.vocab, "hidden_size": shape.dim, "intermediate_size": shape.dense_inner, "moe_intermediate_size": shape.inner,
        "num_hidden_layers": shape.num_layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.heads,
        "max_position_embeddings": shape.max_context, "hidden_act": "situ", "activation_situ_beta": SITU_BETA,
        "activation_situ_linear_beta": SITU_LINEAR_BETA, "attn_res_block_size": shape.block_size, "first_k_dense_replace": 1,
        "kv_lora_rank": shape.kv_rank, "q_lora_rank": shape.q_rank, "qk_nope_head_dim": shape.nope, "qk_rope_head_dim": shape.rope,
        "v_head_dim": shape.v_dim, "latent_moe_use_norm": True, "routed_expert_hidden_size": shape.latent, "mla_use_nope": True,
        "mla_use_output_gate": True, "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc", "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1, "num_experts": shape.num_experts,
        "num_experts_per_token": shape.top_k, "num_shared_experts": shape.num_shared, "num_nextn_predict_layers": 0,
        "routed_scaling_factor": 1.0, "rms_norm_eps": NORM_EPS, "tie_word_embeddings": False, "use_cache": True,
        "linear_attn_config": {
            "full_attn_layers": [layer + 1 for layer in shape.full_layers],
            "kda_layers": [layer + 1 for layer in range(shape.num_layers) if layer not in shape.full_layers],
            "gate_lower_bound": LOWER_BOUND, "head_dim": shape.kda_head_dim, "num_heads": shape.kda_heads,
            "short_conv_kernel_size": CONV_WIDTH, "use_full_rank_gate": True,
        },
        "quantization_config": _quantization(),
    }


def _quantization() -> dict[str, Any]:
    """What compressed-tensors writes for packed MXFP4 experts."""
    weights = {"dynamic": False, "group_size": GROUP, "num_bits": 4, "observer": "minmax", "observer_kwargs": {}, "scale_dtype": "torch.uint8"}
    weights |= {"strategy": "group", "symmetric": True, "type": "float", **dict.fromkeys(("actorder", "block_structure", "zp_dtype"))}
    kept = ["self_attn.*", "shared_experts.*", "mlp\\.(gate|up|gate_up|down)_proj.*", "lm_head.*", "vision_tower.*", "mm_projector.*"]
    group = {"format": "mxfp4-pack-quantized", "input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "config_groups": {"group_0": group}, "format": "mxfp4-pack-quantized", "global_compression_ratio": None,
        "ignore": [f"re:.*{name}" for name in kept], "kv_cache_scheme": None, "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def generation_config(shape: Shape) -> dict[str, Any]:
    """The content of generation_config.json."""
    ids = token_ids(shape.vocab)
    return {"bos_token_id": ids["[BOS]"], "eos_token_id": [ids["<|end_of_msg|>"], ids["[EOS]"]], "pad_token_id": ids["[PAD]"], "temperature": 1.0}


def shape_of(folder: Path) -> Shape:
    """Sizes back from a written config.json."""
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))["text_config"]
    linear = content["linear_attn_config"]
    return Shape(
        vocab=content["vocab_size"], dim=content["hidden_size"], dense_inner=content["intermediate_size"], num_layers=content["num_hidden_layers"],
        full_layers=tuple(layer - 1 for layer in linear["full_attn_layers"]), block_size=content["attn_res_block_size"],
        kda_heads=linear["num_heads"], kda_head_dim=linear["head_dim"], heads=content["num_attention_heads"], nope=content["qk_nope_head_dim"],
        rope=content["qk_rope_head_dim"], v_dim=content["v_head_dim"], q_rank=content["q_lora_rank"], kv_rank=content["kv_lora_rank"],
        num_experts=content["num_experts"], top_k=content["num_experts_per_token"], num_shared=content["num_shared_experts"],
        inner=content["moe_intermediate_size"], latent=content["routed_expert_hidden_size"], max_context=content["max_position_embeddings"])


def tensors(shape: Shape, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint by K3's names."""
    found = {}
    for name, weight in weights.items():
        pieces = _experts(shape, name, weight) if ".experts." in name else [(name, _stored(shape, name, weight))]
        found |= {PREFIX + each: tensor.contiguous() for each, tensor in pieces}
    return found


def _stored(shape: Shape, name: str, weight: Tensor) -> Tensor:
    if name.endswith("A_log"):
        return torch.cat((weight, torch.zeros(shape.kda_head_dim - shape.kda_heads)))
    if name.endswith("conv1d.weight"):
        return weight.unsqueeze(1)
    return weight if name.endswith(WIDE) else weight.bfloat16()


def _experts(shape: Shape, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    stem, leaf = name.rsplit(".", 1)
    parts = {"w1": weight[:, : shape.inner], "w3": weight[:, shape.inner :]} if leaf == "w13" else {"w2": weight}
    for each, matrices in parts.items():
        for expert, matrix in enumerate(matrices):
            packed, scale = pack(matrix)
            yield f"{stem}.{expert}.{each}.weight_packed", packed
            yield f"{stem}.{expert}.{each}.weight_scale", scale


def write(folder: Path, shape: Shape, weights: Mapping[str, Tensor]) -> None:
    """All files but the card; the folder is made when it is not there."""
    make_byte_tokenizer.write(folder, shape.vocab)
    for name, content in (("config.json", config(shape)), ("generation_config.json", generation_config(shape))):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    save_file(tensors(shape, weights), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def read(folder: Path) -> tuple[Shape, dict[str, Tensor]]:
    """Sizes and fp32 weights of a written folder, experts unpacked: what an engine computes with."""
    shape, stored = shape_of(folder), load_file(folder / "model.safetensors")
    weights = {}
    for name, size in shape.weights():
        if ".experts." in name:
            weights[name] = _gathered(shape, stored, PREFIX + name)
        else:
            weight = stored[PREFIX + name].float()
            weights[name] = weight[: size[0]].view(size) if name.endswith(("A_log", "conv1d.weight")) else weight
    return shape, weights


def _gathered(shape: Shape, stored: Mapping[str, Tensor], name: str) -> Tensor:
    stem, leaf = name.rsplit(".", 1)

    def one(expert: int, each: str) -> Tensor:
        at = f"{stem}.{expert}.{each}.weight_"
        return unpack(stored[f"{at}packed"], stored[f"{at}scale"])

    names = re.findall(r"\d", leaf)
    return torch.stack([torch.cat([one(expert, f"w{digit}") for digit in names]) for expert in range(shape.num_experts)])


def main() -> None:
    """Read the command line."""
    from train.trainer import SHAPE

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("state", type=Path, help="state.pt of a training run")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    write(options.folder, SHAPE, torch.load(options.state, weights_only=True)["weights"])


if __name__ == "__main__":
    main()
