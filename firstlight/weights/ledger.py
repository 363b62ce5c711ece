"""Double entry for weights: every checkpoint tensor is used once or left out with a reason, every parameter is written once.

Works on names, shapes and dtypes alone, so that a terabyte is checked in seconds. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from firstlight.spec.model import TensorSpec
from firstlight.spec.weights import Fit, Landing, NameMap, Skip
from firstlight.weights.header import Entry
from firstlight.weights.problems import Problems

Facet = Literal["value", "packed", "scale", "codes", "block_scale"]
Format = Literal["dense", "mxfp4", "fp8"]
GROUP = 32  # columns that share one scale in MXFP4
BLOCK = 128  # rows and columns that share one scale in FP8
BANK = ("gate", "up", "down")
FUSED = "gate_up"  # not a parameter: gate and up of all experts, one below the other

_CASTABLE = frozenset({"float32", "float16", "bfloat16", "float64"})
_ALLOWED: Mapping[Facet, Iterable[str]] = {
    "packed": ("uint8",), "scale": ("uint8", "float8_e8m0"), "codes": ("float8_e4m3",), "block_scale": ("float32", "bfloat16"),
}
PAIRS: Mapping[Format, tuple[Facet, Facet]] = {"mxfp4": ("packed", "scale"), "fp8": ("codes", "block_scale")}
"""What holds the values of a packed format, and what scales them."""
PACKED: tuple[Facet, ...] = ("packed", "codes")
_SUFFIXES: tuple[tuple[str, str, Facet], ...] = (
    (".packed", "", "packed"), (".scale", "", "scale"), (".packed", ".weight", "packed"), (".scale", ".weight", "scale"),
    ("_packed", "", "packed"), ("_scale", "", "scale"), ("_scale_inv", "", "block_scale"),
)


@dataclass(frozen=True, slots=True)
class Move:
    """One checkpoint tensor on its way: into `param` (or its packed codes or scales), in `shape` and `dtype` (of codes: as bytes).

    `expert` is its place in a bank; None in a bank: the tensor is stacked over all experts. `half`: which half of its rows is meant (0, 1)
    when gate and up of all experts lie in one tensor; None: all of it.
    """

    entry: Entry
    param: str
    facet: Facet
    expert: int | None
    shape: tuple[int, ...]
    dtype: str
    fit: Fit
    half: int | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What a load did: counts of tensors, logical parameters, bytes on disk and in memory (`mapped_bytes` of those without a copy)."""

    num_tensors: int
    num_params: int
    num_skipped: Mapping[str, int]
    expert_formats: Mapping[str, Format]
    checkpoint_bytes: int
    memory_bytes: int
    mapped_bytes: int

    def summary(self) -> str:
        """A few lines for people."""
        lines = [
            f"{self.num_tensors:,} tensors, {_size(self.checkpoint_bytes)} on disk, hold {self.num_params:,} parameters",
            f"{_size(self.memory_bytes)} in memory, {_size(self.mapped_bytes)} of it mapped without a copy",
        ]
        formats = Counter(self.expert_formats.values())
        lines += [f"{count:,} banks of experts in {form}" for form, count in formats.items()]
        lines += [f"{count:,} tensors left out ({reason})" for reason, count in self.num_skipped.items()]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Plan:
    """Moves in the order of the bytes on disk. `unpacked` names parameters outside of banks that are stored packed.

    `twins` pairs tensors that no parameter needs with the ones whose bytes they must repeat.
    """

    moves: tuple[Move, ...]
    banks: Mapping[str, int]
    unpacked: frozenset[str]
    report: Report
    twins: tuple[tuple[Entry, Entry], ...] = ()


def bank_of(param: str) -> str | None:
    """`layers.3.ffn.experts` for `layers.3.ffn.experts.gate`; None for a parameter of its own."""
    key, _, leaf = param.rpartition(".")
    return key if leaf in BANK and key.rpartition(".")[2] == "experts" else None


def match(
    entries: Iterable[Entry], wanted: Iterable[TensorSpec], names: NameMap, where: str, *, tied: Mapping[str, str] | None = None
) -> Plan:
    """Decide every move. Raises CheckpointError with all that does not add up; `where` names the checkpoint in it.

    `tied` pairs parameters that the model does not have with those that stand in for them: a checkpoint may hold them too.
    """
    ledger = _Ledger(wanted, names, tied or {})
    for entry in entries:
        ledger.post(entry)
    ledger.settle()
    ledger.problems.raise_if_any(where)
    return ledger.plan()


