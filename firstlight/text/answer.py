"""What a model answered, by channel: pieces for a stream and the message they add up to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, get_args

from firstlight.spec.errors import RequestError
from firstlight.text.stops import StopFinder

Reason = Literal["stop", "length", "abort", "error"]
"""How the engine ended a sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """A piece of the call at `index`: the opening one has id and name and no arguments, later ones have arguments alone."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """One piece of an answer; exactly one field is set and none is ever empty."""

    reasoning: str | None = None
    content: str | None = None
    tool_call: ToolCallDelta | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A complete call; `arguments` is a JSON object as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A whole answer; what is absent is None, and so is `finish_reason` until the answer has ended."""

    reasoning: str | None
    content: str | None
    tool_calls: tuple[ToolCall, ...]
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class _Call:
    """A call in the making; one that never completes is left out of the message."""

    def __init__(self, index: int, call_id: str, name: str) -> None:
        self.index = index
        self.call_id = call_id
        self.name = name
        self.arguments: list[str] = []
        self.complete = False


_Piece = tuple[tuple[str, int], str | ToolCallDelta]


class Transcript:
    """Collects what a parser recognizes; `take` gives the pieces since the last time, `message` the sum.

    `calls_hidden`: calls are read but not returned. `first_number` begins the numbers in the ids that are made up here (NAME:number).
    """

    def __init__(self, *, stop: Sequence[str] = (), include_stop: bool = False, calls_hidden: bool = False, first_number: int = 0) -> None:
        self._stops = StopFinder(stop, include_stop=include_stop) if stop else None
        self._calls_hidden = calls_hidden
        self._first_number = first_number
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._blank: list[str] = []
        self._calls: list[_Call] = []
        self._call: _Call | None = None
        self._pending: list[_Piece] = []
        self._reason: Reason | None = None

    @property
    def stopped(self) -> str | None:
        """The stop string that was met; nothing is taken after it."""
        return self._stops.stopped if self._stops else None

    def visible(self, text: str, show: Callable[[str], None]) -> None:
        """Pass text of one channel to `show` as far as no stop string can begin in it."""
        shown = self._stops.feed(text) if self._stops else text
        if shown:
            show(shown)

    def border(self, show: Callable[[str], None]) -> None:
        """The stretch of text that went to `show` ends: a stop string does not reach across a mark."""
        shown = self._stops.finish() if self._stops and not self._stops.stopped else ""
        if shown:
            show(shown)

    def reasoning(self, text: str) -> None:
        """More of the reasoning."""
        self._reasoning.append(text)
        self._pending.append((("reasoning", 0), text))

    def content(self, text: str) -> None:
        """More of the content; blank text in front waits, because it is left out of a message that only calls tools."""
        if not self._content:
            self._blank.append(text)
            if not text.strip():
                return
            text = "".join(self._blank)
            self._blank.clear()
        self._content.append(text)
        self._pending.append((("content", 0), text))

    def take_reasoning_as_content(self) -> None:
        """What went out as reasoning was the answer: it is said once more, as content."""
        text = "".join(self._reasoning)
        self._reasoning.clear()
        if text:
            self.content(text)

    def open_call(self, name: str | None, call_id: str | None = None) -> None:
        """A call begins; one without a name is read and left out."""
        self._call = None
        if not name or self._calls_hidden:
            return
        self._blank.clear()
        index = len(self._calls)
        self._call = _Call(index, call_id or f"{name}:{self._first_number + index}", name)
        self._calls.append(self._call)
        self._pending.append((("call", index), ToolCallDelta(index=index, id=self._call.call_id, name=name)))

    def arguments(self, text: str) -> None:
        """More of the arguments of the open call."""
        if self._call is not None and text:
            self._call.arguments.append(text)
            self._pending.append((("arguments", self._call.index), text))

    def close_call(self) -> None:
        """The open call is complete."""
        if self._call is not None:
            self._call.complete = True
        self._call = None

    def drop_call(self) -> None:
        """The open call was cut: its pieces stand in the stream, the message leaves it out."""
        self._call = None

    def finish(self, reason: Reason) -> None:
        """Nothing follows.

        Raises: RequestError for a reason that is none of the four.
        """
        if reason not in get_args(Reason):
            raise RequestError(f"an answer ended with {reason!r}", f"Use one of {', '.join(get_args(Reason))}.")
        self._call = None
        self._reason = reason
        if self._blank and not self._calls:
            text = "".join(self._blank)
            self._content.append(text)
            self._pending.append((("content", 0), text))
        self._blank.clear()

    def take(self) -> list[Delta]:
        """Pieces since the last call, neighbours of one kind joined."""
        pending, self._pending = self._pending, []
        deltas = []
        for (kind, index), pieces in groupby(pending, key=lambda piece: piece[0]):
            values = [value for _, value in pieces]
            if kind == "call":
                deltas += [Delta(tool_call=value) for value in values if isinstance(value, ToolCallDelta)]
                continue
            text = "".join(value for value in values if isinstance(value, str))
            if kind == "arguments":
                deltas.append(Delta(tool_call=ToolCallDelta(index=index, arguments=text)))
            else:
                deltas.append(Delta(reasoning=text) if kind == "reasoning" else Delta(content=text))
        return deltas

    @property
    def message(self) -> Message:
        """All pieces together."""
        calls = tuple(ToolCall(id=call.call_id, name=call.name, arguments="".join(call.arguments)) for call in self._calls if call.complete)
        return Message(
            reasoning="".join(self._reasoning) or None, content="".join(self._content) or None, tool_calls=calls, finish_reason=self._ending(calls)
        )

    def _ending(self, calls: tuple[ToolCall, ...]) -> Literal["stop", "length", "tool_calls"] | None:
        """Only words that clients know; an aborted answer says "stop" and never claims its calls."""
        if self._reason is None or self._reason == "length":
            return self._reason
        return "tool_calls" if calls and self._reason == "stop" and self.stopped is None else "stop"
