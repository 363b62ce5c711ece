"""What every id means: its bytes, whether it is a control token, which ids begin a prompt. Both file forms build on this."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from firstlight.spec.errors import RequestError


@dataclass(frozen=True, slots=True)
class Control:
    """A token that only the program writes: the text of a user never encodes to it.

    `hidden` ones are left out of the text that a user sees. The last three say how much of the neighbouring text belongs to it.
    """

    token_id: int
    text: str
    hidden: bool = True
    strips_left: bool = False
    strips_right: bool = False
    whole_word: bool = False


class Vocabulary(ABC):
    """A tokenizer but for its merges; a subclass gives the bytes of one id and the ids of ordinary text."""

    def __init__(
        self, controls: Sequence[Control], num_vocab: int, *, bos_id: int | None = None, eos_id: int | None = None, prefix_ids: Sequence[int] = ()
    ) -> None:
        self.num_vocab = num_vocab
        self.special_ids = {control.text: control.token_id for control in controls}
        self.hidden_ids = frozenset(control.token_id for control in controls if control.hidden)
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.prefix_ids = tuple(prefix_ids)
        self._borders = _pattern(controls)

    @abstractmethod
    def _encode_plain(self, text: str) -> list[int]:
        """Ids of text in which nothing is a control token."""

    @abstractmethod
    def _spell(self, token_id: int) -> bytes:
        """Bytes of an id that was checked; none for an id without a token."""

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of a text, with nothing put in front; the spellings of control tokens count only if `special`.

        Raises: RequestError for a lone surrogate, which no bytes can spell.
        """
        _check(text)
        if not special:
            return self._encode_plain(text)
        ids: list[int] = []
        for piece in self.pieces(text):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self._encode_plain(piece)
        return ids

    def pieces(self, text: str) -> Iterator[str | int]:
        """Ordinary text and control tokens in turn."""
        begin = 0
        for match in self._borders.finditer(text) if self._borders else ():
            yield text[begin : match.start()]
            spelling = match.group()
            yield self.special_ids[spelling if spelling in self.special_ids else spelling.strip()]
            begin = match.end()
        yield text[begin:]

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; a part of a character is possible, an id that only pads the vocabulary has none.

        Raises: RequestError for an id outside of the vocabulary.
        """
        if not 0 <= token_id < self.num_vocab:
            raise RequestError(f"token id {token_id} is not in the vocabulary", f"Use ids from 0 to {self.num_vocab - 1}.")
        return self._spell(token_id)

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of a whole sequence; bytes that are no UTF-8 become U+FFFD."""
        kept = (token_id for token_id in ids if not (skip_special and token_id in self.hidden_ids))
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")


def _check(text: str) -> None:
    """Refuse what UTF-8 cannot carry."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text holds the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}", "Send valid Unicode text."
        ) from None


def _pattern(controls: Sequence[Control]) -> re.Pattern[str] | None:
    """Control tokens in a text: the leftmost one, then the longest."""
    pieces = []
    for control in sorted(controls, key=lambda item: -len(item.text)):
        piece = re.escape(control.text)
        piece = rf"(?<!\w){piece}(?!\w)" if control.whole_word else piece
        # Only a run's first space tries to reach the token, so that long runs stay linear.
        piece = rf"(?:(?<!\s)\s+)?{piece}" if control.strips_left else piece
        pieces.append(rf"{piece}\s*" if control.strips_right else piece)
    return re.compile("|".join(pieces)) if pieces else None
