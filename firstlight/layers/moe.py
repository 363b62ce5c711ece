"""Mixture of experts over the full width.

Letters: T packed tokens, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from firstlight.layers.ffn import Ffn
from firstlight.layers.leaves import Experts, Linear, Router
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
        self.shared_expert_gate = Linear(binder, spec.dim, 1, spec.dtype) if spec.shared_gated else None
        self.ep = mesh.axis("ep")

    def forward(self, x_TD: Tensor) -> Tensor:
        """Weighted sum of experts plus the shared one."""
        y_TD = self.ep.all_reduce(self.experts(x_TD, *self.router(x_TD)))
        if self.shared_experts is None:
            return y_TD
        shared_TD: Tensor = self.shared_experts(x_TD)
        return y_TD + (shared_TD if self.shared_expert_gate is None else torch.sigmoid(self.shared_expert_gate(x_TD)) * shared_TD)
