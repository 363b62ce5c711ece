"""The answer of Kimi K3, mark by mark: channels think, response and tools, also where the model leaves marks out."""

from __future__ import annotations

import json
from enum import Enum, auto

from firstlight.text.answer import Reason, Transcript
from firstlight.text.k3_header import CLOSE, OPEN, SEP, Header, Tag


class _State(Enum):
    THINK = auto()
    AFTER_THINK = auto()
    RESPONSE = auto()
    AFTER_RESPONSE = auto()
    TOOLS = auto()
    CALL = auto()
    VALUE = auto()
    END = auto()


_BEFORE_TOOLS = (_State.THINK, _State.AFTER_THINK, _State.RESPONSE, _State.AFTER_RESPONSE)


class KimiK3Machine:
    """States and events of the format; a mark that fits nowhere is dropped, and no text can make it raise."""

    def __init__(self, transcript: Transcript, *, thinking: bool) -> None:
        self.transcript = transcript
        self._state = _State.THINK if thinking else _State.RESPONSE
        self._header: Header | None = None
        self._begun = False
        self._think_closed = False
        self._responded = False
        self._held: list[str] = []
        self._arguments = _Arguments(transcript)

    @property
    def answering(self) -> bool:
        """Whether the answer is past thinking."""
        return self._state not in (_State.THINK, _State.AFTER_THINK)

    def text(self, text: str) -> None:
        """Ordinary text, in pieces of any size."""
        if self.transcript.stopped:
            return
        if self._header is None:
            self._read(text)
        else:
            settled = self._header.feed(text)
            if settled is not None:
                self._settle(*settled)

    def mark(self, spelling: str) -> None:
        """A control token."""
        if self.transcript.stopped:
            return
        if spelling == SEP:
            tag = self._header.complete() if self._header else None
            self._header = None
            if tag is not None:
                self._apply(tag)
            return
        self._cut_header()
        if spelling in (OPEN, CLOSE):
            self.transcript.border(self._show)
            self._header = Header(opening=spelling == OPEN)
        else:
            self._end()

    def finish(self, reason: Reason) -> None:
        """Nothing follows; what was cut inside a call takes the call with it."""
        self._cut_header()
        if reason == "stop":
            self._end()
        self.transcript.border(self._show)
        self.transcript.finish(reason)

    def _cut_header(self) -> None:
        if self._header is not None:
            self._settle(*self._header.cut())

    def _settle(self, tag: Tag | None, rest: str) -> None:
        self._header = None
        if tag is not None:
            self._apply(tag)
        self._read(rest)

    def _read(self, text: str) -> None:
        self._begun = self._begun or bool(text)
        if self._state == _State.AFTER_THINK:
            self._held.append(text)
            if not text.strip():
                return
            text = "".join(self._held)
            self._held.clear()
            self._respond()
        if self._state in (_State.THINK, _State.RESPONSE, _State.VALUE):
            self.transcript.visible(text, self._show)

    def _show(self, text: str) -> None:
        if self._state == _State.THINK:
            self.transcript.reasoning(text)
        elif self._state == _State.RESPONSE:
            self.transcript.content(text)
        elif self._state == _State.VALUE:
            self._arguments.value(text)

    def _apply(self, tag: Tag) -> None:
        self._held.clear()
        if tag.name == "message":
            if self._begun or not tag.opening:
                self._end()
            return
        self._begun = True
        if self._state != _State.END:
            (self._opened if tag.opening else self._closed)(tag)

    def _opened(self, tag: Tag) -> None:
        state = self._state
        if tag.name in ("argument", "json"):
            if state in (_State.CALL, _State.VALUE):
                self._arguments.open(tag)
                self._state = _State.VALUE
        elif tag.name == "call":
            self._complete_call()
            self.transcript.open_call(tag.attributes.get("tool"))
            self._state = _State.CALL
        elif state in _BEFORE_TOOLS:
            if tag.name == "tools":
                self._state = _State.TOOLS
            elif tag.name == "response":
                self._respond()
            else:
                self._state = _State.THINK

    def _closed(self, tag: Tag) -> None:
        state, name = self._state, tag.name
        if name == "think" and state == _State.THINK:
            self._state = _State.AFTER_THINK
            self._think_closed = True
        elif name == "response":
            self._close_response()
        elif name in ("argument", "json") and state == _State.VALUE:
            self._arguments.close()
            self._state = _State.CALL
        elif name == "call" and state in (_State.CALL, _State.VALUE):
            self._complete_call()
        elif name == "tools" and state in (_State.TOOLS, _State.CALL, _State.VALUE):
            self._end()

    def _respond(self) -> None:
        self._responded = True
        self._state = _State.RESPONSE

    def _close_response(self) -> None:
        """Closed inside think, before anything else, it says that thinking was skipped and the text was the answer."""
        if self._state == _State.THINK and not self._responded and not self._think_closed:
            self.transcript.take_reasoning_as_content()
        elif self._state not in (_State.RESPONSE, _State.AFTER_THINK):
            return
        self._responded = True
        self._state = _State.AFTER_RESPONSE

    def _complete_call(self) -> None:
        if self._state == _State.VALUE:
            self._arguments.close()
        if self._state in (_State.CALL, _State.VALUE):
            self._arguments.finish()
            self.transcript.close_call()
        self._state = _State.TOOLS

    def _end(self) -> None:
        """Nothing more is read; a call is complete without its closing tag, but not in the middle of a value."""
        self.transcript.border(self._show)
        if self._state == _State.CALL and not self.transcript.stopped:
            self._complete_call()
        self.transcript.drop_call()
        self._state = _State.END


