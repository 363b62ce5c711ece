"""The grid of operators and back-ends as a document. No torch."""

from __future__ import annotations

from importlib.metadata import entry_points

from firstlight.ops import declared as _declared  # noqa: F401  (fills the registry)
from firstlight.ops.registry import OPERATORS, REFERENCE, Backend, Operator, Tolerance

IN_TREE = "firstlight.backends."


def render() -> str:
    """Every operator with its contract and the back-ends of this package that have a form of it, as Markdown.

    Note: back-ends that are not ready on this machine, and none from elsewhere, so that the text is the same everywhere.
    """
    forms = _forms()
    columns = sorted({backend for backends in forms.values() for backend in backends})
    lines = [
        "# Operators",
        "",
        "Each operator is declared in `firstlight/ops/declared.py`; the file of its name holds the reference that defines it and the cases of the",
        "contract test. A form is correct when no value is further from the reference than its bound times (1 + the largest value).",
        "",
        "| " + " | ".join(["operator", REFERENCE, *columns]) + " |",
        "|---" * (2 + len(columns)) + "|",
    ]
    for name in OPERATORS:
        lines.append("| " + " | ".join([f"[{name}](#{name})", "yes", *("yes" if column in forms[name] else "" for column in columns)]) + " |")
    for operator in OPERATORS.values():
        lines += _section(operator, [REFERENCE, *sorted(forms[operator.name])])
    return "\n".join(lines) + "\n"


def _section(operator: Operator, backends: list[str]) -> list[str]:
    mutated = [f"Written in place: {', '.join(f'`{name}`' for name in operator.mutates)}.", ""] if operator.mutates else []
    return [
        "", f"## {operator.name}", "", operator.summary, "", "```text", operator.signature, "```", "", *mutated,
        f"{_bounds(operator.tol)} Back-ends: {', '.join(backends)}.",
    ]


def _bounds(tol: Tolerance) -> str:
    if tol.float32 == tol.bfloat16 == 0.0:
        return "Bound: exact."
    return f"Bound: {tol.float32:g} in float32, {tol.bfloat16:g} in bfloat16."


def _forms() -> dict[str, set[str]]:
    """Operator -> back-ends of this package, ready or not; the registry is left as it was found."""
    found: dict[str, set[str]] = {name: set() for name in OPERATORS}
    before = {name: dict(operator.implementations) for name, operator in OPERATORS.items()}
    for point in entry_points(group="firstlight.backends"):
        if not point.value.startswith(IN_TREE):
            continue
        backend: Backend = point.load()
        backend.load()
        for name, operator in OPERATORS.items():
            if backend.name in operator.implementations:
                found[name].add(backend.name)
    for name, operator in OPERATORS.items():
        operator.implementations = before[name]
    return found
