"""The plain residual.

Letters: T packed tokens, D model width.
"""

from __future__ import annotations

from torch import Tensor, nn

from firstlight.layers.registry import part
from firstlight.ops.registry import Binder
from firstlight.parallel.mesh import Mesh
from firstlight.parts.add import Add as Spec


@part("add")
class Add(nn.Module):
    """The stream is one tensor."""

    def __init__(self, spec: Spec, mesh: Mesh, binder: Binder) -> None:
        super().__init__()

    def open(self, x_TD: Tensor) -> Tensor:
        """The stream that the embedding starts."""
        return x_TD

    def mix(self, stream_TD: Tensor, seat: str) -> Tensor:
        """What the sub-layer at this seat reads."""
        return stream_TD

    def push(self, stream_TD: Tensor, y_TD: Tensor, seat: str) -> Tensor:
        """The stream after the sub-layer's output."""
        return stream_TD + y_TD
