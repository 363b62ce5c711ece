"""Find the module that computes a part: the file of the same name, the class marked with @part."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from firstlight.spec.errors import CoverageError
from firstlight.spec.model import PartSpec

if TYPE_CHECKING:
    from torch import nn

    from firstlight.ops.registry import Binder
    from firstlight.parallel.mesh import Mesh

C = TypeVar("C", bound=type)
_PARTS: dict[str, Any] = {}


def part(kind: str) -> Callable[[C], C]:
    """Mark the module class that computes parts of this kind."""

    def mark(module: C) -> C:
        _PARTS[kind] = module
        return module

    return mark


def build(spec: PartSpec, mesh: Mesh, binder: Binder) -> nn.Module:
    """The module of a part, its weights still without memory."""
    if spec.kind not in _PARTS:
        try:
            importlib.import_module(f"firstlight.layers.{spec.kind}")
        except ModuleNotFoundError:
            fix = f"Write firstlight/layers/{spec.kind}.py with a class marked @part."
            raise CoverageError(f"no layer computes parts of kind {spec.kind!r}", fix) from None
    module: nn.Module = _PARTS[spec.kind](spec, mesh, binder)
    return module
