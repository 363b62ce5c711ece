"""A network without a tensor: what every part needs; sizes, caches, operators and flops follow from it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

DTYPE_BYTES: Mapping[str, float] = {
    "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3": 1, "uint8": 1, "int8": 1, "int32": 4, "int64": 8,
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A named tensor that does not exist yet."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_elements(self) -> int:
        """Logical element count."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes at `dtype`, unpacked."""
        return int(self.num_elements * DTYPE_BYTES[self.dtype])

    def under(self, prefix: str) -> TensorSpec:
        """The same tensor with `prefix.` in front of its name."""
        return replace(self, name=f"{prefix}.{self.name}")


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What one layer remembers: `rows` grow by one per token, a `state` has one fixed size per sequence.

    The shape of a rows field is per token, the shape of a state field is per sequence. `layout` names the dims of the fields, a word each:
    two sides that agree on it read the same numbers.
    """

    group: str
    kind: Literal["rows", "state"]
    fields: tuple[TensorSpec, ...]
    tokens_per_block: int = 1
    window: int | None = None
    layout: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of one token (rows) or of one sequence (state), for one layer."""
        return sum(field.num_bytes for field in self.fields)


@dataclass(frozen=True, slots=True)
class OpUse:
    """One line of the operator inventory, which is also the dispatch key."""

    op: str
    dtype: str
    dims: tuple[tuple[str, int | float | str], ...] = ()

    @classmethod
    def of(cls, op: str, dtype: str, **dims: int | float | str) -> OpUse:
        """Build a use from keyword dims; the order of keywords does not matter."""
        return cls(op, dtype, tuple(sorted(dims.items())))

    def dim(self, name: str) -> Any:
        """The value of one dim, None when the use does not say."""
        return dict(self.dims).get(name)


