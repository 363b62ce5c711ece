"""Grouped-query attention: one cached key and value row per key head and token, each shared by a group of query heads.

Source: arXiv 2305.13245; norms on queries and keys: Qwen3, arXiv 2505.09388; output gate from the query projection: Qwen3-Next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from firstlight.parts.rotation import Rotation
from firstlight.spec.model import CacheSpec, OpUse, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Gqa:
    """`rotation` None: NoPE. `normed`: RMS norm of every query and key head before it turns (`plus_one`: its scale is 1 + weight).

    `gated`: the query projection makes, per head, the query and then a gate for the output of that head.
    """

    dim: int
    num_heads: int
    num_key_heads: int
    head_k: int
    head_v: int
    rotation: Rotation | None
    dtype: str
    normed: bool = False
    plus_one: bool = False
    gated: bool = False
    norm_eps: float = 1e-6
    kind: str = "gqa"

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return float(self.head_k**-0.5)

    def linears(self) -> Sequence[tuple[str, int, int]]:
        """(name, in, out) of every product."""
        head_q = self.head_k + (self.head_v if self.gated else 0)
        return (
            ("q_proj", self.dim, self.num_heads * head_q),
            ("k_proj", self.dim, self.num_key_heads * self.head_k),
            ("v_proj", self.dim, self.num_key_heads * self.head_v),
            ("o_proj", self.num_heads * self.head_v, self.dim),
        )

    def weights(self) -> Sequence[TensorSpec]:
        """Products and the norms of one head each."""
        norms = ("q_norm", "k_norm") if self.normed else ()
        return (
            *(TensorSpec(f"{name}.weight", (o, i), self.dtype) for name, i, o in self.linears()),
            *(TensorSpec(f"{name}.weight", (self.head_k,), self.dtype) for name in norms),
        )

    def cache(self) -> Sequence[CacheSpec]:
        """Keys as they are compared (normed and turned), and values."""
        fields = (
            TensorSpec("keys", (self.num_key_heads, self.head_k), self.dtype),
            TensorSpec("values", (self.num_key_heads, self.head_v), self.dtype),
        )
        return (CacheSpec("gqa", "rows", fields, tokens_per_block=16, layout="JK JV"),)

    def ops(self) -> Sequence[OpUse]:
        """Products, norms, one rotation of queries and keys together, attention."""
        norm = OpUse.of("rms_norm", self.dtype, D=self.head_k)
        return (
            *(OpUse.of("linear", self.dtype, I=i, O=o) for _, i, o in self.linears()),
            *((norm, norm) if self.normed else ()),
            *((self.rotation.use(self.num_heads + self.num_key_heads, self.dtype),) if self.rotation else ()),
            OpUse.of("grouped_attention", self.dtype, H=self.num_heads, J=self.num_key_heads, K=self.head_k, V=self.head_v),
        )

    def flops(self, num_tokens: int, context: int) -> int:
        """Products and attention over all earlier tokens."""
        pairs = num_tokens * context + num_tokens * (num_tokens + 1) // 2
        return 2 * num_tokens * sum(i * o for _, i, o in self.linears()) + 2 * pairs * self.num_heads * (self.head_k + self.head_v)

    def active_params(self) -> int:
        """All of them."""
        return sum(weight.num_elements for weight in self.weights())
