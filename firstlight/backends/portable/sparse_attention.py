"""Attention over chosen latents in the absorbed form: each token gathers its rows, a block of tokens at a time.

Letters: X tokens of a block, P query channels met by expanded keys, Q = P + R, C = L + R, O = H * (P + V); the rest as in ops/declared.py.
Memory beside the output: gathered rows of GATHER_ELEMENTS values and their scores; nothing grows with the context.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.backends.portable.latent_attention import Attention

GATHER_ELEMENTS = 1 << 25
"""28 tokens of 2,048 rows of 576 channels."""


def sparse_attention(
    q_THQ: Tensor, rows_SBC: Tensor, tables_NB: Tensor, kv_b_OL: Tensor, chosen_TU: Tensor, starts_N1: Tensor, contexts_N: Tensor,
    *, nope: int, v_dim: int, scale: float,
) -> Tensor:
    """The operator of firstlight.ops.sparse_attention; decode and prefill take one path."""
    num_tokens, num_heads, _ = q_THQ.shape
    device, width = q_THQ.device, chosen_TU.shape[1]
    o_THV = q_THQ.new_zeros(num_tokens, num_heads, v_dim)
    if not num_tokens or not width:
        return o_THV
    key_HPL, value_HVL = kv_b_OL.view(num_heads, nope + v_dim, -1).split((nope, v_dim), 1)
    call = Attention(rows_SBC, tables_NB, key_HPL, value_HVL, scale)
    seq_T = torch.repeat_interleave(torch.arange(len(contexts_N)), starts_N1.diff())
    own_T = (torch.arange(num_tokens) - starts_N1[seq_T] + contexts_N[seq_T]).to(device)
    seq_T = seq_T.to(device)
    size, step = rows_SBC.shape[1], max(1, GATHER_ELEMENTS // (width * rows_SBC.shape[2]))
    for begin in range(0, num_tokens, step):
        part = slice(begin, begin + step)
        chosen_XM = chosen_TU[part].long()
        seen_XM = (chosen_XM >= 0) & (chosen_XM <= own_T[part, None])
        # a place that is nobody's choice repeats one that is read anyway, so that nothing unwritten and nobody else's row is met
        spare_X1 = chosen_XM.where(seen_XM, -1).amax(-1, keepdim=True)
        at_XM = chosen_XM.where(seen_XM, spare_X1).clamp_(min=0)
        rows_XMC = rows_SBC[tables_NB[seq_T[part, None], at_XM // size], at_XM % size]
        found_XHV = call.absorbed(q_THQ[part], rows_XMC, seen_XM)
        o_THV[part] = found_XHV.masked_fill((spare_X1 < 0).unsqueeze(2), 0.0)
    return o_THV
