"""Causal depthwise convolution with SiLU over packed sequences.

Letters: T packed tokens, D channels, W taps, S slots of the pool, N sequences. A window holds the last W - 1 raw inputs, oldest first.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.ops.case import DTYPES, Case, normal, starts_of
from firstlight.spec.model import OpUse


def short_conv(x_TD: Tensor, weight_DW: Tensor, window_SWD: Tensor, slots_N: Tensor, starts_N1: Tensor, contexts_N: Tensor) -> Tensor:
    """y[t] = SiLU(sum over j of weight[j] x[t - W + 1 + j]) in fp32, rounded to the dtype of x; leaves each sequence's new window in its slot.

    Shapes: window_SWD is [S, W - 1, D] in a dtype of its own; starts_N1 and contexts_N are int64 on the CPU.
    """
    y_TD = torch.zeros_like(x_TD)
    num_kept = weight_DW.shape[1] - 1
    for n, (slot, context) in enumerate(zip(slots_N.tolist(), contexts_N.tolist(), strict=True)):
        begin, end = int(starts_N1[n]), int(starts_N1[n + 1])
        past = window_SWD[slot].float() if context else torch.zeros(num_kept, x_TD.shape[1], device=x_TD.device)
        rows = torch.cat((past, x_TD[begin:end].float()))
        for t in range(begin, end):
            taps_WD = rows[t - begin : t - begin + num_kept + 1]
            y_TD[t] = F.silu((weight_DW.float().T * taps_WD).sum(0)).to(x_TD.dtype)
        window_SWD[slot] = rows[len(rows) - num_kept :].to(window_SWD.dtype)
    return y_TD


def cases(seed: int) -> Iterator[Case]:
    """Decode, prefill, both mixed, lengths below and above the window, fresh and resumed sequences, empty ones, pools of another dtype."""
    rng = torch.Generator().manual_seed(seed)
    batches: dict[str, tuple[list[int], list[int]]] = {
        "empty": ([], []),
        "one": ([1], [0]),
        "decode": ([1] * 5, [9, 1, 2, 3, 700]),
        "decode-fresh": ([1] * 4, [0, 4, 0, 1]),
        "prefill": ([67, 2, 5], [0, 0, 0]),
        "resumed": ([1, 2, 3, 4, 133], [5, 64, 1, 2, 64]),
        "mixed": ([1, 70, 1, 2, 1], [40, 0, 0, 3, 17]),
        "idle_sequences": ([0, 3, 0, 1], [7, 0, 0, 5]),
    }
    for name, dtype in DTYPES:
        for label, (lengths, contexts) in batches.items():
            for D, W, pool_dtype in ((6, 4, dtype), (5, 3, torch.bfloat16), (3, 2, torch.float32), (4, 1, dtype)):
                use = OpUse.of("short_conv", name, D=D, W=W)
                slots = torch.randperm(len(lengths) + 2, generator=rng)[: len(lengths)]
                window = normal(rng, len(lengths) + 2, W - 1, D, dtype=pool_dtype)
                for slot, context in zip(slots.tolist(), contexts, strict=True):
                    window[slot, : max(W - 1 - context, 0)] = 0.0
                x, weight, carried = normal(rng, sum(lengths), D, dtype=dtype), normal(rng, D, W), torch.tensor(contexts, dtype=torch.int64)
                args = (x, weight, window, slots, starts_of(lengths), carried)
                yield Case(f"{name}-{label}-{D}x{W}", use, args)
