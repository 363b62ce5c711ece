"""What can be computed, by whom, and why not by the others. No torch: implementations are imported when bound."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Literal, Protocol

from firstlight.spec.errors import CoverageError
from firstlight.spec.model import OpUse

Refusal = str
"""Why a back-end does not serve a use, in words."""

Refuse = Callable[[OpUse], Refusal | None]
REFERENCE = "reference"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest allowed |got - want|: absolute + relative * max|want|, per dtype."""

    float32: float
    bfloat16: float

    def of(self, dtype: str) -> float:
        """The bound for one dtype; integers must be equal."""
        return {"float32": self.float32, "bfloat16": self.bfloat16, "float16": self.bfloat16}.get(dtype, 0.0)


@dataclass(slots=True)
class Implementation:
    """One back-end's form of an operator; `target` is 'module:function' until it is imported."""

    backend: str
    target: str | Callable[..., Any]
    refuse: Refuse

    def load(self) -> Callable[..., Any]:
        """Import the function once."""
        if isinstance(self.target, str):
            module, _, name = self.target.partition(":")
            self.target = getattr(importlib.import_module(module), name)
        return self.target  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Choice:
    """Who serves a use, and what the earlier ones in the order said."""

    use: OpUse
    backend: str
    refused: tuple[tuple[str, Refusal], ...] = ()

    @property
    def fallback(self) -> bool:
        """Whether a preferred back-end declined."""
        return bool(self.refused)


def never_refuse(use: OpUse) -> Refusal | None:
    """Serve every use."""
    return None


@dataclass(slots=True)
class Operator:
    """A contract that back-ends fulfil. Not callable: bind a use, or ask for `reference`."""

    name: str
    summary: str
    signature: str
    tol: Tolerance
    mutates: tuple[str, ...] = ()
    implementations: dict[str, Implementation] = field(default_factory=dict)

    @property
    def module(self) -> str:
        """The file that holds reference and cases."""
        return f"firstlight.ops.{self.name}"

    @property
    def reference(self) -> Callable[..., Any]:
        """The naive form that defines the operator; imports torch."""
        return getattr(importlib.import_module(self.module), self.name)  # type: ignore[no-any-return]

    def cases(self, seed: int = 0) -> Iterator[Any]:
        """The contract test's inputs; imports torch."""
        return importlib.import_module(self.module).cases(seed)  # type: ignore[no-any-return]

    def on(self, backend: str, target: str | None = None, *, refuse: Refuse = never_refuse) -> Callable[[Any], Any]:
        """Register a back-end's form: by import path, or as a decorator."""
        if target is not None:
            self.implementations[backend] = Implementation(backend, target, refuse)

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            self.implementations[backend] = Implementation(backend, function, refuse)
            return function

        return decorate

    def choose(self, use: OpUse, order: Sequence[str]) -> Choice:
        """The first back-end of the order that does not refuse. Raises CoverageError when none serves."""
        refused: list[tuple[str, Refusal]] = []
        for backend in order:
            reason = self._refusal(use, backend)
            if reason is None:
                return Choice(use, backend, tuple(refused))
            refused.append((backend, reason))
        said = "; ".join(f"{backend}: {reason}" for backend, reason in refused)
        raise CoverageError(f"no back-end serves {self.name} {dict(use.dims)} in {use.dtype} ({said})", "Add 'reference' to the order of back-ends.")

    def bind(self, use: OpUse, order: Sequence[str]) -> Callable[..., Any]:
        """The function that serves a use; call it directly, there is no dispatch left."""
        backend = self.choose(use, order).backend
        return self.reference if backend == REFERENCE else self.implementations[backend].load()

    def _refusal(self, use: OpUse, backend: str) -> Refusal | None:
        if backend == REFERENCE:
            return None
        found = self.implementations.get(backend)
        return "has no such operator" if found is None else found.refuse(use)


OPERATORS: dict[str, Operator] = {}


def declare(name: str, summary: str, signature: str, *, tol: Tolerance, mutates: Iterable[str] = ()) -> Operator:
    """Put an operator into the registry; its file firstlight/ops/<name>.py holds the reference and the cases."""
    assert name not in OPERATORS, f"operator {name} is declared twice"
    OPERATORS[name] = Operator(name, summary, signature, tol, tuple(mutates))
    return OPERATORS[name]


class Backend(Protocol):
    """One column of the grid: a torch-free description that registers its forms when loaded."""

    name: str
    device: Literal["cpu", "cuda", "npu", "any"]

    def refuse(self) -> Refusal | None:
        """None: ready on this machine."""

    def load(self) -> None:
        """Register every form with `Operator.on`."""


def load_backends(names: Iterable[str] | None = None) -> dict[str, Refusal | None]:
    """Load back-ends by entry point, all installed ones by default; name -> None (ready) or why it is not."""
    wanted = None if names is None else {name for name in names if name != REFERENCE}
    found: dict[str, Refusal | None] = {}
    for point in entry_points(group="firstlight.backends"):
        if wanted is not None and point.name not in wanted:
            continue
        backend: Backend = point.load()
        found[point.name] = backend.refuse()
        if found[point.name] is None:
            backend.load()
    for missing in sorted((wanted or set()) - set(found)):
        found[missing] = "is not installed"
    return found


@dataclass(slots=True)
class Binder:
    """Hands functions to layers and remembers every use, so that the report and the run cannot differ."""

    order: tuple[str, ...]
    choices: Counter[Choice] = field(default_factory=Counter)

    def bind(self, use: OpUse) -> Callable[..., Any]:
        """Bind one use in this order of back-ends."""
        operator = OPERATORS[use.op]
        self.choices[operator.choose(use, self.order)] += 1
        return operator.bind(use, self.order)

    @property
    def num_fallbacks(self) -> int:
        """Uses that a preferred back-end declined."""
        return sum(count for choice, count in self.choices.items() if choice.fallback)


def inventory(uses: Iterable[OpUse], order: Sequence[str]) -> list[Choice]:
    """One choice per distinct use, in order of first appearance."""
    return [OPERATORS[use.op].choose(use, order) for use in dict.fromkeys(uses)]
