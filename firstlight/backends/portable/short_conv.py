"""Short convolution without a loop over tokens or sequences. Letters as in ops/short_conv.py; P rows of windows and tokens together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def short_conv(x_TD: Tensor, weight_DW: Tensor, window_SWD: Tensor, slots_N: Tensor, starts_N1: Tensor, contexts_N: Tensor) -> Tensor:
    """Put each window in front of its tokens, convolve everything at once, and take the last rows as the new windows."""
    num_kept = weight_DW.shape[1] - 1
    starts, contexts = starts_N1.tolist(), contexts_N.tolist()
    taps_D = weight_DW.float().T.contiguous().unbind(0)
    slots_N = slots_N.to(x_TD.device)
    past_NWD = window_SWD.index_select(0, slots_N).float()
    if 0 in contexts:
        past_NWD = past_NWD.masked_fill((contexts_N == 0).to(x_TD.device)[:, None, None], 0.0)
    if starts == list(range(len(starts))):
        rows_NWD = torch.cat((past_NWD, x_TD.float()[:, None]), dim=1)
        window_SWD.index_copy_(0, slots_N, rows_NWD[:, 1:].to(window_SWD.dtype))
        return F.silu(_weigh(rows_NWD.unbind(1), taps_D)).to(x_TD.dtype)
    lengths_N = starts_N1.diff()
    token_T, window_NW = (place.to(x_TD.device) for place in _places(starts_N1, lengths_N, num_kept))
    rows_PD = past_NWD.new_empty(len(token_T) + window_NW.numel(), x_TD.shape[1])
    rows_PD[token_T] = x_TD.float()
    rows_PD[window_NW] = past_NWD
    kept_NWD = rows_PD[window_NW + lengths_N.to(x_TD.device)[:, None]]
    window_SWD.index_copy_(0, slots_N, kept_NWD.to(window_SWD.dtype))
    num_outputs = len(rows_PD) - num_kept
    sum_PD = _weigh([rows_PD[tap : tap + num_outputs] for tap in range(num_kept + 1)], taps_D)
    return F.silu(sum_PD[token_T - num_kept], inplace=True).to(x_TD.dtype)


def _weigh(shifted: Sequence[Tensor], taps_D: Sequence[Tensor]) -> Tensor:
    """Sum of tap times row, oldest first in decode and prefill alike; one [rows, D] per tap."""
    total_PD = shifted[0] * taps_D[0]
    for rows_PD, tap_D in zip(shifted[1:], taps_D[1:], strict=True):
        total_PD.addcmul_(rows_PD, tap_D)
    return total_PD


def _places(starts_N1: Tensor, lengths_N: Tensor, num_kept: int) -> tuple[Tensor, Tensor]:
    """Rows of the tokens and of the windows when every sequence is its window followed by its tokens."""
    ahead_N = num_kept * torch.arange(len(lengths_N))
    token_T = torch.arange(int(starts_N1[-1])) + (ahead_N + num_kept).repeat_interleave(lengths_N)
    window_NW = (starts_N1[:-1] + ahead_N)[:, None] + torch.arange(num_kept)
    return token_T, window_NW
