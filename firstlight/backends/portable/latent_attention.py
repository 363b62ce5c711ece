"""Attention over cached latents: short chunks meet the rows as they are (absorbed form), long ones expand keys and values block by block.

Letters: P query channels met by expanded keys, Q = P + R, C = L + R, D = P + V, M rows gathered at once, G batches of a product,
X query rows of one batch, O = H * D; the rest as in ops/declared.py.
Memory beside the output: at most GATHER_BYTES of gathered rows (then blocks), a few temporaries of SCORE_ELEMENTS fp32 values, and the
running sums of one chunk; nothing grows with the context. Up to GATHER_BYTES the number of calls per decoded token is constant.
Source: absorbed form, arXiv 2405.04434 (appendix C).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from firstlight.backends.portable.running_softmax import SCORE_ELEMENTS, RunningSoftmax, hide_future, similar

GATHER_BYTES = 1 << 28
"""Rows of 576 bf16 channels: 233,000 tokens."""

MIN_KEYS = 256
"""Rows of a block that a product should see at least; heads are split rather than going below."""

@dataclass(frozen=True, slots=True)
class Attention:
    """One call's rows and weights: the forms differ only in what they gather and multiply."""

    rows_SBC: Tensor
    tables_NB: Tensor
    key_HPL: Tensor
    value_HVL: Tensor
    scale: float

    @property
    def latent(self) -> int:
        """Channels of a row that are expanded per head."""
        return self.key_HPL.shape[2]

    @property
    def max_rows(self) -> int:
        """Rows that may be gathered at once."""
        return max(1, GATHER_BYTES // max(1, self.rows_SBC.shape[2] * self.rows_SBC.element_size()))

    def rows(self, n: int, begin: int, end: int) -> Tensor:
        """Rows begin to end of one sequence [M, C]; begin is a multiple of the block size. Rows beyond the end are never passed on."""
        size = self.rows_SBC.shape[1]
        blocks = self.tables_NB[n, begin // size:-(-end // size)]
        return self.rows_SBC.index_select(0, blocks).flatten(0, 1)[:end - begin]

    def padded_rows(self, sequences: Sequence[int], totals_N1: Tensor, width: int) -> Tensor:
        """Rows of several sequences [N, M, C]; the shorter ones repeat their last row, so that nothing unwritten is read."""
        size = self.rows_SBC.shape[1]
        at_NM = torch.arange(width, device=totals_N1.device).minimum(totals_N1 - 1)
        tables_NB = self.tables_NB[:, :-(-width // size)].index_select(0, torch.tensor(sequences, device=self.tables_NB.device))
        return self.rows_SBC[tables_NB.gather(1, at_NM // size), at_NM % size]

    def absorb(self, q_XHQ: Tensor) -> Tensor:
        """Queries that meet latent rows [X, H, C]: the key half of kv_b moves over to them."""
        nope = self.key_HPL.shape[1]
        q_HXL = torch.bmm(q_XHQ[..., :nope].transpose(0, 1), self.key_HPL)
        return torch.cat((q_HXL.transpose(0, 1), q_XHQ[..., nope:]), -1)

    def expand(self, o_XHL: Tensor) -> Tensor:
        """Values of weighted latents [X, H, V]."""
        return torch.bmm(self.value_HVL, o_XHL.permute(1, 2, 0)).permute(2, 0, 1)

    def absorbed(self, q_XHQ: Tensor, rows_XMC: Tensor, seen_XM: Tensor | None) -> Tensor:
        """One fused attention whose batch is the query tokens and whose queries are the heads, all over the same rows as keys and values."""
        keys_X1MC = rows_XMC.to(q_XHQ.dtype).unsqueeze(1)
        mask = None if seen_XM is None else seen_XM[:, None, None]
        q_X1HC = self.absorb(q_XHQ).unsqueeze(1)
        o_X1HC = functional.scaled_dot_product_attention(q_X1HC, keys_X1MC, keys_X1MC, attn_mask=mask, scale=self.scale)
        return self.expand(o_X1HC[:, 0, :, :self.latent])

    def absorbed_blocks(self, q_XHQ: Tensor, n: int, context: int) -> Tensor:
        """As `absorbed` for more rows than may be gathered at once."""
        num_tokens, num_heads, _ = q_XHQ.shape
        total, width = context + num_tokens, self.rows_SBC.shape[2]
        q_1XC = (self.absorb(q_XHQ).float() * self.scale).view(1, num_tokens * num_heads, width)
        sums = RunningSoftmax.start(1, num_tokens * num_heads, self.latent, q_XHQ.device)
        for begin, end in self.key_blocks(total, max(width, num_tokens * num_heads)):
            keys_1MC = self.rows(n, begin, end).float().unsqueeze(0)
            first = max(0, begin - context) * num_heads
            scores_1XM = torch.bmm(q_1XC[:, first:], keys_1MC.transpose(1, 2))
            hide_future(scores_1XM, begin, context + first // num_heads, num_heads)
            sums.add(scores_1XM, keys_1MC[..., :self.latent], first)
        return self.expand(sums.result().view(num_tokens, num_heads, self.latent).to(q_XHQ.dtype))

    def expanded(self, q_XHQ: Tensor, n: int, context: int) -> Tensor:
        """Keys and values per head, a few heads and a block of rows at a time [X, H, V]."""
        num_tokens, num_heads, _ = q_XHQ.shape
        breadth = max(num_tokens, self.key_HPL.shape[1] + self.value_HVL.shape[1])
        step = min(num_heads, max(1, SCORE_ELEMENTS // (breadth * MIN_KEYS)))
        o_XHV = q_XHQ.new_empty(num_tokens, num_heads, self.value_HVL.shape[1])
        for head in range(0, num_heads, step):
            heads = slice(head, min(head + step, num_heads))
            o_XHV[:, heads] = self._expanded_heads(q_XHQ, n, context, heads, step * breadth).transpose(0, 1)
        return o_XHV

    def _expanded_heads(self, q_XHQ: Tensor, n: int, context: int, heads: slice, breadth: int) -> Tensor:
        key_HPL, value_HVL, latent = self.key_HPL[heads], self.value_HVL[heads], self.latent
        num_heads, nope, _ = key_HPL.shape
        weight_DL = torch.cat((key_HPL.flatten(0, 1), value_HVL.flatten(0, 1)))
        q_HXQ = q_XHQ[:, heads].transpose(0, 1).float() * self.scale
        sums = RunningSoftmax.start(num_heads, len(q_XHQ), value_HVL.shape[1], q_XHQ.device)
        for begin, end in self.key_blocks(context + len(q_XHQ), breadth):
            rows_MC = self.rows(n, begin, end).to(q_XHQ.dtype)
            kv_DM = (weight_DL @ rows_MC[:, :latent].T).float()
            keys_HPM, values_HVM = kv_DM[:num_heads * nope].unflatten(0, (num_heads, -1)), kv_DM[num_heads * nope:].unflatten(0, (num_heads, -1))
            first = max(0, begin - context)
            shared_HXM = torch.matmul(q_HXQ[:, first:, nope:], rows_MC[:, latent:].T.float())
            scores_HXM = shared_HXM.baddbmm_(q_HXQ[:, first:, :nope], keys_HPM)
            hide_future(scores_HXM, begin, context + first, 1)
            sums.add(scores_HXM, values_HVM.transpose(1, 2), first)
        return sums.result()

    def key_blocks(self, total: int, breadth: int) -> Iterator[tuple[int, int]]:
        """Borders of blocks of rows, multiples of the pool's block size, whose `breadth` values per row fit SCORE_ELEMENTS."""
        size = self.rows_SBC.shape[1]
        step = max(1, SCORE_ELEMENTS // (breadth * size)) * size
        for begin in range(0, total, step):
            yield begin, min(begin + step, total)


def latent_attention(
    q_THQ: Tensor, rows_SBC: Tensor, tables_NB: Tensor, kv_b_OL: Tensor, starts_N1: Tensor, contexts_N: Tensor,
    *, nope: int, v_dim: int, scale: float,
) -> Tensor:
    """The operator of firstlight.ops.latent_attention; single tokens go in padded batches of similar length, longer chunks one by one."""
    num_heads = q_THQ.shape[1]
    key_HPL, value_HVL = kv_b_OL.view(num_heads, nope + v_dim, -1).split((nope, v_dim), 1)
    call = Attention(rows_SBC, tables_NB, key_HPL, value_HVL, scale)
    starts, contexts = starts_N1.tolist(), contexts_N.tolist()
    lengths = [end - begin for begin, end in itertools.pairwise(starts)]
    totals = [context + length for context, length in zip(contexts, lengths, strict=True)]
    o_THV = q_THQ.new_empty(len(q_THQ), num_heads, v_dim)
    batched = [n for n, length in enumerate(lengths) if length == 1 and totals[n] <= call.max_rows]
    for group in similar(batched, totals, call.max_rows):
        tokens_N = torch.tensor([starts[n] for n in group], device=q_THQ.device)
        o_THV[tokens_N] = _decode(call, q_THQ[tokens_N], group, [totals[n] for n in group])
    for n in sorted(set(range(len(lengths))) - set(batched)):
        if lengths[n]:
            tokens = slice(starts[n], starts[n + 1])
            o_THV[tokens] = _chunk(call, q_THQ[tokens], n, contexts[n])
    return o_THV


def _decode(call: Attention, q_NHQ: Tensor, group: Sequence[int], totals: Sequence[int]) -> Tensor:
    """One token of each sequence of a group."""
    if len(group) == 1:
        return call.absorbed(q_NHQ, call.rows(group[0], 0, totals[0]).unsqueeze(0), None)
    width, totals_N1 = max(totals), torch.tensor(totals, device=q_NHQ.device).unsqueeze(1)
    seen_NM = torch.arange(width, device=q_NHQ.device) < totals_N1
    return call.absorbed(q_NHQ, call.padded_rows(group, totals_N1, width), seen_NM)


def _chunk(call: Attention, q_XHQ: Tensor, n: int, context: int) -> Tensor:
    """The tokens of one sequence, in the form that costs fewer products."""
    num_tokens = len(q_XHQ)
    total = context + num_tokens
    if not _absorbing_pays(call, num_tokens, total):
        return call.expanded(q_XHQ, n, context)
    if total > call.max_rows or num_tokens * total > SCORE_ELEMENTS:
        return call.absorbed_blocks(q_XHQ, n, context)
    at_M = torch.arange(total, device=q_XHQ.device)
    rows_XMC = call.rows(n, 0, total).expand(num_tokens, -1, -1)
    return call.absorbed(q_XHQ, rows_XMC, at_M <= at_M[context:].unsqueeze(1))


def _absorbing_pays(call: Attention, num_tokens: int, total: int) -> bool:
    """Products per head: weights applied to queries and longer dot products, or weights applied to all rows and shorter ones."""
    _, nope, latent = call.key_HPL.shape
    v_dim, rope = call.value_HVL.shape[1], call.rows_SBC.shape[2] - latent
    expansion = (nope + v_dim) * latent
    absorbed = num_tokens * (expansion + total * (2 * latent + rope))
    return absorbed <= total * expansion + num_tokens * total * (nope + rope + v_dim)
