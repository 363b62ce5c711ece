"""Multi-head latent attention: one cached latent row per token, keys and values expanded from it.

Source: DeepSeek-V2, arXiv 2405.04434; without rotation and with an output gate: Kimi K3, arXiv 2607.24653.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from firstlight.parts.rotation import Rotation
from firstlight.spec.model import CacheSpec, OpUse, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Mla:
    """`q_rank` None: queries come from one matrix. `rotation` None: the rope channels are not rotated (NoPE).

    `norm_eps` is that of the norms on the latents, which the official code leaves at its class default. `sharpness` multiplies the scores
    (the square of YaRN's mscale).
    """

    dim: int
    num_heads: int
    nope: int
    rope: int
    v_dim: int
    q_rank: int | None
    kv_rank: int
    gated: bool
    norm_eps: float
    dtype: str
    rotation: Rotation | None = None
    sharpness: float = 1.0
    kind: str = "mla"

    @property
    def head_q(self) -> int:
        """Query channels of one head."""
        return self.nope + self.rope

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return float(self.head_q**-0.5) * self.sharpness

    @property
    def row_width(self) -> int:
        """Channels of one cached row."""
        return self.kv_rank + self.rope

    def linears(self) -> Sequence[tuple[str, int, int]]:
        """(name, in, out) of every product but the expansion of the latents."""
        width_q, width_v = self.num_heads * self.head_q, self.num_heads * self.v_dim
        found: list[tuple[str, int, int]] = [("q_proj", self.dim, width_q)]
        if self.q_rank is not None:
            found = [("q_a_proj", self.dim, self.q_rank), ("q_b_proj", self.q_rank, width_q)]
        found.append(("kv_a_proj_with_mqa", self.dim, self.row_width))
        if self.gated:
            found.append(("g_proj", self.dim, width_v))
        return (*found, ("o_proj", width_v, self.dim))

    def weights(self) -> Sequence[TensorSpec]:
        """Products, the norms on the latents, the expansion kv_b."""
        found = [TensorSpec(f"{name}.weight", (o, i), self.dtype) for name, i, o in self.linears()]
        if self.q_rank is not None:
            found.append(TensorSpec("q_a_layernorm.weight", (self.q_rank,), self.dtype))
        found.append(TensorSpec("kv_a_layernorm.weight", (self.kv_rank,), self.dtype))
        found.append(TensorSpec("kv_b_proj.weight", (self.num_heads * (self.nope + self.v_dim), self.kv_rank), self.dtype))
        return found

    def cache(self) -> Sequence[CacheSpec]:
        """The normed latent and the shared rope key, side by side."""
        return (CacheSpec("mla", "rows", (TensorSpec("latent", (self.row_width,), self.dtype),), tokens_per_block=16, layout="L"),)

    def ops(self) -> Sequence[OpUse]:
        """Products, norms on the latents, rotation if any, attention."""
        norms = [self.kv_rank] if self.q_rank is None else [self.q_rank, self.kv_rank]
        rotations = [] if self.rotation is None else [self.rotation.use(heads, self.dtype) for heads in (self.num_heads, 1)]
        return (
            *(OpUse.of("linear", self.dtype, I=i, O=o) for _, i, o in self.linears()),
            *(OpUse.of("rms_norm", self.dtype, D=width) for width in norms),
            *rotations,
            OpUse.of("latent_attention", self.dtype, H=self.num_heads, N=self.nope, R=self.rope, V=self.v_dim, L=self.kv_rank),
        )

    def flops(self, num_tokens: int, context: int) -> int:
        """Products and the cheaper of the absorbed and the expanded form."""
        products = 2 * num_tokens * sum(i * o for _, i, o in self.linears())
        pairs = num_tokens * context + num_tokens * (num_tokens + 1) // 2
        expansion = 2 * self.num_heads * (self.nope + self.v_dim) * self.kv_rank
        absorbed = 2 * pairs * self.num_heads * (self.row_width + self.kv_rank) + num_tokens * expansion
        expanded = 2 * pairs * self.num_heads * (self.head_q + self.v_dim) + (context + num_tokens) * expansion
        return products + min(absorbed, expanded)

    def active_params(self) -> int:
        """All of them."""
        return sum(weight.num_elements for weight in self.weights())
