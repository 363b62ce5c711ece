"""Write a byte-level tokenizer in the form of the Kimi models: 256 single-byte ranks, then K3's control tokens at K3's offsets.

    python train/make_byte_tokenizer.py FOLDER [--num-vocab 288]

Writes FOLDER/tiktoken.model and FOLDER/tokenizer_config.json. Id b is byte b; nothing merges.
"""

from __future__ import annotations

import argparse
import base64
import json
from pathlib import Path
from typing import Any

NUM_BYTES = 256
OFFSETS = {
    "[BOS]": 0, "[EOS]": 1, "<|end_of_msg|>": 2, "<|open|>": 3, "<|close|>": 4, "<|sep|>": 5, "[start_header_id]": 6, "[end_header_id]": 7,
    "[EOT]": 9, "<|media_begin|>": 18, "<|media_content|>": 19, "<|media_end|>": 20, "<|media_pad|>": 21, "[UNK]": -2, "[PAD]": -1,
}
"""Control token -> place after the bytes; negative ones count from the end of the vocabulary."""
SHOWN = frozenset({"<|open|>", "<|close|>", "<|sep|>"})
"""Marks that structure a message; the release of K3 does not call them special."""
MIN_VOCAB = NUM_BYTES + 24


def ranks() -> str:
    """The text of tiktoken.model."""
    return "".join(f"{base64.b64encode(bytes([byte])).decode('ascii')} {byte}\n" for byte in range(NUM_BYTES))


def settings(num_vocab: int) -> dict[str, Any]:
    """The content of tokenizer_config.json; ids without a name are left for the loader to call reserved."""
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = {}
    for name, offset in OFFSETS.items():
        token_id = NUM_BYTES + offset if offset >= 0 else num_vocab + offset
        added[str(token_id)] = {"content": name, **flags, "special": name not in SHOWN}
    return {
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "TikTokenTokenizer",
    }


def write(folder: Path, num_vocab: int) -> None:
    """Write both files; the folder is made when it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiktoken.model").write_text(ranks(), encoding="ascii")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings(num_vocab), indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num-vocab", type=int, default=288)
    options = parser.parse_args()
    if not MIN_VOCAB <= options.num_vocab <= NUM_BYTES + 256:
        parser.error(f"--num-vocab is {options.num_vocab}; use {MIN_VOCAB} to {NUM_BYTES + 256}")
    write(options.folder, options.num_vocab)


if __name__ == "__main__":
    main()
