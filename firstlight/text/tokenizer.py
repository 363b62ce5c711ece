"""What was said, as ids: the face of every tokenizer, and how to find the one of a model folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol


class Tokenizer(Protocol):
    """Text to ids and back. Nothing is put in front of a text; `prefix_ids` begin a prompt that is plain text."""

    @property
    def num_vocab(self) -> int:
        """One more than the highest id that has a meaning."""

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Every control token by its spelling."""

    @property
    def hidden_ids(self) -> frozenset[int]:
        """Control tokens that are left out of the text for a user; tool and thinking marks may be shown."""

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text."""

    @property
    def eos_id(self) -> int | None:
        """The token that ends a text; what ends generation is in GenerationDefaults."""

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """What the model expects before a prompt of plain text; often nothing."""

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of a text; the spellings of control tokens count only if `special`."""

    def pieces(self, text: str) -> Iterator[str | int]:
        """Ordinary text and control tokens in turn, as `encode` with `special` tells them apart."""

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of a whole sequence."""

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token, perhaps a part of a character."""


def tokenizer_file(folder: str | Path) -> Path | None:
    """The vocabulary file that would be loaded; the model's own form goes before a converted one."""
    files = (Path(folder) / name for name in ("tiktoken.model", "tokenizer.json"))
    return next((file for file in files if file.is_file()), None)


def load_tokenizer(folder: str | Path) -> Tokenizer | None:
    """The tokenizer of a model folder; None without tokenizer files: the engine then works with ids.

    Raises: ConfigError when a file is damaged.
    """
    file = tokenizer_file(folder)
    if file is None:
        return None
    if file.name == "tiktoken.model":
        from firstlight.text.tiktoken_form import load_tiktoken

        return load_tiktoken(file.parent)
    from firstlight.text.json_form import load_json

    return load_json(file.parent)
