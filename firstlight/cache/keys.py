"""Names of prefixes. No torch.

A key names a whole prefix: key(i) = BLAKE2b(tokens of block i, keyed with key(i - 1)), 128 bits, starting from a root that holds
the model's identity and the caller's salt. Equal keys mean equal prefixes, in every process and on every machine.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

KEY_BYTES = 16


class Chain:
    """Keys of a sequence's full blocks; grows with the sequence, each token is hashed once."""

    __slots__ = ("_tokens_per_block", "keys", "root")

    def __init__(self, root: bytes, tokens_per_block: int) -> None:
        self.root = root
        self.keys: list[bytes] = []
        self._tokens_per_block = tokens_per_block

    def extend(self, tokens: Sequence[int], num_tokens: int) -> None:
        """Hash the full blocks among the first `num_tokens` that are not hashed yet."""
        size, begin = self._tokens_per_block, len(self.keys) * self._tokens_per_block
        end = num_tokens - num_tokens % size
        if end <= begin:
            return
        packed, key = memoryview(array("I", tokens[begin:end])).cast("B"), self.at(len(self.keys))
        step = size * array("I").itemsize
        for offset in range(0, len(packed), step):
            key = blake2b(packed[offset : offset + step], digest_size=KEY_BYTES, key=key).digest()
            self.keys.append(key)

    def at(self, num_blocks: int) -> bytes:
        """The key of the first blocks together; 0 blocks: the root."""
        return self.keys[num_blocks - 1] if num_blocks else self.root

    def key(self, tokens: Sequence[int], num_tokens: int) -> bytes:
        """The key of any number of tokens whose full blocks are hashed."""
        num_blocks, rest = divmod(num_tokens, self._tokens_per_block)
        return tail_key(self.at(num_blocks), tokens[num_tokens - rest : num_tokens]) if rest else self.at(num_blocks)


def root_key(identity: bytes, salt: bytes) -> bytes:
    """Where the chains of one model and one namespace start."""
    return blake2b(len(identity).to_bytes(8, "little") + identity + salt, digest_size=KEY_BYTES, person=b"firstlight.root").digest()


def tail_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a prefix that ends inside a block."""
    return blake2b(array("I", tokens).tobytes(), digest_size=KEY_BYTES, key=parent).digest()
