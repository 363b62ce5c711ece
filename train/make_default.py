"""Write the embedded default model: a tiny checkpoint in K3's layout with seeded random weights.

    python train/make_default.py [FOLDER]

Writes config.json, generation_config.json, model.safetensors, README.md and the byte tokenizer. Every run gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import make_byte_tokenizer
import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).resolve().parent.parent / "firstlight" / "assets" / "default"
SEED = 20260727
NUM_VOCAB, DIM, INNER, MAX_CONTEXT = 288, 96, 192, 32_768
FULL_LAYERS = (4, 7, 8)  # 1-based as in K3; the last two follow each other, as in K3
NUM_LAYERS, BLOCK_SIZE = 8, 3
KDA_HEADS, KDA_HEAD_DIM, CONV_WIDTH, LOWER_BOUND = 3, 32, 4, -5.0
HEADS, NOPE, ROPE, V_DIM, Q_RANK, KV_RANK = 3, 32, 16, 24, 48, 32
NUM_EXPERTS, TOP_K, NUM_SHARED, EXPERT_INNER, LATENT = 8, 2, 2, 32, 64
GROUP = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E8M0_BIAS = 127
E2M1_MAX_EXPONENT = 2  # 6 = 1.5 * 2**2

CARD = f"""# The embedded default model

The weights are random: this model has learnt nothing and its text is noise.

It has every part of Kimi K3's decoder in K3's layout on disk, with about a million weights: {NUM_LAYERS} layers, of which
{", ".join(map(str, FULL_LAYERS))} (counted from 1) are gated NoPE-MLA and the others KDA, Attention Residuals in blocks of {BLOCK_SIZE},
{NUM_EXPERTS} MXFP4 experts in a latent of {LATENT} beside {NUM_SHARED} shared ones, and a byte-level tokenizer with K3's control tokens.
Decay lies near 1, so that old tokens still matter. `vision_config` is empty because there is no image tower.

Made by `train/make_default.py` in the repository, which gives the same numbers on every machine.
"""


def config() -> dict[str, Any]:
    """The content of config.json."""
    ids = token_ids()
    ends = {"bos_token_id": ids["[BOS]"], "eos_token_id": ids["<|end_of_msg|>"], "pad_token_id": ids["[PAD]"]}
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        **ends,
        "media_placeholder_token_id": ids["<|media_pad|>"],
        "ignore_index": -100,
        "tie_word_embeddings": False,
        "text_config": text_config() | ends,
        "vision_config": {},
    }


def text_config() -> dict[str, Any]:
    """The nested part that describes the decoder."""
    return {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "dtype": "bfloat16",
        "vocab_size": NUM_VOCAB,
        "hidden_size": DIM,
        "intermediate_size": INNER,
        "moe_intermediate_size": EXPERT_INNER,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": MAX_CONTEXT,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": BLOCK_SIZE,
        "first_k_dense_replace": 1,
        "kv_lora_rank": KV_RANK,
        "q_lora_rank": Q_RANK,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": V_DIM,
        "latent_moe_use_norm": True,
        "routed_expert_hidden_size": LATENT,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_token": TOP_K,
        "num_shared_experts": NUM_SHARED,
        "num_nextn_predict_layers": 0,
        "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "use_cache": True,
        "linear_attn_config": {
            "full_attn_layers": list(FULL_LAYERS),
            "kda_layers": [layer for layer in range(1, NUM_LAYERS + 1) if layer not in FULL_LAYERS],
            "gate_lower_bound": LOWER_BOUND,
            "head_dim": KDA_HEAD_DIM,
            "num_heads": KDA_HEADS,
            "short_conv_kernel_size": CONV_WIDTH,
            "use_full_rank_gate": True,
        },
        "quantization_config": quantization_config(),
    }


def quantization_config() -> dict[str, Any]:
    """What compressed-tensors writes for packed MXFP4 experts."""
    weights = {"dynamic": False, "group_size": GROUP, "num_bits": 4, "observer": "minmax", "observer_kwargs": {}, "scale_dtype": "torch.uint8"}
    absent = dict.fromkeys(("actorder", "block_structure", "zp_dtype"))
    weights |= {"strategy": "group", "symmetric": True, "type": "float", **absent}
    kept = ["self_attn.*", "shared_experts.*", "mlp\\.(gate|up|gate_up|down)_proj.*", "lm_head.*", "vision_tower.*", "mm_projector.*"]
    group = {"format": "mxfp4-pack-quantized", "input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "config_groups": {"group_0": group},
        "format": "mxfp4-pack-quantized",
        "global_compression_ratio": None,
        "ignore": [f"re:.*{name}" for name in kept],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def token_ids() -> dict[str, int]:
    """Control token -> id, from the tokenizer that goes with the model."""
    added = make_byte_tokenizer.settings(NUM_VOCAB)["added_tokens_decoder"]
    return {entry["content"]: int(token_id) for token_id, entry in added.items()}


def generation_config() -> dict[str, Any]:
    """The content of generation_config.json."""
    ids = token_ids()
    return {"bos_token_id": ids["[BOS]"], "eos_token_id": [ids["<|end_of_msg|>"], ids["[EOS]"]], "pad_token_id": ids["[PAD]"], "temperature": 1.0}


class Draw:
    """Seeded tensors: every call moves the generator on, so the order of calls is part of the checkpoint."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, std: float | None = None, mean: float = 0.0) -> torch.Tensor:
        """Fp32; without `std` such that a unit input gives a unit output.

        Note: twelve uniform numbers added in a fixed order; the logarithms of torch.randn end in other bits on other processors.
        """
        total = torch.full(shape, -6.0)
        for _ in range(12):
            total += torch.rand(shape, generator=self.generator)
        return mean + total * (shape[-1] ** -0.5 if std is None else std)

    def uniform(self, *shape: int, low: float, high: float) -> torch.Tensor:
        """Fp32 between the bounds."""
        return low + (high - low) * torch.rand(shape, generator=self.generator)

    def linear(self, *shape: int) -> torch.Tensor:
        """A bf16 projection."""
        return self.normal(*shape).bfloat16()

    def norm(self, size: int) -> torch.Tensor:
        """A norm weight that is not all ones, so that leaving it out is seen."""
        return self.normal(size, std=0.1, mean=1.0)


