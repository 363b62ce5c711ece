"""Networks of a few tensors with free names, and the files that hold them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from firstlight.spec.model import CacheSpec, ModelSpec, OpUse, TensorSpec
from firstlight.spec.weights import NameMap, Rename

NAMES = NameMap((
    Rename("output.experts.{e}.{leaf*}", "output.experts.{leaf*}"),
    Rename("output.padded.{leaf*}", "output.padded.{leaf*}", "pad"),
    Rename("output.squeezed.{leaf*}", "output.squeezed.{leaf*}", "squeeze"),
    Rename("{all*}", "{all*}"),
))
"""Files use our own names; the path says how a tensor must fit."""


@dataclass(frozen=True, slots=True)
class Tensors:
    """A part that is nothing but its tensors."""

    tensors: tuple[TensorSpec, ...]
    kind: str = "tensors"

    def weights(self) -> Sequence[TensorSpec]:
        return self.tensors

    def cache(self) -> Sequence[CacheSpec]:
        return ()

    def ops(self) -> Sequence[OpUse]:
        return ()

    def flops(self, num_tokens: int, context: int) -> int:
        return 0

    def active_params(self) -> int:
        return sum(each.num_elements for each in self.tensors)


def model_of(*tensors: TensorSpec, num_vocab: int = 3, dim: int = 5, dtype: str = "bfloat16") -> ModelSpec:
    """Embedding (tied), last norm, and `tensors` under "output."."""
    return ModelSpec(
        name="tiny", num_vocab=num_vocab, dim=dim, max_context=8, layers=(), output=Tensors(tensors), norm_eps=1e-5, dtype=dtype, tied=True)


def write_file(file: Path, tensors: Mapping[str, tuple[str, Sequence[int], bytes]]) -> None:
    """A safetensors file from (dtype, shape, bytes), written by hand so that any dtype and any nonsense can be."""
    header, body = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(body), len(body) + len(content)]}
        body += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + body)
