"""What a safetensors file says it holds, checked to the last byte before anything is mapped. No torch.

Source: huggingface/safetensors README, section "Format": 8 bytes length, JSON header, one buffer without holes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firstlight.weights.problems import Problems

# Name in the file -> (our name, bits per element).
DTYPES: dict[str, tuple[str, int]] = {
    "BOOL": ("bool", 8), "U8": ("uint8", 8), "I8": ("int8", 8), "I16": ("int16", 16), "U16": ("uint16", 16), "I32": ("int32", 32),
    "U32": ("uint32", 32), "I64": ("int64", 64), "U64": ("uint64", 64), "F16": ("float16", 16), "BF16": ("bfloat16", 16),
    "F32": ("float32", 32), "F64": ("float64", 64), "C64": ("complex64", 64), "F8_E4M3": ("float8_e4m3", 8), "F8_E5M2": ("float8_e5m2", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8), "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8), "F8_E8M0": ("float8_e8m0", 8),
    "F6_E2M3": ("float6_e2m3", 6), "F6_E3M2": ("float6_e3m2", 6), "F4": ("float4_e2m1", 4),
}

MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own reader
MAX_NAME = 1024
MAX_SHOWN = 60
_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor on disk; `offset` counts from the beginning of the file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    offset: int
    num_bytes: int


class _Damage(Exception):
    """Why a whole header, or one tensor of it, cannot be believed."""


def read_header(file: Path, problems: Problems) -> list[Entry]:
    """The tensors of one file in the order of their bytes; what is wrong goes to `problems` and is left out."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            if stream.read(len(_POINTER)) == _POINTER:
                problems.add("pointer", file.name)
                return []
            stream.seek(0)
            length = _length(stream.read(8), size)
            described = _decode(stream.read(length))
    except OSError as error:
        problems.add("unreadable", f"{file.name} ({error.strerror})")
        return []
    except _Damage as damage:
        problems.add("damaged", f"{file.name} {damage}")
        return []
    return _entries(file, described, 8 + length, size, problems)


def _length(prefix: bytes, size: int) -> int:
    """Bytes of the JSON header."""
    if len(prefix) < 8:
        raise _Damage(f"is cut off: {size} bytes, no header")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise _Damage(f"is no safetensors file: header of {length:,} bytes, {MAX_HEADER_BYTES:,} is the limit")
    if 8 + length > size:
        raise _Damage(f"is cut off: {size:,} bytes, its header alone takes {8 + length:,}")
    return length


def _decode(text: bytes) -> dict[str, Any]:
    if not text.startswith(b"{"):
        raise _Damage("has a header that is no JSON object")
    try:
        header: dict[str, Any] = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except ValueError as error:
        raise _Damage(f"has a header that is no JSON: {error}") from None
    except RecursionError:
        raise _Damage("has a header that is nested too deeply") from None
    remarks = header.pop("__metadata__", None)
    if remarks is not None and not (isinstance(remarks, dict) and all(isinstance(value, str) for value in remarks.values())):
        raise _Damage("has a __metadata__ that does not pair strings with strings")
    return header


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Damage(f"describes {key} twice")
        found[key] = value
    return found


def _entries(file: Path, described: dict[str, Any], data_begin: int, size: int, problems: Problems) -> list[Entry]:
    found: list[Entry] = []
    for name, facts in described.items():
        try:
            found.append(_entry(file, name, facts, data_begin, size))
        except _Damage as damage:
            problems.add("damaged", f"{name if _plain(name) else ascii(name[:MAX_SHOWN])} in {file.name} {damage}")
    found.sort(key=lambda entry: (entry.offset, entry.num_bytes))
    if len(found) == len(described):
        _check_cover(file, found, data_begin, size, problems)
    return found


def _entry(file: Path, name: str, facts: Any, data_begin: int, size: int) -> Entry:
    if not _plain(name):
        raise _Damage(f"has a name of {len(name):,} characters that cannot be shown")
    if not isinstance(facts, dict) or not {"dtype", "shape", "data_offsets"} <= facts.keys():
        raise _Damage("lacks dtype, shape or data_offsets")
    shape, offsets = _counts(facts["shape"]), _counts(facts["data_offsets"])
    if shape is None or offsets is None or len(offsets) != 2:
        raise _Damage(f"has shape {repr(facts['shape'])[:MAX_SHOWN]} and data_offsets {repr(facts['data_offsets'])[:MAX_SHOWN]}")
    if not isinstance(facts["dtype"], str) or facts["dtype"] not in DTYPES:
        raise _Damage(f"has an unknown dtype {repr(facts['dtype'])[:MAX_SHOWN]}")
    dtype, bits = DTYPES[facts["dtype"]]
    begin, end = offsets
    wanted = math.prod(shape) * bits
    if max(wanted, end) >= 1 << 63:
        raise _Damage("has sizes beyond 64 bits")
    if (end - begin) * 8 != wanted:
        raise _Damage(f"has {end - begin:,} bytes, {list(shape)} of {dtype} take {-(-wanted // 8):,}")
    if data_begin + end > size:
        raise _Damage(f"is cut off: ends at byte {data_begin + end:,} of a file of {size:,}")
    return Entry(name, shape, dtype, file, data_begin + begin, end - begin)


def _plain(name: str) -> bool:
    return name.isprintable() and len(name) <= MAX_NAME


def _counts(value: Any) -> tuple[int, ...] | None:
    right = isinstance(value, list) and all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in value)
    return tuple(value) if right else None


def _check_cover(file: Path, entries: list[Entry], data_begin: int, size: int, problems: Problems) -> None:
    """Every byte belongs to exactly one tensor."""
    at, before = data_begin, "the header"
    for entry in entries:
        if entry.offset < at:
            problems.add("damaged", f"{entry.name} in {file.name} overlaps {before} by {at - entry.offset:,} bytes")
        elif entry.offset > at:
            problems.add("damaged", f"{entry.name} in {file.name} leaves {entry.offset - at:,} unused bytes after {before}")
        at, before = max(at, entry.offset + entry.num_bytes), entry.name
    if at < size:
        problems.add("damaged", f"{file.name} has {size - at:,} bytes after its last tensor")
