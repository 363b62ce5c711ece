"""Answers as they come: from text, in which control tokens are spelled out, or from token ids, where only ids are marks."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

from firstlight.text.answer import Delta, Message, Reason, Transcript
from firstlight.text.detokenizer import Detokenizer
from firstlight.text.tokenizer import Tokenizer


class Machine(Protocol):
    """What understands one format; text arrives in pieces of any size, marks whole."""

    transcript: Transcript

    @property
    def answering(self) -> bool:
        """Whether the answer is past thinking."""

    def text(self, text: str) -> None:
        """Ordinary text."""

    def mark(self, spelling: str) -> None:
        """A mark of the format."""

    def finish(self, reason: Reason) -> None:
        """Nothing follows."""


class Splitter:
    """Cuts text at marks; what could be the beginning of one waits."""

    def __init__(self, marks: Collection[str]) -> None:
        self._marks = frozenset(marks)
        self._pattern = re.compile("|".join(re.escape(mark) for mark in sorted(self._marks, key=len, reverse=True)) or r"(?!)")
        self._reach = max(map(len, self._marks), default=1) - 1
        self._held = ""

    def feed(self, text: str) -> Iterator[tuple[str, bool]]:
        """(piece, whether it is a mark) in order."""
        text = self._held + text
        begin = 0
        for match in self._pattern.finditer(text):
            if match.start() > begin:
                yield text[begin : match.start()], False
            yield match.group(), True
            begin = match.end()
        end = self._hold_from(text, begin)
        self._held = text[end:]
        if end > begin:
            yield text[begin:end], False

    def finish(self) -> str:
        """What waited for more."""
        held, self._held = self._held, ""
        return held

    def _hold_from(self, text: str, begin: int) -> int:
        for start in range(max(begin, len(text) - self._reach), len(text)):
            tail = text[start:]
            if any(mark.startswith(tail) for mark in self._marks):
                return start
        return len(text)


class Parser:
    """One answer from text deltas; the result does not depend on where they are cut."""

    def __init__(self, machine: Machine, marks: Collection[str]) -> None:
        self._machine = machine
        self._splitter = Splitter(marks)

    def feed(self, text_delta: str) -> list[Delta]:
        """What this text adds to the answer."""
        for piece, marks in self._splitter.feed(text_delta):
            (self._machine.mark if marks else self._machine.text)(piece)
        return self._machine.transcript.take()

    def finish(self, engine_reason: Reason) -> list[Delta]:
        """What was held back, now that the engine has ended the answer: "stop" (its end token came), "length", "abort" or "error"."""
        held = self._splitter.finish()
        if held:
            self._machine.text(held)
        self._machine.finish(engine_reason)
        return self._machine.transcript.take()

    @property
    def stopped(self) -> str | None:
        """The stop string that was met, if any."""
        return self._machine.transcript.stopped

    @property
    def message(self) -> Message:
        """All that came so far; complete after `finish`."""
        return self._machine.transcript.message


class Reader:
    """One answer from token ids, in any number at a time; work per token does not grow with the answer.

    `marks`: control tokens of the format by id. Other control tokens show nothing. `spelled`: marks that are no tokens of this vocabulary.
    """

    def __init__(
        self, machine: Machine, tokenizer: Tokenizer, marks: Mapping[int, str], hidden: Collection[int], spelled: Collection[str] = ()
    ) -> None:
        self._machine = machine
        self._marks = marks
        self._hidden = hidden
        self._detokenizer = Detokenizer(tokenizer, skip_special=False)
        self._splitter = Splitter(spelled)

    def push(self, token_ids: Sequence[int]) -> list[Delta]:
        """What these tokens add to the answer; the one that ended it may be among them or not."""
        pieces: list[str] = []
        for token_id in token_ids:
            if token_id in self._marks:
                pieces.append(self._detokenizer.finish())
                self._text("".join(pieces), ends=True)
                pieces.clear()
                self._machine.mark(self._marks[token_id])
            elif token_id not in self._hidden:
                pieces.append(self._detokenizer.feed(token_id))
        self._text("".join(pieces))
        return self._machine.transcript.take()

    def marks(self, token_id: int) -> bool:
        """Whether a token is a mark of the format, which is read and never shown."""
        return token_id in self._marks

    def finish(self, engine_reason: Reason) -> list[Delta]:
        """What was held back, now that the engine has ended the answer; a cut character becomes U+FFFD."""
        self._text(self._detokenizer.finish(), ends=True)
        self._machine.finish(engine_reason)
        return self._machine.transcript.take()

    @property
    def stopped(self) -> str | None:
        """The stop string that was met: the sequence can be cancelled."""
        return self._machine.transcript.stopped

    @property
    def answering(self) -> bool:
        """Whether the answer is past thinking."""
        return self._machine.answering

    @property
    def message(self) -> Message:
        """All that came so far; complete after `finish`."""
        return self._machine.transcript.message

    def _text(self, text: str, *, ends: bool = False) -> None:
        for piece, marks in self._splitter.feed(text):
            (self._machine.mark if marks else self._machine.text)(piece)
        held = self._splitter.finish() if ends else ""
        if held:
            self._machine.text(held)
