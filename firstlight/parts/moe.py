"""Mixture of experts over the full width, with an optional shared expert.

Source: DeepSeek-V3, arXiv 2412.19437 (bias-balanced sigmoid router, groups); Kimi Linear, arXiv 2510.26692; gated shared expert: Qwen3-Next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from firstlight.parts.activation import Activation
from firstlight.parts.ffn import Ffn
from firstlight.spec.model import CacheSpec, OpUse, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """How experts are chosen; `biased`: an fp32 bias takes part in the choice, not in the weights."""

    score: str = "sigmoid"
    num_groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    scale: float = 1.0
    biased: bool = True

    def weights(self, dim: int, num_experts: int, dtype: str) -> Sequence[TensorSpec]:
        """Score matrix and bias."""
        bias = (TensorSpec("router.bias", (num_experts,), "float32"),) if self.biased else ()
        return (TensorSpec("router.weight", (num_experts, dim), dtype), *bias)

    def use(self, dim: int, num_experts: int, top_k: int, dtype: str) -> OpUse:
        """The operator use."""
        return OpUse.of("route", dtype, D=dim, E=num_experts, X=top_k, score=self.score, groups=self.num_groups)


def bank(dim: int, inner: int, num_experts: int, dtype: str) -> Sequence[TensorSpec]:
    """The three stacked matrices of a bank of experts."""
    return (
        TensorSpec("experts.gate", (num_experts, inner, dim), dtype),
        TensorSpec("experts.up", (num_experts, inner, dim), dtype),
        TensorSpec("experts.down", (num_experts, dim, inner), dtype),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """`shared_inner` 0: no shared expert. `shared_gated`: a token opens the shared expert as far as the sigmoid of one product says."""

    dim: int
    inner: int
    num_experts: int
    top_k: int
    router: Router
    shared_inner: int
    activation: Activation
    dtype: str
    expert_format: str = "dense"
    shared_gated: bool = False
    kind: str = "moe"

    @property
    def shared(self) -> Ffn | None:
        """The expert that sees every token."""
        if not self.shared_inner:
            return None
        return Ffn(dim=self.dim, inner=self.shared_inner, activation=self.activation, dtype=self.dtype)

    def weights(self) -> Sequence[TensorSpec]:
        """Router, bank, shared expert and its gate."""
        shared = tuple(weight.under("shared_experts") for weight in self.shared.weights()) if self.shared else ()
        gate = (TensorSpec("shared_expert_gate.weight", (1, self.dim), self.dtype),) if self.shared_gated else ()
        router = self.router.weights(self.dim, self.num_experts, self.dtype)
        return (*router, *bank(self.dim, self.inner, self.num_experts, self.dtype), *shared, *gate)

    def cache(self) -> Sequence[CacheSpec]:
        """Nothing is remembered."""
        return ()

    def ops(self) -> Sequence[OpUse]:
        """Route, experts, shared expert and its gate."""
        use = OpUse.of(
            "experts", self.dtype, D=self.dim, I=self.inner, E=self.num_experts, X=self.top_k, format=self.expert_format, kind=self.activation.kind)
        route = self.router.use(self.dim, self.num_experts, self.top_k, self.dtype)
        gate = (OpUse.of("linear", self.dtype, I=self.dim, O=1),) if self.shared_gated else ()
        return (route, use, *(self.shared.ops() if self.shared else ()), *gate)

    def flops(self, num_tokens: int, context: int) -> int:
        """Products of the chosen experts only."""
        return 2 * num_tokens * self.active_params()

    def active_params(self) -> int:
        """Router, top_k experts, shared expert and its gate."""
        shared = (self.shared.active_params() if self.shared else 0) + self.dim * self.shared_gated
        bias = self.num_experts if self.router.biased else 0
        return self.num_experts * self.dim + bias + 3 * self.top_k * self.dim * self.inner + shared
