"""GLM-5 and 5.2: the layers of DeepSeek-V3.2, whose indexers turn neighbouring pairs and may serve the layers after them too.

Source: zai-org/GLM-5 config.json; transformers 5.24 for the order of pairs and the norms on latents; arXiv 2603.12201.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from firstlight.parts.dsa import Dsa
from firstlight.spec.config import ConfigReader
from firstlight.spec.errors import ConfigError
from firstlight.spec.model import LayerSpec
from firstlight.spec.weights import Reading

PATTERN = {"F": "full", "S": "shared"}
SCHEDULE_KEYS = ("index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")


def read(config: ConfigReader, inner: Callable[[ConfigReader, str], Reading]) -> Reading:
    """The family's facts, with each layer's way to its rows."""
    found = inner(config, "deepseek_v3")
    interleaved = config.take("indexer_rope_interleave", bool, True)
    kinds = _indexers(config, len(found.spec.layers))
    config.ignore("index_share_for_mtp_iteration", "about draft layers, which are left out")
    layers = []
    for layer, kind in zip(found.spec.layers, kinds, strict=True):
        assert isinstance(layer.mixer, Dsa), "the family reads a config of this name as sparse"
        mixer = replace(layer.mixer, index_interleaved=interleaved, shared=kind == "shared")
        layers.append(LayerSpec(layer.index, mixer, layer.ffn, layer.residual))
    return Reading(replace(found.spec, layers=tuple(layers)), found.names)


def _indexers(config: ConfigReader, num_layers: int) -> list[str]:
    """full or shared per layer: from the list, a pattern of letters, or every `freq`-th layer after the first ones."""
    if config.has("indexer_types"):
        for key in SCHEDULE_KEYS:
            config.ignore(key, "indexer_types decides")
        kinds = config.take_list("indexer_types", str)
    elif config.has("index_topk_pattern"):
        for key in SCHEDULE_KEYS[1:]:
            config.ignore(key, "index_topk_pattern decides")
        kinds = [PATTERN.get(letter, letter) for letter in config.take("index_topk_pattern", str)]
    else:
        freq, offset = config.positive("index_topk_freq", 1), config.natural("index_skip_topk_offset", 2)
        kinds = ["full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(num_layers)]
    if len(kinds) != num_layers or not set(kinds) <= {"full", "shared"} or kinds[0] != "full":
        fact = f"{config.path}: indexers of {len(kinds)} layers, {sorted(set(kinds))}, the first {kinds[:1]}"
        raise ConfigError(fact, f"Give {num_layers} of full, shared, and begin with full.")
    return kinds
