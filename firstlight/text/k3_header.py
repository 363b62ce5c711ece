"""The inside of a Kimi K3 tag, collected after its first mark; models leave the last mark out at times.

Source: the tag syntax of encoding_k3.py of moonshotai/Kimi-K3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

OPEN = "<|open|>"
CLOSE = "<|close|>"
SEP = "<|sep|>"
END = "<|end_of_msg|>"

_BARE = ("think", "response", "tools")
_WITH_ATTRIBUTES = ("call", "argument", "json", "message")
_MAX_LENGTH = 4096
"""Longer than any header with a name and a key; what follows cannot be one."""

_WORD = r"[\w.:-]+"
_ATTRIBUTE = re.compile(rf'({_WORD})="([^"]*)"')
_BEGINNING = re.compile(rf'\s*(?:{_WORD}(?:\s+{_WORD}="[^"]*")*(?:\s+(?:{_WORD}(?:=(?:"[^"]*)?)?)?)?)?')
"""Whatever can still become a tag; every beginning of a match matches."""


@dataclass(frozen=True, slots=True)
class Tag:
    """A recognized tag with its attributes, unescaped."""

    opening: bool
    name: str
    attributes: Mapping[str, str] = field(default_factory=dict)


Settled = tuple[Tag | None, str]
"""The tag if there was one, and text that did not belong to it."""


class Header:
    """Text after an opening or closing mark, until it is known what it was."""

    def __init__(self, *, opening: bool) -> None:
        self._opening = opening
        self._bare = _BARE if opening else _BARE + _WITH_ATTRIBUTES
        self._long = _WITH_ATTRIBUTES if opening else ()
        self._text = ""

    def feed(self, text: str) -> Settled | None:
        """None while it may still become a tag; else a tag whose last mark is missing, or no tag at all."""
        self._text += text
        inner = self._text.lstrip()
        if len(self._text) <= _MAX_LENGTH:
            if any(name.startswith(inner) for name in self._bare + self._long):
                return None
            name = self._bare_name(inner)
            if name is None and _BEGINNING.fullmatch(self._text):
                return None
            if name is not None and not inner[len(name) :].strip():
                return None
        return self._short(inner)

    def cut(self) -> Settled:
        """Another mark or the end came first."""
        inner = self._text.strip()
        unfinished = any(name.startswith(inner) for name in self._bare + self._long)
        unfinished = unfinished or (inner.startswith(self._long) and _BEGINNING.fullmatch(self._text) is not None)
        if self._bare_name(inner) is None and unfinished:
            return None, ""
        return self._short(inner)

    def complete(self) -> Tag | None:
        """The last mark came; None for a tag that nobody knows."""
        words = self._text.split(None, 1)
        if not words or words[0] not in _BARE + _WITH_ATTRIBUTES:
            return None
        attributes = {key: _unescape(value) for key, value in _ATTRIBUTE.findall(words[1])} if len(words) > 1 else {}
        return Tag(self._opening, words[0], attributes)

    def _bare_name(self, inner: str) -> str | None:
        return next((name for name in self._bare if inner.startswith(name)), None)

    def _short(self, inner: str) -> Settled:
        """A known name stands for its tag and the rest is text; without one, only the mark is dropped."""
        name = self._bare_name(inner)
        return (None, self._text) if name is None else (Tag(self._opening, name), inner[len(name) :])


def escape(value: str) -> str:
    """An attribute value as it stands between quotes."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def _unescape(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")
