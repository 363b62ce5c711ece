"""A real trace of chats, at 1/32, through the real scheduler and cache: nothing that is cached is missed, and little room is used well.

Run with -s to see the table. Whole trace on the machine of the authors: 37.4 % for rows and for a grid of one block, 23.2 % for snapshots at
the ends of prompts and at branches alone. (The trace does not say how an answer goes on inside of a block, so no prompt continues a
snapshot at the end of the one before; with real chats those hit, see the last test.)
"""

from __future__ import annotations

import gzip
import json
from functools import lru_cache

import pytest

from tests.cache.replay import BLOCK, MANY, SOME, STATE_BLOCKS, TRACE, TRACE_BLOCK, Replay, Site, conversations, lru_hit, replay, sessions

SHORT = 1500
COUNTS = [SHORT, pytest.param(None, marks=pytest.mark.slow, id="whole")]
GRIDS = {"rows": 0, "auto": 0, "grid": BLOCK}
SHARE_OF_SNAPSHOTS = 0.25
MOST_GRID_LOSS = 0.5
MOST_LOSS_TO_LRU = 1.0
BLOCK_HITS = 36.6
"""Share of the blocks of the whole trace that came before, in percent; of its tokens it is 37.3."""


@lru_cache(maxsize=2)
def most(count: int | None) -> float:
    """The best that any cache of full trace blocks could do, in percent of tokens; at full scale."""
    seen: set[int] = set()
    num_found = num_tokens = 0
    with gzip.open(TRACE, "rt", encoding="ascii") as lines:
        for line in list(lines)[:count]:
            request = json.loads(line)
            names = request["hash_ids"][: request["input_length"] // TRACE_BLOCK]
            num_found += TRACE_BLOCK * sum(name in seen for name in names)
            num_tokens += request["input_length"]
            seen.update(names)
    return 100 * num_found / num_tokens


@lru_cache(maxsize=6)
def unlimited(count: int | None, layout: str) -> Replay:
    room = SOME if count else MANY
    return replay(conversations(count), room, None if layout == "rows" else room, grid=GRIDS[layout])


@pytest.mark.parametrize("count", COUNTS)
def test_a_cache_that_forgets_nothing_misses_nothing(count: int | None) -> None:
    rows, grid, auto = (unlimited(count, layout) for layout in ("rows", "grid", "auto"))
    print(f"\nunlimited: at most {most(count):.2f} %, rows {rows.hit:.2f} %, grid of one block {grid.hit:.2f} %, auto {auto.hit:.2f} %")
    assert rows.hit >= most(count) - MOST_GRID_LOSS
    assert grid.hit >= most(count) - MOST_GRID_LOSS
    if count is None:
        assert grid.hit >= BLOCK_HITS - MOST_GRID_LOSS
    assert auto.hit >= (23.0 if count is None else 13.0)
    for each in (rows, grid, auto):
        counts = each.cache.index.counts
        assert (0, 0, 0) == (counts.evicted_rows, counts.evicted_snapshots, each.cache.index.waste())


def limits(count: int | None, layout: str, share: float) -> tuple[int, int | None]:
    """Blocks of rows and snapshots in a share of the bytes of all that is distinct, a quarter of it for snapshots."""
    budget = share * unlimited(count, layout).working_set
    if layout == "rows":
        return int(budget), None
    num_kept = int(SHARE_OF_SNAPSHOTS * budget / STATE_BLOCKS)
    return int(budget - num_kept * STATE_BLOCKS), num_kept


@pytest.mark.parametrize("share", [0.1, 0.3, 1.0])
@pytest.mark.parametrize(("count", "layout"), [
    (SHORT, "rows"), (SHORT, "auto"), pytest.param(SHORT, "grid", marks=pytest.mark.slow),
    *(pytest.param(None, layout, marks=pytest.mark.slow) for layout in GRIDS),
])
def test_little_room_is_used_no_worse_than_by_lru(count: int | None, layout: str, share: float) -> None:
    num_blocks, num_kept = limits(count, layout, share)
    found = replay(conversations(count), num_blocks, num_kept, grid=GRIDS[layout])
    plain = lru_hit(found.sequences, num_blocks, num_kept, grid=GRIDS[layout])
    index = found.cache.index
    print(
        f"\n{count or 'whole'} {layout} {share:4.0%}: {num_blocks} blocks, {num_kept or 0} snapshots: hit {found.hit:.2f} %, LRU {plain:.2f} %; "
        f"waste {index.waste()} of {index.num_rows} blocks")
    assert found.hit >= plain - MOST_LOSS_TO_LRU
    assert index.num_rows <= num_blocks
    assert index.num_snapshots <= (num_kept or 0)
    if share == 1.0:
        assert index.waste() <= 0.2 * index.num_rows, "rows are kept that nobody can resume from"


@pytest.mark.parametrize(("layout", "loss"), [("rows", 1.1), ("auto", 0.8), pytest.param("grid", 1.5, marks=pytest.mark.slow)])
def test_requests_together_hit_what_they_hit_one_by_one(layout: str, loss: float) -> None:
    """32 at a time: what is being computed cannot be resumed from yet, and nothing else is lost. Long prompts divide their lane: four are."""
    found = replay(conversations(SHORT), SOME, None if layout == "rows" else SOME, grid=GRIDS[layout], together=32)
    assert found.hit >= unlimited(SHORT, layout).hit - loss


def test_many_sessions_keep_their_states() -> None:
    """128 chats of 12 turns, 8 at a time; all is cached: 91 %. With two snapshots per chat 88 % is the bound, with one and a half 80 %."""
    hits = {}
    for per_session in (1.5, 2.0, 100.0):
        num_kept = int(128 * per_session)
        site = Site(SOME, num_kept, together=8)
        found = sessions(site, num_sessions=128, num_turns=12, seed=3)
        assert 128 * 12 == len(found.sequences)
        hits[per_session] = found.hit
        plain = lru_hit(found.sequences, SOME, num_kept)
        print(f"\n{per_session} snapshots per session: hit {found.hit:.1f} %, LRU {plain:.1f} %, waste {found.cache.index.waste()}")
        assert found.hit >= plain - 0.2
    assert hits[100.0] >= 90
    assert hits[2.0] >= 88
    assert hits[1.5] >= 80


def test_sessions_whose_rows_do_not_fit() -> None:
    """Rows for a third of the chats: rows and the states that need them go together."""
    site = Site(128 * 12 * 50 // BLOCK // 3, 256, together=8)
    found = sessions(site, num_sessions=128, num_turns=12, seed=4)
    plain = lru_hit(found.sequences, site.cache.counts()["mla"]["total"], 256)  # type: ignore[arg-type]
    print(f"\nrows for a third: hit {found.hit:.1f} %, LRU {plain:.1f} %, waste {found.cache.index.waste()} of {found.cache.index.num_rows}")
    assert found.hit >= plain - MOST_LOSS_TO_LRU
