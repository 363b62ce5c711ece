"""Tiny Qwen3-Next and Qwen3.5 made by transformers: the witnesses for ours. Decay near one, unlike head widths, several key-head groups."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LAYER_TYPES = ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"]
SHAPE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 48, "num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
    "linear_key_head_dim": 12, "linear_value_head_dim": 20, "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_conv_kernel_dim": 4,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 28, "num_experts": 8, "num_experts_per_tok": 3, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "layer_types": LAYER_TYPES,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
}
NEXT = {"intermediate_size": 80, "mlp_only_layers": [1], "decoder_sparse_step": 1, "norm_topk_prob": True}
MROPE = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48, "num_position_embeddings": 16, "patch_size": 4,
}
KINDS = ("qwen3_next", "qwen3_5_moe_text", "qwen3_5_moe")


def make_qwen(kind: str, folder: Path | None, *, seed: int = 0, **changes: Any) -> Any:
    """A seeded fp32 model of one model_type in eval mode, saved by save_pretrained when a folder is given; `changes` replace text fields."""
    model = _built(kind, SHAPE | changes)
    model.config._attn_implementation = "eager"
    model.config.get_text_config()._attn_implementation = "eager"
    model = model.eval().float()
    _draw(model, seed)
    if folder is not None:
        model.save_pretrained(folder)
    return model


def _built(kind: str, fields: dict[str, Any]) -> Any:
    import transformers
    from transformers.models.qwen3_5_moe import configuration_qwen3_5_moe as configs

    if kind == "qwen3_next":
        return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**NEXT | fields))
    text = configs.Qwen3_5MoeTextConfig(**fields | {"rope_parameters": fields["rope_parameters"] | MROPE})
    if kind == "qwen3_5_moe_text":
        return transformers.Qwen3_5MoeForCausalLM(text)
    return transformers.Qwen3_5MoeForConditionalGeneration(configs.Qwen3_5MoeConfig(text_config=text.to_dict(), vision_config=VISION))


def write_published(model: Any, folder: Path) -> None:
    """The same Qwen3.5 as it is published: gate and up of all experts in one tensor, a drafting head, dtype inside of text_config."""
    config = json.loads(model.config.to_json_string(use_diff=False))
    text = config["text_config"] | {"dtype": "float32", "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    for key in ("dtype", "tie_word_embeddings"):
        config.pop(key, None)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"text_config": text}), encoding="utf-8")
    tensors = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in tensors)
    save_file(tensors | {"mtp.fc.weight": torch.ones(48, 96), "mtp.layers.0.mlp.gate.weight": torch.ones(8, 48)}, folder / "model.safetensors")


def draw_gdn(name: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Values for one parameter of a Gated DeltaNet layer: exp(g) lies around 0.99, and moves with the input."""
    drawn = torch.randn(tensor.shape, generator=generator)
    share = torch.rand(tensor.shape, generator=generator)
    if name.endswith("A_log"):
        return (0.5 + 1.5 * share).log()
    if name.endswith("dt_bias"):
        return math.log(1.6e-3) + (math.log(2.5e-2) - math.log(1.6e-3)) * share
    if name.endswith("conv1d.weight"):
        return 0.5 * drawn
    return 1.0 + 0.3 * drawn if name.endswith("norm.weight") else drawn * tensor.shape[-1] ** -0.5


def _draw(model: Any, seed: int) -> None:
    """Norms off their centre, sharp queries and routers, so that each of them matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted(model.named_parameters()):
            if ".linear_attn." in name:
                tensor.copy_(draw_gdn(name, tensor, generator))
                continue
            drawn = torch.randn(tensor.shape, generator=generator)
            if "norm" in name and tensor.dim() == 1:  # centred at zero
                tensor.copy_(0.2 * drawn)
            elif "embed_tokens" in name:
                tensor.copy_(drawn)
            else:
                sharp = any(part in name for part in ("q_proj", "k_proj", "mlp.gate.weight"))
                tensor.copy_((2.0 if sharp else 1.0) * drawn * tensor.shape[-1] ** -0.5)
