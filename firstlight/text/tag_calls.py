"""How models with a template write tool calls, for grammars."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal

from firstlight.text.tag_parser import CALL, END_CALL, END_SECTION, K2_ARGUMENTS, K2_CALL, K2_END_CALL, SECTION
from firstlight.text.zone import Pieces


class _JsonCalls:
    """What both forms share: one JSON object of arguments, marks as ids where the vocabulary has them."""

    style: Literal["json"] = "json"
    content_close: Pieces = ()
    argument_end: Pieces = ()
    raw_begin: Pieces = ()
    raw_end: Pieces = ()

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special

    def argument_begin(self, key: str, kind: str) -> Pieces:
        """Nothing: arguments are no elements of their own."""
        return ()

    def _mark(self, spelling: str) -> int | str:
        return self._special.get(spelling, spelling)


class HermesCalls(_JsonCalls):
    """Each call in a pair of marks."""

    separator = "\n"
    section_open: Pieces = ()
    section_close: Pieces = ()

    @property
    def end(self) -> Pieces:
        """The end of the object, and the mark."""
        return ("}\n", self._mark(END_CALL))

    def begin(self, name: str, index: int) -> Pieces:
        """The mark, and the object up to its arguments."""
        return (self._mark(CALL), f'\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ')


class KimiK2Calls(_JsonCalls):
    """A section of calls, each with its id in front."""

    separator = ""

    @property
    def section_open(self) -> Pieces:
        """The mark of the section."""
        return (self._mark(SECTION),)

    @property
    def section_close(self) -> Pieces:
        """The end of the section."""
        return (self._mark(END_SECTION),)

    @property
    def end(self) -> Pieces:
        """The end of one call."""
        return (self._mark(K2_END_CALL),)

    def begin(self, name: str, index: int) -> Pieces:
        """The id in the model's own form."""
        return (self._mark(K2_CALL), f"functions.{name}:{index}", self._mark(K2_ARGUMENTS))
