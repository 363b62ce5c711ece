"""Tiny models of the DeepSeek families made by transformers: the witnesses for ours. Every head, expert, group and indexer matters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SHAPE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 24, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 4, "n_shared_experts": 1, "n_routed_experts": 16, "routed_scaling_factor": 2.5, "kv_lora_rank": 32, "q_lora_rank": 48,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 24, "v_head_dim": 20, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3,
    "first_k_dense_replace": 2, "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}
YARN = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "mscale": 0.9, "mscale_all_dim": 1.1, "beta_fast": 16.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}
INDEX = {"index_n_heads": 16, "index_head_dim": 20, "index_topk": 8}
SHARED = ["full", "full", "shared", "shared", "full"]
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {}, "deepseek_v32": INDEX, "glm_moe_dsa": INDEX | {"n_group": 1, "topk_group": 1, "indexer_types": SHARED, "rms_norm_eps": 1e-5},
}


def make_deepseek(folder: Path | None, family: str, *, seed: int = 0, **changes: Any) -> Any:
    """A seeded fp32 model of the family in eval mode, saved by save_pretrained when a folder is given; `changes` replace config fields."""
    import transformers

    names = {"deepseek_v3": "DeepseekV3", "deepseek_v32": "DeepseekV32", "glm_moe_dsa": "GlmMoeDsa"}
    config = getattr(transformers, f"{names[family]}Config")(**SHAPE | FAMILIES[family] | changes)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{names[family]}ForCausalLM")(config).eval().float()
    generator = torch.Generator().manual_seed(seed)
    tensors = [*model.named_parameters(), *((name, each) for name, each in model.named_buffers() if name.endswith("correction_bias"))]
    with torch.no_grad():
        for name, tensor in sorted(tensors):
            drawn = torch.randn(tensor.shape, generator=generator)
            if name.endswith(("correction_bias", "k_norm.bias")):
                tensor.copy_(0.1 * drawn)
            elif "norm" in name:
                tensor.copy_(1.0 + 0.1 * drawn)
            elif "embed_tokens" in name:
                tensor.copy_(drawn)
            else:  # queries are sharper, so that what is attended to depends on content and place
                tensor.copy_((2.0 if "q_b_proj" in name or "wq_b" in name else 1.0) * drawn * tensor.shape[-1] ** -0.5)
    if folder is not None:
        model.save_pretrained(folder)
    return model
