"""The largest scores without sorting all of them: a threshold, then of the scores equal to it the first. Letters as in ops/index_topk.py."""

from __future__ import annotations

import torch
from torch import Tensor


def index_topk(scores_TM: Tensor, visible_T: Tensor, *, top_k: int) -> Tensor:
    """The operator of firstlight.ops.index_topk; what it returns depends on values only, never on the order in which equal ones are met."""
    num_tokens, num_rows = scores_TM.shape
    width = min(top_k, num_rows)
    if not num_tokens or not width:
        return torch.full((num_tokens, width), -1, dtype=torch.int32, device=scores_TM.device)
    visible_TM = torch.arange(num_rows, device=scores_TM.device) < visible_T[:, None]
    seen_TM = scores_TM.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).masked_fill_(~visible_TM, -torch.inf)
    edge_T1 = seen_TM.topk(width, sorted=False).values.amin(-1, keepdim=True)
    above_TM = seen_TM > edge_T1
    tied_TM = (seen_TM == edge_T1) & visible_TM
    room_T1 = width - above_TM.sum(-1, keepdim=True)
    kept_TM = above_TM | (tied_TM & (tied_TM.cumsum(-1) <= room_T1))
    # every kept row goes to the column of its rank, all others to one column that is cut off
    column_TM = (kept_TM.cumsum(-1) - 1).masked_fill_(~kept_TM, width)
    rows_TM = torch.arange(num_rows, dtype=torch.int32, device=scores_TM.device).expand(num_tokens, -1)
    found_TU = torch.full((num_tokens, width + 1), -1, dtype=torch.int32, device=scores_TM.device)
    return found_TU.scatter_(1, column_TM, rows_TM)[:, :width].contiguous()
