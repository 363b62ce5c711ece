"""Answers of models that mark thinking with `<think>` and tool calls in one of two common ways, or not at all.

hermes: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Qwen writes it. kimi_k2: a section of calls with native ids.
"""

from __future__ import annotations

import json
from enum import Enum, auto
from typing import Literal

from firstlight.text.answer import Reason, Transcript
from firstlight.text.json_call import JsonCall

Style = Literal["hermes", "kimi_k2", "plain"]
THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
SECTION, END_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
K2_CALL, K2_ARGUMENTS, K2_END_CALL = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_MARKS: dict[Style, tuple[str, ...]] = {
    "hermes": (CALL, END_CALL),
    "kimi_k2": (SECTION, END_SECTION, K2_CALL, K2_ARGUMENTS, K2_END_CALL),
    "plain": (),
}


class _State(Enum):
    START = auto()
    THINK = auto()
    CONTENT = auto()
    JSON = auto()
    SECTION = auto()
    CALL_ID = auto()
    ARGUMENTS = auto()


def marks_of(style: Style, *, thinks: bool) -> tuple[str, ...]:
    """Spellings that the parser of a style reacts to."""
    return ((THINK, END_THINK) if thinks else ()) + _MARKS[style]


class TagMachine:
    """`thinking`: "open", the prompt ended inside of it; "optional", the answer may begin with `<think>`; "none".

    With `trims`, line ends beside a mark belong to the mark, as the templates of such models write them.
    """

    def __init__(self, transcript: Transcript, *, thinking: Literal["open", "optional", "none"], trims: bool) -> None:
        self.transcript = transcript
        self._state = {"open": _State.THINK, "optional": _State.START, "none": _State.CONTENT}[thinking]
        self._trims = trims
        self._after_mark = trims and thinking == "open"
        self._line_ends: list[str] = []
        self._held: list[str] = []
        self._call: JsonCall | None = None
        self._call_id: list[str] = []
        self._arguments: list[str] = []

    @property
    def answering(self) -> bool:
        """Whether the answer is past thinking."""
        return self._state not in (_State.START, _State.THINK)

    def text(self, text: str) -> None:
        """Ordinary text, in pieces of any size."""
        if self.transcript.stopped:
            return
        if self._state == _State.START:
            self._held.append(text)
            if not text.strip():
                return
            text = "".join(self._held)
            self._held.clear()
            self._state = _State.CONTENT
        if self._state == _State.CALL_ID:
            self._call_id.append(text)
        elif self._call is not None:
            self._call.feed(text)
        elif self._state != _State.SECTION:
            if self._trims and self._state in (_State.THINK, _State.CONTENT):
                text = self._without_edges(text)
            if text:
                self.transcript.visible(text, self._show)

    def mark(self, spelling: str) -> None:
        """A mark; one that fits nowhere is dropped, one inside a JSON string is part of it."""
        if self.transcript.stopped:
            return
        if self._call is not None and self._call.inside_string:
            self.text(spelling)
            return
        self.transcript.border(self._show)
        self._held.clear()
        self._line_ends.clear()
        self._after_mark = self._trims
        if spelling == THINK and self._state in (_State.START, _State.CONTENT):
            self._state = _State.THINK
        elif spelling == END_THINK and self._state in (_State.START, _State.THINK):
            self._state = _State.CONTENT
        elif spelling in _MARKS["hermes"]:
            self._hermes(spelling)
        elif spelling in _MARKS["kimi_k2"]:
            self._kimi_k2(spelling)

    def finish(self, reason: Reason) -> None:
        """Nothing follows; a call that was cut is left out of the message."""
        if self._held:
            self._state = _State.CONTENT
            self.transcript.visible("".join(self._held), self._show)
        if self._line_ends:
            self.transcript.visible("".join(self._line_ends), self._show)
        self.transcript.border(self._show)
        if reason == "stop" and not self.transcript.stopped:
            self._end_json()
            self._end_arguments(sure=False)
        self.transcript.finish(reason)

    def _show(self, text: str) -> None:
        if self._state == _State.THINK:
            self.transcript.reasoning(text)
        elif self._state == _State.CONTENT:
            self.transcript.content(text)
        elif self._state == _State.ARGUMENTS:
            self._arguments.append(text)
            self.transcript.arguments(text)

    def _without_edges(self, text: str) -> str:
        """Text without the line ends after a mark, and without those at its end, which wait for what follows."""
        if self._after_mark:
            text = text.lstrip("\n")
            if not text:
                return ""
            self._after_mark = False
        body = text.rstrip("\n")
        tail = text[len(body) :]
        if body:
            body = "".join(self._line_ends) + body
            self._line_ends.clear()
        if tail:
            self._line_ends.append(tail)
        return body

    def _hermes(self, spelling: str) -> None:
        self._end_json()
        if spelling == CALL:
            self._state = _State.JSON
            self._call = JsonCall(self.transcript)

    def _end_json(self) -> None:
        if self._call is not None:
            self._state = _State.CONTENT
            shown = self._call.finish()
            self._call = None
            if shown.strip():
                self.transcript.content(shown)

    def _kimi_k2(self, spelling: str) -> None:
        if spelling == SECTION:
            self._state = _State.SECTION if self._state in (_State.START, _State.THINK, _State.CONTENT) else self._state
        elif spelling == K2_CALL:
            self._end_arguments(sure=False)
            self._call_id.clear()
            self._state = _State.CALL_ID
        elif spelling == K2_ARGUMENTS and self._state == _State.CALL_ID:
            self._begin_call()
        elif spelling == K2_END_CALL:
            if self._state == _State.CALL_ID:
                self._begin_call()
            self._end_arguments(sure=True)
        elif spelling == END_SECTION:
            self._end_arguments(sure=False)
            self._state = _State.CONTENT if self._state in (_State.SECTION, _State.CALL_ID) else self._state

    def _begin_call(self) -> None:
        """The id is the model's own, functions.NAME:NUMBER; something else is a bare name."""
        call_id = "".join(self._call_id).strip()
        name, _, number = call_id.rpartition(":")
        native = bool(name) and number.isascii() and number.isdecimal()
        name = (name if native else call_id).removeprefix("functions.")
        self.transcript.open_call(name, call_id if native else None)
        self._arguments.clear()
        self._state = _State.ARGUMENTS

    def _end_arguments(self, *, sure: bool) -> None:
        """Without its end mark, a call counts when its arguments are whole."""
        if self._state != _State.ARGUMENTS:
            return
        text = "".join(self._arguments)
        if not text.strip():
            self.transcript.arguments("{}")
        if sure or not text.strip() or _is_object(text):
            self.transcript.close_call()
        else:
            self.transcript.drop_call()
        self._state = _State.SECTION


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
