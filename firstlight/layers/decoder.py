"""The network: embedding, layers, last mix and norm, head.

Letters: T packed tokens, D model width, R rows that yield logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from firstlight.layers.leaves import Linear, RmsNorm, empty
from firstlight.layers.registry import build
from firstlight.layers.step import LayerCache, Step
from firstlight.ops.experts import Bank
from firstlight.ops.registry import Binder
from firstlight.parallel.mesh import Mesh
from firstlight.spec.errors import CheckpointError
from firstlight.spec.model import LayerSpec, ModelSpec


class Embedding(nn.Module):
    """Rows of the embedding matrix."""

    def __init__(self, num_vocab: int, dim: int, dtype: str) -> None:
        super().__init__()
        self.weight = empty(dtype, num_vocab, dim)

    def forward(self, tokens_T: Tensor) -> Tensor:
        """One row per token."""
        return self.weight[tokens_T]


class Layer(nn.Module):
    """Mix, norm, mixer, push; mix, norm, ffn, push."""

    def __init__(self, spec: LayerSpec, model: ModelSpec, mesh: Mesh, binder: Binder) -> None:
        super().__init__()
        self.mixer_norm = _norm(binder, model)
        self.mixer: Any = build(spec.mixer, mesh, binder)
        self.ffn_norm = _norm(binder, model)
        self.ffn: Any = build(spec.ffn, mesh, binder)
        self.residual: Any = build(spec.residual, mesh, binder)

    def forward(self, stream: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """The stream after this layer; its form is the residual part's own."""
        y_TD = self.mixer(self.mixer_norm(self.residual.mix(stream, "mixer")), step, cache)
        stream = self.residual.push(stream, y_TD, "mixer")
        y_TD = self.ffn(self.ffn_norm(self.residual.mix(stream, "ffn")))
        return self.residual.push(stream, y_TD, "ffn")  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Built without memory; `fill` gives it weights."""

    def __init__(self, spec: ModelSpec, mesh: Mesh, binder: Binder) -> None:
        super().__init__()
        self.spec = spec
        self.embed = Embedding(spec.num_vocab, spec.dim, spec.dtype)
        self.layers = nn.ModuleList(Layer(layer, spec, mesh, binder) for layer in spec.layers)
        self.output: Any = build(spec.output, mesh, binder)
        self.norm = _norm(binder, spec)
        self.head = Linear(binder, spec.dim, spec.num_vocab, spec.dtype)
        self.eval()

    def forward(self, step: Step, caches: Sequence[LayerCache]) -> Tensor:
        """Logits of the rows that the step asks for."""
        stream = self.output.open(self.embed(step.tokens_T))
        for layer, cache in zip(self.layers, caches, strict=True):
            stream = layer(stream, step, cache)
        x_RD = self.output.mix(stream, "output")[step.logit_rows_R]
        return self.head(self.norm(x_RD))  # type: ignore[no-any-return]

    def fill(self, tensors: Mapping[str, Tensor], banks: Mapping[str, Bank]) -> None:
        """Put loaded weights in place. Raises CheckpointError when a parameter stays empty or a name is not ours."""
        left = set(tensors) | set(banks)
        for name, bank in banks.items():
            owner: Any = self.get_submodule(name)
            owner.bank = bank
            left.discard(name)
        for name, param in list(self.named_parameters()):
            source = "embed.weight" if name == "head.weight" and self.spec.tied else name
            if source in tensors and tensors[source].shape == param.shape:
                place, _, leaf = name.rpartition(".")
                setattr(self.get_submodule(place), leaf, nn.Parameter(tensors[source], requires_grad=False))
                left.discard(source)
        empty_ones = sorted(name for name, param in self.named_parameters() if param.is_meta)
        if left or empty_ones:
            fact = f"parameters left empty: {empty_ones[:8]}; weights nobody took: {sorted(left)[:8]}"
            raise CheckpointError(fact, "Mend the name rules of the model file.")


def _norm(binder: Binder, spec: ModelSpec) -> RmsNorm:
    return RmsNorm(binder, spec.dim, spec.norm_eps, spec.dtype, plus_one=spec.norm_plus_one)
