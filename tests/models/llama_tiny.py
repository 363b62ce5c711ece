"""A tiny Llama made by transformers: the witness for ours. Weights are drawn so that every head and every pair of channels matters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SHAPE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 12, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def make_llama(folder: Path | None, *, seed: int = 0, **changes: Any) -> Any:
    """A seeded fp32 LlamaForCausalLM in eval mode, saved by save_pretrained when a folder is given; `changes` replace config fields."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SHAPE | changes)
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).eval().float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted(model.named_parameters()):
            drawn = torch.randn(tensor.shape, generator=generator)
            if "norm" in name:
                tensor.copy_(1.0 + 0.1 * drawn)
            elif "embed_tokens" in name:
                tensor.copy_(drawn)
            else:  # queries and keys are sharper, so that what is attended to depends on content and place
                tensor.copy_((2.0 if "q_proj" in name or "k_proj" in name else 1.0) * drawn * tensor.shape[-1] ** -0.5)
    if folder is not None:
        model.save_pretrained(folder)
    return model