@runtime_checkable
class PartSpec(Protocol):
    """A mixer, ffn, residual, output or encoder: what it needs, not what it does."""

    @property
    def kind(self) -> str:
        """Name of the part file and of the layer file that computes it."""

    def weights(self) -> Sequence[TensorSpec]:
        """Parameters by local name."""

    def cache(self) -> Sequence[CacheSpec]:
        """What a sequence leaves behind in this part."""

    def ops(self) -> Sequence[OpUse]:
        """Every operator use, once per occurrence."""

    def flops(self, num_tokens: int, context: int) -> int:
        """Multiply-adds counted as two, for `num_tokens` new tokens after `context` earlier ones."""

    def active_params(self) -> int:
        """Parameters that one token touches."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: norm, mixer, residual, norm, ffn, residual."""

    index: int
    mixer: PartSpec
    ffn: PartSpec
    residual: PartSpec

    def parts(self) -> tuple[tuple[str, PartSpec], ...]:
        """(seat, part) in execution order; the seat is the parameter prefix inside the layer."""
        return (("mixer", self.mixer), ("ffn", self.ffn), ("residual", self.residual))


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The facts of a network. `output` mixes the residual stream once before the last norm.

    `norm_plus_one`: weights of the layers' norms and of the last one are centred at zero, the scale is 1 + weight.
    """

    name: str
    num_vocab: int
    dim: int
    max_context: int
    layers: tuple[LayerSpec, ...]
    output: PartSpec
    norm_eps: float
    dtype: str
    norm_plus_one: bool = False
    tied: bool = False
    encoders: tuple[PartSpec, ...] = ()
    expert_format: str = "dense"
    bos_id: int | None = None
    stop_ids: tuple[int, ...] = ()
    media_id: int | None = None
    notes: tuple[str, ...] = ()

    def weights(self) -> Iterator[TensorSpec]:
        """Every text parameter by its full name, in the order in which layers stream."""
        yield TensorSpec("embed.weight", (self.num_vocab, self.dim), self.dtype)
        for layer in self.layers:
            prefix = f"layers.{layer.index}"
            for norm in ("mixer_norm", "ffn_norm"):
                yield TensorSpec(f"{prefix}.{norm}.weight", (self.dim,), self.dtype)
            for seat, part in layer.parts():
                for weight in part.weights():
                    yield weight.under(f"{prefix}.{seat}")
        for weight in self.output.weights():
            yield weight.under("output")
        yield TensorSpec("norm.weight", (self.dim,), self.dtype)
        if not self.tied:
            yield TensorSpec("head.weight", (self.num_vocab, self.dim), self.dtype)

    def with_dtype(self, dtype: str) -> ModelSpec:
        """The same network computed in another dtype; leaves that must stay fp32 stay so."""
        layers = tuple(
            LayerSpec(layer.index, _cast(layer.mixer, dtype), _cast(layer.ffn, dtype), _cast(layer.residual, dtype)) for layer in self.layers
        )
        encoders = tuple(_cast(part, dtype) for part in self.encoders)
        return replace(self, dtype=dtype, layers=layers, output=_cast(self.output, dtype), encoders=encoders)

    def with_context(self, max_context: int) -> ModelSpec:
        """The same network, serving shorter sequences."""
        return replace(self, max_context=max_context)

    @property
    def num_text_params(self) -> int:
        """Logical parameters of the decoder, embedding and head, no encoder."""
        return sum(weight.num_elements for weight in self.weights())

    @property
    def num_params(self) -> int:
        """Logical parameters with encoders."""
        encoders = sum(w.num_elements for part in self.encoders for w in part.weights())
        return self.num_text_params + encoders

    @property
    def num_published_params(self) -> int:
        """Text parameters as published totals of this family count them.

        Products, convolutions and decay vectors, A_log twice (it stands for the beta vector too); norms, residual mixes and
        router biases are left out. For Kimi K3 this is 2,779,479,991,232.
        """
        total = 0
        for weight in self.weights():
            vector = "norm" in weight.name or weight.name.endswith("router.bias")
            if not vector and ".residual." not in weight.name and not weight.name.startswith("output."):
                total += weight.num_elements * (2 if weight.name.endswith("A_log") else 1)
        return total

    @property
    def num_active_params(self) -> int:
        """Parameters per text token: the embedding row not counted, the head counted."""
        total = self.dim + self.num_vocab * self.dim + self.output.active_params()
        for layer in self.layers:
            total += 2 * self.dim + sum(part.active_params() for _, part in layer.parts())
        return total

    def ops(self) -> Iterator[OpUse]:
        """Every operator use of the text model, once per occurrence."""
        norm = OpUse.of("rms_norm", self.dtype, D=self.dim)
        for layer in self.layers:
            yield norm
            yield norm
            for _, part in layer.parts():
                yield from part.ops()
        yield from self.output.ops()
        yield norm
        yield OpUse.of("linear", self.dtype, I=self.dim, O=self.num_vocab)

    def inventory(self) -> Counter[OpUse]:
        """Operator uses with their counts."""
        return Counter(self.ops())

    def groups(self) -> dict[str, list[tuple[int, CacheSpec]]]:
        """Cache group -> (layer index, spec) of the layers that share its layout."""
        found: dict[str, list[tuple[int, CacheSpec]]] = {}
        for layer in self.layers:
            for spec in layer.mixer.cache():
                found.setdefault(spec.group, []).append((layer.index, spec))
        return found

    @property
    def row_bytes_per_token(self) -> int:
        """Bytes that one token adds to all rows groups together."""
        return self._cache_bytes("rows")

    @property
    def state_bytes_per_sequence(self) -> int:
        """Bytes of all state groups of one sequence together."""
        return self._cache_bytes("state")

    def _cache_bytes(self, kind: str) -> int:
        specs = [spec for members in self.groups().values() for _, spec in members]
        return sum(spec.num_bytes for spec in specs if spec.kind == kind)

    def flops(self, num_tokens: int, context: int = 0, num_logits: int = 1) -> int:
        """Flops of the text model for `num_tokens` after `context`, with `num_logits` rows through the head."""
        total = 2 * num_logits * self.dim * self.num_vocab
        for layer in self.layers:
            total += sum(part.flops(num_tokens, context) for _, part in layer.parts())
        return total + self.output.flops(num_tokens, context)


def _cast(part: PartSpec, dtype: str) -> PartSpec:
    return replace(part, dtype=dtype)  # type: ignore[type-var]
