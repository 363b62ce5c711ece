"""Sizes of the trained model, and the name and shape of each of its weights in K3's spelling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

LOWER_BOUND = -5.0
CONV_WIDTH = 4
SITU_BETA, SITU_LINEAR_BETA = 4.0, 25.0
NORM_EPS, LATENT_NORM_EPS, QK_NORM_EPS = 1e-5, 1e-6, 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """`full_layers` count from 0. Experts lie stacked: w13 [E, 2I, L] holds gate over up, w2 [E, L, I]."""

    vocab: int = 288
    dim: int = 192
    dense_inner: int = 512
    full_layers: tuple[int, ...] = (3, 7, 8)
    num_layers: int = 9
    block_size: int = 3
    kda_heads: int = 6
    kda_head_dim: int = 32
    heads: int = 4
    nope: int = 48
    rope: int = 16
    v_dim: int = 64
    q_rank: int = 128
    kv_rank: int = 64
    num_experts: int = 16
    top_k: int = 2
    num_shared: int = 2
    inner: int = 96
    latent: int = 128
    max_context: int = 65_536

    @property
    def kda_width(self) -> int:
        """Channels of all KDA heads."""
        return self.kda_heads * self.kda_head_dim

    @property
    def head_q(self) -> int:
        """Query channels of one MLA head."""
        return self.nope + self.rope

    def weights(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every weight."""
        yield "model.embed_tokens.weight", (self.vocab, self.dim)
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            for norm in ("input_layernorm", "post_attention_layernorm"):
                yield f"{prefix}{norm}.weight", (self.dim,)
            for seat in ("self_attention_res", "mlp_res"):
                yield f"{prefix}{seat}_norm.weight", (self.dim,)
                yield f"{prefix}{seat}_proj.weight", (1, self.dim)
            mixer = self._mla() if layer in self.full_layers else self._kda()
            ffn = self._glu("mlp.", self.dense_inner) if layer == 0 else self._moe()
            for name, shape in (*((f"self_attn.{name}", shape) for name, shape in mixer), *ffn):
                yield prefix + name, shape
        yield "model.output_attn_res_norm.weight", (self.dim,)
        yield "model.output_attn_res_proj.weight", (1, self.dim)
        yield "model.norm.weight", (self.dim,)
        yield "lm_head.weight", (self.vocab, self.dim)

    def _kda(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name in "qkv":
            yield f"{name}_proj.weight", (self.kda_width, self.dim)
            yield f"{name}_conv1d.weight", (self.kda_width, CONV_WIDTH)
        yield "f_a_proj.weight", (self.kda_head_dim, self.dim)
        yield "f_b_proj.weight", (self.kda_width, self.kda_head_dim)
        yield "b_proj.weight", (self.kda_heads, self.dim)
        yield "g_proj.weight", (self.kda_width, self.dim)
        yield "A_log", (self.kda_heads,)
        yield "dt_bias", (self.kda_width,)
        yield "o_norm.weight", (self.kda_head_dim,)
        yield "o_proj.weight", (self.dim, self.kda_width)

    def _mla(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "q_a_proj.weight", (self.q_rank, self.dim)
        yield "q_a_layernorm.weight", (self.q_rank,)
        yield "q_b_proj.weight", (self.heads * self.head_q, self.q_rank)
        yield "kv_a_proj_with_mqa.weight", (self.kv_rank + self.rope, self.dim)
        yield "kv_a_layernorm.weight", (self.kv_rank,)
        yield "kv_b_proj.weight", (self.heads * (self.nope + self.v_dim), self.kv_rank)
        yield "g_proj.weight", (self.heads * self.v_dim, self.dim)
        yield "o_proj.weight", (self.dim, self.heads * self.v_dim)

    def _glu(self, prefix: str, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{prefix}gate_proj.weight", (inner, self.dim)
        yield f"{prefix}up_proj.weight", (inner, self.dim)
        yield f"{prefix}down_proj.weight", (self.dim, inner)

    def _moe(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        prefix = "block_sparse_moe."
        yield f"{prefix}gate.weight", (self.num_experts, self.dim)
        yield f"{prefix}gate.e_score_correction_bias", (self.num_experts,)
        yield f"{prefix}routed_expert_down_proj.weight", (self.latent, self.dim)
        yield f"{prefix}routed_expert_norm.weight", (self.latent,)
        yield f"{prefix}routed_expert_up_proj.weight", (self.dim, self.latent)
        yield f"{prefix}experts.w13", (self.num_experts, 2 * self.inner, self.latent)
        yield f"{prefix}experts.w2", (self.num_experts, self.latent, self.inner)
        yield from self._glu(f"{prefix}shared_experts.", self.num_shared * self.inner)
