"""Attention over cached latents: keys and values expanded row by row, softmax in fp32, and the inputs of its contract test.

Letters: T packed tokens, N sequences, S blocks of the pool, B rows per block (of a table: its columns), H heads, P query channels met by
expanded keys, R channels shared by all heads (rotated or not), Q = P + R, V value width, L latent width, C = L + R, O = H * (P + V), M rows.
Source: multi-head latent attention, DeepSeek-V2, arXiv 2405.04434 (s. 2.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from firstlight.ops.case import DTYPES, Case, normal, shuffled_tables, starts_of
from firstlight.spec.model import OpUse


def latent_attention(
    q_THQ: Tensor, rows_SBC: Tensor, tables_NB: Tensor, kv_b_OL: Tensor, starts_N1: Tensor, contexts_N: Tensor,
    *, nope: int, v_dim: int, scale: float,
) -> Tensor:
    """Every token attends to its sequence's rows up to its own, which the pool already holds; o [T, H, V].

    Shapes: kv_b_OL is, per head, `nope` rows that make the key and `v_dim` rows that make the value; tables hold block ids, and anything
    beyond the blocks in use.
    """
    num_heads, num_rows, width = q_THQ.shape[1], rows_SBC.shape[1], kv_b_OL.shape[1]
    kv_b_HDL = kv_b_OL.float().view(num_heads, nope + v_dim, width)
    o_THV = q_THQ.new_empty(len(q_THQ), num_heads, v_dim)
    starts, contexts = starts_N1.tolist(), contexts_N.tolist()
    for n, context in enumerate(contexts):
        begin, end = starts[n], starts[n + 1]
        total = context + end - begin
        blocks = tables_NB[n, :-(-total // num_rows)]
        rows_MC = rows_SBC[blocks].flatten(0, 1)[:total].float()
        kv_HMD = torch.einsum("ml,hdl->hmd", rows_MC[:, :width], kv_b_HDL)
        shared_HMR = rows_MC[:, width:].expand(num_heads, -1, -1)
        keys_HMQ = torch.cat((kv_HMD[..., :nope], shared_HMR), -1)
        scores_HTM = torch.einsum("thq,hmq->htm", q_THQ[begin:end].float(), keys_HMQ) * scale
        future_TM = torch.ones(end - begin, total, dtype=torch.bool, device=q_THQ.device).triu(context + 1)
        weights_HTM = scores_HTM.masked_fill(future_TM, -torch.inf).softmax(-1)
        o_THV[begin:end] = torch.einsum("htm,hmv->thv", weights_HTM, kv_HMD[..., nope:])
    return o_THV


def make_case(
    rng: torch.Generator, name: str, lengths: Sequence[int], contexts: Sequence[int], *,
    heads: int = 3, widths: tuple[int, int, int, int] = (12, 4, 10, 24), block: int = 4, dtype: torch.dtype = torch.float32, spread: float = 1.0,
) -> Case:
    """Shuffled blocks of a pool twice as large as needed; `widths` are (P, R, V, L), table columns beyond the need hold -1."""
    nope, rope, v_dim, latent = widths
    totals = [context + length for context, length in zip(contexts, lengths, strict=True)]
    tables_NB, num_blocks = shuffled_tables(rng, totals, block)
    q_THQ = normal(rng, sum(lengths), heads, nope + rope, dtype=dtype, spread=spread)
    rows_SBC = normal(rng, num_blocks, block, latent + rope, dtype=dtype)
    kv_b_OL = normal(rng, heads * (nope + v_dim), latent, dtype=dtype, spread=latent**-0.5)
    use = OpUse.of("latent_attention", str(dtype).removeprefix("torch."), H=heads, N=nope, R=rope, V=v_dim, L=latent)
    args = (q_THQ, rows_SBC, tables_NB, kv_b_OL, starts_of(lengths), torch.tensor(contexts, dtype=torch.int64))
    return Case(name, use, args, {"nope": nope, "v_dim": v_dim, "scale": (nope + rope)**-0.5})


def cases(seed: int = 0) -> Iterator[Case]:
    """Decode and prefill apart and together, blocks begun and full, with and without shared channels, few and many rows."""
    rng = torch.Generator().manual_seed(seed)
    for block in (4, 16):
        for length in (1, 3, 16, 17):
            yield make_case(rng, f"fresh{length}-block{block}", [length], [0], block=block)
            yield make_case(rng, f"continued{length}-block{block}", [length], [29], block=block)
    for name, dtype in DTYPES:
        yield make_case(rng, f"decode-{name}", [1] * 6, [0, 3, 4, 70, 15, 64], dtype=dtype)
        yield make_case(rng, f"mixed-{name}", [1, 20, 1, 5, 1], [33, 7, 0, 130, 131], dtype=dtype)
        yield make_case(rng, f"plain-{name}", [1, 9, 1], [40, 12, 3], widths=(16, 0, 8, 20), block=16, dtype=dtype)
        yield make_case(rng, f"long-{name}", [150, 1], [300, 600], heads=2, widths=(16, 8, 20, 32), block=16, dtype=dtype)
        yield make_case(rng, f"prompt-{name}", [257], [0], heads=4, widths=(8, 4, 12, 64), block=16, dtype=dtype)
        yield make_case(rng, f"peaked-{name}", [1, 30], [90, 50], dtype=dtype, spread=6.0)
    yield make_case(rng, "one-head", [1, 2], [9, 9], heads=1)
    yield make_case(rng, "uneven", [1] * 4, [2, 900, 1, 5], block=16)
    yield make_case(rng, "idle", [0, 1, 0, 6], [5, 8, 0, 3])
    yield make_case(rng, "no-tokens", [0, 0], [3, 0])
    yield make_case(rng, "empty", [], [])
