"""Scores of the indexer: single tokens in padded batches, chunks by blocks of tokens and rows. Letters as in ops/declared.py; X tokens.

Memory beside the output: at most GATHER_BYTES of gathered keys and of scores per head, or a block of SCORE_ELEMENTS of either.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from firstlight.backends.portable.running_softmax import SCORE_ELEMENTS, hide_future, similar

GATHER_BYTES = 1 << 28
"""Keys of 128 channels in fp32: half a million rows."""

MIN_ROWS = 256
"""Rows of a block that a product should see at least; chunks are split rather than going below."""


def index_scores(
    q_THK: Tensor, weights_TH: Tensor, keys_SBK: Tensor, tables_NB: Tensor, starts_N1: Tensor, contexts_N: Tensor, *, scale: float,
) -> Tensor:
    """The operator of firstlight.ops.index_scores."""
    starts, contexts = starts_N1.tolist(), contexts_N.tolist()
    lengths = [end - begin for begin, end in itertools.pairwise(starts)]
    totals = [context + length for context, length in zip(contexts, lengths, strict=True)]
    scores_TM = torch.full((len(q_THK), max(totals, default=0)), -torch.inf, device=q_THK.device)
    max_rows = max(1, GATHER_BYTES // (4 * max(q_THK.shape[1:], default=1)))
    batched = [n for n, length in enumerate(lengths) if length == 1 and totals[n] <= max_rows]
    for group in similar(batched, totals, max_rows):
        tokens_N = torch.tensor([starts[n] for n in group], device=q_THK.device)
        found_NM = _decode(q_THK[tokens_N] * scale, weights_TH[tokens_N], keys_SBK, tables_NB, group, [totals[n] for n in group])
        scores_TM[tokens_N, : found_NM.shape[1]] = found_NM
    step = max(1, SCORE_ELEMENTS // (q_THK.shape[1] * MIN_ROWS))
    for n in sorted(set(range(len(lengths))) - set(batched)):
        for begin in range(starts[n], starts[n + 1], step):
            end, context = min(begin + step, starts[n + 1]), contexts[n] + begin - starts[n]
            q_XHK = q_THK[begin:end].float() * scale
            _chunk(q_XHK, weights_TH[begin:end], keys_SBK, tables_NB[n], context, scores_TM[begin:end])
    return scores_TM


def _meet(q_GXK: Tensor, weights_GXH: Tensor, keys_GMK: Tensor) -> Tensor:
    """Weighted sums [G, X, M]; rows of a product are the heads of X tokens. Destroys nothing that it is given."""
    met_GXM = torch.bmm(q_GXK.float(), keys_GMK.float().transpose(1, 2)).relu_()
    num_batches, num_tokens, num_heads = weights_GXH.shape
    met_XHM = met_GXM.view(num_batches * num_tokens, num_heads, -1)
    return torch.bmm(weights_GXH.float().reshape(-1, 1, num_heads), met_XHM).view(num_batches, num_tokens, -1)


def _decode(q_NHK: Tensor, weights_NH: Tensor, keys_SBK: Tensor, tables_NB: Tensor, group: Sequence[int], totals: Sequence[int]) -> Tensor:
    """One token of each sequence of a group; the shorter ones repeat their last row and are -inf there."""
    size, width = keys_SBK.shape[1], max(totals)
    blocks_NB = tables_NB[:, : -(-width // size)].index_select(0, torch.tensor(group, device=tables_NB.device))
    if len(group) == 1:
        keys_NMK = keys_SBK.index_select(0, blocks_NB[0]).flatten(0, 1)[:width].unsqueeze(0)
        return _meet(q_NHK, weights_NH.unsqueeze(1), keys_NMK)[:, 0]
    totals_N1 = torch.tensor(totals, device=q_NHK.device).unsqueeze(1)
    place_M = torch.arange(width, device=q_NHK.device)
    at_NM = place_M.minimum(totals_N1 - 1)
    keys_NMK = keys_SBK[blocks_NB.gather(1, at_NM // size), at_NM % size]
    return _meet(q_NHK, weights_NH.unsqueeze(1), keys_NMK)[:, 0].masked_fill(place_M >= totals_N1, -torch.inf)


def _chunk(q_XHK: Tensor, weights_XH: Tensor, keys_SBK: Tensor, table_B: Tensor, context: int, scores_XM: Tensor) -> None:
    """Neighbouring tokens of one sequence, a block of rows at a time, written where they belong."""
    num_tokens, num_heads, _ = q_XHK.shape
    size, total = keys_SBK.shape[1], context + num_tokens
    step = max(1, SCORE_ELEMENTS // (num_tokens * num_heads * size)) * size
    for begin in range(0, total, step):
        end = min(begin + step, total)
        keys_MK = keys_SBK.index_select(0, table_B[begin // size : -(-end // size)]).flatten(0, 1)[: end - begin]
        found_1XM = _meet(q_XHK.flatten(0, 1).unsqueeze(0), weights_XH.unsqueeze(0), keys_MK.unsqueeze(0))
        hide_future(found_1XM, begin, context, 1)
        scores_XM[:, begin:end] = found_1XM[0]