class _Ledger:
    """The open book: what has landed where, until it is settled."""

    def __init__(self, wanted: Iterable[TensorSpec], names: NameMap, tied: Mapping[str, str]) -> None:
        self.problems = Problems()
        self._tied = tied
        self._repeated: dict[str, Entry] = {}
        self._specs = {spec.name: spec for spec in wanted}
        self._names = names
        self._moves: list[Move] = []
        self._skipped: Counter[str] = Counter()
        self._seen: list[str] = []
        self._modules: set[str] = set()
        self._checkpoint_bytes = 0
        self._landed: dict[str, dict[tuple[Facet, int | None], Entry]] = {}
        self._formats: dict[str, Format] = {}

    def post(self, entry: Entry) -> None:
        """Book one checkpoint tensor."""
        self._seen.append(entry.name)
        self._checkpoint_bytes += entry.num_bytes
        found = self._names.find(entry.name)
        if found is None:
            self.problems.add("unexpected", entry.name)
        elif isinstance(found, Skip):
            self._skipped[found.reason] += 1
        elif bank_of(found.param.removesuffix("_up")) and found.param.endswith(FUSED):
            for half, leaf in enumerate(BANK[:2]):
                self._land(entry, replace(found, param=found.param.removesuffix(FUSED) + leaf), half)
        else:
            self._land(entry, found)

    def settle(self) -> None:
        """Close the book: every parameter complete, every bank in one format."""
        by_bank: dict[str, dict[Format, Entry]] = {}
        for spec in self._specs.values():
            bank = bank_of(spec.name)
            for form, entry in self._complete(spec):
                if bank is not None:
                    by_bank.setdefault(bank, {}).setdefault(form, entry)
        for param, entry in self._repeated.items():
            twin = self._landed.get(self._tied[param], {}).get(("value", None))
            if twin is None:
                self.problems.add("untied", f"{entry.name} has no plain {self._tied[param]} beside it to repeat")
            elif (twin.shape, twin.dtype) != (entry.shape, entry.dtype):
                told = f"{entry.name} is {entry.dtype} {list(entry.shape)}, {twin.name} is {twin.dtype} {list(twin.shape)}"
                self.problems.add("untied", told)
        for bank, formats in by_bank.items():
            if len(formats) > 1:
                told = " and ".join(f"{entry.name} {form}" for form, entry in formats.items())
                self.problems.add("mixed formats", f"{bank} has {told}")
            self._formats[bank] = next(iter(formats))

    def plan(self) -> Plan:
        """The settled book."""
        moves = sorted(self._moves, key=lambda move: (move.entry.file, move.entry.offset))
        banks = {bank: self._specs[f"{bank}.gate"].shape[0] for bank in self._formats}
        unpacked = frozenset(move.param for move in moves if move.facet in PACKED and bank_of(move.param) is None)
        kept = [move for move in moves if move.param not in unpacked]
        memory = sum(_memory_bytes(move) for move in kept) + sum(self._specs[name].num_bytes for name in unpacked)
        mapped = sum(_memory_bytes(move) for move in kept if _same_bytes(move))
        twins = tuple((entry, self._landed[self._tied[param]]["value", None]) for param, entry in self._repeated.items())
        report = Report(
            len(self._seen), sum(spec.num_elements for spec in self._specs.values()), dict(self._skipped), self._formats,
            self._checkpoint_bytes, memory, mapped)
        return Plan(tuple(moves), banks, unpacked, report, twins)

    def _land(self, entry: Entry, landing: Landing, half: int | None = None) -> None:
        param, facet = self._facet(landing.param)
        spec = self._specs.get(param)
        if spec is None and param in self._tied and param not in self._repeated:
            self._repeated[param] = entry
            self._skipped[f"repeats {self._tied[param]}, which the head is tied to"] += 1
            return
        if spec is None:
            self.problems.add("unexpected", f"{entry.name} (the model has no {landing.param})")
            return
        in_bank = bank_of(param) is not None
        if landing.expert is not None and (not in_bank or landing.expert >= spec.shape[0]):
            there = f"{spec.shape[0]} experts" if in_bank else "no experts"
            self.problems.add("unexpected", f"{entry.name} ({param} has {there})")
            return
        if facet == "value" and entry.dtype == "float8_e4m3" and len(spec.shape) - in_bank > 1:
            facet = "codes"
        landed = self._landed.setdefault(param, {})
        if (facet, landing.expert) in landed:
            self.problems.add("duplicated", f"{entry.name} and {landed[facet, landing.expert].name} both hold {param}")
            return
        landed[facet, landing.expert] = entry
        self._check(entry, landing, spec, facet, half)

    def _facet(self, param: str) -> tuple[str, Facet]:
        """The parameter that a landing belongs to, and whether it brings values, packed codes or scales."""
        if param in self._specs:
            return param, "value"
        for suffix, instead, facet in _SUFFIXES:
            base = param.removesuffix(suffix) + instead
            if param.endswith(suffix) and base in self._specs:
                return base, facet
        return param, "value"

    def _check(self, entry: Entry, landing: Landing, spec: TensorSpec, facet: Facet, half: int | None) -> None:
        shape = spec.shape if landing.expert is None else spec.shape[1:]
        allowed: Iterable[str] = _ALLOWED.get(facet, ())
        if facet == "value":
            allowed = _CASTABLE if spec.dtype in _CASTABLE else (spec.dtype,)
        elif facet == "block_scale":
            shape = (*shape[:-2], *(-(-size // BLOCK) for size in shape[-2:]))
        elif facet != "codes":
            columns, whole = divmod(shape[-1], 2 if facet == "packed" else GROUP)
            if whole or len(shape) < 2:
                self.problems.add("misshapen", f"{entry.name} is {facet}, but {spec.name} is {list(shape)}, no multiple of {GROUP} columns")
                return
            shape = (*shape[:-1], columns)
        whole_shape = shape if half is None else (*shape[:-2], 2 * shape[-2], shape[-1])
        wrong_dtype, wrong_shape = entry.dtype not in allowed, not fits(entry.shape, whole_shape, landing.fit)
        if half == 1 and (wrong_dtype or wrong_shape):
            return  # said of the first half
        if wrong_dtype:
            self.problems.add("wrong dtype", f"{entry.name} is {entry.dtype}, {' or '.join(sorted(allowed))} can be read")
        elif wrong_shape:
            self.problems.add("misshapen", f"{entry.name} is {list(entry.shape)}, {list(whole_shape)} is needed")
        else:
            dtype = spec.dtype if facet == "value" else "float32" if facet == "block_scale" else "uint8"
            self._moves.append(Move(entry, spec.name, facet, landing.expert, shape, dtype, landing.fit, half))

    def _complete(self, spec: TensorSpec) -> Iterator[tuple[Format, Entry]]:
        """Each format in which a complete piece of the parameter is there, with a tensor as witness."""
        landed = self._landed.get(spec.name, {})
        if not landed:
            self.problems.add("missing", self._told_origin(spec.name, 0 if bank_of(spec.name) else None))
            return
        stacked = {facet: entry for (facet, expert), entry in landed.items() if expert is None}
        if bank_of(spec.name) is None or len(stacked) == len(landed):
            yield from self._pieces(spec.name, stacked)
            return
        pieces: dict[int, dict[Facet, Entry]] = {}
        for (facet, expert), entry in landed.items():
            if expert is None:
                self.problems.add("duplicated", f"{entry.name} holds all experts of {spec.name}, which are there one by one too")
            else:
                pieces.setdefault(expert, {})[facet] = entry
        for piece in pieces.values():
            yield from self._pieces(spec.name, piece)
        self._note_gaps(spec, pieces.keys())

    def _pieces(self, param: str, found: Mapping[Facet, Entry]) -> Iterator[tuple[Format, Entry]]:
        if "value" in found:
            yield "dense", found["value"]
        for form, (codes, scale) in PAIRS.items():
            if codes in found and scale in found:
                yield form, found[codes]
            elif codes in found:
                self.problems.add("unpaired", f"{found[codes].name} has no scale")
            elif scale in found:
                self.problems.add("unpaired", f"{found[scale].name} has no packed codes")
        if "value" in found and len(found) > 1 and bank_of(param) is None:
            other = next(entry for facet, entry in found.items() if facet != "value")
            self.problems.add("mixed formats", f"{found['value'].name} and {other.name} both hold {param}")

    def _note_gaps(self, spec: TensorSpec, present: Iterable[int]) -> None:
        gaps = sorted(set(range(spec.shape[0])) - set(present))
        if gaps:
            packed = any(facet in PAIRS["mxfp4"] for facet, _ in self._landed[spec.name])
            example = self._told_origin(spec.name + (".packed" if packed else ""), gaps[0])
            listed = ", ".join(str(gap) for gap in gaps[:4]) + (", ..." if len(gaps) > 4 else "")
            self.problems.add("expert gap", f"{spec.name} lacks {len(gaps):,} of {spec.shape[0]:,} experts: {listed} ({example})")

    def _told_origin(self, param: str, expert: int | None) -> str:
        """What the absent tensor is called in the checkpoint: of several names, the one whose neighbours are there."""
        names = self._names.origins(param, expert)
        if not names:
            return param
        if len(names) > 1 and not self._modules:
            self._modules = {module for name in self._seen for module in _modules(name)}
        known = [sum(module in self._modules for module in _modules(name)) for name in names]
        return f"{names[known.index(max(known))]} for {param}"


def _modules(name: str) -> Iterator[str]:
    """`a.b` and `a` of `a.b.c`."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def fits(found: tuple[int, ...], wanted: tuple[int, ...], fit: Fit) -> bool:
    """Whether a tensor of one shape may stand for another under a rule."""
    if found == wanted:
        return True
    if fit == "exact":
        return False
    bare, need = _bare(found), _bare(wanted)
    if bare == need:
        return True
    return fit == "pad" and len(bare) == len(wanted) > 0 and bare[0] > wanted[0] and bare[1:] == wanted[1:]


def _bare(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.2f} MiB"


def _same_bytes(move: Move) -> bool:
    return move.facet in ("packed", "scale", "codes") or move.entry.dtype == move.dtype


def _memory_bytes(move: Move) -> int:
    return TensorSpec(move.param, move.shape, move.dtype).num_bytes
