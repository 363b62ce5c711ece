"""A block as bytes that can be trusted: a header that says what it is, a checksum over everything. No torch.

Layout: magic, header length (4 bytes, little endian), header (JSON, sorted keys), payload, BLAKE2b-128 of all before it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

MAGIC = b"FLBLOCK\x00"
VERSION = 1
CHECKSUM_BYTES = 16

Refusal = Literal["short", "magic", "version", "checksum", "header", "identity", "key", "layout", "length"]


@dataclass(frozen=True, slots=True)
class Layout:
    """What the payload of a group's block holds, in order: (layer, field, shape, dtype) of every tensor.

    `states` names the order of a recurrent state's axes, so that a transposed one is refused.
    """

    group: str
    kind: str
    tokens_per_block: int
    tensors: tuple[tuple[int, str, tuple[int, ...], str], ...]
    states: str = "HKV"

    def described(self) -> dict[str, object]:
        """As JSON values."""
        tensors = [[layer, name, list(shape), dtype] for layer, name, shape, dtype in self.tensors]
        return {"group": self.group, "kind": self.kind, "tokens_per_block": self.tokens_per_block, "tensors": tensors, "states": self.states}


@dataclass(slots=True)
class Codec:
    """Wraps and unwraps blocks of one engine; what does not fit is refused by a word and counted, never raised."""

    identity: bytes
    refused: Counter[Refusal] = field(default_factory=Counter)

    def wrap(self, layout: Layout, key: bytes, payload: bytes) -> bytes:
        """The bytes of a block under its key."""
        header = json.dumps(
            {"version": VERSION, "identity": self.identity.hex(), "key": key.hex(), "length": len(payload), "layout": layout.described()},
            sort_keys=True).encode()
        body = b"".join((MAGIC, len(header).to_bytes(4, "little"), header, payload))
        return body + blake2b(body, digest_size=CHECKSUM_BYTES).digest()

    def unwrap(self, layout: Layout, key: bytes, content: bytes | memoryview) -> memoryview | None:
        """The payload; None: this is not that block of this engine, or it is damaged."""
        view = memoryview(content).cast("B")
        refusal, payload = self._opened(layout, key, view)
        if refusal is not None:
            self.refused[refusal] += 1
        return payload

    def _opened(self, layout: Layout, key: bytes, view: memoryview) -> tuple[Refusal | None, memoryview | None]:
        begin = len(MAGIC) + 4
        if len(view) < begin + CHECKSUM_BYTES:
            return "short", None
        if bytes(view[: len(MAGIC)]) != MAGIC:
            return "magic", None
        body, checksum = view[:-CHECKSUM_BYTES], bytes(view[-CHECKSUM_BYTES:])
        if blake2b(body, digest_size=CHECKSUM_BYTES).digest() != checksum:
            return "checksum", None
        end = begin + int.from_bytes(view[len(MAGIC) : begin], "little")
        try:
            header = json.loads(bytes(body[begin:end]))
        except ValueError:
            return "header", None
        wanted = {"version": VERSION, "identity": self.identity.hex(), "key": key.hex(), "layout": layout.described(), "length": len(body) - end}
        names: Sequence[Refusal] = ("version", "identity", "key", "layout", "length")
        wrong = next((name for name in names if not isinstance(header, dict) or header.get(name) != wanted[name]), None)
        return (wrong, None) if wrong is not None else (None, body[end:])
