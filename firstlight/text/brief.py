"""Values of a client inside of messages: short, whatever their size and depth."""

from __future__ import annotations

import reprlib
from typing import Any


class _Brief(reprlib.Repr):
    """Eighty characters of a text, the first levels of anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 80
        self.maxlevel = 3


def brief(value: Any) -> str:
    """How a value looks, in a hundred characters or so."""
    text = _Brief().repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
