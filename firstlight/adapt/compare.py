"""Where do two runs part? Compare two traces module by module, in execution order, and look at the first divergence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import torch

from firstlight.adapt.record import Trace
from firstlight.ops.registry import Tolerance
from firstlight.spec.errors import PrecisionError

Names = Callable[[str], str | None] | Mapping[str, str]
"""From a module name of the reference to ours; None or absent: it has no counterpart."""

_CONTEXT_ROWS = 4
_SHOWN_NAMES = 8


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far one module is from its reference; `bound` is what was allowed.

    Floating outputs: `max_abs` is the largest |got - want| (infinite where either is NaN), `max_rel` is that over max|want|.
    Integer outputs are sets of ids per token: `max_abs` is the largest number of ids that differ, `max_rel` the share of
    tokens whose sets differ. `position` is the place of the largest error in the shape of the reference; `first_token` the
    first token beyond the bound. `reason` says why the two cannot be compared at all.
    """

    name: str
    reference: str
    got_shape: tuple[int, ...]
    want_shape: tuple[int, ...]
    max_abs: float
    max_rel: float
    bound: float
    position: tuple[int, ...] | None = None
    first_token: int | None = None
    reason: str | None = None
    ids: bool = False

    @property
    def within(self) -> bool:
        """Whether the module agrees with its reference."""
        return self.reason is None and self.first_token is None

    def __str__(self) -> str:
        if self.reason is not None:
            return f"{self.name}: {self.reason}"
        text = f"{self.name}: {self.numbers}"
        return text if self.within else f"{text}, largest at {list(self.position or ())}, first at token {self.first_token}"

    @property
    def numbers(self) -> str:
        """The error and its bound in words."""
        if self.ids:
            return f"up to {self.max_abs:.0f} ids differ, in {self.max_rel:.2%} of the tokens, bound {self.bound:.2%}"
        return f"max abs {self.max_abs:.2e}, relative {self.max_rel:.2e}, bound {self.bound:.2e}"

    @property
    def excess(self) -> float:
        """The error over its bound: above 1 diverges."""
        if self.reason is not None:
            return float("inf")
        error = self.max_rel if self.ids else self.max_abs
        return error / self.bound if self.bound else (0.0 if error == 0 else float("inf"))


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome for all modules; `compared` is in execution order."""

    compared: tuple[Divergence, ...]
    only_got: tuple[str, ...] = ()
    only_want: tuple[str, ...] = ()
    unmapped: tuple[str, ...] = ()

    @property
    def divergences(self) -> tuple[Divergence, ...]:
        """The modules beyond their bound."""
        return tuple(row for row in self.compared if not row.within)

    @property
    def first(self) -> Divergence | None:
        """The first module in execution order that is beyond its bound; all before it agree."""
        return next((row for row in self.compared if not row.within), None)

    @property
    def worst(self) -> Divergence | None:
        """The module with the largest error relative to its bound."""
        return max(self.compared, key=lambda row: row.excess, default=None)

    def check(self, *, complete: bool = False) -> Comparison:
        """Return self when everything compared agrees; `complete` also wants every module of the reference to have been found.

        Raises:
            PrecisionError: a module diverges, nothing could be compared, or (complete) modules of the reference are missing.
        """
        first = self.first
        if first is not None:
            raise PrecisionError(
                f"{len(self.divergences)} of {len(self.compared)} modules diverge, the first is {first} (reference {first.reference})",
                f"Look at what this module computes from its inputs: {self._last_good(first)}.",
            )
        if not self.compared:
            raise PrecisionError(
                f"no module could be compared; ours: {_few(self.only_got)}; theirs: {_few(self.only_want + self.unmapped)}",
                "Give a map from the reference's module names to ours.",
            )
        if complete and self.only_want:
            raise PrecisionError(
                f"{len(self.only_want)} modules of the reference have no output here: {_few(self.only_want)}",
                "Record these modules, or map their names to None when they have no counterpart.",
            )
        return self

    def __str__(self) -> str:
        agree = len(self.compared) - len(self.divergences)
        lines = [f"{agree} of {len(self.compared)} modules agree"]
        first, worst = self.first, self.worst
        if first is not None:
            at = self.compared.index(first)
            lines.append(f"first divergence: {first} (reference {first.reference})")
            lines += [_line(row) for row in self.compared[max(0, at - _CONTEXT_ROWS) : at + _CONTEXT_ROWS + 1]]
        elif worst is not None:
            lines.append(f"closest to its bound: {worst}")
        for label, names in (("not in the reference", self.only_got), ("only in the reference", self.only_want), ("no counterpart", self.unmapped)):
            if names:
                lines.append(f"{label} ({len(names)}): {_few(names)}")
        return "\n".join(lines)

    def table(self) -> str:
        """One line per compared module, in execution order."""
        return "\n".join(_line(row) for row in self.compared)

    def _last_good(self, first: Divergence) -> str:
        at = self.compared.index(first)
        return f"everything up to {self.compared[at - 1].name} agrees" if at else "nothing runs before it"


def compare(got: Trace, want: Trace, names: Names | None = None, tol: float | Tolerance = 1e-3, *, id_share: float = 0.0) -> Comparison:
    """Compare what both traces hold. A module agrees when |got - want| <= tol * max(1, max|want|) everywhere.

    `names` leads from the reference's names to ours, the same names when not given. A Tolerance is read by the coarser dtype
    of the two. Expert ids may differ on a share `id_share` of the tokens. The order is that of `got`, or of `want` when only
    that one keeps an order. Dims of size 1 in front, and heads split or flattened, do not matter.
    """
    lookup = _lookup(names)
    pairs: list[tuple[str, str]] = []
    only_want: list[str] = []
    unmapped: list[str] = []
    for reference in want.outputs:
        name = lookup(reference)
        if name is None:
            unmapped.append(reference)
        elif name not in got.outputs:
            only_want.append(reference)
        else:
            pairs.append((name, reference))
    if got.ordered or not want.ordered:
        rank = {name: i for i, name in enumerate(got.outputs)}
        pairs.sort(key=lambda pair: rank[pair[0]])
    num_tokens = want.extra["ids"].numel() if "ids" in want.extra else None
    rows = [_one(name, reference, got.outputs[name], want.outputs[reference], num_tokens, tol, id_share) for name, reference in pairs]
    met = {name for name, _ in pairs}
    return Comparison(tuple(rows), tuple(name for name in got.outputs if name not in met), tuple(only_want), tuple(unmapped))


def _lookup(names: Names | None) -> Callable[[str], str | None]:
    if names is None:
        return lambda name: name
    return names.get if isinstance(names, Mapping) else names


def _one(
    name: str, reference: str, got: torch.Tensor, want: torch.Tensor, num_tokens: int | None, tol: float | Tolerance, id_share: float
) -> Divergence:
    shapes = (tuple(got.shape), tuple(want.shape))
    reason = _incomparable(got, want)
    if reason is not None:
        return Divergence(name, reference, *shapes, float("inf"), float("inf"), 0.0, reason=reason)
    if not want.numel():
        return Divergence(name, reference, *shapes, 0.0, 0.0, 0.0)
    num_rows = _num_rows(want, num_tokens)
    ours, theirs = got.reshape(num_rows, -1), want.reshape(num_rows, -1)
    if _kind(want) == "ids":
        largest, relative, flat, beyond = _id_error(ours, theirs)
        bound = id_share
        beyond = beyond & (relative > id_share)
    else:
        largest, relative, flat, error, scale = _float_error(ours, theirs)
        bound = (tol if isinstance(tol, float | int) else tol.of(_coarser(got, want))) * max(1.0, scale)
        beyond = error > bound
    first = int(beyond.int().argmax()) if bool(beyond.any()) else None
    position = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), want.shape)) if want.ndim else ()
    return Divergence(name, reference, *shapes, largest, relative, bound, position, first, ids=_kind(want) == "ids")


def _float_error(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[float, float, int, torch.Tensor, float]:
    """Largest error, the same over the scale, where it is, the largest error of each row, and the scale max|theirs|."""
    magnitude = theirs.double().abs()
    finite = magnitude[magnitude.isfinite()]
    scale = finite.max().item() if finite.numel() else 0.0
    error = torch.where(ours == theirs, 0.0, (ours.double() - theirs.double()).abs()).nan_to_num(nan=float("inf"))
    largest = error.max().item()
    relative = largest / scale if scale else (0.0 if largest == 0 else float("inf"))
    return largest, relative, int(error.argmax()), error.amax(1), scale


def _id_error(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[float, float, int, torch.Tensor]:
    """Ids that differ in the worst row, the share of rows that differ, where the worst row begins, and which rows differ."""
    equal = ours[:, :, None] == theirs[:, None, :]
    differ = torch.maximum((~equal.any(2)).sum(1), (~equal.any(1)).sum(1))
    return float(differ.max()), (differ > 0).double().mean().item(), int(differ.argmax()) * theirs.shape[1], differ > 0


def _kind(tensor: torch.Tensor) -> str:
    return "numbers" if tensor.is_floating_point() or tensor.dtype is torch.bool else "ids"


def _incomparable(got: torch.Tensor, want: torch.Tensor) -> str | None:
    """Why two outputs cannot be laid over each other: one must be a view of the other, ones in front aside."""
    if _kind(got) != _kind(want):
        return f"{str(got.dtype).removeprefix('torch.')} cannot be compared with {str(want.dtype).removeprefix('torch.')}"
    ours, theirs = _edges(got), _edges(want)
    if got.numel() != want.numel() or not (ours <= theirs or theirs <= ours):
        return f"shape {list(got.shape)} is not {list(want.shape)}"
    return None


def _edges(tensor: torch.Tensor) -> set[int]:
    """Where the dims end, counted in elements of what is outside; [T, H, K] holds all edges of [1, T, H * K]."""
    return set(accumulate(tensor.shape, mul)) - {1}


def _num_rows(want: torch.Tensor, num_tokens: int | None) -> int:
    """The number of tokens when the trace tells it and the shape agrees, else the first dim above 1."""
    if num_tokens is not None and (num_tokens == 1 or num_tokens in _edges(want)):
        return num_tokens
    return next((size for size in want.shape if size > 1), 1)


def _coarser(got: torch.Tensor, want: torch.Tensor) -> str:
    return str(min((got.dtype, want.dtype), key=lambda dtype: dtype.itemsize)).removeprefix("torch.")


def _line(row: Divergence) -> str:
    return f"  {'ok  ' if row.within else 'DIFF'} {row.name:<44} {row.reason or row.numbers}"


def _few(names: Iterable[str]) -> str:
    found = list(names)
    more = len(found) - _SHOWN_NAMES
    return ", ".join(found[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "") if found else "none"
