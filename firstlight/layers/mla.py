"""Multi-head latent attention.

Letters: T packed tokens, D model width, H heads, Q query width of a head, V value width, C row width, L latent width, R rope width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from firstlight.layers.leaves import Linear, RmsNorm, Rotary, empty
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
        if spec.rotation is not None:
            self.turn_q, self.turn_k = (Rotary(binder, spec.rotation, heads, spec.dtype) for heads in (spec.num_heads, 1))

    def forward(self, x_TD: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """Writes this step's rows, attends over rows of each sequence."""
        spec = self.spec
        resid_TD = x_TD if spec.q_rank is None else self.q_a_layernorm(self.q_a_proj(x_TD))
        q_TD = self.q_proj(resid_TD) if spec.q_rank is None else self.q_b_proj(resid_TD)
        q_THQ = q_TD.view(-1, spec.num_heads, spec.head_q)
        c_TC = self.kv_a_proj_with_mqa(x_TD)
        latent_TL, key_TR = self.kv_a_layernorm(c_TC[:, : spec.kv_rank]), c_TC[:, spec.kv_rank :]
        if spec.rotation is not None:
            turned_THR = self.turn_q(q_THQ[..., spec.nope :], step.positions_T)
            q_THQ = torch.cat((q_THQ[..., : spec.nope], turned_THR), dim=-1)
            key_TR = self.turn_k(key_TR.unsqueeze(1), step.positions_T).squeeze(1)
        cache["latent"].view(-1, spec.row_width).index_copy_(0, step.row_slots["mla"], torch.cat((latent_TL, key_TR), dim=1))
        o_TD = self.look(x_TD, resid_TD, q_THQ, step, cache).flatten(1)
        if spec.gated:
            o_TD = o_TD * torch.sigmoid(self.g_proj(x_TD))
        return self.tp.all_reduce(self.o_proj(o_TD))

    def look(self, x_TD: Tensor, resid_TD: Tensor, q_THQ: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """Attention [T, H, V] over all rows up to each token's own; `resid_TD` is what queries are made of."""
        spec = self.spec
        return self.attend(  # type: ignore[no-any-return]
            q_THQ, cache["latent"], step.tables["mla"], self.kv_b_proj.weight, step.starts_N1, step.contexts_N,
            nope=spec.nope, v_dim=spec.v_dim, scale=spec.scale)


class _Expansion(nn.Module):
    """Holds kv_b under its checkpoint name; calling it expands latents, which only comparisons with a reference do."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.weight = empty(spec.dtype, spec.num_heads * (spec.nope + spec.v_dim), spec.kv_rank)

    def forward(self, latent_TL: Tensor) -> Tensor:
        return nn.functional.linear(latent_TL, self.weight)
