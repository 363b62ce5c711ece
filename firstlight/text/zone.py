"""Facts about the answers of a chat format that structured output needs: where free text ends and which marks stand around calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Pieces = tuple[int | str, ...]
"""Ids of control tokens, and ordinary text in any tokenization."""


class CallForm(Protocol):
    """How a model writes tool calls: content_close section_open (begin arguments end)+ section_close, with `separator` between calls.

    "elements": one typed element per argument; string values are raw text. "json": one JSON object.
    """

    @property
    def style(self) -> Literal["elements", "json"]:
        """How arguments are written."""

    @property
    def content_close(self) -> Pieces:
        """What ends the content before the calls."""

    @property
    def section_open(self) -> Pieces:
        """What stands before the first call."""

    @property
    def section_close(self) -> Pieces:
        """What stands after the last call."""

    @property
    def separator(self) -> str:
        """Text between two calls."""

    @property
    def end(self) -> Pieces:
        """What ends one call."""

    @property
    def argument_end(self) -> Pieces:
        """What ends one argument element."""

    @property
    def raw_begin(self) -> Pieces:
        """What stands before all arguments as one JSON object, where they cannot be written one by one; "elements" only."""

    @property
    def raw_end(self) -> Pieces:
        """What stands after them."""

    def begin(self, name: str, index: int) -> Pieces:
        """What begins the call at `index`, counted from 0 in its message."""

    def argument_begin(self, key: str, kind: str) -> Pieces:
        """What begins an argument element; kind is string, number, boolean, null, object or array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Zone:
    """The order is: thinking, think_close, body_open, body, then body_close or the calls and message_close, then one of end_ids.

    thinking: "open", the prompt ended inside of it; "optional", the answer may begin with think_open; "none", the body begins at once.
    """

    thinking: Literal["open", "optional", "none"]
    think_open: Pieces
    think_close: Pieces
    banned_thinking: frozenset[int]
    body_open: Pieces
    body_close: Pieces
    message_close: Pieces
    banned_body: frozenset[int]
    end_ids: frozenset[int]
    calls: CallForm | None