class _Arguments:
    """The arguments object of one call, written as its elements come: strings at once, other values when they are whole."""

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript
        self._key: str | None = None
        self._kind = ""
        self._value: list[str] = []
        self._first = ""
        self._num_written = 0
        self._raw = False

    def open(self, tag: Tag) -> None:
        """An element begins; one before it that was not closed ends here."""
        if self._kind:
            self.close()
        self._key = tag.attributes.get("key")
        self._kind = "raw" if tag.name == "json" else "string" if tag.attributes.get("type", "string") == "string" else "typed"
        self._value = []
        self._first = ""
        if tag.name == "json":
            self._kind = "skipped" if self._num_written or self._raw else "raw"
        elif self._raw or self._key is None:
            self._kind = "skipped"
        elif self._kind == "string":
            self._write_key()
            self._transcript.arguments('"')

    def value(self, text: str) -> None:
        """More text of the open element."""
        if self._kind == "string":
            self._transcript.arguments(_quoted(text)[1:-1])
        elif self._kind == "raw":
            self._raw_value(text)
        elif self._kind == "typed":
            self._value.append(text)

    def _raw_value(self, text: str) -> None:
        """All arguments in one: what begins as an object goes on at once, anything else waits until it is known to be no JSON value."""
        self._value.append(text)
        self._first = self._first or text.lstrip()[:1]
        if self._first == "{":
            self._raw = True
            self._transcript.arguments("".join(self._value))
            self._value.clear()

    def close(self) -> None:
        """The open element is whole."""
        if self._kind == "string":
            self._transcript.arguments('"')
        elif self._kind == "typed":
            self._write_key()
            text = "".join(self._value)
            self._transcript.arguments(text if _is_json(text) else _quoted(text))
        elif self._kind == "raw" and self._value:
            self._close_raw("".join(self._value))
        self._kind = ""

    def _close_raw(self, text: str) -> None:
        """A value that is no object becomes the only argument; text that is no JSON stays, as the format takes it back like that."""
        self._raw = bool(text.strip())
        plain = text.strip()
        if plain == "null":
            text = "{}"
        elif plain and _is_json(text):
            text = f'{{"json": {text}}}'
        self._transcript.arguments(text)

    def finish(self) -> None:
        """The call is complete; the next one begins anew."""
        if not self._raw:
            self._transcript.arguments("}" if self._num_written else "{}")
        self._num_written = 0
        self._raw = False

    def _write_key(self) -> None:
        assert self._key is not None
        self._transcript.arguments((", " if self._num_written else "{") + _quoted(self._key) + ": ")
        self._num_written += 1


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    """Whether every JSON parser reads it; NaN and Infinity are Python's own."""
    constants: list[str] = []
    try:
        json.loads(text, parse_constant=constants.append, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return False
    return not constants
