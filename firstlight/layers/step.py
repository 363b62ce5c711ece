"""One batch as tensors: what every layer of a step shares.

Letters: T packed tokens, N sequences, R rows that yield logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

LayerCache = Mapping[str, Tensor]
"""Field name -> pool tensor of one layer: rows [blocks, tokens_per_block, ...], state [slots, ...]."""


@dataclass(frozen=True, slots=True)
class Step:
    """Sequence n owns packed tokens starts_N1[n] to starts_N1[n+1] and has contexts_N[n] tokens computed before.

    `handed` is what a layer leaves for later ones of the same step.
    """

    tokens_T: Tensor
    positions_T: Tensor
    starts_N1: Tensor
    contexts_N: Tensor
    tables: Mapping[str, Tensor]
    row_slots: Mapping[str, Tensor]
    slots: Mapping[str, Tensor]
    logit_rows_R: Tensor
    handed: dict[str, Tensor] = field(default_factory=dict)
