"""Kimi Delta Attention.

Letters: T packed tokens, D model width, H heads, K key width, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from firstlight.layers.leaves import GatedRmsNorm, Linear, ShortConv, empty
from firstlight.layers.registry import part
from firstlight.layers.step import LayerCache, Step
from firstlight.ops.registry import Binder
from firstlight.parallel.mesh import Mesh
from firstlight.parts.kda import Kda as Spec

QK_NORM_EPS = 1e-6


@part("kda")
class Kda(nn.Module):
    """Projections, short convolutions, delta rule, gated norm, output projection."""

    def __init__(self, spec: Spec, mesh: Mesh, binder: Binder) -> None:
        super().__init__()
        self.spec, self.tp = spec, mesh.axis("tp")
        self.q_proj = Linear(binder, spec.dim, spec.width_k, spec.dtype)
        self.k_proj = Linear(binder, spec.dim, spec.width_k, spec.dtype)
        self.v_proj = Linear(binder, spec.dim, spec.width_v, spec.dtype)
        self.q_conv1d = ShortConv(binder, spec.width_k, spec.conv_width, spec.dtype)
        self.k_conv1d = ShortConv(binder, spec.width_k, spec.conv_width, spec.dtype)
        self.v_conv1d = ShortConv(binder, spec.width_v, spec.conv_width, spec.dtype)
        self.f_a_proj = Linear(binder, spec.dim, spec.decay_rank, spec.dtype)
        self.f_b_proj = Linear(binder, spec.decay_rank, spec.width_k, spec.dtype)
        self.b_proj = Linear(binder, spec.dim, spec.num_heads, spec.dtype)
        self.A_log = empty("float32", spec.num_heads)
        self.dt_bias = empty("float32", spec.width_k)
        if spec.gate_rank is None:
            self.g_proj = Linear(binder, spec.dim, spec.width_v, spec.dtype)
        else:
            self.g_a_proj = Linear(binder, spec.dim, spec.gate_rank, spec.dtype)
            self.g_b_proj = Linear(binder, spec.gate_rank, spec.width_v, spec.dtype)
        uses = {use.op: use for use in spec.ops()}
        self.decay_gate = binder.bind(uses["decay_gate"])
        self.gated_delta = binder.bind(uses["gated_delta"])
        self.o_norm = GatedRmsNorm(binder, spec.num_heads, spec.head_v, spec.norm_eps, "sigmoid", spec.dtype)
        self.o_proj = Linear(binder, spec.width_v, spec.dim, spec.dtype)

    def forward(self, x_TD: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """Reads and leaves the recurrent state and the three windows in the sequences' slots."""
        spec, slots_N = self.spec, step.slots["kda"]
        heads_k, heads_v = (-1, spec.num_heads, spec.head_k), (-1, spec.num_heads, spec.head_v)
        q_THK = self.q_conv1d(self.q_proj(x_TD), cache["conv_q"], slots_N, step).view(heads_k)
        k_THK = self.k_conv1d(self.k_proj(x_TD), cache["conv_k"], slots_N, step).view(heads_k)
        v_THV = self.v_conv1d(self.v_proj(x_TD), cache["conv_v"], slots_N, step).view(heads_v)
        f_THK = self.f_b_proj(self.f_a_proj(x_TD)).view(heads_k)
        g_THK = self.decay_gate(f_THK, self.A_log, self.dt_bias.view(heads_k[1:]), lower_bound=spec.lower_bound)
        beta_TH = torch.sigmoid(self.b_proj(x_TD).float())
        o_THV = self.gated_delta(
            q_THK, k_THK, v_THV, g_THK, beta_TH, cache["recurrent"], slots_N, step.starts_N1, step.contexts_N,
            scale=spec.head_k**-0.5, norm_eps=QK_NORM_EPS)
        y_THV = self.o_norm(o_THV, self._gate(x_TD).view(heads_v))
        return self.tp.all_reduce(self.o_proj(y_THV.flatten(1)))

    def _gate(self, x_TD: Tensor) -> Tensor:
        gate: Tensor = self.g_proj(x_TD) if self.spec.gate_rank is None else self.g_b_proj(self.g_a_proj(x_TD))
        return gate
