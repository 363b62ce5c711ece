"""Mixture of experts over the full width.

Letters: T packed tokens, D model width.
"""

from __future__ import annotations

from torch import Tensor, nn

from firstlight.layers.ffn import Ffn
from firstlight.layers.leaves import Experts, Router
from firstlight.layers.registry import part
from firstlight.ops.registry import Binder
from firstlight.parallel.mesh import Mesh
from firstlight.parts.moe import Moe as Spec


@part("moe")
class Moe(nn.Module):
    """Routed experts, reduced over ep, plus the shared expert."""

    def __init__(self, spec: Spec, mesh: Mesh, binder: Binder) -> None:
        super().__init__()
        use = next(use for use in spec.ops() if use.op == "experts")
        self.router = Router(binder, spec.router, spec.dim, spec.num_experts, spec.top_k, spec.dtype)
        self.experts = Experts(binder, spec.activation, use)
        self.shared_experts = Ffn(spec.shared, mesh, binder) if spec.shared else None
        self.ep = mesh.axis("ep")

    def forward(self, x_TD: Tensor) -> Tensor:
        """Weighted sum of experts plus the shared one."""
        y_TD = self.ep.all_reduce(self.experts(x_TD, *self.router(x_TD)))
        return y_TD if self.shared_experts is None else y_TD + self.shared_experts(x_TD)
