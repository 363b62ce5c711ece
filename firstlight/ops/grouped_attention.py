"""Attention over cached keys and values that several heads share, softmax in fp32, and the inputs of its contract test.

Letters: T packed tokens, N sequences, S blocks of the pool, B rows per block (of a table: its columns), H heads, J key heads, K key width,
V value width, M rows.
Source: grouped-query attention, arXiv 2305.13245: head h reads key head h // (H / J).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from firstlight.ops.case import DTYPES, Case, normal, shuffled_tables, starts_of
from firstlight.spec.model import OpUse


def grouped_attention(
    q_THK: Tensor, keys_SBJK: Tensor, values_SBJV: Tensor, tables_NB: Tensor, starts_N1: Tensor, contexts_N: Tensor, *, scale: float,
) -> Tensor:
    """Every token attends to its sequence's rows up to its own, which the pools already hold; o [T, H, V].

    Shapes: J divides H; tables hold block ids, and anything beyond the blocks in use.
    """
    num_heads, num_rows, num_key_heads = q_THK.shape[1], keys_SBJK.shape[1], keys_SBJK.shape[2]
    assert num_heads % num_key_heads == 0, (num_heads, num_key_heads)
    o_THV = q_THK.new_empty(len(q_THK), num_heads, values_SBJV.shape[3])
    starts, contexts = starts_N1.tolist(), contexts_N.tolist()
    for n, context in enumerate(contexts):
        begin, end = starts[n], starts[n + 1]
        total = context + end - begin
        blocks = tables_NB[n, :-(-total // num_rows)]
        keys_MHK, values_MHV = (
            pool[blocks].flatten(0, 1)[:total].float().repeat_interleave(num_heads // num_key_heads, dim=1) for pool in (keys_SBJK, values_SBJV))
        scores_HTM = torch.einsum("thk,mhk->htm", q_THK[begin:end].float(), keys_MHK) * scale
        future_TM = torch.ones(end - begin, total, dtype=torch.bool, device=q_THK.device).triu(context + 1)
        weights_HTM = scores_HTM.masked_fill(future_TM, -torch.inf).softmax(-1)
        o_THV[begin:end] = torch.einsum("htm,mhv->thv", weights_HTM, values_MHV)
    return o_THV


def make_case(
    rng: torch.Generator, name: str, lengths: Sequence[int], contexts: Sequence[int], *,
    heads: tuple[int, int] = (6, 2), widths: tuple[int, int] = (12, 10), block: int = 4, dtype: torch.dtype = torch.float32, spread: float = 1.0,
) -> Case:
    """Shuffled blocks of pools twice as large as needed; `heads` are (H, J), `widths` (K, V); table columns beyond the need hold -1."""
    (num_heads, num_key_heads), (key_width, value_width) = heads, widths
    totals = [context + length for context, length in zip(contexts, lengths, strict=True)]
    tables_NB, num_blocks = shuffled_tables(rng, totals, block)
    q_THK = normal(rng, sum(lengths), num_heads, key_width, dtype=dtype, spread=spread)
    keys_SBJK = normal(rng, num_blocks, block, num_key_heads, key_width, dtype=dtype)
    values_SBJV = normal(rng, num_blocks, block, num_key_heads, value_width, dtype=dtype)
    use = OpUse.of("grouped_attention", str(dtype).removeprefix("torch."), H=num_heads, J=num_key_heads, K=key_width, V=value_width)
    args = (q_THK, keys_SBJK, values_SBJV, tables_NB, starts_of(lengths), torch.tensor(contexts, dtype=torch.int64))
    return Case(name, use, args, {"scale": key_width**-0.5})


def cases(seed: int = 0) -> Iterator[Case]:
    """Decode and prefill apart and together, blocks begun and full, every way of sharing, values narrower and wider than keys."""
    rng = torch.Generator().manual_seed(seed)
    for block in (4, 16):
        for length in (1, 3, 17):
            yield make_case(rng, f"fresh{length}-block{block}", [length], [0], block=block)
            yield make_case(rng, f"continued{length}-block{block}", [length], [29], block=block)
    for name, dtype in DTYPES:
        yield make_case(rng, f"decode-{name}", [1] * 6, [0, 3, 4, 70, 15, 64], dtype=dtype)
        yield make_case(rng, f"mixed-{name}", [1, 20, 1, 5, 1], [33, 7, 0, 130, 131], heads=(9, 3), widths=(8, 8), dtype=dtype)
        yield make_case(rng, f"plain-{name}", [1, 9, 1], [40, 12, 3], heads=(3, 3), widths=(8, 20), block=16, dtype=dtype)
        yield make_case(rng, f"one-key-head-{name}", [1, 9, 1], [40, 12, 3], heads=(4, 1), widths=(16, 16), block=16, dtype=dtype)
        yield make_case(rng, f"long-{name}", [150, 1], [300, 600], heads=(4, 2), widths=(16, 16), block=16, dtype=dtype)
        yield make_case(rng, f"prompt-{name}", [257], [0], heads=(4, 2), widths=(8, 8), block=16, dtype=dtype)
        yield make_case(rng, f"peaked-{name}", [1, 30], [90, 50], dtype=dtype, spread=6.0)
    yield make_case(rng, "uneven", [1] * 4, [2, 900, 1, 5], block=16)
    yield make_case(rng, "idle", [0, 1, 0, 6], [5, 8, 0, 3])
    yield make_case(rng, "no-tokens", [0, 0], [3, 0])
    yield make_case(rng, "empty", [], [])
