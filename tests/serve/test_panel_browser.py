"""The panel in a real browser, against a real server process: it loads, moves, asks for the key, and says when the server is gone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.serve.node import needs_npm, run
from tests.serve.process import server

CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.slow, needs_npm, pytest.mark.skipif(CHROMIUM is None, reason="Debian's chromium is not installed")]
KEY = "a-key-for-the-panel"


@pytest.mark.parametrize("scene", ["watch", "dark"])
def test_a_person_watches_a_server(scene: str, tmp_path: Path) -> None:
    """Under load and until its end; in a small window in the dark. Nothing is asked of anybody else."""
    with server("--api-key", KEY, "--cache-bytes", "8MiB", "--max-sequences", "3") as process:
        found = run("panel.mjs", scene, CHROMIUM, process.url, KEY, process.process.pid, tmp_path)
        assert ([], True) == (found["outside"], found["count"] >= 2)
        assert (scene == "watch") == (process.process.poll() is not None), "the first scene ends with the server's death"
