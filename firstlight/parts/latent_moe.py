"""LatentMoE: experts act in a narrower latent; router and shared expert see the full width.

Source: LatentMoE, arXiv 2601.18089; Kimi K3, arXiv 2607.24653.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from firstlight.parts.activation import Activation
from firstlight.parts.ffn import Ffn
from firstlight.parts.moe import Router, bank
from firstlight.spec.model import CacheSpec, OpUse, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentMoe:
    """`latent` is the experts' width; `normed`: an RMS norm stands between the combine and the way back up."""

    dim: int
    latent: int
    inner: int
    num_experts: int
    top_k: int
    router: Router
    shared_inner: int
    activation: Activation
    normed: bool
    norm_eps: float
    dtype: str
    expert_format: str = "dense"
    kind: str = "latent_moe"

    @property
    def shared(self) -> Ffn | None:
        """The expert that sees every token, on the full width."""
        if not self.shared_inner:
            return None
        return Ffn(dim=self.dim, inner=self.shared_inner, activation=self.activation, dtype=self.dtype)

    def weights(self) -> Sequence[TensorSpec]:
        """Router, way down, bank, norm, way up, shared expert."""
        shared = tuple(weight.under("shared_experts") for weight in self.shared.weights()) if self.shared else ()
        norm = (TensorSpec("routed_expert_norm.weight", (self.latent,), self.dtype),) if self.normed else ()
        return (
            *self.router.weights(self.dim, self.num_experts, self.dtype),
            TensorSpec("routed_expert_down_proj.weight", (self.latent, self.dim), self.dtype),
            *bank(self.latent, self.inner, self.num_experts, self.dtype),
            *norm,
            TensorSpec("routed_expert_up_proj.weight", (self.dim, self.latent), self.dtype),
            *shared,
        )

    def cache(self) -> Sequence[CacheSpec]:
        """Nothing is remembered."""
        return ()

    def ops(self) -> Sequence[OpUse]:
        """Route, down, experts, norm, up, shared expert."""
        use = OpUse.of(
            "experts", self.dtype, D=self.latent, I=self.inner, E=self.num_experts, X=self.top_k,
            format=self.expert_format, kind=self.activation.kind)
        return (
            self.router.use(self.dim, self.num_experts, self.top_k, self.dtype),
            OpUse.of("linear", self.dtype, I=self.dim, O=self.latent),
            use,
            *((OpUse.of("rms_norm", self.dtype, D=self.latent),) if self.normed else ()),
            OpUse.of("linear", self.dtype, I=self.latent, O=self.dim),
            *(self.shared.ops() if self.shared else ()),
        )

    def flops(self, num_tokens: int, context: int) -> int:
        """Products of the chosen experts only."""
        return 2 * num_tokens * self.active_params()

    def active_params(self) -> int:
        """Router, both ways, norm, top_k experts, shared expert."""
        shared = self.shared.active_params() if self.shared else 0
        bias = self.num_experts if self.router.biased else 0
        ways = 2 * self.dim * self.latent + (self.latent if self.normed else 0)
        return self.num_experts * self.dim + bias + ways + 3 * self.top_k * self.latent * self.inner + shared
