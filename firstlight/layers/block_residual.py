"""Block Attention Residuals: a bank of snapshots with the running prefix in its last used row.

Letters: M sources, T packed tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from firstlight.layers.leaves import empty
from firstlight.layers.registry import part
from firstlight.ops.registry import Binder
from firstlight.parallel.mesh import Mesh
from firstlight.parts.block_residual import BlockResidual as Spec
from firstlight.spec.model import OpUse


@dataclass(slots=True)
class Bank:
    """Rows 0 to num_blocks - 1 are snapshots, row num_blocks is the prefix; later rows are not written yet.

    The prefix is the first field because that is what a recorder shows of a layer, as the official code does.
    """

    prefix_TD: Tensor
    rows_MTD: Tensor
    num_blocks: int = 0


@part("block_residual")
class BlockResidual(nn.Module):
    """Seats are "mixer" and "ffn" in a layer, "output" before the last norm."""

    def __init__(self, spec: Spec, mesh: Mesh, binder: Binder) -> None:
        super().__init__()
        self.spec = spec
        self.compute: dict[str, Callable[..., Tensor]] = {}
        for seat in spec.seats:
            for leaf, shape in (("norm", (spec.dim,)), ("proj", (1, spec.dim))):
                holder = nn.Module()
                holder.weight = empty(spec.dtype, *shape)
                self.add_module(f"{seat}_{leaf}", holder)
            if spec.num_sources(seat) > 1:
                self.compute[seat] = binder.bind(OpUse.of("block_residual", spec.dtype, D=spec.dim, M=spec.num_sources(seat)))

    def open(self, x_TD: Tensor) -> Bank:
        """A bank for the whole depth with the embedding as its prefix."""
        spec = self.spec
        num_rows = -(-spec.num_layers // spec.block_size) + 1
        rows_MTD = torch.empty((num_rows, *x_TD.shape), dtype=x_TD.dtype, device=x_TD.device)
        rows_MTD[0] = x_TD
        return Bank(rows_MTD[0], rows_MTD)

    def mix(self, bank: Bank, seat: str) -> Tensor:
        """Softmax mix of snapshots and prefix; a lone source passes through."""
        if seat not in self.compute:
            return bank.prefix_TD
        norm, proj = (self.get_parameter(f"{seat}_{leaf}.weight") for leaf in ("norm", "proj"))
        sources_MTD = bank.rows_MTD[: bank.num_blocks + 1]
        return self.compute[seat](sources_MTD, norm, proj.view(-1), eps=self.spec.eps)

    def push(self, bank: Bank, y_TD: Tensor, seat: str) -> Bank:
        """Add to the prefix; at a block start the prefix becomes a snapshot first and y starts the new one."""
        if seat == "mixer" and self.spec.starts_block:
            bank.num_blocks += 1
            bank.prefix_TD = bank.rows_MTD[bank.num_blocks]
            bank.prefix_TD.copy_(y_TD)
        else:
            bank.prefix_TD.add_(y_TD)
        return bank
