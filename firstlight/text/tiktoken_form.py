"""Tokenizers kept as `tiktoken.model` with `tokenizer_config.json`: the form of the Kimi models.

Source: tokenization_kimi.py of moonshotai/Kimi-K2-Instruct (pattern, reserved slots, size guards).
"""

from __future__ import annotations

import re
from binascii import a2b_base64
from collections.abc import Iterator, Mapping
from pathlib import Path

import tiktoken

from firstlight.spec.errors import ConfigError
from firstlight.text.settings import Settings, check_distinct
from firstlight.text.vocabulary import Control, Vocabulary

FILE_NAME = "tiktoken.model"
NUM_SLOTS = 256
"""Ids after the ranks that control tokens may take."""

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join((
    r"[\p{Han}]+",
    f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
    f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
))
"""Han runs, words with their contractions, up to three digits, punctuation, line ends, spaces; no merge crosses a piece."""

_MAX_TEXT = 400_000
_MAX_RUN = 25_000
# The look-behind lets only the first character of a run try, so that the search is linear.
_LONG_RUN = re.compile(rf"(?<!\S)\S{{{_MAX_RUN + 1},}}|(?<!\s)\s{{{_MAX_RUN + 1},}}")
_RESTORE = "Restore the file from the model's release."


class TiktokenTokenizer(Vocabulary):
    """Byte-pair merges by rank within the pieces of a fixed pattern."""

    def __init__(self, ranks: Mapping[bytes, int], controls: tuple[Control, ...], num_vocab: int, settings: Settings) -> None:
        by_text = {control.text: control.token_id for control in controls}
        bos_id = by_text.get(settings.bos or "")
        super().__init__(
            controls,
            num_vocab,
            bos_id=bos_id,
            eos_id=by_text.get(settings.eos or ""),
            prefix_ids=(bos_id,) if settings.adds_bos and bos_id is not None else (),
        )
        self._merges = tiktoken.Encoding(FILE_NAME, pat_str=PATTERN, mergeable_ranks=dict(ranks), special_tokens={})
        self._spellings = [b""] * num_vocab
        for spelling, rank in ranks.items():
            self._spellings[rank] = spelling
        for control in controls:
            self._spellings[control.token_id] = control.text.encode("utf-8")

    def _encode_plain(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in _cut(text):
            ids += self._merges.encode_ordinary(piece)
        return ids

    def _spell(self, token_id: int) -> bytes:
        return self._spellings[token_id]


def load_tiktoken(folder: Path) -> TiktokenTokenizer:
    """Read both files; slots that have no name are called as the model's own tokenizer calls them.

    Raises: ConfigError when a file is damaged or the two do not fit together.
    """
    file = folder / FILE_NAME
    ranks = _read_ranks(file)
    settings = Settings.read(folder)
    if settings.written_by not in (None, "TikTokenTokenizer"):
        raise ConfigError(
            f"{settings.file}: `tokenizer_class` is {settings.written_by!r}, only 'TikTokenTokenizer' is known to split text as {FILE_NAME} needs",
            "Convert the tokenizer to tokenizer.json, which carries its own pattern.",
        )
    controls = _all_slots(file, len(ranks), settings)
    return TiktokenTokenizer(ranks, controls, len(ranks) + len(controls), settings)


def _all_slots(file: Path, num_ranks: int, settings: Settings) -> tuple[Control, ...]:
    """One control token per id after the ranks, up to the size of the model's vocabulary."""
    named = {control.token_id: control for control in settings.added}
    outside = [token_id for token_id in named if not num_ranks <= token_id < num_ranks + NUM_SLOTS]
    if outside:
        raise ConfigError(
            f"{settings.file} names token {outside[0]}, the {num_ranks} ranks of {file.name} leave {num_ranks} to {num_ranks + NUM_SLOTS - 1}",
            "Restore both files from the same release.",
        )
    end = max([settings.model_num_vocab, *(token_id + 1 for token_id in named)])
    if end <= num_ranks:
        end = num_ranks + NUM_SLOTS
    controls = tuple(named.get(token_id) or Control(token_id, f"<|reserved_token_{token_id}|>") for token_id in range(num_ranks, end))
    check_distinct(str(settings.file), controls)
    return controls


def _read_ranks(file: Path) -> dict[bytes, int]:
    """Token bytes -> rank; ranks run from 0 without a gap and every byte has one."""
    ranks: dict[bytes, int] = {}
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}", _RESTORE) from None
    for number, line in enumerate(lines, 1):
        try:
            token, rank = line.split()
            ranks[a2b_base64(token, strict_mode=True)] = int(rank)
        except ValueError:
            if line.strip():
                raise ConfigError(f"{file} line {number} is {line[:60]!r}, not a base64 token and its rank", _RESTORE) from None
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if sorted(ranks.values()) != list(range(len(ranks))) or missing:
        raise ConfigError(f"{file} holds {len(ranks)} tokens that are not ranked 0 to {len(ranks) - 1}, or lacks one of the 256 bytes", _RESTORE)
    return ranks


def _cut(text: str) -> Iterator[str]:
    """Pieces that are encoded one by one, so that no text, however long, costs quadratic time; part of what ids mean."""
    for begin in range(0, len(text), _MAX_TEXT):
        part = text[begin : begin + _MAX_TEXT]
        last = 0
        for run in _LONG_RUN.finditer(part):
            for cut in range(run.start() + _MAX_RUN, run.end(), _MAX_RUN):
                yield part[last:cut]
                last = cut
        yield part[last:]
