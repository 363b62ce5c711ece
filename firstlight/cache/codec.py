"""A block as bytes that can leave: what it is, where it belongs, and proof that it came back whole. No torch.

Layout: prefix (magic, version, length of the header, length of the payload, checksum), header (JSON), payload (the fields of all layers, in
the order of the header). The checksum is the first 128 bits of BLAKE2b over everything else.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Literal

MAGIC = b"FLBLOCK\n"
VERSION = 1
CHECKSUM_BYTES = 16
_PREFIX = struct.Struct(f"<8sHIQ{CHECKSUM_BYTES}s")  # no padding: every bit is checked
PREFIX_BYTES = _PREFIX.size

Reason = Literal[
    "magic", "version", "truncated", "trailing", "checksum", "group", "kind", "layout", "members", "tokens_per_block", "num_tokens", "identity",
    "key", "header",
]
"""Why bytes are not usable; those from "group" on name the first field of the header that differs."""


@dataclass(frozen=True, slots=True)
class Header:
    """What must be equal on both sides. `members`: per layer its index and its fields (name, shape, dtype); `layout`: letters of their dims.

    `num_tokens`: length of the prefix that the block ends, 0 for a full block of rows.
    """

    group: str
    kind: str
    layout: str
    members: tuple[tuple[int, tuple[tuple[str, tuple[int, ...], str], ...]], ...]
    tokens_per_block: int
    num_tokens: int
    identity: bytes
    key: bytes

    def to_bytes(self) -> bytes:
        """JSON, the same on every machine."""
        return json.dumps(asdict(self), default=bytes.hex, separators=(",", ":")).encode()


def encode(header: Header, payload: bytes) -> bytes:
    """Pack a block."""
    text = header.to_bytes()
    return b"".join((_prefix(text, payload), text, payload))


def decode(blob: bytes | memoryview, expected: Header) -> memoryview | Reason:
    """The payload of a block that is whole and the one expected, or why it cannot be used."""
    view = memoryview(blob).cast("B")
    if len(view) < PREFIX_BYTES:
        return "truncated"
    magic, version, header_bytes, payload_bytes, checksum = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        return "magic"
    if version != VERSION:
        return "version"
    end = PREFIX_BYTES + header_bytes + payload_bytes
    if len(view) != end:
        return "truncated" if len(view) < end else "trailing"
    text, payload = view[PREFIX_BYTES : PREFIX_BYTES + header_bytes], view[PREFIX_BYTES + header_bytes :]
    if _checksum(view[: PREFIX_BYTES - CHECKSUM_BYTES], text, payload) != checksum:
        return "checksum"
    want = expected.to_bytes()
    return payload if text == want else _difference(bytes(text), want)


def _prefix(text: bytes, payload: bytes) -> bytes:
    front = _PREFIX.pack(MAGIC, VERSION, len(text), len(payload), b"")[:-CHECKSUM_BYTES]
    return front + _checksum(front, text, payload)


def _checksum(*pieces: bytes | memoryview) -> bytes:
    found = blake2b(digest_size=CHECKSUM_BYTES)
    for piece in pieces:
        found.update(piece)
    return found.digest()


def _difference(text: bytes, want: bytes) -> Reason:
    """The first field in which two headers differ."""
    try:
        got = json.loads(text)
    except ValueError:
        return "header"
    if not isinstance(got, dict):
        return "header"
    return next((name for name, value in json.loads(want).items() if got.get(name) != value), "header")
