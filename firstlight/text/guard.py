"""Keeps text that users wrote from becoming control tokens in a prompt that a template renders as one string."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from firstlight.spec.errors import RequestError

# Noncharacters: valid in Unicode text, assigned to nothing for ever, no spaces to strip.
_SEALS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


class Guard:
    """Puts a seal inside every spelling of a control token, whole or cut off at the end of a text; `open` takes the seals out again.

    A sealed text is no spelling any more, neither alone nor joined to its neighbours, so whatever the template does
    with it, only spellings of the template itself are found in the result.
    """

    def __init__(self, spellings: Collection[str], values: Any) -> None:
        self._spellings = [spelling for spelling in spellings if len(spelling) > 1]
        whole = "|".join(f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in self._spellings)
        self._whole = re.compile(whole or r"(?!)")
        self._beginnings = {text[:length] for text in self._spellings for length in range(1, len(text))}
        self._reach = max(map(len, self._beginnings), default=0)
        self.seal = _free_seal(values)

    def sealed(self, value: Any) -> Any:
        """A copy of plain values in which every text is sealed; keys of objects too."""
        if isinstance(value, str):
            return self._seal(value)
        if isinstance(value, Mapping):
            return {self._seal(str(key)): self.sealed(item) for key, item in value.items()}
        return [self.sealed(item) for item in value] if isinstance(value, list | tuple) else value

    def open(self, text: str) -> str:
        """The text as its user wrote it."""
        return text.replace(self.seal, "")

    def _seal(self, text: str) -> str:
        text = self._whole.sub(lambda match: match.group() + self.seal, text)
        cuts = [begin for begin in range(max(0, len(text) - self._reach), len(text)) if text[begin:] in self._beginnings]
        for begin in reversed(cuts):
            text = text[: begin + 1] + self.seal + text[begin + 1 :]
        return text


def _free_seal(values: Any) -> str:
    """A character that stands nowhere in these values, not even escaped."""
    written = repr(values)
    for seal in _SEALS:
        if seal not in written and f"\\u{ord(seal):04x}" not in written:
            return seal
    raise RequestError("the messages hold all 32 noncharacters from U+FDD0 to U+FDEF", "Leave at least one of them out.")
