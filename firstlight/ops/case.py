"""One input of the contract test, and the ways in which it is disturbed before a back-end sees it.

Letters as in declared.py. A pool is an argument whose suffix starts with S (slots or blocks): only parts of it belong to the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from firstlight.ops import declared as _declared  # noqa: F401  (fills the registry)
from firstlight.ops.registry import OPERATORS
from firstlight.spec.model import OpUse

HOST_ARGUMENTS = ("starts_N1", "contexts_N")
"""Arguments that stay on the CPU whatever the device, because the host reads them."""

DTYPES: tuple[tuple[str, torch.dtype], ...] = (("float32", torch.float32), ("bfloat16", torch.bfloat16))
Slack = Literal["columns", "steps"]


def normal(rng: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32, spread: float = 1.0) -> Tensor:
    """Gaussian values, drawn in fp32 and rounded to `dtype`, so that every dtype sees the same numbers."""
    return (torch.randn(*shape, generator=rng) * spread).to(dtype)


def starts_of(lengths: Iterable[int]) -> Tensor:
    """The N+1 borders of packed sequences with these lengths."""
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


def shuffled_tables(rng: torch.Generator, totals: Sequence[int], block: int) -> tuple[Tensor, int]:
    """Tables [N, B] of sequences with so many rows, over shuffled blocks of a pool, and the size of the pool in blocks.

    The pool is twice as large as needed; columns beyond the need hold -1.
    """
    needed = [-(-total // block) for total in totals]
    num_blocks = 2 * sum(needed) + 3
    spare = iter(torch.randperm(num_blocks, generator=rng).tolist())
    tables_NB = torch.full((len(totals), max(needed, default=0) + 3), -1, dtype=torch.int64)
    for n, count in enumerate(needed):
        tables_NB[n, :count] = torch.tensor([next(spare) for _ in range(count)], dtype=torch.int64)
    return tables_NB, num_blocks


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to every tensor inside lists, tuples and dataclasses."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{item.name: map_tensors(getattr(value, item.name), change) for item in dataclasses.fields(value)})
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """Every tensor inside lists, tuples and dataclasses, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found


def fill_garbage(tensor: Tensor) -> Tensor:
    """Fill with what must never be read: NaN, or the largest value of an integer dtype."""
    return tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)


def parameters_of(op: str) -> tuple[str, ...]:
    """Names of the positional parameters that an operator declares."""
    inside = OPERATORS[op].signature.split(")")[0].lstrip("(")
    return tuple(part.split("=")[0].strip() for part in inside.split("*")[0].split(",") if part.strip())


def letters_of(name: str) -> str:
    """The shape suffix of a parameter name, '' without one."""
    suffix = name.rpartition("_")[2]
    return suffix if suffix[:1].isupper() else ""


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Arguments of one call. `has_nan`: the definition itself yields NaN, elsewhere NaN means that garbage was read."""

    name: str
    use: OpUse
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    has_nan: bool = False

    def __repr__(self) -> str:
        return f"{self.use.op}-{self.name}"

    @property
    def named(self) -> dict[str, Any]:
        """Positional arguments by declared name."""
        return dict(zip(parameters_of(self.use.op), self.args, strict=False))

    @property
    def pools(self) -> tuple[str, ...]:
        """Names of the arguments that hold slots or blocks."""
        return tuple(name for name in self.named if letters_of(name).startswith("S"))

    def run(self, function: Callable[..., Any]) -> tuple[Any, ...]:
        """Call a form of the operator; always a tuple of outputs."""
        got = function(*self.args, **self.kwargs)
        return got if isinstance(got, tuple) else (got,)

    def clone(self) -> Case:
        """A copy that shares no memory."""
        return self.with_tensors(lambda _, tensor: tensor.clone())

    def to(self, device: str) -> Case:
        """A copy on a device, except what the host reads."""
        return self.with_tensors(lambda name, tensor: tensor.clone() if name in HOST_ARGUMENTS else tensor.to(device, copy=True))

    def with_tensors(self, change: Callable[[str, Tensor], Tensor]) -> Case:
        """A case whose tensors went through `change(name, tensor)`."""
        args = tuple(map_tensors(value, partial(change, name)) for name, value in self.named.items())
        kwargs = {name: map_tensors(value, partial(change, name)) for name, value in self.kwargs.items()}
        return dataclasses.replace(self, args=args, kwargs=kwargs)

    def strided(self, slack: Slack) -> Case:
        """The same values as views into larger garbage: slices of wider rows, or every second column. Pools get gaps between slots only."""
        pools = self.pools

        def widen(name: str, tensor: Tensor) -> Tensor:
            if name in HOST_ARGUMENTS or tensor.dim() == 0:
                return tensor.clone()
            return _spread_slots(tensor) if name in pools else _spread_columns(tensor, slack)

        return self.with_tensors(widen)

    def poisoned(self) -> Case:
        """A copy whose pools hold NaN wherever the batch must not look."""
        live = {name: self.live(name) for name in self.pools}

        def poison(name: str, tensor: Tensor) -> Tensor:
            copy = tensor.clone()
            if name in live:
                copy[~live[name].to(copy.device)] = torch.nan
            return copy

        return self.with_tensors(poison)

    def live(self, name: str) -> Tensor:
        """Mask of a pool's slots (or blocks and rows) that hold something the batch may read."""
        named, pool = self.named, self.named[name]
        contexts: Sequence[int] = named["contexts_N"].tolist()
        if "slots_N" in named:
            mask = torch.zeros(pool.shape[0], dtype=torch.bool)
            for slot, context in zip(named["slots_N"].tolist(), contexts, strict=True):
                mask[slot] = context > 0
            return mask
        mask = torch.zeros(pool.shape[:2], dtype=torch.bool)
        lengths = named["starts_N1"].diff().tolist()
        for blocks, context, length in zip(named["tables_NB"].tolist(), contexts, lengths, strict=True):
            for position in range(context + length):
                mask[blocks[position // pool.shape[1]], position % pool.shape[1]] = True
        return mask


def _spread_slots(pool: Tensor) -> Tensor:
    buffer = fill_garbage(pool.new_empty(pool.shape[0], pool[0].numel() + 3 if len(pool) else 3))
    inner = torch.empty(pool.shape[1:]).stride()
    view = buffer.as_strided(pool.shape, (buffer.stride(0), *inner), 1)
    return view.copy_(pool)


def _spread_columns(tensor: Tensor, slack: Slack) -> Tensor:
    width = tensor.shape[-1]
    buffer = fill_garbage(tensor.new_empty(*tensor.shape[:-1], 2 * width + 3))
    view = buffer[..., 1:1 + width] if slack == "columns" else buffer[..., 1:1 + 2 * width:2]
    return view.copy_(tensor)
