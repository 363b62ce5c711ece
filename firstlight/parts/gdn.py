"""Gated DeltaNet: a gated delta rule with one decay per value head, one short convolution over queries, keys and values, output gate.

Source: arXiv 2412.06464; key heads that serve several value heads, and the layout of the projections: Qwen3-Next, Qwen3.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from firstlight.spec.model import CacheSpec, OpUse, TensorSpec

CHUNK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Gdn:
    """`num_heads` value heads, in groups that share one of `num_key_heads`.

    `interleaved`: two projections whose outputs go key head by key head (query, key, its values, its gates; its betas, its decays), as in
    Qwen3-Next; else four projections, each by its own heads, as in Qwen3.5.
    """

    dim: int
    num_heads: int
    num_key_heads: int
    head_k: int
    head_v: int
    conv_width: int
    interleaved: bool
    norm_eps: float
    dtype: str
    kind: str = "gdn"

    @property
    def width_k(self) -> int:
        """All key heads' channels."""
        return self.num_key_heads * self.head_k

    @property
    def width_v(self) -> int:
        """All value heads' channels."""
        return self.num_heads * self.head_v

    @property
    def width_conv(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.width_k + self.width_v

    def linears(self) -> Sequence[tuple[str, int, int]]:
        """(name, in, out) of every product."""
        wide = {"in_proj_qkv": self.width_conv, "in_proj_z": self.width_v, "in_proj_b": self.num_heads, "in_proj_a": self.num_heads}
        if self.interleaved:
            wide = {"in_proj_qkvz": self.width_conv + self.width_v, "in_proj_ba": 2 * self.num_heads}
        return (*((name, self.dim, width) for name, width in wide.items()), ("out_proj", self.width_v, self.dim))

    def weights(self) -> Sequence[TensorSpec]:
        """Convolution, decay parameters and the gated norm stay fp32."""
        return (
            *(TensorSpec(f"{name}.weight", (o, i), self.dtype) for name, i, o in self.linears()),
            TensorSpec("conv1d.weight", (self.width_conv, self.conv_width), "float32"),
            TensorSpec("A_log", (self.num_heads,), "float32"),
            TensorSpec("dt_bias", (self.num_heads,), "float32"),
            TensorSpec("norm.weight", (self.head_v,), "float32"),
        )

    def cache(self) -> Sequence[CacheSpec]:
        """The recurrent state in fp32 and the last raw inputs of the convolution."""
        return (
            CacheSpec("gdn", "state", (
                TensorSpec("recurrent", (self.num_heads, self.head_k, self.head_v), "float32"),
                TensorSpec("conv", (self.conv_width - 1, self.width_conv), self.dtype),
            ), layout="HKV WD"),
        )

    def ops(self) -> Sequence[OpUse]:
        """Products, convolution, gate, delta rule, gated norm."""
        return (
            *(OpUse.of("linear", self.dtype, I=i, O=o) for _, i, o in self.linears()),
            OpUse.of("short_conv", self.dtype, D=self.width_conv, W=self.conv_width),
            OpUse.of("decay_gate", self.dtype, H=self.num_heads, K=1, gate="softplus"),
            OpUse.of("gated_delta", self.dtype, H=self.num_heads, J=self.num_key_heads, K=self.head_k, V=self.head_v, decay="head"),
            OpUse.of("gated_rms_norm", self.dtype, H=self.num_heads, V=self.head_v, activation="silu"),
        )

    def flops(self, num_tokens: int, context: int) -> int:
        """Products, and the state update: token by token for one, by chunks of 64 for more."""
        products = 2 * num_tokens * sum(i * o for _, i, o in self.linears())
        update = 7 * self.head_k * self.head_v
        if num_tokens > 1:
            update = 6 * self.head_k * self.head_v + CHUNK * (4 * self.head_k + 3 * self.head_v) // 2
        return products + num_tokens * self.num_heads * update

    def active_params(self) -> int:
        """All of them."""
        return sum(weight.num_elements for weight in self.weights())
