"""A grammar in the making, in the notation that llguidance reads: names for rules, control tokens by id, schemas in place.

Source: docs/syntax.md of guidance-ai/llguidance.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from llguidance import regex_to_lark

from firstlight.spec.structured import Choice, JsonSchema, Structure
from firstlight.text.grammar_schema import embedded
from firstlight.text.zone import Pieces

# What is forced is forced by the mask alone: the model spells it as it likes.
_HEAD = '%llguidance {"no_forcing": true}'
_ANY_TEXT = "/(?s:.*)/"


class Rules:
    """Collects rules; every method that adds one returns what stands for it in others."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._names: dict[str, str] = {}

    def render(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join([_HEAD, f"start: {start or empty()}", *self._lines])

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._lines)

    def forget(self, count: int) -> None:
        """Drop all but the first `count`, which must not use later ones."""
        self._lines = self._lines[:count]
        self._names = dict(list(self._names.items())[:count])

    def rule(self, body: str, *, option: str = "") -> str:
        """A rule; equal ones share a name."""
        return self._named("r", body, option)

    def terminal(self, body: str) -> str:
        """A piece of text by regular expression: what stands next to it cannot be mixed into it."""
        return self._named("T", body, "")

    def text(self) -> str:
        """Any text without a control token."""
        return self.terminal(_ANY_TEXT)

    def text_up_to(self, mark: str) -> str:
        """Any text up to the first occurrence of `mark`, and the mark."""
        return self.rule(f"/(?s:.*){_quoted(mark)}/", option="[lazy]")

    def json(self, schema: Any, *, strict: bool) -> str:
        """A JSON value under a schema."""
        return self.rule(f"%json {embedded(schema, strict=strict)}")

    def regex(self, pattern: str) -> str:
        """Text that a pattern matches as a whole."""
        return self.terminal(f"/{regex_to_lark(pattern, 'dw')}/")

    def structure(self, structure: Structure) -> str:
        """A whole answer."""
        if isinstance(structure, JsonSchema):
            return self.json(structure.schema, strict=structure.strict)
        if isinstance(structure, Choice):
            return self.rule(one_of(literal(option) for option in structure.options))
        return self.regex(structure.pattern)

    def _named(self, prefix: str, body: str, option: str) -> str:
        key = f"{option}: {body}"
        if key not in self._names:
            self._names[key] = f"{prefix}{len(self._names)}"
            self._lines.append(f"{self._names[key]}{key}")
        return self._names[key]


def literal(text: str) -> str:
    """Exactly this text."""
    return json.dumps(text)


def token(ids: Iterable[int]) -> str:
    """One token of these, by id."""
    return f"<[{','.join(map(str, sorted(ids)))}]>"


def marks(pieces: Pieces) -> str:
    """Control tokens and text, exactly in this order."""
    return joined(*(token([piece]) if isinstance(piece, int) else literal(piece) for piece in pieces if piece != ""))


def joined(*parts: str) -> str:
    """One after the other; parts may be empty."""
    return " ".join(part for part in parts if part)


def one_of(parts: Iterable[str]) -> str:
    """Any one of these; an empty one means that nothing need come."""
    found: Sequence[str] = list(dict.fromkeys(parts))
    return f"({' | '.join(part or empty() for part in found)})" if len(found) > 1 else found[0]


def empty() -> str:
    """Nothing, where the notation wants something."""
    return '""'


def _quoted(text: str) -> str:
    """Text inside a regular expression between slashes."""
    return "".join(f"\\x{{{ord(letter):x}}}" if not letter.isalnum() else letter for letter in text)
