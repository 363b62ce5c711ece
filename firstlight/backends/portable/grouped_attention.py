"""Attention over shared key heads in torch's fused form: single tokens in padded batches, longer chunks one by one, long contexts by blocks.

Letters: G heads per key head, X query rows of one batch, M rows gathered at once, C rows of a running softmax (J batches of G * X queries);
the rest as in ops/declared.py.
Memory beside the output: at most GATHER_BYTES of gathered keys and values, and a mask or scores of SCORE_ELEMENTS values; nothing else grows
with the context.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from firstlight.backends.portable.running_softmax import SCORE_ELEMENTS, RunningSoftmax, hide_future, similar

GATHER_BYTES = 1 << 28
"""Keys and values of 8 heads of 128 bf16 channels: 65,000 tokens."""


@dataclass(frozen=True, slots=True)
class Attention:
    """One call's rows: how they are gathered, and the two ways over them."""

    keys_SBJK: Tensor
    values_SBJV: Tensor
    tables_NB: Tensor
    scale: float

    @property
    def max_rows(self) -> int:
        """Rows that may be gathered at once."""
        _, _, num_key_heads, width = self.keys_SBJK.shape
        return max(1, GATHER_BYTES // (num_key_heads * (width + self.values_SBJV.shape[3]) * self.keys_SBJK.element_size()))

    def rows(self, n: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values begin to end of one sequence [J, M, K], [J, M, V]; begin is a multiple of the block size."""
        size = self.keys_SBJK.shape[1]
        blocks = self.tables_NB[n, begin // size:-(-end // size)]
        keys_JMK, values_JMV = (
            pool.index_select(0, blocks).flatten(0, 1)[:end - begin].transpose(0, 1) for pool in (self.keys_SBJK, self.values_SBJV))
        return keys_JMK, values_JMV

    def padded_rows(self, sequences: Sequence[int], totals_N1: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Keys and values of several sequences [N, J, M, K]; the shorter ones repeat their last row, so that nothing unwritten is read."""
        size = self.keys_SBJK.shape[1]
        at_NM = torch.arange(width, device=totals_N1.device).minimum(totals_N1 - 1)
        tables_NB = self.tables_NB[:, :-(-width // size)].index_select(0, torch.tensor(sequences, device=self.tables_NB.device))
        slot_NM = tables_NB.gather(1, at_NM // size) * size + at_NM % size
        keys_NJMK, values_NJMV = (
            pool.flatten(0, 1)[slot_NM].transpose(1, 2) for pool in (self.keys_SBJK, self.values_SBJV))
        return keys_NJMK, values_NJMV

    def grouped(self, q_XHK: Tensor) -> Tensor:
        """Heads beside those that they share a key head with [X, J, G, K]."""
        q_XJGK: Tensor = q_XHK.unflatten(1, (self.keys_SBJK.shape[2], -1))
        return q_XJGK

    def decode(self, q_NHK: Tensor, group: Sequence[int], totals: Sequence[int]) -> Tensor:
        """One token of each sequence of a group: the heads of a key head are its queries, all over the same rows."""
        if len(group) == 1:
            rows, mask = tuple(part.unsqueeze(0) for part in self.rows(group[0], 0, totals[0])), None
        else:
            width, totals_N1 = max(totals), torch.tensor(totals, device=q_NHK.device).unsqueeze(1)
            rows = self.padded_rows(group, totals_N1, width)
            mask = (torch.arange(width, device=q_NHK.device) < totals_N1)[:, None, None]
        o_NJGV = self._fused(self.grouped(q_NHK), rows, mask)
        return o_NJGV.flatten(1, 2)

    def chunk(self, q_XHK: Tensor, n: int, context: int) -> Tensor:
        """The tokens of one sequence; as many at a time as the mask has room for."""
        total = context + len(q_XHK)
        if total > self.max_rows:
            return self.chunk_by_blocks(q_XHK, n, context)
        keys_JMK, values_JMV = self.rows(n, 0, total)
        step = max(1, SCORE_ELEMENTS // total)
        if step >= len(q_XHK):
            return self._visible(q_XHK, keys_JMK, values_JMV, context)
        pieces = [(begin, min(begin + step, len(q_XHK))) for begin in range(0, len(q_XHK), step)]
        return torch.cat([
            self._visible(q_XHK[begin:end], keys_JMK[:, :context + end], values_JMV[:, :context + end], context + begin) for begin, end in pieces])

    def chunk_by_blocks(self, q_XHK: Tensor, n: int, context: int) -> Tensor:
        """As `chunk` for more rows than may be gathered at once."""
        num_tokens, num_heads, _ = q_XHK.shape
        num_key_heads, value_width = self.values_SBJV.shape[2:]
        per_token = num_heads // num_key_heads
        # tokens outside, the heads of a key head inside: rows of one token stand together
        q_JCK = (self.grouped(q_XHK).float() * self.scale).transpose(0, 1).flatten(1, 2)
        sums = RunningSoftmax.start(num_key_heads, num_tokens * per_token, value_width, q_XHK.device)
        size = self.keys_SBJK.shape[1]
        step = max(1, min(self.max_rows, SCORE_ELEMENTS // (num_tokens * num_heads)) // size) * size
        total = context + num_tokens
        for begin in range(0, total, step):
            keys_JMK, values_JMV = (part.float() for part in self.rows(n, begin, min(begin + step, total)))
            first = max(0, begin - context) * per_token
            scores_JCM = torch.bmm(q_JCK[:, first:], keys_JMK.transpose(1, 2))
            hide_future(scores_JCM, begin, context + first // per_token, per_token)
            sums.add(scores_JCM, values_JMV, first)
        o_JXGV: Tensor = sums.result().to(q_XHK.dtype).unflatten(1, (num_tokens, per_token))
        return o_JXGV.transpose(0, 1).flatten(1, 2)

    def _visible(self, q_XHK: Tensor, keys_JMK: Tensor, values_JMV: Tensor, context: int) -> Tensor:
        """Attention of tokens that stand at the end of the rows; heads of one group are batches that see the same keys without a copy."""
        q_GJXK = self.grouped(q_XHK).permute(2, 1, 0, 3)
        num_heads = len(q_GJXK)
        mask = None
        if context:
            at_M = torch.arange(keys_JMK.shape[1], device=q_XHK.device)
            mask = at_M <= at_M[context:].unsqueeze(1)
        o_GJXV = self._fused(q_GJXK, (keys_JMK.expand(num_heads, -1, -1, -1), values_JMV.expand(num_heads, -1, -1, -1)), mask, causal=not context)
        return o_GJXV.permute(2, 1, 0, 3).flatten(1, 2)

    def _fused(self, q: Tensor, rows: tuple[Tensor, ...], mask: Tensor | None, *, causal: bool = False) -> Tensor:
        keys, values = (part.to(q.dtype) for part in rows)
        return functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask, is_causal=causal, scale=self.scale)


def grouped_attention(
    q_THK: Tensor, keys_SBJK: Tensor, values_SBJV: Tensor, tables_NB: Tensor, starts_N1: Tensor, contexts_N: Tensor, *, scale: float,
) -> Tensor:
    """The operator of firstlight.ops.grouped_attention; single tokens go in padded batches of similar length, longer chunks one by one."""
    call = Attention(keys_SBJK, values_SBJV, tables_NB, scale)
    starts, contexts = starts_N1.tolist(), contexts_N.tolist()
    lengths = [end - begin for begin, end in itertools.pairwise(starts)]
    totals = [context + length for context, length in zip(contexts, lengths, strict=True)]
    o_THV = q_THK.new_empty(len(q_THK), q_THK.shape[1], values_SBJV.shape[3])
    batched = [n for n, length in enumerate(lengths) if length == 1 and totals[n] <= call.max_rows]
    for group in similar(batched, totals, call.max_rows):
        tokens_N = torch.tensor([starts[n] for n in group], device=q_THK.device)
        o_THV[tokens_N] = call.decode(q_THK[tokens_N], group, [totals[n] for n in group])
    for n in sorted(set(range(len(lengths))) - set(batched)):
        if lengths[n]:
            tokens = slice(starts[n], starts[n + 1])
            o_THV[tokens] = call.chunk(q_THK[tokens], n, contexts[n])
    return o_THV
