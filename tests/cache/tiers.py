"""A tier in memory, and the way of blocks out of a machine and back, as a tiered cache would go it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from firstlight import LLM
from firstlight.cache.manager import CacheManager
from firstlight.cache.pool import CachePool
from firstlight.cache.tier import BlockKey, CacheTier, Usage


@dataclass
class MemoryTier:
    """Keeps bytes until it is full."""

    name: str = "memory"
    capacity_bytes: int | None = None
    blobs: dict[BlockKey, bytes] = field(default_factory=dict)

    def put(self, key: BlockKey, blob: bytes) -> bool:
        used = sum(len(each) for other, each in self.blobs.items() if other != key)
        if self.capacity_bytes is not None and used + len(blob) > self.capacity_bytes:
            return False
        self.blobs[key] = bytes(blob)
        return True

    def get(self, key: BlockKey) -> bytes | None:
        return self.blobs.get(key)

    def discard(self, key: BlockKey) -> None:
        self.blobs.pop(key, None)

    def usage(self) -> Usage:
        return Usage(len(self.blobs), sum(map(len, self.blobs.values())), self.capacity_bytes)


@dataclass(frozen=True)
class Entry:
    """What the index lists: a full block of rows, or a snapshot (`num_tokens` above 0)."""

    key: bytes
    parent: bytes
    num_tokens: int = 0


def parts_of(llm: LLM) -> tuple[CacheManager, CachePool]:
    machine = llm.machine
    assert machine is not None
    return machine.cache, machine.pool


def places(llm: LLM) -> Iterator[tuple[Entry, str, int]]:
    """(entry, group, block) of everything that is listed, blocks before those that follow them."""
    cache, pool = parts_of(llm)
    names = {kind: [name for name, group in pool.groups.items() if group.kind == kind] for kind in ("rows", "state")}
    for rows in cache.index.rows():
        for name, block in zip(names["rows"], rows.blocks, strict=True):
            yield Entry(rows.key, rows.parent), name, block
    for snapshot in cache.index.snapshots():
        held = list(zip(names["state"], snapshot.slots, strict=True))
        if snapshot.tail:
            held += zip(names["rows"], snapshot.tail, strict=True)
        for name, block in held:
            yield Entry(snapshot.key, snapshot.parent, snapshot.num_tokens), name, block


def write_out(llm: LLM, tier: CacheTier) -> list[Entry]:
    """Copy all that is listed into a tier; what it refused is left out."""
    _, pool = parts_of(llm)
    entries: dict[Entry, bool] = {}
    for entry, name, block in places(llm):
        taken = tier.put(BlockKey(name, entry.key), pool.read(name, block, entry.key, num_tokens=entry.num_tokens))
        entries[entry] = entries.get(entry, True) and taken
    return [entry for entry, whole in entries.items() if whole]


def restore(llm: LLM, tier: CacheTier, entries: list[Entry]) -> int:
    """List again what a tier still holds whole; returns how much that was."""
    cache, pool = parts_of(llm)
    num_listed = 0
    for entry in entries:
        def fill(name: str, block: int, entry: Entry = entry) -> bool:
            blob = tier.get(BlockKey(name, entry.key))
            return blob is not None and pool.write(name, block, blob, entry.key, num_tokens=entry.num_tokens)

        if entry.num_tokens:
            num_listed += cache.adopt_snapshot(entry.key, entry.parent, entry.num_tokens, fill)
        else:
            num_listed += cache.adopt_rows(entry.key, entry.parent, fill)
        cache.check()
    return num_listed


def restart(folder: str, parcel: str, answer: str) -> None:
    """What a new process does: boot, restore, compute the rest of a prompt, say what came out."""
    blobs, entries, tokens, options = pickle.loads(Path(parcel).read_bytes())
    with LLM(folder, **options) as llm:
        num_listed = restore(llm, MemoryTier(blobs=blobs), entries)
        got_TV, first = llm.logits(tokens, cached=True)
        torch.save({"logits": got_TV, "first": first, "listed": num_listed, "unusable": llm.stats()["unusable_blocks"]}, answer)
