"""From planned moves to tensors in memory: mapped where the bytes already fit, cast or unpacked where they do not.

Letters: O I rows and columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from firstlight.ops.experts import UNPACK, Bank
from firstlight.spec.errors import CapacityError
from firstlight.spec.model import ModelSpec, TensorSpec
from firstlight.spec.weights import NameMap
from firstlight.weights.checkpoint import Checkpoint
from firstlight.weights.header import Entry
from firstlight.weights.ledger import BANK, PAIRS, Format, Move, Plan, Report, bank_of, match
from firstlight.weights.memory import available_bytes
from firstlight.weights.problems import Problems

DTYPES = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "uint8": torch.uint8, "int8": torch.int8,
    "int32": torch.int32, "int64": torch.int64,
}
LIGHT_BYTES = 1 << 20
"""A light check looks at the numbers of tensors up to this size (norms, biases, decay vectors), of all that are cast, and at every scale."""
FULL_BYTES = 1 << 30
"""Checkpoints up to this size are checked in full when nothing else is asked for."""
PIECE = 1 << 22
"""Elements looked at together, so that a check of a large tensor needs little memory."""
NAN_SCALE, NAN_CODE = 255, 0x7F
"""Of E8M0; of E4M3, whatever its sign."""

Check = Literal["auto", "light", "full"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """Parameters by name, banks of experts by the name of their module, and what was done."""

    tensors: Mapping[str, Tensor]
    banks: Mapping[str, Bank]
    report: Report


def load(
    checkpoint: Checkpoint, spec: ModelSpec, names: NameMap, *, memory_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None, check: Check = "auto",
) -> Loaded:
    """Load every parameter exactly once; `progress` gets (tensors done, all).

    Raises:
        CheckpointError: names, shapes, formats or numbers are wrong; all that was found is listed.
        CapacityError: the parameters need more than `memory_bytes` (what the system says is available when not given).
    """
    wanted = {each.name: each for each in spec.weights()}
    tied = {"head.weight": "embed.weight"} if spec.tied else None
    plan = match(checkpoint.entries.values(), wanted.values(), names, str(checkpoint.folder), tied=tied)
    _refuse_too_large(plan, memory_bytes)
    checkpoint.read_ahead()
    full = check == "full" or (check == "auto" and checkpoint.num_bytes <= FULL_BYTES)
    problems = Problems()
    found: dict[tuple[str, str, int | None], Tensor] = {}
    for done, move in enumerate(plan.moves):
        found[move.param, move.facet, move.expert] = _move(checkpoint, move, full, problems)
        if progress is not None:
            progress(done + 1, len(plan.moves))
    for entry, twin in plan.twins:
        _compare(checkpoint, entry, twin, problems)
    problems.raise_if_any(str(checkpoint.folder))
    tensors = {param: tensor for (param, facet, _), tensor in found.items() if facet == "value" and bank_of(param) is None}
    tensors |= {param: _unpacked(found, wanted[param]) for param in plan.unpacked}
    banks = {name: _bank(found, name, count, plan.report.expert_formats[name]) for name, count in plan.banks.items()}
    return Loaded(tensors, banks, plan.report)


def _refuse_too_large(plan: Plan, memory_bytes: int | None) -> None:
    free = available_bytes() if memory_bytes is None else memory_bytes
    need = plan.report.memory_bytes
    if free is not None and need > free:
        raise CapacityError(
            f"the parameters need {need:,} bytes of memory, {free:,} bytes are available",
            "Use a machine with more memory, a smaller model, or dtype='auto' instead of 'float32'.")


def _move(checkpoint: Checkpoint, move: Move, full: bool, problems: Problems) -> Tensor:
    raw: Tensor = checkpoint.tensor(move.entry.name)
    if move.facet in ("scale", "codes"):
        raw = raw.view(torch.uint8)  # E8M0 and E4M3 are bytes to us; a conversion would round or lose their values
    if move.half is not None:
        raw = raw.unflatten(-2, (2, -1)).select(-3, move.half)
    _check_numbers(raw, move, full, problems)
    fitted = raw if tuple(raw.shape) == move.shape else _fitted(raw, move, problems)
    cast = fitted.to(DTYPES[move.dtype])
    if cast.dtype is not fitted.dtype and (num_lost := _num_broken(cast) - _num_broken(fitted)):
        problems.add("not finite", f"{move.entry.name} ({num_lost:,} values are beyond the range of {move.dtype})")
    return cast


def _check_numbers(raw: Tensor, move: Move, full: bool, problems: Problems) -> None:
    if move.facet == "scale":
        num_nan = int((raw == NAN_SCALE).sum())
        if num_nan:
            problems.add("not finite", f"{move.entry.name} ({num_nan:,} scales are NaN)")
    elif move.facet == "codes" and full:
        num_nan = sum(int(((piece & NAN_CODE) == NAN_CODE).sum()) for piece in raw.reshape(-1).split(PIECE))
        if num_nan:
            problems.add("not finite", f"{move.entry.name} ({num_nan:,} codes are NaN)")
    elif move.facet in ("value", "block_scale") and (full or move.entry.num_bytes <= LIGHT_BYTES or raw.dtype is not DTYPES[move.dtype]):
        num_broken = _num_broken(raw)
        if num_broken:
            problems.add("not finite", f"{move.entry.name} ({num_broken:,} values are NaN or infinite)")


def _compare(checkpoint: Checkpoint, entry: Entry, twin: Entry, problems: Problems) -> None:
    """Tensors that are said to be one must be so to the last bit."""
    ours, theirs = (checkpoint.tensor(each.name).reshape(-1).view(torch.uint8) for each in (entry, twin))
    num_apart = sum(int((one != other).sum()) for one, other in zip(ours.split(PIECE), theirs.split(PIECE), strict=True))
    if num_apart:
        fact = f"{entry.name} and {twin.name} differ in {num_apart:,} of {entry.num_bytes:,} bytes, but tie_word_embeddings says that they are one"
        problems.add("untied", fact)


def _num_broken(values: Tensor) -> int:
    """How many values are NaN or infinite."""
    if not values.is_floating_point():
        return 0
    pieces = values.reshape(-1).split(PIECE)
    return sum(piece.numel() - int(torch.isfinite(piece).sum()) for piece in pieces)


def _fitted(raw: Tensor, move: Move, problems: Problems) -> Tensor:
    if raw.numel() == torch.Size(move.shape).numel():
        return raw.reshape(move.shape)
    flat = raw.reshape(-1, *move.shape[1:])
    kept, padding = flat[: move.shape[0]], flat[move.shape[0] :]
    if bool((padding != 0).any()):
        problems.add("padding", f"{move.entry.name} ({int((padding != 0).sum()):,} values beyond {move.shape[0]} are not zero)")
    return kept


def _unpacked(found: Mapping[tuple[str, str, int | None], Tensor], wanted: TensorSpec) -> Tensor:
    form = next(form for form, (codes, _) in PAIRS.items() if (wanted.name, codes, None) in found)
    codes_OI, scale = (found[wanted.name, facet, None] for facet in PAIRS[form])
    return UNPACK[form](codes_OI, scale).to(DTYPES[wanted.dtype])


def _bank(found: Mapping[tuple[str, str, int | None], Tensor], name: str, num_experts: int, form: Format) -> Bank:
    def pieces(leaf: str, facet: str) -> tuple[Tensor, ...]:
        stacked = found.get((f"{name}.{leaf}", facet, None))
        return tuple(stacked.unbind(0)) if stacked is not None else tuple(found[f"{name}.{leaf}", facet, e] for e in range(num_experts))

    if form == "dense":
        return Bank(form, *(pieces(leaf, "value") for leaf in BANK))
    codes, scale = PAIRS[form]
    return Bank(form, *(pieces(leaf, codes) for leaf in BANK), *(pieces(leaf, scale) for leaf in BANK))
