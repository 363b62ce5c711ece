"""From a GGUF file to a folder in the layout of Hugging Face: config, weights as fp32, tokenizer.

Every key of the architecture and every tensor is used, or the file is refused.
Source: ggml-org/ggml docs/gguf.md; tensor names and the order of rotary rows: ggml-org/llama.cpp convert_hf_to_gguf.py, gguf-py/gguf/constants.py.
Letters: O I rows and columns of a matrix.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from firstlight.fetch.gguf_vocabulary import write_tokenizer
from firstlight.fetch.wheel import Progress
from firstlight.spec.errors import CheckpointError, ConfigError, CoverageError

ARCHITECTURE = "llama"
_CONFIG = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "attention.key_length": "head_dim", "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
_NEEDED = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count", "attention.layer_norm_rms_epsilon")
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER = "This file needs a rule in fetch/gguf_form.py; fetch a known model (firstlight fetch --help)."


def require_library() -> Any:
    """The gguf package. Raises CoverageError when it is not installed."""
    try:
        import gguf
    except ImportError:
        fact = "GGUF weights are dequantised by the package gguf, which is not installed"
        raise CoverageError(fact, "Install it: pip install 'firstlight[fetch]', or pip install gguf.") from None
    return gguf


def convert(file: Path, folder: Path, progress: Progress) -> None:
    """Write the folder, which must not be there yet. Raises ConfigError or CheckpointError before any weight is written."""
    gguf = require_library()
    try:
        reader = gguf.GGUFReader(file)
    except (ValueError, IndexError) as error:
        raise CheckpointError(f"{file.name} is no GGUF file: {error}", "Fetch again.") from None
    fields = {key: field.contents() for key, field in reader.fields.items()}
    names = [tensor.name for tensor in reader.tensors]
    config = read_config(fields, tied="output.weight" not in names)
    wanted = _names(config["num_hidden_layers"], config["tie_word_embeddings"])
    if set(names) != set(wanted):
        missing, extra = sorted(set(wanted) - set(names)), sorted(set(names) - set(wanted))
        raise CheckpointError(f"{file.name} lacks the tensors {missing[:4]} and holds {extra[:4]}, which are not known", _OTHER)
    folder.mkdir()
    write_tokenizer(fields, folder)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")})
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for done, tensor in enumerate(reader.tensors):
        progress("dequantising", done, len(names))
        found_OI = np.ascontiguousarray(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        kind = tensor.name.split(".")[-2]
        tensors[wanted[tensor.name]] = unpermuted(found_OI, heads[kind]) if kind in heads else found_OI
    _write_weights(tensors, folder, progress)


def read_config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """config.json of a file's metadata. Raises ConfigError for what this family does not have."""
    architecture = fields.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise ConfigError(f"the GGUF file holds the architecture {architecture!r}, {ARCHITECTURE!r} is known", _OTHER)
    own = {key.removeprefix("llama."): value for key, value in fields.items() if key.startswith("llama.")}
    turned = own.pop("rope.dimension_count", None)
    missing, unread = [key for key in _NEEDED if key not in own], sorted(set(own) - set(_CONFIG))
    if missing or unread:
        raise ConfigError(f"the GGUF file lacks the keys {missing} and sets {unread}, which are not known", _OTHER)
    config: dict[str, Any] = {_CONFIG[key]: _shortest(value) for key, value in own.items()}
    head_dim = config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    if turned not in (None, head_dim):
        raise ConfigError(f"the GGUF file turns {turned} of {head_dim} channels of a head", _OTHER)
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("rope_theta", 10_000.0)
    config["vocab_size"] = len(fields.get("tokenizer.ggml.tokens", ())) or config.get("vocab_size")
    ids = {f"{ours}_token_id": fields.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in
           (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "hidden_act": "silu", "attention_bias": False,
        "mlp_bias": False, "tie_word_embeddings": tied, **config, **ids,
    }


def unpermuted(weight_OI: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Rows of a projection whose heads turn, from neighbouring pairs (as llama.cpp keeps them) to halves (as checkpoints do)."""
    pairs = weight_OI.reshape(num_heads, -1, 2, weight_OI.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight_OI.shape))


def _names(num_layers: int, tied: bool) -> dict[str, str]:
    """GGUF name -> checkpoint name of every tensor."""
    outer = {f"{theirs}.weight": f"{ours}.weight" for theirs, ours in _OUTER.items() if not (tied and theirs == "output")}
    inner = {f"blk.{i}.{theirs}.weight": f"model.layers.{i}.{ours}.weight" for i in range(num_layers) for theirs, ours in _LAYER.items()}
    return outer | inner


def _write_weights(tensors: dict[str, np.ndarray[Any, Any]], folder: Path, progress: Progress) -> None:
    from safetensors.numpy import save_file

    progress("writing", 0, 1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # the library lets nobody else read it
    progress("writing", 1, 1)


def _shortest(value: Any) -> Any:
    """A float32 as the decimal that was meant: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
