"""How much each cached row matters to each token, in the indexer's opinion. Letters as in declared.py.

Source: lightning indexer, DeepSeek-V3.2-Exp, deepseek-ai/DeepSeek-V3.2-Exp inference/model.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from firstlight.ops.case import DTYPES, Case, normal, shuffled_tables, starts_of
from firstlight.spec.model import OpUse


def index_scores(
    q_THK: Tensor, weights_TH: Tensor, keys_SBK: Tensor, tables_NB: Tensor, starts_N1: Tensor, contexts_N: Tensor, *, scale: float,
) -> Tensor:
    """sum over heads of weight * relu(scale * q . key) [T, M] in fp32; weights may be negative. M: rows of the longest sequence.

    Rows after a token's own, and those that its sequence does not have, are -inf.
    """
    starts, contexts = starts_N1.tolist(), contexts_N.tolist()
    totals = [context + end - begin for context, begin, end in zip(contexts, starts, starts[1:], strict=False)]
    num_rows = keys_SBK.shape[1]
    scores_TM = torch.full((len(q_THK), max(totals, default=0)), -torch.inf, device=q_THK.device)
    for n, total in enumerate(totals):
        begin, end = starts[n], starts[n + 1]
        keys_MK = keys_SBK[tables_NB[n, :-(-total // num_rows)]].flatten(0, 1)[:total].float()
        met_THM = (torch.einsum("thk,mk->thm", q_THK[begin:end].float(), keys_MK) * scale).relu()
        sum_TM = torch.einsum("thm,th->tm", met_THM, weights_TH[begin:end].float())
        future_TM = torch.ones(end - begin, total, dtype=torch.bool, device=q_THK.device).triu(contexts[n] + 1)
        scores_TM[begin:end, :total] = sum_TM.masked_fill(future_TM, -torch.inf)
    return scores_TM


def make_case(
    rng: torch.Generator, name: str, lengths: Sequence[int], contexts: Sequence[int], *,
    heads: int = 3, width: int = 12, block: int = 4, dtype: torch.dtype = torch.float32,
) -> Case:
    """Shuffled blocks of a pool twice as large as needed; table columns beyond the need hold -1."""
    totals = [context + length for context, length in zip(contexts, lengths, strict=True)]
    tables_NB, num_blocks = shuffled_tables(rng, totals, block)
    q_THK, weights_TH = normal(rng, sum(lengths), heads, width, dtype=dtype), normal(rng, sum(lengths), heads, spread=heads**-0.5)
    keys_SBK = normal(rng, num_blocks, block, width, dtype=dtype)
    use = OpUse.of("index_scores", str(dtype).removeprefix("torch."), H=heads, K=width)
    args = (q_THK, weights_TH, keys_SBK, tables_NB, starts_of(lengths), torch.tensor(contexts, dtype=torch.int64))
    return Case(name, use, args, {"scale": width**-0.5})


def cases(seed: int = 0) -> Iterator[Case]:
    """Decode and prefill apart and together, blocks begun and full, one head and many."""
    rng = torch.Generator().manual_seed(seed)
    for block in (4, 16):
        for length in (1, 3, 17):
            yield make_case(rng, f"fresh{length}-block{block}", [length], [0], block=block)
            yield make_case(rng, f"continued{length}-block{block}", [length], [29], block=block)
    for name, dtype in DTYPES:
        yield make_case(rng, f"decode-{name}", [1] * 6, [0, 3, 4, 70, 15, 64], dtype=dtype)
        yield make_case(rng, f"mixed-{name}", [1, 20, 1, 5, 1], [33, 7, 0, 130, 131], heads=5, dtype=dtype)
        yield make_case(rng, f"many-heads-{name}", [1, 9, 1], [40, 12, 3], heads=64, width=8, block=16, dtype=dtype)
        yield make_case(rng, f"long-{name}", [150, 1], [300, 600], heads=16, block=16, dtype=dtype)
        yield make_case(rng, f"prompt-{name}", [257], [0], heads=4, width=16, block=16, dtype=dtype)
    yield make_case(rng, "one-head", [1, 2], [9, 9], heads=1)
    yield make_case(rng, "uneven", [1] * 4, [2, 900, 1, 5], block=16)
    yield make_case(rng, "idle", [0, 1, 0, 6], [5, 8, 0, 3])
    yield make_case(rng, "no-tokens", [0, 0], [3, 0])
    yield make_case(rng, "empty", [], [])
