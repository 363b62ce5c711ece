"""The tensors behind block ids: rows in blocks, states in slots, one entry per layer of a group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from firstlight.cache.blocks import Group, Transfer
from firstlight.cache.codec import Codec, Layout
from firstlight.spec.model import CacheSpec, ModelSpec

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class CachePool:
    """Memory is taken once and never moves. `poison`: blocks hold NaN until somebody writes them."""

    def __init__(
        self, spec: ModelSpec, groups: Sequence[Group], *, device: str = "cpu", poison: bool = False, identity: bytes = b""
    ) -> None:
        self.poison = poison
        self.codec = Codec(identity)
        self.groups = {group.name: group for group in groups}
        self._members: dict[str, list[dict[str, Tensor]]] = {name: [] for name in self.groups}
        self._indices: dict[str, list[int]] = {name: [] for name in self.groups}
        self._layers: dict[int, dict[str, Tensor]] = {layer.index: {} for layer in spec.layers}
        for name, members in spec.groups().items():
            for index, cache in members:
                tensors = self._allocate(self.groups[name], cache, device)
                self._members[name].append(tensors)
                self._indices[name].append(index)
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

    def layout(self, group: str) -> Layout:
        """What the bytes of one of its blocks hold, in order."""
        tensors = [
            (index, name, tuple(tensor.shape[1:]), str(tensor.dtype).removeprefix("torch."))
            for index, members in zip(self._indices[group], self._members[group], strict=True) for name, tensor in members.items()
        ]
        return Layout(group, self.groups[group].kind, self.groups[group].tokens_per_block, tuple(tensors))

    def read(self, group: str, block: int, key: bytes) -> bytes:
        """A block of all layers as bytes under its key, with a header and a checksum."""
        pieces = [_bytes(tensor[block]) for members in self._members[group] for tensor in members.values()]
        return self.codec.wrap(self.layout(group), key, b"".join(pieces))

    def write(self, group: str, block: int, content: bytes | memoryview, key: bytes) -> bool:
        """Fill a block from bytes; False, and nothing is written: they are damaged, or of another key, engine or layout."""
        payload = self.codec.unwrap(self.layout(group), key, content)
        if payload is None:
            return False
        begin = 0
        for members in self._members[group]:
            for tensor in members.values():
                size = tensor[block].nbytes
                raw = torch.frombuffer(bytearray(payload[begin : begin + size]), dtype=torch.uint8)
                tensor[block] = raw.view(tensor.dtype).view(tensor.shape[1:]).to(tensor.device)
                begin += size
        return True

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


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
