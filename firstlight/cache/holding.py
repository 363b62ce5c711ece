"""What a sequence holds besides its table. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from firstlight.cache.blocks import BlockTable, Transfer
from firstlight.cache.keys import Chain
from firstlight.cache.prefix import Match, Rows
from firstlight.cache.snapshots import Snapshot


@dataclass(slots=True)
class Holding:
    """`rows` are the published blocks that it uses, `own` those among them that it published, `kept` the snapshots that it left.

    `origin` is the snapshot that it resumed from, `source` the same until it is copied; `last` the latest one on its way; `pending` the one that the
    step in flight copies; `mark` where a snapshot would have let it resume further on.
    """

    table: BlockTable
    chain: Chain
    rows: list[Rows] = field(default_factory=list)
    num_published: int = 0
    num_committed: int = 0
    mark: int = 0
    source: Snapshot | None = None
    last: Snapshot | None = None
    pending: tuple[int, tuple[int, ...]] | None = None
    own: list[Rows] = field(default_factory=list)
    kept: list[Snapshot] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    resumed: bool = False
    origin: Snapshot | None = None


@dataclass(frozen=True, slots=True)
class Prefix:
    """The part of a prompt that need not be computed again. `mark` is where a snapshot would have let more be reused, 0: nowhere."""

    num_tokens: int = 0
    mark: int = 0
    match: Match = field(default_factory=Match)

    def cold(self) -> Prefix:
        """The same prompt with nothing to resume from."""
        return Prefix(match=Match(chain=self.match.chain))
