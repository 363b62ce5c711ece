"""Grouped-query attention.

Letters: T packed tokens, D model width, H heads, J key heads, K key width of a head, V value width, Q query projection of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from firstlight.layers.leaves import Linear, RmsNorm, Rotary
from firstlight.layers.registry import part
from firstlight.layers.step import LayerCache, Step
from firstlight.ops.registry import Binder
from firstlight.parallel.mesh import Mesh
from firstlight.parts.gqa import Gqa as Spec


@part("gqa")
class Gqa(nn.Module):
    """Queries and keys turn in one call of the operator; keys are cached as they will be compared."""

    def __init__(self, spec: Spec, mesh: Mesh, binder: Binder) -> None:
        super().__init__()
        self.spec, self.tp = spec, mesh.axis("tp")
        products = {name: Linear(binder, num_in, num_out, spec.dtype) for name, num_in, num_out in spec.linears()}
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (products[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
        if spec.normed:
            self.q_norm, self.k_norm = (RmsNorm(binder, spec.head_k, spec.norm_eps, spec.dtype, plus_one=spec.plus_one) for _ in range(2))
        self.turn = None if spec.rotation is None else Rotary(binder, spec.rotation, spec.num_heads + spec.num_key_heads, spec.dtype)
        self.attend = binder.bind(next(use for use in spec.ops() if use.op == "grouped_attention"))

    def forward(self, x_TD: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """Writes this step's rows, attends over all rows of each sequence."""
        spec = self.spec
        q_THQ = self.q_proj(x_TD).unflatten(1, (spec.num_heads, -1))
        q_THK, gate_THV = q_THQ[..., : spec.head_k], q_THQ[..., spec.head_k :]
        k_TJK = self.k_proj(x_TD).unflatten(1, (spec.num_key_heads, spec.head_k))
        v_TJV = self.v_proj(x_TD).unflatten(1, (spec.num_key_heads, spec.head_v))
        if spec.normed:
            q_THK, k_TJK = self.q_norm(q_THK), self.k_norm(k_TJK)
        if self.turn is not None:
            both = self.turn(torch.cat((q_THK, k_TJK), dim=1), step.positions_T)
            q_THK, k_TJK = both[:, : spec.num_heads], both[:, spec.num_heads :]
        for name, row in (("keys", k_TJK), ("values", v_TJV)):
            cache[name].view(-1, *row.shape[1:]).index_copy_(0, step.row_slots["gqa"], row)
        o_THV = self.attend(
            q_THK, cache["keys"], cache["values"], step.tables["gqa"], step.starts_N1, step.contexts_N, scale=spec.scale)
        if spec.gated:
            o_THV = o_THV * torch.sigmoid(gate_THV)
        return self.tp.all_reduce(self.o_proj(o_THV.flatten(1)))
