"""The tokenizer inside a GGUF file as tokenizer.json and tokenizer_config.json, built by the library that will read it.

Source: ggml-org/llama.cpp src/llama-vocab.cpp (what each `tokenizer.ggml.pre` splits by), ggml-org/ggml docs/gguf.md (token types).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from firstlight.spec.errors import ConfigError

NORMAL, CONTROL, USER = 1, 3, 4
SPLITS = ("smollm",)
"""Values of `tokenizer.ggml.pre` that are known: each digit alone, then words as in GPT-2."""
_OTHER = "This file needs a rule in fetch/gguf_vocabulary.py; fetch a known model (firstlight fetch --help)."


def write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """Write both files. Raises ConfigError for a tokenizer of another kind."""
    kind, split = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or split not in SPLITS or fields.get("tokenizer.ggml.add_space_prefix"):
        raise ConfigError(f"the GGUF file has a tokenizer {kind!r} that splits like {split!r}, gpt2 like {' or '.join(SPLITS)} is known", _OTHER)
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    if len(set(tokens)) != len(tokens) or len(types) != len(tokens) or not set(types) <= {NORMAL, CONTROL, USER}:
        fact = f"the GGUF file has {len(tokens)} tokens, {len(set(tokens))} of them distinct, of {len(types)} types {sorted(set(types))}"
        raise ConfigError(fact, _OTHER)
    _write_rules(tokens, types, fields["tokenizer.ggml.merges"], folder / "tokenizer.json")
    added = {
        str(token_id): {"content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": each == CONTROL}
        for token_id, (token, each) in enumerate(zip(tokens, types, strict=True)) if each != NORMAL
    }
    named = {name: fields.get(f"tokenizer.ggml.{key}_token_id") for name, key in
             (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding"))}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": False, "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)), "model_max_length": fields["llama.context_length"],
        **{name: tokens[token_id] for name, token_id in named.items() if token_id is not None}, "added_tokens_decoder": added,
    }
    if "tokenizer.chat_template" in fields:
        settings["chat_template"] = fields["tokenizer.chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_rules(tokens: list[str], types: list[int], merges: list[str], file: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    rules = Tokenizer(BPE(vocab={token: token_id for token_id, token in enumerate(tokens)}, merges=pairs))
    rules.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)])
    rules.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, types, strict=True):
        if kind == CONTROL:
            rules.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == USER:
            rules.add_tokens([AddedToken(token, special=False, normalized=False)])
    rules.save(str(file))
