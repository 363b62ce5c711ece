"""Feed-forward of the chosen experts.

Letters: T packed tokens, X chosen experts, E experts, D width, I inner width, P pairs of a token and one expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from firstlight.ops.activation import Kind, activation
from firstlight.ops.case import DTYPES, Case, normal
from firstlight.ops.fp8_unpack import fp8_unpack, pack
from firstlight.ops.linear import linear
from firstlight.ops.mxfp4_unpack import GROUP_COLUMNS, mxfp4_unpack
from firstlight.spec.model import OpUse

Unpack = Callable[[Tensor, Tensor], Tensor]
UNPACK: Mapping[str, Unpack] = {"mxfp4": mxfp4_unpack, "fp8": fp8_unpack}
"""Packed format -> what makes fp32 of codes and scales."""


@dataclass(frozen=True, slots=True, eq=False)
class Bank:
    """The matrices of all experts of a layer, one tensor per expert: gate and up [I, D], down [D, I].

    In mxfp4 the matrices are uint8 with two codes per byte, in fp8 with one, and the scales (of 32 columns; of 128 x 128) are given.
    """

    format: Literal["dense", "mxfp4", "fp8"]
    gate: tuple[Tensor, ...]
    up: tuple[Tensor, ...]
    down: tuple[Tensor, ...]
    gate_scale: tuple[Tensor, ...] | None = None
    up_scale: tuple[Tensor, ...] | None = None
    down_scale: tuple[Tensor, ...] | None = None

    def __post_init__(self) -> None:
        scales = (self.gate_scale, self.up_scale, self.down_scale)
        assert all((scale is None) == (self.format == "dense") for scale in scales), f"scales do not go with the format {self.format}"
        counts = [len(part) for part in (self.gate, self.up, self.down, *scales) if part is not None]
        assert len(set(counts)) == 1, f"parts of a bank hold unlike numbers of experts: {counts}"

    @property
    def num_experts(self) -> int:
        """Experts in the bank, used or not."""
        return len(self.gate)

    def dense(self, expert: int, dtype: torch.dtype, forms: Mapping[str, Unpack] = UNPACK) -> tuple[Tensor, Tensor, Tensor]:
        """Gate, up and down of one expert, unpacked by the form of this format and rounded to `dtype`."""
        if self.gate_scale is None or self.up_scale is None or self.down_scale is None:
            return self.gate[expert].to(dtype), self.up[expert].to(dtype), self.down[expert].to(dtype)
        unpack = forms[self.format]
        return (
            unpack(self.gate[expert], self.gate_scale[expert]).to(dtype),
            unpack(self.up[expert], self.up_scale[expert]).to(dtype),
            unpack(self.down[expert], self.down_scale[expert]).to(dtype),
        )


def experts(
    x_TD: Tensor, bank: Bank, ids_TX: Tensor, weights_TX: Tensor, *, kind: Kind, beta: float | None = 1.0, linear_beta: float | None = None,
) -> Tensor:
    """Weighted sum of down(activation(gate x, up x)) over the chosen experts; an expert may be chosen twice, or by nobody.

    Note: products in the dtype of x, the sum over experts in fp32, one rounding.
    """
    y_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    for expert in ids_TX.unique().tolist():
        gate_ID, up_ID, down_DI = bank.dense(expert, x_TD.dtype)
        token, choice = torch.where(ids_TX == expert)
        x_PD = x_TD[token]
        hidden_PI = activation(linear(x_PD, gate_ID), linear(x_PD, up_ID), kind=kind, beta=beta, linear_beta=linear_beta)
        out_PD = linear(hidden_PI, down_DI).float()
        y_TD.index_add_(0, token, weights_TX[token, choice].float()[:, None] * out_PD)
    return y_TD.to(x_TD.dtype)


def _dense_bank(rng: torch.Generator, E: int, D: int, inner: int, dtype: torch.dtype) -> Bank:
    def draw(*shape: int) -> tuple[Tensor, ...]:
        return normal(rng, E, *shape, dtype=dtype, spread=shape[-1] ** -0.5).unbind(0)

    return Bank("dense", draw(inner, D), draw(inner, D), draw(D, inner))


def _packed_bank(rng: torch.Generator, E: int, D: int, inner: int) -> Bank:
    def draw(outer: int, columns: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        packed = torch.randint(0, 256, (E, outer, columns // 2), generator=rng, dtype=torch.uint8)
        scale = torch.randint(121, 126, (E, outer, columns // GROUP_COLUMNS), generator=rng, dtype=torch.uint8)
        return packed.unbind(0), scale.unbind(0)

    (gate, gate_scale), (up, up_scale), (down, down_scale) = draw(inner, D), draw(inner, D), draw(D, inner)
    return Bank("mxfp4", gate, up, down, gate_scale, up_scale, down_scale)


def _fp8_bank(rng: torch.Generator, E: int, D: int, inner: int) -> Bank:
    def draw(outer: int, columns: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        codes, scales = zip(*(pack(normal(rng, outer, columns, spread=columns**-0.5)) for _ in range(E)), strict=True)
        return codes, scales

    (gate, gate_scale), (up, up_scale), (down, down_scale) = draw(inner, D), draw(inner, D), draw(D, inner)
    return Bank("fp8", gate, up, down, gate_scale, up_scale, down_scale)


def _choices(rng: torch.Generator, T: int, E: int, X: int) -> tuple[Tensor, Tensor]:
    ids = torch.rand(T, E, generator=rng).argsort(dim=1)[:, :X].contiguous()
    return ids, torch.rand(T, X, generator=rng) + 0.1


def cases(seed: int) -> Iterator[Case]:
    """Every format and both activations; no token, one, many; idle experts, all tokens on one expert, an expert chosen twice."""
    rng = torch.Generator().manual_seed(seed)
    situ: dict[str, Any] = {"kind": "situ", "beta": 4.0, "linear_beta": 25.0}
    for name, dtype in DTYPES:
        forms = (("dense", 5, 2, 17, 9), ("dense", 1, 1, 8, 8), ("mxfp4", 6, 3, 64, 32), ("mxfp4", 3, 2, 32, 96), ("fp8", 4, 2, 130, 24))
        for form, E, X, D, inner in forms:
            packed = _fp8_bank if form == "fp8" else _packed_bank
            bank = _dense_bank(rng, E, D, inner, dtype) if form == "dense" else packed(rng, E, D, inner)
            for kwargs in ({"kind": "silu"}, situ):
                use = OpUse.of("experts", name, D=D, I=inner, E=E, X=X, format=form, kind=kwargs["kind"])
                for T in (0, 1, 67):
                    ids, weights = _choices(rng, T, E, X)
                    label = f"{name}-{form}-{E}x{D}x{inner}-{kwargs['kind']}-{T}"
                    yield Case(label, use, (normal(rng, T, D, dtype=dtype), bank, ids, weights), kwargs)
        bank = _dense_bank(rng, 8, 16, 12, dtype)
        for label, rows in {"twice": [[3, 3], [0, 7]], "crowded": [[5, 2]] * 65, "idle": [[7, 0], [0, 7]]}.items():
            use = OpUse.of("experts", name, D=16, I=12, E=8, X=2, format="dense", kind="situ")
            ids = torch.tensor(rows)
            yield Case(f"{name}-{label}", use, (normal(rng, len(rows), 16, dtype=dtype), bank, ids, torch.rand(ids.shape, generator=rng)), situ)
