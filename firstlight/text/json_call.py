"""A tool call that a model writes as one JSON object: the arguments are passed on while they come."""

from __future__ import annotations

import json
import re
from typing import Any

from firstlight.text.answer import Transcript

_STRING_END = re.compile(r'["\\]')
_STRUCTURE = re.compile(r'["{}\[\],:]')
_ARGUMENTS = ("arguments", "parameters")


class JsonCall:
    """Reads {"name": ..., "arguments": {...}} in pieces of any size, keys in any order; each character is looked at once."""

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript
        self.inside_string = False
        self._escaped = False
        self._depth = 0
        self._key: str | None = None
        self._field: list[str] = []
        self._seen: list[str] = []
        self._waiting: list[str] = []
        self._named = False
        self._passing = False
        self._has_arguments = False
        self._done = False

    def feed(self, text: str) -> None:
        """More of the object."""
        self._seen.append(text)
        begin = 0
        while begin < len(text) and not self._done:
            begin = self._in_string(text, begin) if self.inside_string else self._outside(text, begin)

    def finish(self) -> str:
        """The end mark came. What to show as text: nothing, or all of it when it was no call."""
        if self._depth == 1 and not self.inside_string:
            self._end_field()
        if not self._named:
            return "".join(self._seen)
        if self._depth > 1 or self.inside_string or self._transcript.stopped:
            self._transcript.drop_call()
            return ""
        if not self._has_arguments:
            self._transcript.arguments("{}")
        self._transcript.close_call()
        return ""

    def _in_string(self, text: str, begin: int) -> int:
        if self._escaped:
            self._escaped = False
            self._take(text[begin])
            return begin + 1
        match = _STRING_END.search(text, begin)
        end = match.end() if match else len(text)
        if match and match.group() == "\\":
            self._escaped = True
        elif match:
            self.inside_string = False
        self._take(text[begin:end])
        return end

    def _outside(self, text: str, begin: int) -> int:
        match = _STRUCTURE.search(text, begin)
        if match is None:
            self._take(text[begin:])
            return len(text)
        if match.start() > begin:
            self._take(text[begin : match.start()])
        self._structure(match.group())
        return match.end()

    def _structure(self, sign: str) -> None:
        if sign in "{[":
            self._depth += 1
            if self._depth == 1:
                return
        elif self._depth == 0:
            return
        elif sign in "}]":
            self._depth -= 1
        self.inside_string = sign == '"'
        if self._depth == 1 and sign == ":" and self._key is None:
            key = _value("".join(self._field))
            self._key = key if isinstance(key, str) else ""
            self._field.clear()
        elif (self._depth == 1 and sign == ",") or self._depth == 0:
            self._end_field()
            self._done = self._depth == 0
        else:
            self._take(sign)
            if self._passing and self._depth == 1:
                self._end_passing()

    def _take(self, text: str) -> None:
        """Text of the key or value that is being read."""
        if self._key in _ARGUMENTS and not self._passing and not self._field:
            if self._has_arguments:
                return
            text = text.lstrip()
            self._passing = text.startswith("{")
        if self._passing:
            self._pass(text)
        elif text:
            self._field.append(text)

    def _pass(self, text: str) -> None:
        self._has_arguments = True
        if self._named:
            self._transcript.visible(text, self._transcript.arguments)
        else:
            self._waiting.append(text)

    def _end_passing(self) -> None:
        self._passing = False
        if self._named:
            self._transcript.border(self._transcript.arguments)

    def _end_field(self) -> None:
        key, field = self._key, "".join(self._field).strip()
        self._key = None
        self._field.clear()
        if key == "name" and not self._named:
            name = _value(field)
            if isinstance(name, str) and name:
                self._begin(name)
        elif key in _ARGUMENTS and not self._has_arguments and field:
            given = _value(field)
            self._pass(given if isinstance(given, str) and given.strip() else "{}" if field in ("null", '""') else field)
            self._end_passing()

    def _begin(self, name: str) -> None:
        self._named = True
        self._transcript.open_call(name)
        if self._waiting:
            self._pass("".join(self._waiting))
        if not self._passing:
            self._transcript.border(self._transcript.arguments)


def _value(text: str) -> Any:
    """The value of JSON text, None where it has none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
