"""Gated delta rule: the recurrence that defines it, token by token in fp32, and the inputs of its contract test.

Letters: T packed tokens, N sequences, S slots, H value heads, J key heads (H is a multiple of J), K key width, V value width.
Source: Gated DeltaNet, arXiv 2412.06464 (decay per head); Kimi Delta Attention, arXiv 2510.26692 (decay per key channel).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from firstlight.ops.case import DTYPES, Case, normal, starts_of
from firstlight.spec.model import OpUse

Decay = Literal["bounded", "strong", "slow"]


def gated_delta(
    q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, g_THK: Tensor, beta_TH: Tensor,
    state_SHKV: Tensor, slots_N: Tensor, starts_N1: Tensor, contexts_N: Tensor,
    *, scale: float, norm_eps: float | None = None,
) -> Tensor:
    """Decay the state along K, move it towards v at k, read it at q; the state of a slot is updated in place.

    Shapes: q and k may have J < H heads, key head j then serves value heads j*H/J to (j+1)*H/J; a log decay g [T, H] is one per head.
    Note: norm_eps None takes q and k as they are, else both are divided by sqrt(sum of squares + norm_eps).
    """
    num_heads = v_THV.shape[1]
    q_THK, k_THK = (spread_heads(normalise(x, norm_eps), num_heads) for x in (q_THK, k_THK))
    decay_THK = (g_THK if g_THK.dim() == 3 else g_THK.unsqueeze(-1)).float().exp()
    o_THV = torch.empty_like(v_THV, memory_format=torch.contiguous_format)
    starts, contexts = starts_N1.tolist(), contexts_N.tolist()
    for n, slot in enumerate(slots_N.tolist()):
        state_HKV = state_SHKV[slot].clone() if contexts[n] else torch.zeros_like(state_SHKV[slot])
        for t in range(starts[n], starts[n + 1]):
            state_HKV = state_HKV * decay_THK[t].unsqueeze(-1)
            found_HV = torch.einsum("hk,hkv->hv", k_THK[t], state_HKV)
            write_HV = beta_TH[t].float().unsqueeze(-1) * (v_THV[t].float() - found_HV)
            state_HKV = state_HKV + torch.einsum("hk,hv->hkv", k_THK[t], write_HV)
            o_THV[t] = torch.einsum("hk,hkv->hv", q_THK[t] * scale, state_HKV)
        state_SHKV[slot] = state_HKV
    return o_THV


def normalise(x_TJK: Tensor, norm_eps: float | None) -> Tensor:
    """To fp32, and to unit length over K when an eps is given."""
    x_TJK = x_TJK.float()
    if norm_eps is None:
        return x_TJK
    return x_TJK * torch.rsqrt(x_TJK.square().sum(-1, keepdim=True) + norm_eps)


def spread_heads(x_TJK: Tensor, num_heads: int) -> Tensor:
    """Repeat every key head for its group of value heads."""
    groups = num_heads // x_TJK.shape[1]
    return x_TJK if groups == 1 else x_TJK.repeat_interleave(groups, dim=1)


def log_decay(rng: torch.Generator, decay: Decay, *shape: int) -> Tensor:
    """Gates as models make them: within (-5, 0), softplus down to about -60, or so near 0 that a state outlives 1000 tokens."""
    x = normal(rng, *shape, spread=2.0)
    if decay == "bounded":
        return -5.0 * torch.sigmoid(x)
    if decay == "strong":
        return -functional.softplus(8.0 * x).clamp(max=60.0)
    return -1e-3 * torch.sigmoid(x)


def make_case(
    rng: torch.Generator, name: str, lengths: Sequence[int], contexts: Sequence[int], *,
    heads: tuple[int, int] = (3, 3), widths: tuple[int, int] = (16, 24), decay: Decay = "bounded", scalar: bool = False,
    dtype: torch.dtype = torch.float32, norm_eps: float | None = 1e-6,
) -> Case:
    """A batch on shuffled slots of a pool with spare ones; `heads` are (key heads, value heads), `widths` are (K, V)."""
    (num_key_heads, num_heads), (head_k, head_v) = heads, widths
    num_tokens, dims = sum(lengths), {"H": num_heads, "K": head_k, "V": head_v}
    q_TJK, k_TJK = (normal(rng, num_tokens, num_key_heads, head_k, dtype=dtype) for _ in range(2))
    if norm_eps is None:
        q_TJK, k_TJK = (normalise(x, 1e-6).to(dtype) for x in (q_TJK, k_TJK))
    v_THV = normal(rng, num_tokens, num_heads, head_v, dtype=dtype)
    g = log_decay(rng, decay, *((num_tokens, num_heads) if scalar else (num_tokens, num_heads, head_k)))
    beta_TH = torch.sigmoid(normal(rng, num_tokens, num_heads))
    state_SHKV = normal(rng, len(lengths) + 2, num_heads, head_k, head_v, spread=0.5)
    slots_N = torch.randperm(len(state_SHKV), generator=rng)[:len(lengths)]
    if scalar:
        dims["J"] = num_key_heads
    use = OpUse.of("gated_delta", str(dtype).removeprefix("torch."), **dims, decay="head" if scalar else "channel")
    args = (q_TJK, k_TJK, v_THV, g, beta_TH, state_SHKV, slots_N, starts_of(lengths), torch.tensor(contexts, dtype=torch.int64))
    return Case(name, use, args, {"scale": 1 / math.sqrt(head_k), "norm_eps": norm_eps})


def cases(seed: int = 0) -> Iterator[Case]:
    """Lengths around the chunk borders, every kind of gate, K unlike V, prefill beside decode, slots that hold garbage."""
    rng = torch.Generator().manual_seed(seed)
    for length in (1, 2, 3, 15, 16, 17, 63, 64, 65, 130, 257):
        yield make_case(rng, f"length{length}", [length], [0 if length % 2 else 7])
    for name, dtype in DTYPES:
        for decay in ("bounded", "strong", "slow"):
            yield make_case(rng, f"{decay}-{name}", [1, 70, 1, 33, 5], [90, 64, 1, 0, 12], decay=decay, dtype=dtype)
        yield make_case(rng, f"grouped-{name}", [1, 66, 20], [3, 0, 9], heads=(2, 6), decay="strong", scalar=True, dtype=dtype)
        yield make_case(rng, f"decode-{name}", [1] * 5, [5, 0, 64, 63, 1], dtype=dtype)
        for length in (1, 7, 64, 131):
            yield make_case(
                rng, f"head-{length}-{name}", [length], [length % 4], heads=(2, 8), widths=(24, 16), decay="slow", scalar=True, dtype=dtype)
        yield make_case(rng, f"head-mixed-{name}", [1, 0, 131, 7, 1], [5, 3, 0, 64, 0], heads=(3, 6), decay="slow", scalar=True, dtype=dtype)
    yield make_case(rng, "slow-1000", [1000], [200], heads=(2, 2), decay="slow")
    yield make_case(rng, "slow-scalar-300", [300], [200], heads=(1, 2), decay="slow", scalar=True)
    yield make_case(rng, "strong-scalar-130", [130], [1], widths=(24, 8), decay="strong", scalar=True)
    yield make_case(rng, "normalised", [40, 1, 9], [0, 8, 8], norm_eps=None)
    yield make_case(rng, "decode-one", [1], [17], decay="slow")
    yield make_case(rng, "decode-fresh", [1], [0])
    yield make_case(rng, "decode-scalar", [1] * 3, [0, 2, 2], heads=(1, 3), scalar=True)
    yield make_case(rng, "decode-wide", [1] * 3, [4, 0, 4], heads=(8, 8), widths=(128, 136))
    yield make_case(rng, "idle", [0, 1, 0, 18], [4, 6, 4, 0])
    for scalar in (False, True):
        yield make_case(rng, "no-tokens" + "-scalar" * scalar, [0, 0], [3, 0], heads=(1, 3), scalar=scalar)
        yield make_case(rng, "empty" + "-scalar" * scalar, [], [], heads=(1, 3), scalar=scalar)
