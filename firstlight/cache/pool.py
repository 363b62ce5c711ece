"""The tensors behind block ids: rows in blocks, states in slots, one entry per layer of a group.

Letters: B bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from firstlight.cache.blocks import Group, Transfer
from firstlight.cache.codec import Header, decode, encode
from firstlight.spec.model import CacheSpec, ModelSpec

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class CachePool:
    """Memory is taken once and never moves. `poison`: blocks hold NaN until somebody writes them.

    `identity` is that of the CacheManager; `unusable` counts by reason what `write` was given in vain.
    """

    def __init__(self, spec: ModelSpec, groups: Sequence[Group], *, device: str = "cpu", poison: bool = False, identity: bytes = b"") -> None:
        self.poison, self.identity = poison, identity
        self.unusable: Counter[str] = Counter()
        self._specs = spec.groups()
        self.groups = {group.name: group for group in groups}
        self._members: dict[str, list[dict[str, Tensor]]] = {name: [] for name in self.groups}
        self._layers: dict[int, dict[str, Tensor]] = {layer.index: {} for layer in spec.layers}
        for name, members in self._specs.items():
            for index, cache in members:
                tensors = self._allocate(self.groups[name], cache, device)
                self._members[name].append(tensors)
                self._layers[index].update(tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(tensor.nbytes for members in self._members.values() for tensors in members for tensor in tensors.values())

    def layer(self, index: int) -> Mapping[str, Tensor]:
        """Field name -> pool tensor of one layer."""
        return self._layers[index]

    def claim(self, fresh: Mapping[str, Iterable[int]]) -> None:
        """Blocks change hands: NaN in poison mode, else states are zeroed; rows are never read before they are written."""
        for name, ids in fresh.items():
            if self.poison:
                self._fill(name, ids, float("nan"))
            elif self.groups[name].kind == "state":
                self._fill(name, ids, 0.0)

    def scrub(self, spoiled: Mapping[str, Iterable[int]]) -> None:
        """Overwrite blocks whose content must not be seen again."""
        for name, ids in spoiled.items():
            self._fill(name, ids, float("nan") if self.poison else 0.0)

    def copy(self, transfers: Iterable[Transfer]) -> None:
        """Copy blocks inside their groups, all layers and fields."""
        for transfer in transfers:
            for tensors in self._members[transfer.group]:
                for tensor in tensors.values():
                    tensor[transfer.target] = tensor[transfer.source]

    def read(self, group: str, block: int, key: bytes, *, num_tokens: int = 0) -> bytes:
        """A block of all layers as bytes, see codec.py. `num_tokens` says how long the prefix of a snapshot is.

        Note: of a block of rows that a snapshot ends in, what follows its last token belongs to others and leaves as zeros.
        """
        rest = num_tokens % self.groups[group].tokens_per_block if self.groups[group].kind == "rows" else 0
        pieces = []
        for tensor in self._fields(group):
            found = tensor[block].cpu()
            if rest:
                found = found.clone()
                found[rest:] = 0
            pieces.append(found.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return encode(self._header(group, key, num_tokens), b"".join(pieces))

    def write(self, group: str, block: int, blob: bytes, key: bytes, *, num_tokens: int = 0) -> bool:
        """Put a block back that `read` gave under the same key, here or in another process; False: not usable, and nothing was written."""
        payload = decode(blob, self._header(group, key, num_tokens))
        if isinstance(payload, str):
            self.unusable[payload] += 1
            return False
        places = [tensor[block] for tensor in self._fields(group)]
        if len(payload) != sum(place.nbytes for place in places):
            self.unusable["payload"] += 1
            return False
        content_B, begin = torch.frombuffer(bytearray(payload), dtype=torch.uint8), 0
        for place in places:
            # cloned, since a field may begin anywhere and a number only at a multiple of its size
            found_B = content_B[begin : begin + place.nbytes].clone()
            place.copy_(found_B.view(place.dtype).view(place.shape))
            begin += place.nbytes
        return True

    def _fields(self, group: str) -> Iterator[Tensor]:
        """The tensors of a group in the order of the header."""
        for tensors in self._members[group]:
            yield from tensors.values()

    def _header(self, group: str, key: bytes, num_tokens: int) -> Header:
        members = tuple(
            (index, tuple((field.name, field.shape, field.dtype) for field in cache.fields)) for index, cache in self._specs[group])
        found = self.groups[group]
        return Header(group, found.kind, self._specs[group][0][1].layout, members, found.tokens_per_block, num_tokens, self.identity, key)

    def _fill(self, name: str, ids: Iterable[int], value: float) -> None:
        index = torch.tensor(list(ids), dtype=torch.int64)
        if not index.numel():
            return
        for tensors in self._members[name]:
            for tensor in tensors.values():
                tensor.index_fill_(0, index.to(tensor.device), value)

    def _allocate(self, group: Group, cache: CacheSpec, device: str) -> dict[str, Tensor]:
        lead = (group.num_blocks, group.tokens_per_block) if group.kind == "rows" else (group.num_blocks,)
        found = {}
        for field in cache.fields:
            # zeros come from the system untouched, so an unused block costs no memory
            tensor = torch.zeros((*lead, *field.shape), dtype=_DTYPES[field.dtype], device=device)
            found[field.name] = tensor.fill_(float("nan")) if self.poison else tensor
        return found
