"""A model that knows nothing: it draws evenly from what a grammar allows, and ends as soon as it may with some patience."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from firstlight.text.grammar import Grammar, GrammarState
from firstlight.text.tokenizer import Tokenizer

BFCL = Path(__file__).parent / "data/bfcl/cases.jsonl.gz"


def cases() -> list[dict[str, Any]]:
    """Functions of BFCL: id, and functions with name and parameters."""
    return [json.loads(line) for line in gzip.decompress(BFCL.read_bytes()).decode().splitlines()]


def bounded(schema: Any, *, length: int = 8, items: int = 2) -> Any:
    """The same schema for a model that cannot stop: short strings and lists, small numbers, no key that is not listed."""
    if isinstance(schema, list):
        return [bounded(part, length=length, items=items) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {key: bounded(value, length=length, items=items) if key != "enum" else value for key, value in schema.items()}
    kind = schema.get("type")
    if kind == "string" and not {"enum", "const", "format", "pattern"} & set(schema):
        found.setdefault("maxLength", length)
    elif kind == "array":
        found.setdefault("items", {"type": "integer", "minimum": 0, "maximum": 9})
        found["maxItems"] = max(items, schema.get("minItems", 0))
    elif kind in ("integer", "number") and "enum" not in schema:
        found |= {"minimum": max(schema.get("minimum", -999), -999), "maximum": min(schema.get("maximum", 999), 999)}
    elif kind == "object" and "enum" not in schema:
        missing = {name: {"type": "boolean"} for name in schema.get("required", []) if name not in schema.get("properties", {})}
        found["properties"] = {**found.get("properties", {}), **missing}
        found.setdefault("additionalProperties", False)
    return found


def allowed(state: GrammarState, num_vocab: int) -> list[int]:
    """Ids that may come next."""
    mask = state.allowed()
    return list(range(num_vocab)) if mask is None else [token for token in range(num_vocab) if mask[token >> 3] >> (token & 7) & 1]


def walk(grammar: Grammar, rng: random.Random, *, num_vocab: int, most: int = 3000) -> list[int]:
    """Tokens of a complete answer, drawn evenly; an AssertionError if it does not end."""
    state, tokens = grammar.begin(), []
    while not state.done:
        assert len(tokens) < most, f"no end within {most} tokens"
        tokens.append(rng.choice(allowed(state, num_vocab)))
        state.accept(tokens[-1])
    return tokens


def follow(grammar: Grammar, ids: list[int], num_vocab: int) -> int | None:
    """The place of the first token that the grammar refuses; None: it takes all of them."""
    state = grammar.begin()
    for place, token in enumerate(ids):
        if token not in allowed(state, num_vocab):
            return place
        state.accept(token)
    return None


def text_of(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """What was said, without the token that ended it."""
    return tokenizer.decode(tokens[:-1] if tokens and tokens[-1] in tokenizer.special_ids.values() else tokens)
