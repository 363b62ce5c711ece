"""Mixture of experts in a latent narrower than the model.

Letters: T packed tokens, D model width, L latent width.
"""

from __future__ import annotations

from torch import Tensor, nn

from firstlight.layers.ffn import Ffn
from firstlight.layers.leaves import Experts, Linear, RmsNorm, Router
from firstlight.layers.registry import part
from firstlight.ops.registry import Binder
from firstlight.parallel.mesh import Mesh
from firstlight.parts.latent_moe import LatentMoe as Spec


@part("latent_moe")
class LatentMoe(nn.Module):
    """The norm is not linear, so the sum over ranks comes before it."""

    def __init__(self, spec: Spec, mesh: Mesh, binder: Binder) -> None:
        super().__init__()
        use = next(use for use in spec.ops() if use.op == "experts")
        self.router = Router(binder, spec.router, spec.dim, spec.num_experts, spec.top_k, spec.dtype)
        self.routed_expert_down_proj = Linear(binder, spec.dim, spec.latent, spec.dtype)
        self.experts = Experts(binder, spec.activation, use)
        self.routed_expert_norm = RmsNorm(binder, spec.latent, spec.norm_eps, spec.dtype) if spec.normed else None
        self.routed_expert_up_proj = Linear(binder, spec.latent, spec.dim, spec.dtype)
        self.shared_experts = Ffn(spec.shared, mesh, binder) if spec.shared else None
        self.ep = mesh.axis("ep")

    def forward(self, x_TD: Tensor) -> Tensor:
        """Down, experts, full sum, norm, up, plus the shared expert on the full width."""
        z_TL = self.routed_expert_down_proj(x_TD)
        y_TL = self.ep.all_reduce(self.experts(z_TL, *self.router(x_TD)))
        if self.routed_expert_norm is not None:
            y_TL = self.routed_expert_norm(y_TL)
        y_TD: Tensor = self.routed_expert_up_proj(y_TL)
        return y_TD if self.shared_experts is None else y_TD + self.shared_experts(x_TD)
