"""How many blocks of each group a number of bytes buys. No torch."""

from __future__ import annotations

from firstlight.cache.blocks import Group
from firstlight.spec.errors import CapacityError
from firstlight.spec.model import ModelSpec

FREE_SHARE = 0.25
SNAPSHOT_SHARE = 0.25
MOST_SNAPSHOTS = 4096
"""More would cost bookkeeping time and save nothing measurable."""


def default_bytes(spec: ModelSpec, *, free_bytes: int, max_sequences: int, max_context: int) -> int:
    """A quarter of the free memory, or what all sequences at full length could use if that is less."""
    most = max_sequences * (spec.state_bytes_per_sequence + max_context * spec.row_bytes_per_token)
    return min(int(free_bytes * FREE_SHARE), most)


def split(
    spec: ModelSpec, *, cache_bytes: int, tokens_per_block: int, max_sequences: int, max_context: int, prefix_cache: bool = False
) -> list[Group]:
    """One budget over all groups: states for as many sequences as half of it holds, snapshots within a quarter, rows with the rest.

    Raises CapacityError when not even one state and one block fit.
    """
    kinds = {name: members[0][1].kind for name, members in spec.groups().items()}
    state_bytes, block_bytes = spec.state_bytes_per_sequence, spec.row_bytes_per_token * tokens_per_block
    if cache_bytes < state_bytes + block_bytes:
        raise CapacityError(
            f"a cache of {cache_bytes:,} bytes cannot hold one state ({state_bytes:,} bytes) and one block ({block_bytes:,} bytes)",
            f"Give cache_bytes of at least {state_bytes + block_bytes:,}.")
    num_slots = max_sequences
    if state_bytes:
        share = cache_bytes // 2 if block_bytes else cache_bytes
        num_slots = min(max_sequences, max(1, share // state_bytes))
    num_kept = int(cache_bytes * SNAPSHOT_SHARE) // state_bytes if prefix_cache and state_bytes else 0
    num_kept = min(num_kept, MOST_SNAPSHOTS, (cache_bytes - num_slots * state_bytes - block_bytes) // state_bytes) if num_kept else 0
    num_blocks = 0
    if block_bytes:
        most = max_sequences * -(-max_context // tokens_per_block) * (4 if prefix_cache else 1)
        num_blocks = min(most, (cache_bytes - (num_slots + num_kept) * state_bytes) // block_bytes)
    return [
        Group(name, "rows", num_blocks, tokens_per_block) if kind == "rows" else Group(name, "state", num_slots + num_kept, num_kept=num_kept)
        for name, kind in kinds.items()
    ]
