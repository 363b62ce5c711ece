"""Which back-ends the operators are tested on, and memory that shows when it is read before it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch

from firstlight.ops import declared as _declared  # noqa: F401  (fills the registry)
from firstlight.ops.case import fill_garbage
from firstlight.ops.registry import OPERATORS, REFERENCE, Operator, load_backends

ALLOCATORS = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch, "empty_permuted"), (torch.Tensor, "new_empty"),
              (torch.Tensor, "new_empty_strided"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backend", action="append", metavar="NAME", help="test this back-end instead of all that are ready; may be given again")
    parser.addoption("--device", metavar="DEVICE", help="where the inputs live; by default where the back-end works, else the CPU")


def backends_under_test(config: pytest.Config) -> dict[str, str]:
    """Name -> device; the reference comes first. A back-end that was asked for must be ready."""
    asked = config.getoption("--backend", default=None)
    points = {point.name: point for point in entry_points(group="firstlight.backends")}
    found = load_backends(asked)
    absent = {name: reason for name, reason in found.items() if reason is not None}
    if asked and absent:
        raise pytest.UsageError("; ".join(f"back-end {name} {reason}" for name, reason in absent.items()))
    device = config.getoption("--device", default=None)
    ready = [name for name in found if name not in absent]
    works_on = {name: points[name].load().device for name in ready}
    return {name: device or ("cpu" if works_on.get(name, "any") == "any" else works_on[name]) for name in (REFERENCE, *ready)}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`contract`: every case on every back-end that has the operator; `column`: every operator on every back-end that has it."""
    if not {"contract", "column"} & set(metafunc.fixturenames):
        return
    columns = [
        (operator, backend, device) for backend, device in backends_under_test(metafunc.config).items()
        for operator in OPERATORS.values() if backend == REFERENCE or backend in operator.implementations
    ]
    if "column" in metafunc.fixturenames:
        metafunc.parametrize("column", [pytest.param(column, id=f"{column[0].name}-{column[1]}") for column in columns])
    else:
        metafunc.parametrize("contract", [item for column in columns for item in contract_items(*column)], indirect=True)


def contract_items(operator: Operator, backend: str, device: str) -> list[Any]:
    """One item per case; an operator that cannot list its cases gets one item, which fails."""
    try:
        cases = list(operator.cases(0))
    except (ImportError, AttributeError) as error:
        return [pytest.param(error, id=f"{operator.name}-{backend}-none")]
    return [pytest.param((operator, backend, device, case), id=f"{operator.name}-{backend}-{case.name}") for case in cases]


@pytest.fixture
def contract(request: pytest.FixtureRequest) -> Any:
    """(operator, back-end, device, case)."""
    if isinstance(request.param, Exception):
        pytest.fail(f"an operator without reference and cases: {request.param}")
    return request.param


@pytest.fixture
def garbage_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fresh memory holds NaN, or the largest integer."""
    for owner, name in ALLOCATORS:
        monkeypatch.setattr(owner, name, filled(getattr(owner, name)))
    yield
    monkeypatch.undo()


def filled(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def allocate_filled(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        return tensor.fill_(True) if tensor.dtype == torch.bool else fill_garbage(tensor)

    return allocate_filled
