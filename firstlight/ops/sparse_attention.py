"""Attention over chosen rows of cached latents, softmax in fp32, and the inputs of its contract test.

Letters: P query channels met by expanded keys, Q = P + R, C = L + R, D = P + V, O = H * D; the rest as in declared.py.
Source: DeepSeek-V3.2-Exp: multi-head latent attention in which every token sees the rows that an indexer chose for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from firstlight.ops.case import DTYPES, Case
from firstlight.ops.latent_attention import make_case as dense_case
from firstlight.spec.model import OpUse


def sparse_attention(
    q_THQ: Tensor, rows_SBC: Tensor, tables_NB: Tensor, kv_b_OL: Tensor, chosen_TU: Tensor, starts_N1: Tensor, contexts_N: Tensor,
    *, nope: int, v_dim: int, scale: float,
) -> Tensor:
    """Every token attends to the chosen rows of its sequence, places from its start; -1, and a row after its own, is nobody's choice.

    A token without any row gets 0. Each row is chosen once at most.
    """
    num_heads, size, width = q_THQ.shape[1], rows_SBC.shape[1], kv_b_OL.shape[1]
    kv_b_HDL = kv_b_OL.float().view(num_heads, nope + v_dim, width)
    o_THV = q_THQ.new_zeros(len(q_THQ), num_heads, v_dim)
    starts, contexts = starts_N1.tolist(), contexts_N.tolist()
    for n, context in enumerate(contexts):
        for token in range(starts[n], starts[n + 1]):
            mine_M = chosen_TU[token].long()
            mine_M = mine_M[(mine_M >= 0) & (mine_M <= context + token - starts[n])]
            if not len(mine_M):
                continue
            rows_MC = rows_SBC[tables_NB[n, mine_M // size], mine_M % size].float()
            kv_HMD = torch.einsum("ml,hdl->hmd", rows_MC[:, :width], kv_b_HDL)
            keys_HMQ = torch.cat((kv_HMD[..., :nope], rows_MC[:, width:].expand(num_heads, -1, -1)), -1)
            weights_HM = (torch.einsum("hq,hmq->hm", q_THQ[token].float(), keys_HMQ) * scale).softmax(-1)
            o_THV[token] = torch.einsum("hm,hmv->hv", weights_HM, kv_HMD[..., nope:])
    return o_THV


def make_case(rng: torch.Generator, name: str, lengths: Sequence[int], contexts: Sequence[int], top_k: int, **options: Any) -> Case:
    """Up to `top_k` rows per token, in any order, with -1 and rows of the future among them; every seventh token has none."""
    dense = dense_case(rng, name, lengths, contexts, **options)
    width = max((context + length for context, length in zip(contexts, lengths, strict=True)), default=0)
    chosen_TU = torch.full((sum(lengths), min(top_k, width)), -1, dtype=torch.int32)
    token = 0
    for context, length in zip(contexts, lengths, strict=True):
        for place in range(length):
            picked = torch.randperm(context + length, generator=rng)[: chosen_TU.shape[1]].int()
            if token % 7 != 6:
                chosen_TU[token, : len(picked)] = picked.where(picked % 5 != 4, torch.tensor(-1, dtype=torch.int32))
                chosen_TU[token, 0] = context + place if context + place not in chosen_TU[token, 1:].tolist() else -1
            token += 1
    q_THQ, rows_SBC, tables_NB, kv_b_OL, starts_N1, contexts_N = dense.args
    use = OpUse.of("sparse_attention", dense.use.dtype, **dict(dense.use.dims), U=top_k)
    return Case(name, use, (q_THQ, rows_SBC, tables_NB, kv_b_OL, chosen_TU, starts_N1, contexts_N), dense.kwargs)


def cases(seed: int = 0) -> Iterator[Case]:
    """Decode and prefill apart and together, fewer rows than wanted and more, tokens without any, every width of head."""
    rng = torch.Generator().manual_seed(seed)
    for length in (1, 3, 17):
        yield make_case(rng, f"fresh{length}", [length], [0], 8)
        yield make_case(rng, f"continued{length}", [length], [29], 8, block=16)
    for name, dtype in DTYPES:
        yield make_case(rng, f"decode-{name}", [1] * 8, [0, 3, 4, 70, 15, 64, 9, 9], 8, dtype=dtype)
        yield make_case(rng, f"mixed-{name}", [1, 20, 1, 5, 1], [33, 7, 0, 130, 131], 16, dtype=dtype)
        yield make_case(rng, f"plain-{name}", [1, 9, 1], [40, 12, 3], 7, widths=(16, 0, 8, 20), block=16, dtype=dtype)
        yield make_case(rng, f"prompt-{name}", [140], [20], 24, heads=2, widths=(16, 8, 20, 32), block=16, dtype=dtype)
        yield make_case(rng, f"peaked-{name}", [1, 30], [90, 50], 12, dtype=dtype, spread=6.0)
    yield make_case(rng, "one-row", [1, 6], [9, 9], 1, heads=1)
    yield make_case(rng, "idle", [0, 1, 0, 6], [5, 8, 0, 3], 4)
    yield make_case(rng, "no-tokens", [0, 0], [3, 0], 4)
    yield make_case(rng, "empty", [], [], 4)
