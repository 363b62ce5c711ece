"""Dense gated feed-forward.

Letters: T packed tokens, D model width.
"""

from __future__ import annotations

from torch import Tensor, nn

from firstlight.layers.leaves import Act, Linear
from firstlight.layers.registry import part
from firstlight.ops.registry import Binder
from firstlight.parallel.mesh import Mesh
from firstlight.parts.ffn import Ffn as Spec


@part("ffn")
class Ffn(nn.Module):
    """down(act(gate x, up x)), reduced over tp."""

    def __init__(self, spec: Spec, mesh: Mesh, binder: Binder) -> None:
        super().__init__()
        self.gate_proj = Linear(binder, spec.dim, spec.inner, spec.dtype)
        self.up_proj = Linear(binder, spec.dim, spec.inner, spec.dtype)
        self.act_fn = Act(binder, spec.activation, spec.inner, spec.dtype)
        self.down_proj = Linear(binder, spec.inner, spec.dim, spec.dtype)
        self.tp = mesh.axis("tp")

    def forward(self, x_TD: Tensor) -> Tensor:
        """One feed-forward."""
        return self.tp.all_reduce(self.down_proj(self.act_fn(self.gate_proj(x_TD), self.up_proj(x_TD))))
