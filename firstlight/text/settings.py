"""What a model folder says about its tokenizer beside the vocabulary file itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firstlight.spec.config import ConfigReader
from firstlight.spec.errors import ConfigError
from firstlight.text.vocabulary import Control

_RESTORE = "Restore the file from the model's release."


@dataclass(frozen=True, slots=True)
class Settings:
    """tokenizer_config.json, and the vocabulary size of config.json; a missing file says nothing."""

    file: Path
    added: tuple[Control, ...] = ()
    bos: str | None = None
    eos: str | None = None
    adds_bos: bool | None = None
    written_by: str | None = None
    model_num_vocab: int = 0

    @classmethod
    def read(cls, folder: Path) -> Settings:
        """Raises: ConfigError when a file is there but damaged."""
        file = folder / "tokenizer_config.json"
        model_num_vocab = _model_num_vocab(folder / "config.json")
        if not file.is_file():
            return cls(file, model_num_vocab=model_num_vocab)
        reader = ConfigReader.open(file)
        return cls(
            file,
            added=_added(reader),
            bos=_token_text(reader, "bos_token"),
            eos=_token_text(reader, "eos_token"),
            adds_bos=reader.take("add_bos_token", bool, None),
            written_by=reader.take("tokenizer_class", str, None),
            model_num_vocab=model_num_vocab,
        )


def as_control(where: str, token_id: Any, entry: Any) -> Control:
    """A control token from its entry in one of the JSON files.

    Raises: ConfigError when the id or the text is missing.
    """
    text = entry.get("content") if isinstance(entry, dict) else None
    if not isinstance(text, str) or not text or not isinstance(token_id, int):
        raise ConfigError(f"{where}: the added token {token_id} is {entry!r}, an id and a text are needed", _RESTORE)
    return Control(
        token_id,
        text,
        hidden=bool(entry.get("special", True)),
        strips_left=bool(entry.get("lstrip")),
        strips_right=bool(entry.get("rstrip")),
        whole_word=bool(entry.get("single_word")),
    )


def check_distinct(where: str, controls: tuple[Control, ...]) -> None:
    """Raises: ConfigError when two control tokens share an id or a text."""
    seen: dict[str | int, Control] = {}
    for control in controls:
        for key in (control.token_id, control.text):
            other = seen.setdefault(key, control)
            if other is not control:
                raise ConfigError(
                    f"{where}: {key!r} stands for two added tokens, {other.token_id} {other.text!r} and {control.token_id} {control.text!r}",
                    _RESTORE,
                )


def _added(reader: ConfigReader) -> tuple[Control, ...]:
    found = []
    for key, entry in reader.take("added_tokens_decoder", dict, {}).items():
        if not key.isascii() or not key.isdecimal():
            raise ConfigError(f"{reader.path}: `added_tokens_decoder` has the key {key!r}, not an id", _RESTORE)
        found.append(as_control(reader.path, int(key), entry))
    controls = tuple(found)
    check_distinct(reader.path, controls)
    return controls


def _token_text(reader: ConfigReader, key: str) -> str | None:
    value = reader.take(key, object, None)
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{reader.path}: `{key}` is {value!r}, neither a text nor an object with one", _RESTORE)
    return value


def _model_num_vocab(file: Path) -> int:
    """Rows of the model's embedding; 0 when unknown."""
    if not file.is_file():
        return 0
    reader = ConfigReader.open(file)
    for place in (reader, reader.child("text_config")) if reader.has("text_config") else (reader,):
        if place.has("vocab_size"):
            return place.positive("vocab_size")
    return 0
