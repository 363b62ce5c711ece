"""Qwen3.5 with experts, and Qwen3.6: an envelope around a text model and an image tower.

Source: Qwen/Qwen3.6-35B-A3B config.json and tensor names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from firstlight.spec.config import ConfigReader
from firstlight.spec.weights import Reading, Skip

VISION_REASON = "image tower: images are not supported yet, text is complete without it"


def read(config: ConfigReader, inner: Callable[[ConfigReader, str], Reading]) -> Reading:
    """The text model's facts under the envelope's name; dtype and tying may stand outside, where the framework writes them."""
    config.ignore_framework_keys()
    child = config.child("text_config")
    text = inner(child, "qwen3_5_moe_text")
    for key in ("bos_token_id", "eos_token_id", "vocab_size", "hidden_size"):
        config.ignore(key, "text_config decides")
    for key in ("vision_config", "video_token_id", "vision_start_token_id", "vision_end_token_id", "language_model_only"):
        config.ignore(key, VISION_REASON)
    config.ignore("pad_token_id", "packed batches need no padding")
    config.expect("quantization_config", (None,), "Use a checkpoint in bf16, fp16 or fp32.")
    spec = replace(
        text.spec, name="qwen3_5_moe", media_id=config.take("image_token_id", int, None),
        tied=config.take("tie_word_embeddings", bool, text.spec.tied))
    if child.has("dtype") or child.has("torch_dtype"):
        for key in ("dtype", "torch_dtype"):
            config.ignore(key, "text_config decides")
    else:
        spec = spec.with_dtype(config.take_dtype())
    names = text.names.moved("model.", "model.language_model.")
    return Reading(spec, names.with_skips(Skip("model.visual.{leaf*}", VISION_REASON)))
