"""Tokenizers kept as `tokenizer.json`, run by the tokenizers library and decoded from bytes here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tokenizers

from firstlight.spec.errors import ConfigError
from firstlight.text.settings import Settings, as_control, check_distinct
from firstlight.text.vocabulary import Control, Vocabulary

FILE_NAME = "tokenizer.json"
_SPACE = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_RESTORE = "Restore the file from the model's release."

Spelling = Callable[[str], bytes]


class JsonTokenizer(Vocabulary):
    """Bytes come from the spelling of each token, so that a stream and a whole text decode alike."""

    def __init__(
        self, rules: tokenizers.Tokenizer, spelling: Spelling, controls: tuple[Control, ...], settings: Settings, *, leading_space: bool
    ) -> None:
        num_vocab = max([settings.model_num_vocab, *(token_id + 1 for token_id in rules.get_vocab(with_added_tokens=True).values())])
        bos_id = rules.token_to_id(settings.bos) if settings.bos else None
        super().__init__(
            controls,
            num_vocab,
            bos_id=bos_id,
            eos_id=rules.token_to_id(settings.eos) if settings.eos else None,
            prefix_ids=_prefix(rules, bos_id, settings),
        )
        self._rules = rules
        self._spelling = spelling
        self._leading_space = leading_space
        self._texts = {control.token_id: control.text for control in controls}
        self._breaks = _breaks(rules, controls)

    def _encode_plain(self, text: str) -> list[int]:
        if self._breaks is None:
            return list(self._rules.encode(text, add_special_tokens=False).ids)
        return [token_id for piece in self._breaks.split(text) for token_id in self._rules.encode(piece, add_special_tokens=False).ids]

    def _spell(self, token_id: int) -> bytes:
        if token_id in self._texts:
            return self._texts[token_id].encode("utf-8")
        token = self._rules.id_to_token(token_id)
        return self._spelling(token) if token else b""

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of a whole sequence, without the space that encoding put in front."""
        text = super().decode(ids, skip_special=skip_special)
        return text.removeprefix(" ") if self._leading_space else text


def load_json(folder: Path) -> JsonTokenizer:
    """Read tokenizer.json; a text's control tokens are found by us, never by the library.

    Raises: ConfigError when the file is damaged, or spells its tokens in a way that is not known.
    """
    file = folder / FILE_NAME
    layout = _read(file)
    spelling, leading_space = _spelling(file, layout)
    controls = []
    for entry in layout.get("added_tokens") or []:
        control = as_control(str(file), entry.get("id") if isinstance(entry, dict) else None, entry)
        # Runs of spaces are ordinary text that some models keep among the added tokens.
        if control.text.strip():
            controls.append(control)
            entry["special"] = True
    check_distinct(str(file), tuple(controls))
    rules = _build(file, layout)
    rules.no_truncation()
    rules.no_padding()
    # With every control token special, this makes the library read all of them as ordinary text.
    rules.encode_special_tokens = True
    return JsonTokenizer(rules, spelling, tuple(controls), Settings.read(folder), leading_space=leading_space)


def _read(file: Path) -> dict[str, Any]:
    try:
        layout = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}", _RESTORE) from None
    if not isinstance(layout, dict) or not isinstance(layout.get("added_tokens") or [], list):
        raise ConfigError(f"{file} is not a tokenizer", _RESTORE)
    return layout


def _build(file: Path, layout: dict[str, Any]) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(layout, ensure_ascii=False))
    except Exception as error:  # noqa: BLE001 - the library raises the bare class for every flaw of the file
        raise ConfigError(f"{file} is damaged: {error}", _RESTORE) from None


def _prefix(rules: tokenizers.Tokenizer, bos_id: int | None, settings: Settings) -> tuple[int, ...]:
    """Ids that the post-processor puts before a text; `add_bos_token` has the last word."""
    plain = rules.encode("a", add_special_tokens=False).ids
    whole = rules.encode("a", add_special_tokens=True).ids
    prefix = tuple(whole[: whole.index(plain[0])]) if plain and plain[0] in whole else ()
    if settings.adds_bos and bos_id is not None and bos_id not in prefix:
        return (bos_id, *prefix)
    return tuple(token_id for token_id in prefix if token_id != bos_id) if settings.adds_bos is False else prefix


def _breaks(rules: tokenizers.Tokenizer, controls: tuple[Control, ...]) -> re.Pattern[str] | None:
    """Where to cut user text so that no merge can build a control token; None: none can be built anyway."""
    ids = {control.token_id for control in controls}
    built = [control.text for control in controls if ids & set(rules.encode(control.text, add_special_tokens=False).ids)]
    if not built:
        return None
    return re.compile("|".join(f"(?<={re.escape(text[0])})(?={re.escape(text[1:])})" for text in built))


def _spelling(file: Path, layout: dict[str, Any]) -> tuple[Spelling, bool]:
    """How token texts stand for bytes, and whether encoding puts a space in front."""
    decoders = _steps(layout.get("decoder"))
    kinds = {str(decoder.get("type")) for decoder in decoders}
    if "ByteLevel" in kinds:
        return _from_byte_level, False
    if kinds & {"ByteFallback", "Metaspace"}:
        return _from_byte_fallback, "Strip" in kinds or any(_adds_space(decoder) for decoder in decoders)
    raise ConfigError(
        f"{file} decodes with {sorted(kinds) or 'nothing'}, only ByteLevel, ByteFallback and Metaspace are supported",
        "Take the tokenizer file away to work with token ids.",
    )


def _adds_space(decoder: dict[str, Any]) -> bool:
    return decoder.get("type") == "Metaspace" and decoder.get("prepend_scheme", "always") != "never" and bool(decoder.get("add_prefix_space", True))


def _steps(decoder: Any) -> list[dict[str, Any]]:
    """The steps of a decoder, nested sequences opened."""
    if not isinstance(decoder, dict):
        return []
    nested = decoder.get("decoders")
    return [step for item in nested for step in _steps(item)] if isinstance(nested, list) else [decoder]


def _byte_letters() -> dict[str, int]:
    """Letter -> byte of the byte-level alphabet: printable Latin-1 stands for itself, the rest follows from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_LETTERS = _byte_letters()


def _from_byte_level(token: str) -> bytes:
    if all(letter in _LETTERS for letter in token):
        return bytes(_LETTERS[letter] for letter in token)
    return token.encode("utf-8")


def _from_byte_fallback(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte.group(1), 16)]) if byte else token.replace(_SPACE, " ").encode("utf-8")
