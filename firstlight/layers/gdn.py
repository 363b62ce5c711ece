"""Gated DeltaNet.

Letters: T packed tokens, D model width, C channels of the convolution, H value heads, J key heads, K key width, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from firstlight.layers.leaves import GatedRmsNorm, Linear, ShortConv, empty
from firstlight.layers.registry import part
from firstlight.layers.step import LayerCache, Step
from firstlight.ops.registry import Binder
from firstlight.parallel.mesh import Mesh
from firstlight.parts.gdn import Gdn as Spec

QK_NORM_EPS = 1e-6


@part("gdn")
class Gdn(nn.Module):
    """Projections, one short convolution, delta rule, gated norm, output projection."""

    def __init__(self, spec: Spec, mesh: Mesh, binder: Binder) -> None:
        super().__init__()
        self.spec, self.tp = spec, mesh.axis("tp")
        products = {name: Linear(binder, num_in, num_out, spec.dtype) for name, num_in, num_out in spec.linears()}
        if spec.interleaved:
            self.in_proj_qkvz, self.in_proj_ba = products["in_proj_qkvz"], products["in_proj_ba"]
        else:
            self.in_proj_qkv, self.in_proj_z = products["in_proj_qkv"], products["in_proj_z"]
            self.in_proj_b, self.in_proj_a = products["in_proj_b"], products["in_proj_a"]
        self.out_proj = products["out_proj"]
        self.conv1d = ShortConv(binder, spec.width_conv, spec.conv_width, spec.dtype)
        self.A_log = empty("float32", spec.num_heads)
        self.dt_bias = empty("float32", spec.num_heads)
        uses = {use.op: use for use in spec.ops()}
        self.decay_gate = binder.bind(uses["decay_gate"])
        self.gated_delta = binder.bind(uses["gated_delta"])
        self.norm = GatedRmsNorm(binder, spec.num_heads, spec.head_v, spec.norm_eps, "silu", spec.dtype)

    def forward(self, x_TD: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """Reads and leaves the recurrent state and the window in the sequences' slots."""
        spec, slots_N = self.spec, step.slots["gdn"]
        x_TC, z_THV, b_TH, a_TH = self._interleaved(x_TD) if spec.interleaved else self._apart(x_TD)
        y_TC = self.conv1d(x_TC, cache["conv"], slots_N, step)
        q_TC, k_TC, v_TC = y_TC.split((spec.width_k, spec.width_k, spec.width_v), dim=1)
        q_TJK, k_TJK = (part_TC.unflatten(1, (spec.num_key_heads, spec.head_k)) for part_TC in (q_TC, k_TC))
        g_TH = self.decay_gate(a_TH, self.A_log, self.dt_bias)
        o_THV = self.gated_delta(
            q_TJK, k_TJK, v_TC.unflatten(1, (spec.num_heads, spec.head_v)), g_TH, torch.sigmoid(b_TH.float()), cache["recurrent"], slots_N,
            step.starts_N1, step.contexts_N, scale=spec.head_k**-0.5, norm_eps=QK_NORM_EPS)
        y_TD: Tensor = self.out_proj(self.norm(o_THV, z_THV).flatten(1))
        return self.tp.all_reduce(y_TD)

    def _interleaved(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Inputs of the convolution, gates, betas and decays, brought from the order of key heads into their own."""
        spec, group = self.spec, self.spec.num_heads // self.spec.num_key_heads
        by_head_TJD: Tensor = self.in_proj_qkvz(x_TD).unflatten(1, (spec.num_key_heads, -1))
        q_TJK, k_TJK, v_TJD, z_TJD = by_head_TJD.split((spec.head_k, spec.head_k, group * spec.head_v, group * spec.head_v), dim=2)
        b_TJG, a_TJG = self.in_proj_ba(x_TD).unflatten(1, (spec.num_key_heads, -1)).split(group, dim=2)
        x_TC = torch.cat([part_TJD.flatten(1) for part_TJD in (q_TJK, k_TJK, v_TJD)], dim=1)
        return x_TC, z_TJD.flatten(1).unflatten(1, (spec.num_heads, spec.head_v)), b_TJG.flatten(1), a_TJG.flatten(1)

    def _apart(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        z_THV = self.in_proj_z(x_TD).unflatten(1, (self.spec.num_heads, self.spec.head_v))
        return self.in_proj_qkv(x_TD), z_THV, self.in_proj_b(x_TD), self.in_proj_a(x_TD)
