"""Settings for all tests: the same random inputs on every run, unless `--hypothesis-profile nightly` asks for new ones."""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("nightly", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where clients of others may be installed; left out: they are not run."""
    parser.addoption("--clients", metavar="FOLDER", help="folder for the environments of clients that other people wrote")
