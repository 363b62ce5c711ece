"""Multi-head latent attention.

Letters: T packed tokens, D model width, H heads, Q query width of a head, V value width, C row width, L latent width, R rope width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from firstlight.layers.leaves import Linear, RmsNorm, empty
from firstlight.layers.registry import part
from firstlight.layers.step import LayerCache, Step
from firstlight.ops.registry import Binder
from firstlight.parallel.mesh import Mesh
from firstlight.parts.mla import Mla as Spec


@part("mla")
class Mla(nn.Module):
    """`kv_b_proj` is never run as a product: the attention operator expands or absorbs it."""

    def __init__(self, spec: Spec, mesh: Mesh, binder: Binder) -> None:
        super().__init__()
        self.spec, self.tp = spec, mesh.axis("tp")
        products = {name: Linear(binder, num_in, num_out, spec.dtype) for name, num_in, num_out in spec.linears()}
        self.kv_a_proj_with_mqa, self.o_proj = products["kv_a_proj_with_mqa"], products["o_proj"]
        if spec.gated:
            self.g_proj = products["g_proj"]
        if spec.q_rank is None:
            self.q_proj = products["q_proj"]
        else:
            self.q_a_proj, self.q_b_proj = products["q_a_proj"], products["q_b_proj"]
            self.q_a_layernorm = RmsNorm(binder, spec.q_rank, spec.norm_eps, spec.dtype)
        self.kv_a_layernorm = RmsNorm(binder, spec.kv_rank, spec.norm_eps, spec.dtype)
        self.kv_b_proj = _Expansion(spec)
        uses = {use.op: use for use in spec.ops()}
        self.attend = binder.bind(uses["latent_attention"])
        if spec.rope_theta is not None:
            self.rotations = [binder.bind(use) for use in spec.ops() if use.op == "rope"]
            self.inv_freq = [spec.rope_theta ** (-i / spec.rope) for i in range(0, spec.rope, 2)]

    def forward(self, x_TD: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """Writes this step's rows, attends over all rows of each sequence."""
        spec = self.spec
        q_TD = self.q_proj(x_TD) if spec.q_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TD)))
        q_THQ = q_TD.view(-1, spec.num_heads, spec.head_q)
        c_TC = self.kv_a_proj_with_mqa(x_TD)
        latent_TL, key_TR = self.kv_a_layernorm(c_TC[:, : spec.kv_rank]), c_TC[:, spec.kv_rank :]
        if spec.rope_theta is not None:
            q_THQ, key_TR = self._rotate(q_THQ, key_TR, step.positions_T)
        rows_SBC = cache["latent"]
        rows_SBC.view(-1, spec.row_width).index_copy_(0, step.row_slots["mla"], torch.cat((latent_TL, key_TR), dim=1))
        o_THV = self.attend(
            q_THQ, rows_SBC, step.tables["mla"], self.kv_b_proj.weight, step.starts_N1, step.contexts_N,
            nope=spec.nope, v_dim=spec.v_dim, scale=spec.scale)
        o_TD = o_THV.flatten(1)
        if spec.gated:
            o_TD = o_TD * torch.sigmoid(self.g_proj(x_TD))
        return self.tp.all_reduce(self.o_proj(o_TD))

    def _rotate(self, q_THQ: Tensor, key_TR: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        spec, (rotate_q, rotate_k) = self.spec, self.rotations
        turned_THR = rotate_q(q_THQ[..., spec.nope :], positions_T, self.inv_freq, interleaved=spec.interleaved)
        key_T1R = rotate_k(key_TR.unsqueeze(1), positions_T, self.inv_freq, interleaved=spec.interleaved)
        return torch.cat((q_THQ[..., : spec.nope], turned_THR), dim=-1), key_T1R.squeeze(1)


class _Expansion(nn.Module):
    """Holds kv_b under its checkpoint name; calling it expands latents, which only comparisons with a reference do."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.weight = empty(spec.dtype, spec.num_heads * (spec.nope + spec.v_dim), spec.kv_rank)

    def forward(self, latent_TL: Tensor) -> Tensor:
        return nn.functional.linear(latent_TL, self.weight)
