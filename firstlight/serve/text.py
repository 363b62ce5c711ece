"""Tokens as text for a client: names of single tokens, the pieces of a completion, and log probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from firstlight.engine.sampler import TokenLogprobs
from firstlight.sched.sequence import Event
from firstlight.text.detokenizer import Detokenizer
from firstlight.text.tokenizer import Tokenizer


class Spelling:
    """How single tokens are written; without a tokenizer by their id."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token; none for an id without a meaning."""
        if self._tokenizer is None:
            return str(token).encode()
        return self._tokenizer.token_bytes(token) if token < self._tokenizer.num_vocab else b""

    def name(self, token: int) -> str:
        """The text of a token; bytes that are no text of their own are spelled out, so that different tokens have different names."""
        spelled = self.bytes_of(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def content(self, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """As `logprobs.content` of a chat completion."""
        return [
            {**self._entry(entry.token, entry.logprob), "top_logprobs": [self._entry(*pair) for pair in entry.top]} for entry in entries
        ]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self.name(token), "logprob": max(logprob, -9999.0), "bytes": list(self.bytes_of(token))}


@dataclass(slots=True)
class Lists:
    """As `logprobs` of a completion: four lists with one entry per token; offsets count characters from the start of the text."""

    spelling: Spelling
    measure: Detokenizer | None
    length: int = 0

    def of(self, tokens: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, list[Any]]:
        """The next tokens; None stands for the first of a prompt, which nothing rates."""
        offsets = []
        for token in tokens:
            offsets.append(self.length)
            self.length += len(self.measure.feed(token)) if self.measure is not None else 0
        return {
            "tokens": [self.spelling.name(token) for token in tokens],
            "token_logprobs": [None if entry is None else max(entry.logprob, -9999.0) for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        pairs = dict([*entry.top, (entry.token, entry.logprob)])
        return {self.spelling.name(token): max(logprob, -9999.0) for token, logprob in pairs.items()}


@dataclass(slots=True)
class Piece:
    """What one event adds to an answer."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None
    num_cached: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class Text:
    """The text of one completion: events in, pieces out; work per token does not grow with what came before."""

    def __init__(self, detokenizer: Detokenizer | None, num_prompt: int) -> None:
        self._detokenizer = detokenizer
        self._rated: list[TokenLogprobs | None] = [None]
        self._num_prompt = num_prompt

    def take(self, event: Event) -> Piece:
        """Enter an event. A stop string ends the piece with "stop", though the engine may go on."""
        piece = Piece(num_cached=event.num_cached_tokens, finish=event.finish)
        if event.prompt_logprobs is not None:
            # After a preemption they come again; those that are known stay.
            self._rated += event.prompt_logprobs[len(self._rated) - 1 - event.begin :]
            if len(self._rated) == self._num_prompt:
                piece.prompt_logprobs = self._rated
        if event.token is not None:
            piece.tokens.append(event.token)
            if event.logprobs is not None:
                piece.logprobs.append(event.logprobs)
            if self._detokenizer is not None and event.finish != "stop":
                piece.text = self._detokenizer.feed(event.token)
        if self._detokenizer is not None:
            if event.finish is not None:
                piece.text += self._detokenizer.finish()
            if self._detokenizer.stopped is not None:
                piece.finish = "stop"
        return piece
