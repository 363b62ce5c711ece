"""Kimi Delta Attention: a gated delta rule with a decay per key channel, short convolutions, output gate.

Source: Kimi Linear, arXiv 2510.26692; bounded gate and full-rank output gate: Kimi K3, arXiv 2607.24653.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from firstlight.spec.model import CacheSpec, OpUse, TensorSpec

CHUNK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Kda:
    """`lower_bound` None: softplus gate. `gate_rank` None: the output gate is one full matrix."""

    dim: int
    num_heads: int
    head_k: int
    head_v: int
    conv_width: int
    decay_rank: int
    lower_bound: float | None
    gate_rank: int | None
    norm_eps: float
    dtype: str
    kind: str = "kda"

    @property
    def width_k(self) -> int:
        """All heads' key channels."""
        return self.num_heads * self.head_k

    @property
    def width_v(self) -> int:
        """All heads' value channels."""
        return self.num_heads * self.head_v

    def weights(self) -> Sequence[TensorSpec]:
        """Convolutions, decay parameters and o_norm stay fp32."""
        widths = {"q": self.width_k, "k": self.width_k, "v": self.width_v}
        found = [TensorSpec(f"{name}_proj.weight", (width, self.dim), self.dtype) for name, width in widths.items()]
        found += [TensorSpec(f"{name}_conv1d.weight", (width, self.conv_width), "float32") for name, width in widths.items()]
        found += [
            TensorSpec("f_a_proj.weight", (self.decay_rank, self.dim), self.dtype),
            TensorSpec("f_b_proj.weight", (self.width_k, self.decay_rank), self.dtype),
            TensorSpec("b_proj.weight", (self.num_heads, self.dim), self.dtype),
            TensorSpec("A_log", (self.num_heads,), "float32"),
            TensorSpec("dt_bias", (self.width_k,), "float32"),
            TensorSpec("o_norm.weight", (self.head_v,), "float32"),
            TensorSpec("o_proj.weight", (self.dim, self.width_v), self.dtype),
        ]
        return (*found, *self._gate_weights())

    def _gate_weights(self) -> Sequence[TensorSpec]:
        if self.gate_rank is None:
            return (TensorSpec("g_proj.weight", (self.width_v, self.dim), self.dtype),)
        return (
            TensorSpec("g_a_proj.weight", (self.gate_rank, self.dim), self.dtype),
            TensorSpec("g_b_proj.weight", (self.width_v, self.gate_rank), self.dtype),
        )

    def cache(self) -> Sequence[CacheSpec]:
        """The recurrent state in fp32 and the last raw inputs of the three convolutions."""
        window = self.conv_width - 1
        return (
            CacheSpec("kda", "state", (
                TensorSpec("recurrent", (self.num_heads, self.head_k, self.head_v), "float32"),
                TensorSpec("conv_q", (window, self.width_k), self.dtype),
                TensorSpec("conv_k", (window, self.width_k), self.dtype),
                TensorSpec("conv_v", (window, self.width_v), self.dtype),
            ), layout="HKV WD WD WD"),
        )

    def linears(self) -> Sequence[tuple[int, int]]:
        """(in, out) of every product."""
        gate = [(self.dim, self.width_v)] if self.gate_rank is None else [(self.dim, self.gate_rank), (self.gate_rank, self.width_v)]
        return (
            (self.dim, self.width_k), (self.dim, self.width_k), (self.dim, self.width_v),
            (self.dim, self.decay_rank), (self.decay_rank, self.width_k), (self.dim, self.num_heads),
            *gate, (self.width_v, self.dim),
        )

    def ops(self) -> Sequence[OpUse]:
        """Products, convolutions, gate, delta rule, gated norm."""
        convs = [OpUse.of("short_conv", self.dtype, D=width, W=self.conv_width) for width in (self.width_k, self.width_k, self.width_v)]
        gate = "softplus" if self.lower_bound is None else "bounded"
        return (
            *(OpUse.of("linear", self.dtype, I=i, O=o) for i, o in self.linears()),
            *convs,
            OpUse.of("decay_gate", self.dtype, H=self.num_heads, K=self.head_k, gate=gate),
            OpUse.of("gated_delta", self.dtype, H=self.num_heads, K=self.head_k, V=self.head_v, decay="channel"),
            OpUse.of("gated_rms_norm", self.dtype, H=self.num_heads, V=self.head_v, activation="sigmoid"),
        )

    def flops(self, num_tokens: int, context: int) -> int:
        """Products, and the state update: token by token for one, by chunks of 64 for more."""
        products = 2 * num_tokens * sum(i * o for i, o in self.linears())
        update = 7 * self.head_k * self.head_v
        if num_tokens > 1:
            update = 6 * self.head_k * self.head_v + CHUNK * (4 * self.head_k + 3 * self.head_v) // 2
        return products + num_tokens * self.num_heads * update

    def active_params(self) -> int:
        """All of them."""
        return sum(weight.num_elements for weight in self.weights())
