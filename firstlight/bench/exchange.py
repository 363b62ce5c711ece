"""One request as it went: when tokens came, how many, and how it ended; read from the events of an OpenAI stream."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from firstlight.bench.wire import Fault

MOST_ERROR_BYTES = 1 << 16
SHOWN_CHARACTERS = 300


@dataclass(slots=True)
class Exchange:
    """What was measured of one request. All times are readings of one clock.

    Note: `due_s` is when the plan wanted it sent, `begun_s` when the tool began to; latencies count from the former.
    """

    due_s: float
    begun_s: float
    num_asked: int = 0
    num_shared: float = 0.0
    end_s: float = 0.0
    marks_s: array[float] = field(default_factory=lambda: array("d"))
    """When each chunk with tokens came."""
    counts: array[int] = field(default_factory=lambda: array("L"))
    """Tokens up to and with that chunk, as the server counts on the way; empty where it does not."""
    num_input: int | None = None
    num_output: int | None = None
    num_cached: int | None = None
    num_refused: int = 0
    finish: str | None = None
    fault: Fault | None = None

    @property
    def num_tokens(self) -> int:
        """Of the answer: as the server counts, else one per chunk."""
        return self.num_output if self.num_output is not None else len(self.marks_s)

    @property
    def num_first(self) -> int:
        """Tokens of the first chunk."""
        return self.counts[0] if self.counts else 1

    @property
    def ttft_s(self) -> float | None:
        """From when it was due until the first chunk with tokens."""
        return self.marks_s[0] - self.due_s if self.marks_s else None

    @property
    def tpot_s(self) -> float | None:
        """Per token behind the first chunk; None where there is no such token."""
        later = self.num_tokens - self.num_first
        return (self.marks_s[-1] - self.marks_s[0]) / later if later > 0 and len(self.marks_s) > 1 else None

    @property
    def e2e_s(self) -> float:
        """From when it was due until the last byte."""
        return self.end_s - self.due_s

    @property
    def late_s(self) -> float:
        """What the tool itself added before it began."""
        return self.begun_s - self.due_s


class Stream:
    """Receives a reply and enters what it says into an exchange."""

    def __init__(self, exchange: Exchange, keep_text: bool) -> None:
        self.exchange = exchange
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.text: list[str] | None = [] if keep_text else None
        self.fault: Fault | None = None
        self._events = True
        self._ended = False
        self._rest = b""
        self._lines: list[bytes] = []
        self._refused = bytearray()

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        """Anything but a good stream of events is read as an error message."""
        self.status, self.headers = status, headers
        self._events = status == 200 and "event-stream" in headers.get("content-type", "text/event-stream")

    def body(self, piece: bytes, at_s: float) -> None:
        """Split into lines; an empty one ends an event."""
        if not self._events:
            self._refused += piece[: MOST_ERROR_BYTES - len(self._refused)]
            return
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._lines.append(line[5:].lstrip())
            elif line.startswith(b"error:"):
                self.fault = self.fault or Fault("stream_error", _shown(line[6:].strip()))
            elif not line and self._lines:
                self._event(b"\n".join(self._lines), at_s)
                self._lines.clear()

    def close(self, fault: Fault | None) -> Fault | None:
        """The reply is over, as far as the connection goes; what was wrong with it, the first thing first."""
        if not self._events and self.status:
            kind = f"http_{self.status}" if self.status != 200 else "malformed"
            return Fault(kind, _shown(bytes(self._refused)) or "no message")
        if self.fault or fault:
            return self.fault or fault
        if not self._ended and self.exchange.finish is None:
            return Fault("disconnect", "the stream ended without a finish reason and without [DONE]")
        return None if self.exchange.marks_s else Fault("empty", f"a whole stream without a token, finish reason {self.exchange.finish}")

    def _event(self, text: bytes, at_s: float) -> None:
        if text == b"[DONE]":
            self._ended = True
            return
        try:
            event = json.loads(text)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            self.fault = self.fault or Fault("malformed", f"an event is no JSON object: {_shown(text)}")
        elif event.get("error"):
            self.fault = self.fault or Fault("stream_error", _shown(text))
        else:
            try:
                self._enter(event, at_s)
            except (AttributeError, TypeError, ValueError, OverflowError):
                self.fault = self.fault or Fault("malformed", f"an event of another shape: {_shown(text)}")

    def _enter(self, event: dict[str, Any], at_s: float) -> None:
        exchange, usage = self.exchange, event.get("usage") or {}
        choice = next(iter(event.get("choices") or ()), None)
        count = usage.get("completion_tokens")
        if usage:
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            exchange.num_input = usage.get("prompt_tokens", exchange.num_input)
            exchange.num_output = exchange.num_output if count is None else count
            exchange.num_cached = usage.get("prompt_cache_hit_tokens", exchange.num_cached) if cached is None else cached
        if choice is None:
            return
        exchange.finish = choice.get("finish_reason") or exchange.finish
        said, answer = _said(choice)
        if answer and self.text is not None:
            self.text.append(answer)
        if count is not None and len(exchange.counts) == len(exchange.marks_s):
            if count > (exchange.counts[-1] if exchange.counts else 0):
                exchange.counts.append(count)
                exchange.marks_s.append(at_s)
        elif said:
            exchange.marks_s.append(at_s)


def _said(choice: dict[str, Any]) -> tuple[bool, str]:
    """Whether a choice says anything new, thoughts and calls of tools included; and its new text of the answer proper."""
    if "text" in choice:
        return bool(choice["text"]), choice["text"] or ""
    delta = choice.get("delta") or {}
    answer = delta.get("content") or ""
    return bool(answer or delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls")), answer


def _shown(text: bytes) -> str:
    return text.decode("utf-8", "replace").strip()[:SHOWN_CHARACTERS]
