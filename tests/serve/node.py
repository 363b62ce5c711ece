"""Programs in JavaScript under tests/serve/npm, on packages that `make clients` installs there."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent / "npm"
LIMIT_S = 120.0
needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")


def run(program: str, *arguments: str | Path | int) -> Any:
    """What a program says: JSON on its standard output, after it ended well."""
    locked = json.loads((FOLDER / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    for place in filter(None, locked):
        file = FOLDER / place / "package.json"
        found = json.loads(file.read_text(encoding="utf-8"))["version"] if file.is_file() else None
        assert locked[place]["version"] == found, f"{place} is {found}: run `make clients`"
    done = subprocess.run(["node", FOLDER / program, *map(str, arguments)], capture_output=True, text=True, timeout=LIMIT_S)
    assert 0 == done.returncode, done.stderr + done.stdout
    return json.loads(done.stdout)
