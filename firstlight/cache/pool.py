"""The tensors behind block ids: rows in blocks, states in slots, one entry per layer of a group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from firstlight.cache.blocks import Group, Transfer
from firstlight.spec.model import CacheSpec, ModelSpec

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class CachePool:
    """Memory is taken once and never moves. `poison`: blocks hold NaN until somebody writes them."""

    def __init__(self, spec: ModelSpec, groups: Sequence[Group], *, device: str = "cpu", poison: bool = False) -> None:
        self.poison = poison
        self.groups = {group.name: group for group in groups}
        self._members: dict[str, list[dict[str, Tensor]]] = {name: [] for name in self.groups}
        self._layers: dict[int, dict[str, Tensor]] = {layer.index: {} for layer in spec.layers}
        for name, members in spec.groups().items():
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
