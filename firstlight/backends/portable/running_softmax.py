"""What the attention forms share: a softmax over rows that arrive block by block, the causal border, and groups of similar length.

Letters: G batches of a product, X query rows of one batch, M rows; the rest as in ops/declared.py.
Source: running softmax, arXiv 2205.14135 (s. 3.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SCORE_ELEMENTS = 1 << 22
"""16 MiB in fp32: small enough for the allocator to reuse warm memory instead of asking the system for new."""

SLACK_ROWS = 64
"""Sequences whose lengths differ by less may share a padded batch even if that doubles the shorter one's work."""


@dataclass(slots=True)
class RunningSoftmax:
    """Weighted sums over keys that arrive in blocks, rescaled as the largest score grows; fp32."""

    peak_GX1: Tensor
    sum_GX1: Tensor
    o_GXV: Tensor

    @classmethod
    def start(cls, num_batches: int, num_queries: int, width: int, device: torch.device) -> RunningSoftmax:
        """Nothing seen yet."""
        shape = (num_batches, num_queries)
        peak_GX1 = torch.full((*shape, 1), -torch.inf, dtype=torch.float32, device=device)
        return cls(peak_GX1, torch.zeros_like(peak_GX1), torch.zeros(*shape, width, dtype=torch.float32, device=device))

    def add(self, scores_GXM: Tensor, values_GMV: Tensor, first: int) -> None:
        """Take in a block for the queries from `first` on; every one of them sees a key of it. Destroys the scores."""
        peak_GX1, sum_GX1, o_GXV = self.peak_GX1[:, first:], self.sum_GX1[:, first:], self.o_GXV[:, first:]
        higher_GX1 = torch.maximum(peak_GX1, scores_GXM.amax(-1, keepdim=True))
        scores_GXM.sub_(higher_GX1).exp_()
        shrink_GX1 = (peak_GX1 - higher_GX1).exp_()
        sum_GX1.mul_(shrink_GX1).add_(scores_GXM.sum(-1, keepdim=True))
        o_GXV.mul_(shrink_GX1).baddbmm_(scores_GXM, values_GMV)
        peak_GX1.copy_(higher_GX1)

    def result(self) -> Tensor:
        """The softmax-weighted means so far."""
        return self.o_GXV / self.sum_GX1


def similar(sequences: Sequence[int], totals: Sequence[int], max_rows: int) -> Iterator[list[int]]:
    """Groups whose padding costs less than the rows themselves, and whose padded rows may be gathered at once."""
    group: list[int] = []
    for n in sorted(sequences, key=lambda n: totals[n]):
        if group and (totals[n] > 2 * totals[group[0]] + SLACK_ROWS or (len(group) + 1) * totals[n] > max_rows):
            yield group
            group = []
        group.append(n)
    if group:
        yield group


def hide_future(scores_GXM: Tensor, begin: int, context: int, rows_per_token: int) -> None:
    """Scores of rows after each query's own become -inf; `begin` is the first row's position, `context` the first query's."""
    _, num_queries, num_rows = scores_GXM.shape
    if begin + num_rows - 1 <= context:
        return
    rows_M = torch.arange(begin, begin + num_rows, device=scores_GXM.device)
    tokens_X = context + torch.arange(num_queries, device=scores_GXM.device) // rows_per_token
    scores_GXM.masked_fill_(rows_M > tokens_X.unsqueeze(1), -torch.inf)
