"""Ids to text as they come: every piece is final, no character is shown before all of its bytes are there."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from firstlight.text.stops import StopFinder
from firstlight.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one sequence; work per token does not grow with what came before.

    Without a stop, the pieces of `feed` and `finish` together equal the text of all tokens at once.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str] = (), skip_special: bool = True, include_stop: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.hidden_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopFinder(stop, include_stop=include_stop) if stop else None

    @property
    def stopped(self) -> str | None:
        """The stop string that was met; what comes after it is not text."""
        return self._stops.stopped if self._stops else None

    def feed(self, token_id: int) -> str:
        """Text that became final with this token; bytes that can no longer become a character are U+FFFD.

        Raises: RequestError for an id outside of the vocabulary.
        """
        if token_id in self._skipped:
            return ""
        text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        return self._stops.feed(text) if self._stops else text

    def finish(self) -> str:
        """What was held back, now that no token follows; a cut character becomes one U+FFFD."""
        text = self._utf8.decode(b"", final=True)
        return self._stops.feed(text) + self._stops.finish() if self._stops else text
