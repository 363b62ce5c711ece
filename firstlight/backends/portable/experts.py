"""Experts with the tokens sorted by expert. Letters as in ops/experts.py; P token-expert pairs, sorted by expert."""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.backends.portable.fp8_unpack import fp8_unpack
from firstlight.backends.portable.mxfp4_unpack import mxfp4_unpack
from firstlight.ops.activation import Kind, activation
from firstlight.ops.experts import Bank
from firstlight.ops.linear import linear

UNPACK = {"mxfp4": mxfp4_unpack, "fp8": fp8_unpack}


def experts(
    x_TD: Tensor, bank: Bank, ids_TX: Tensor, weights_TX: Tensor, *, kind: Kind, beta: float | None = 1.0, linear_beta: float | None = None,
) -> Tensor:
    """One pass per used expert over a contiguous run of its tokens; the sum over a token's experts has a fixed order."""
    if not ids_TX.numel():
        return torch.zeros_like(x_TD)
    sorted_P, order_P = ids_TX.flatten().sort(stable=True)
    used, counts = (part.tolist() for part in torch.unique_consecutive(sorted_P, return_counts=True))
    runs = x_TD[order_P // ids_TX.shape[1]].split(counts)
    outs = [_expert(run_PD, bank, expert, kind, beta, linear_beta) for expert, run_PD in zip(used, runs, strict=True)]
    pair_TXD = torch.cat(outs)[order_P.argsort()].view(*ids_TX.shape, -1)
    return (weights_TX.float()[..., None] * pair_TXD.float()).sum(1).to(x_TD.dtype)


def _expert(x_PD: Tensor, bank: Bank, expert: int, kind: Kind, beta: float | None, linear_beta: float | None) -> Tensor:
    gate_ID, up_ID, down_DI = bank.dense(expert, x_PD.dtype, UNPACK)
    hidden_PI = activation(linear(x_PD, gate_ID), linear(x_PD, up_ID), kind=kind, beta=beta, linear_beta=linear_beta)
    return linear(hidden_PI, down_DI)
