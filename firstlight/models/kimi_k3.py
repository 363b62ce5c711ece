"""Kimi K3: an envelope around a text model and an image tower.

Source: moonshotai/Kimi-K3 config.json and tensor names; arXiv 2607.24653.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from firstlight.spec.config import ConfigReader
from firstlight.spec.weights import Reading, Skip

VISION_REASON = "image tower: images are not supported yet, text is complete without it"


def read(config: ConfigReader, inner: Callable[[ConfigReader, str], Reading]) -> Reading:
    """The text model's facts under K3's name."""
    config.ignore_framework_keys()
    text = inner(config.child("text_config"), "kimi_linear")
    for key in ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "tie_word_embeddings", "vocab_size", "hidden_size", "quantization_config"):
        config.ignore(key, "text_config decides")
    config.ignore("vision_config", VISION_REASON)
    config.ignore("image_placeholder", VISION_REASON)
    config.ignore("pad_token_id", "packed batches need no padding")
    spec = replace(text.spec, name="kimi_k3", media_id=config.take("media_placeholder_token_id", int, None))
    skips = (Skip("vision_tower.{leaf*}", VISION_REASON), Skip("mm_projector.{leaf*}", VISION_REASON))
    return Reading(spec, text.names.nested("language_model.").with_skips(*skips))
