"""Who computes what: the axes that layers reduce over. An axis of size 1 makes every collective the identity."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

AxisName = Literal["dp", "pp", "ep", "tp"]


@dataclass(frozen=True, slots=True)
class Axis:
    """One direction of the mesh as this rank sees it."""

    name: AxisName
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        assert self.size == 1, "meshes of more than one rank come with the distributed runner"

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the axis."""
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Concatenate over the axis along a tensor dim."""
        return x


@dataclass(frozen=True, slots=True)
class Mesh:
    """All axes; a fresh Mesh is one rank alone."""

    axes: dict[AxisName, Axis] = field(default_factory=lambda: {name: Axis(name) for name in ("dp", "pp", "ep", "tp")})

    def axis(self, name: AxisName) -> Axis:
        """The axis of that name."""
        return self.axes[name]
