"""Declaring, registering, choosing and binding; refusals in words; what is imported when."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import firstlight.ops
from firstlight.ops import catalogue, registry
from firstlight.ops.registry import OPERATORS, REFERENCE, Backend, Binder, Choice, Operator, Tolerance, declare, inventory, load_backends
from firstlight.spec.errors import CoverageError
from firstlight.spec.model import OpUse

USE = OpUse.of("scale_up", "bfloat16", D=8, H=2)
NOT_OPERATORS = {"__init__", "registry", "declared", "case", "catalogue"}


def scale_up(x: int) -> int:
    return x * 2


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Operator:
    """A declared operator that is gone after the test."""
    monkeypatch.setattr(registry, "OPERATORS", dict(OPERATORS))
    return declare("scale_up", "Twice.", "(x) -> y", tol=Tolerance(1e-5, 1e-2), mutates=["x"])


def wide_only(use: OpUse) -> str | None:
    return None if use.dim("D") >= 16 else f"D is {use.dim('D')}, needs 16"


def test_declare_enters_the_registry_once(operator: Operator) -> None:
    assert operator is registry.OPERATORS["scale_up"]
    assert ("x",) == operator.mutates
    assert "firstlight.ops.scale_up" == operator.module
    with pytest.raises(AssertionError, match="scale_up is declared twice"):
        declare("scale_up", "Again.", "(x) -> y", tol=Tolerance(0.0, 0.0))


def test_an_operator_is_not_callable(operator: Operator) -> None:
    assert not callable(operator)


def test_tolerance_by_dtype() -> None:
    tol = Tolerance(1e-5, 2e-2)
    assert [1e-5, 2e-2, 2e-2, 0.0] == [tol.of(dtype) for dtype in ("float32", "bfloat16", "float16", "int64")]


def test_on_as_decorator_and_by_path(operator: Operator) -> None:
    assert scale_up is operator.on("wide", refuse=wide_only)(scale_up)
    operator.on("path", "operator:neg")
    assert "operator:neg" == operator.implementations["path"].target
    assert -3 == operator.bind(USE, ["path"])(3)
    assert callable(operator.implementations["path"].target)
    assert 6 == operator.bind(OpUse.of("scale_up", "bfloat16", D=16), ["wide"])(3)


def test_choose_takes_the_first_that_serves_and_keeps_the_reasons(operator: Operator) -> None:
    operator.on("wide", refuse=wide_only)(scale_up)
    operator.on("any")(scale_up)
    choice = operator.choose(USE, ["absent", "wide", "any", REFERENCE])
    assert Choice(USE, "any", (("absent", "has no such operator"), ("wide", "D is 8, needs 16"))) == choice
    assert choice.fallback
    assert not operator.choose(USE, ["any", "wide"]).fallback
    assert REFERENCE == operator.choose(USE, ["wide", REFERENCE]).backend


def test_nobody_serves(operator: Operator) -> None:
    operator.on("wide", refuse=wide_only)(scale_up)
    with pytest.raises(CoverageError) as caught:
        operator.bind(USE, ["absent", "wide"])
    assert "no back-end serves scale_up {'D': 8, 'H': 2} in bfloat16 (absent: has no such operator; wide: D is 8, needs 16)" == caught.value.fact
    assert "reference" in caught.value.fix
    with pytest.raises(CoverageError):
        operator.choose(USE, [])


def test_a_form_is_imported_when_bound_not_when_chosen(operator: Operator) -> None:
    operator.on("broken", "firstlight.backends.nowhere:scale_up")
    assert "broken" == operator.choose(USE, ["broken"]).backend
    with pytest.raises(ModuleNotFoundError):
        operator.bind(USE, ["broken"])


def test_binding_the_reference() -> None:
    from firstlight.ops.rms_norm import rms_norm

    assert rms_norm is OPERATORS["rms_norm"].bind(OpUse.of("rms_norm", "float32", D=4), [REFERENCE])


def test_binder_counts_every_use_and_every_fallback(operator: Operator) -> None:
    operator.on("wide", refuse=wide_only)(scale_up)
    operator.on("any")(scale_up)
    binder, wide = Binder(("wide", "any")), OpUse.of("scale_up", "bfloat16", D=16)
    for use in (USE, wide, USE):
        assert scale_up is binder.bind(use)
    assert 2 == binder.num_fallbacks
    assert {Choice(USE, "any", (("wide", "D is 8, needs 16"),)): 2, Choice(wide, "wide"): 1} == dict(binder.choices)


def test_inventory_is_one_choice_per_distinct_use(operator: Operator) -> None:
    operator.on("wide", refuse=wide_only)(scale_up)
    wide = OpUse.of("scale_up", "bfloat16", D=16)
    same = OpUse.of("scale_up", "bfloat16", H=2, D=8)
    assert ["wide", REFERENCE] == [choice.backend for choice in inventory([wide, USE, wide, same], ["wide", REFERENCE])]


class Pretend:
    """A back-end that counts how often it was loaded."""

    device = "cpu"

    def __init__(self, name: str, reason: str | None) -> None:
        self.name, self.reason, self.num_loads = name, reason, 0

    def refuse(self) -> str | None:
        return self.reason

    def load(self) -> None:
        self.num_loads += 1
        registry.OPERATORS["scale_up"].on(self.name)(scale_up)


@pytest.fixture
def installed(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> dict[str, Pretend]:
    found = {"fast": Pretend("fast", None), "remote": Pretend("remote", "no such device here")}
    points = [
        SimpleNamespace(name=name, value=f"{catalogue.IN_TREE}{name}:backend", load=lambda backend=backend: backend)
        for name, backend in found.items()
    ]

    def listed(*, group: str) -> list[Any]:
        return points if group == "firstlight.backends" else []

    monkeypatch.setattr(registry, "entry_points", listed)
    monkeypatch.setattr(catalogue, "entry_points", listed)
    return found


def test_load_backends_loads_the_ready_ones(installed: dict[str, Pretend]) -> None:
    assert {"fast": None, "remote": "no such device here"} == load_backends()
    assert [1, 0] == [backend.num_loads for backend in installed.values()]


def test_load_backends_by_name(installed: dict[str, Pretend]) -> None:
    assert {"remote": "no such device here", "missing": "is not installed"} == load_backends(["reference", "remote", "missing"])
    assert [0, 0] == [backend.num_loads for backend in installed.values()]


def test_the_catalogue_lists_back_ends_that_are_not_ready_and_leaves_no_trace(installed: dict[str, Pretend], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "OPERATORS", registry.OPERATORS)
    text = catalogue.render()
    assert "| operator | reference | fast | remote |" in text
    assert "| [scale_up](#scale_up) | yes | yes | yes |" in text
    assert {} == registry.OPERATORS["scale_up"].implementations


def test_the_catalogue_states_every_contract() -> None:
    text = catalogue.render()
    for operator in OPERATORS.values():
        assert f"## {operator.name}\n\n{operator.summary}\n\n```text\n{operator.signature}\n```\n" in text
    assert "Written in place: `window_SWD`." in text
    assert "Bound: exact. Back-ends: reference, portable." in text


def test_portable_is_installed_and_registers_importable_forms() -> None:
    points = {point.name: point for point in metadata.entry_points(group="firstlight.backends")}
    backend: Backend = points["portable"].load()
    assert ("portable", "any", None) == (backend.name, backend.device, backend.refuse())
    assert {"portable": None} == load_backends(["portable"])
    for name in ("experts", "gated_delta", "latent_attention", "mxfp4_unpack", "short_conv"):
        assert name == OPERATORS[name].implementations["portable"].load().__name__


def test_every_operator_has_a_file_and_every_file_an_operator() -> None:
    files = {path.stem for path in Path(firstlight.ops.__path__[0]).glob("*.py")} - NOT_OPERATORS
    assert set(OPERATORS) == files


@pytest.mark.parametrize("name", OPERATORS)
def test_the_file_holds_reference_and_cases(name: str) -> None:
    assert name == OPERATORS[name].reference.__name__
    assert next(OPERATORS[name].cases(0)).use.op == name


def test_registry_catalogue_and_back_end_do_not_import_torch() -> None:
    program = (
        "import sys\n"
        "import firstlight.ops.declared, firstlight.ops.catalogue\n"
        "from firstlight.ops.registry import OPERATORS, load_backends\n"
        "from firstlight.spec.model import OpUse\n"
        "import firstlight.backends.portable\n"
        "assert load_backends()['portable'] is None\n"
        "firstlight.ops.catalogue.render()\n"
        "OPERATORS['experts'].choose(OpUse.of('experts', 'float32'), ['portable'])\n"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "[]" == run.stdout.strip()