def pack_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [out, in / 2], the even column in the low nibble, and biased exponents [out, in / 32]."""
    groups = weight.reshape(weight.shape[0], -1, GROUP)
    exponents = torch.frexp(groups.abs().amax(2)).exponent - 1 - E2M1_MAX_EXPONENT
    grid = torch.tensor(E2M1)
    # Powers of two from Python are exact on every processor.
    scaled = groups * torch.tensor([[2.0**-exponent for exponent in row] for row in exponents.tolist()])[:, :, None]
    codes = torch.bucketize(scaled.abs(), (grid[1:] + grid[:-1]) / 2) + 8 * (scaled < 0)
    codes = codes.to(torch.uint8).reshape(weight.shape)
    return codes[:, 0::2] | codes[:, 1::2] << 4, (exponents + E8M0_BIAS).to(torch.uint8)


def kda(draw: Draw) -> Iterator[tuple[str, torch.Tensor]]:
    """Linear attention; A_log fills head_dim entries of which the first num_heads count, as K3 stores it."""
    width = KDA_HEADS * KDA_HEAD_DIM
    for name in "qkv":
        yield f"{name}_proj.weight", draw.linear(width, DIM)
        yield f"{name}_conv1d.weight", draw.normal(width, 1, CONV_WIDTH)
    yield "f_a_proj.weight", draw.linear(KDA_HEAD_DIM, DIM)
    yield "f_b_proj.weight", (draw.normal(width, KDA_HEAD_DIM) * 0.5).bfloat16()
    yield "b_proj.weight", draw.linear(KDA_HEADS, DIM)
    yield "g_proj.weight", draw.linear(width, DIM)
    yield "o_proj.weight", draw.linear(DIM, width)
    rates = draw.uniform(KDA_HEADS, low=math.log(0.85), high=math.log(1.2))
    yield "A_log", torch.cat([rates, torch.zeros(KDA_HEAD_DIM - KDA_HEADS)])
    # The decay is exp(-5 * sigmoid(exp(A_log) * (f + dt_bias))): around 0.985 here, with time scales from tens to hundreds of tokens.
    yield "dt_bias", draw.uniform(width, low=-8.0, high=-4.5)
    yield "o_norm.weight", draw.norm(KDA_HEAD_DIM)


def mla(draw: Draw) -> Iterator[tuple[str, torch.Tensor]]:
    """Latent attention with an output gate."""
    yield "q_a_proj.weight", draw.linear(Q_RANK, DIM)
    yield "q_a_layernorm.weight", draw.norm(Q_RANK).bfloat16()
    yield "q_b_proj.weight", draw.linear(HEADS * (NOPE + ROPE), Q_RANK)
    yield "kv_a_proj_with_mqa.weight", draw.linear(KV_RANK + ROPE, DIM)
    yield "kv_a_layernorm.weight", draw.norm(KV_RANK).bfloat16()
    yield "kv_b_proj.weight", draw.linear(HEADS * (NOPE + V_DIM), KV_RANK)
    yield "g_proj.weight", draw.linear(HEADS * V_DIM, DIM)
    yield "o_proj.weight", draw.linear(DIM, HEADS * V_DIM)


def glu(draw: Draw, inner: int) -> Iterator[tuple[str, torch.Tensor]]:
    """A dense gated MLP."""
    yield "gate_proj.weight", draw.linear(inner, DIM)
    yield "up_proj.weight", draw.linear(inner, DIM)
    yield "down_proj.weight", draw.linear(DIM, inner)


def moe(draw: Draw) -> Iterator[tuple[str, torch.Tensor]]:
    """Router, packed experts in the latent, one shared MLP over the full width."""
    yield "gate.weight", draw.linear(NUM_EXPERTS, DIM)
    yield "gate.e_score_correction_bias", draw.normal(NUM_EXPERTS, std=0.1)
    yield "routed_expert_down_proj.weight", draw.linear(LATENT, DIM)
    yield "routed_expert_norm.weight", draw.norm(LATENT).bfloat16()
    yield "routed_expert_up_proj.weight", draw.linear(DIM, LATENT)
    for expert in range(NUM_EXPERTS):
        for name, shape in (("w1", (EXPERT_INNER, LATENT)), ("w2", (LATENT, EXPERT_INNER)), ("w3", (EXPERT_INNER, LATENT))):
            packed, scale = pack_mxfp4(draw.normal(*shape))
            yield f"experts.{expert}.{name}.weight_packed", packed
            yield f"experts.{expert}.{name}.weight_scale", scale
    for name, tensor in glu(draw, NUM_SHARED * EXPERT_INNER):
        yield f"shared_experts.{name}", tensor


def tensors() -> dict[str, torch.Tensor]:
    """The whole checkpoint by K3's names."""
    draw = Draw(SEED)
    found = {"lm_head.weight": draw.linear(NUM_VOCAB, DIM), "model.embed_tokens.weight": draw.normal(NUM_VOCAB, DIM, std=1.0).bfloat16()}
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}{norm}.weight"] = draw.norm(DIM).bfloat16()
        for mix in ("self_attention_res", "mlp_res"):
            found |= residual_mix(draw, prefix + mix)
        mixer = mla(draw) if layer + 1 in FULL_LAYERS else kda(draw)
        found |= {f"{prefix}self_attn.{name}": tensor for name, tensor in mixer}
        ffn = [(f"mlp.{name}", tensor) for name, tensor in glu(draw, INNER)] if layer == 0 else [(f"block_sparse_moe.{n}", t) for n, t in moe(draw)]
        found |= {prefix + name: tensor for name, tensor in ffn}
    found |= residual_mix(draw, "model.output_attn_res")
    found["model.norm.weight"] = draw.norm(DIM).bfloat16()
    return {f"language_model.{name}": tensor.contiguous() for name, tensor in found.items()}


def residual_mix(draw: Draw, prefix: str) -> dict[str, torch.Tensor]:
    """The two leaves that score the sources of one residual mix."""
    return {f"{prefix}_norm.weight": draw.norm(DIM).bfloat16(), f"{prefix}_proj.weight": draw.linear(1, DIM)}


def write(folder: Path) -> None:
    """Write all files; the folder is made when it is not there."""
    make_byte_tokenizer.write(folder, NUM_VOCAB)
    for name, content in (("config.json", config()), ("generation_config.json", generation_config())):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(CARD, encoding="utf-8")
    save_file(tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    write(parser.parse_args().folder)


if __name__ == "__main__":
    main()
