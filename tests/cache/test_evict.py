"""The order of eviction against its definition, and what a snapshot is worth."""

from __future__ import annotations

import random
import time

from hypothesis import given
from hypothesis import strategies as st

from firstlight.cache.blocks import Group
from firstlight.cache.evict import Ranking, worth
from firstlight.cache.manager import CacheManager

VERBS = st.lists(st.tuples(st.sampled_from(["put", "revalue", "drop", "sink"]), st.integers(0, 6), st.integers(0, 20)), max_size=300)


@given(VERBS)
def test_ranking_is_its_definition(verbs: list[tuple[str, int, int]]) -> None:
    ranking: Ranking[int] = Ranking()
    ranks: dict[int, tuple[float, int]] = {}
    levels: dict[int, float] = {}
    level = 0.0
    for turn, (verb, item, value) in enumerate(verbs):
        if verb == "put":
            levels[item] = level
            ranks[item] = (level + value, turn)
            ranking.put(item, value)
        elif verb == "revalue":
            if item in ranks:
                ranks[item] = (levels[item] + value, turn)
            ranking.revalue(item, value)
        elif verb == "drop":
            ranks.pop(item, None)
            ranking.drop(item)
        else:
            least = min(ranks, key=lambda each: ranks[each], default=None)
            assert least == ranking.sink()
            if least is not None:
                level = ranks.pop(least)[0]
        assert (len(ranks), level) == (len(ranking), ranking.level)


def test_what_is_used_no_more_fades() -> None:
    """A long one that is never used again goes in the end, however small those are that come."""
    ranking: Ranking[str] = Ranking()
    ranking.put("long", 1000.0)
    gone = []
    for number in range(600):
        ranking.put(f"short {number}", 10.0)
        gone += [ranking.sink()] if len(ranking) > 4 else []
    assert "long" in gone
    assert gone.index("long") > 200


def test_worth() -> None:
    """Longer, used more, open ends first; who was continued is worth what others do with it."""
    def value(num_tokens: int = 100, num_uses: int = 0, continued: bool = False) -> float:
        return worth(num_tokens=num_tokens, num_uses=num_uses, continued=continued)

    assert value(200) == 2 * value(100)
    assert value(num_uses=2) > value(num_uses=1) > value()
    assert value(num_uses=3, continued=True) > value(num_uses=1, continued=True) == value(continued=True) > 0
    assert value(num_uses=1, continued=True) < value() < value(num_uses=2, continued=True)


def serve(cache: CacheManager, seq_id: int, tokens: list[int]) -> int:
    """Compute a prompt as if in one step; returns how much was cached."""
    prefix = cache.match(tokens)
    assert cache.reserve(seq_id, len(tokens), prefix=prefix) is not None
    cache.commit(seq_id, tokens)
    cache.release(seq_id)
    cache.check()
    return prefix.num_tokens


def test_rows_go_by_their_last_use_ends_first() -> None:
    """Two paths with a common beginning; the one used last stays whole until the other has lost its own part."""
    cache = CacheManager([Group("mla", "rows", 12, 1)], prefix_cache=True)
    stem, left, right = [1, 2, 3, 4], [5, 6, 7], [8, 9, 10]
    serve(cache, 0, stem + left)
    serve(cache, 1, stem + right)
    assert 6 == serve(cache, 2, stem + left)
    steps = []
    for number in range(12):
        # a stranger that keeps one block more each time, and publishes nothing
        assert cache.reserve(9, number + 1) is not None
        steps.append(tuple(cache.match([*stem, *path, 0]).num_tokens for path in (left, right)))
        cache.check()
    free, own = [(7, 7)] * 2, [(7, 6), (7, 5), (7, 4), (6, 4), (5, 4), (4, 4), (3, 3), (2, 2), (1, 1), (0, 0)]
    assert free + own == steps


def test_a_path_is_never_cut_in_the_middle() -> None:
    """Whatever is evicted, what is left of a prompt is its beginning."""
    rng = random.Random(0)
    cache = CacheManager([Group("mla", "rows", 40, 2), Group("kda", "state", 6, num_kept=4)], prefix_cache=True)
    for number in range(300):
        tokens = [rng.randrange(3) for _ in range(rng.randint(1, 30))]
        serve(cache, number, tokens)
        listed = {rows.key: rows for rows in cache.index.rows()}
        orphans = [rows for rows in listed.values() if rows.before is not None and rows.before is not listed.get(rows.parent)]
        assert [] == orphans


def test_snapshots_go_with_the_rows_that_they_need() -> None:
    cache = CacheManager([Group("mla", "rows", 8, 2), Group("kda", "state", 6, num_kept=4)], prefix_cache=True)
    tokens = [1, 2, 3, 4, 5]
    assert cache.reserve(0, 5) is not None
    cache.commit(0, tokens)
    cache.release(0, tokens=tokens)
    assert (2, 1) == (cache.index.num_rows, cache.index.num_snapshots)
    assert cache.reserve(1, 16 - 2) is not None
    assert 0 == cache.index.num_snapshots, "its last full block is gone"
    assert cache.index.num_rows == cache.index.waste() == 1
    cache.check()


def test_eviction_costs_the_same_however_much_is_cached() -> None:
    def seconds(num_kept: int) -> float:
        """Per snapshot that makes room for another."""
        cache = CacheManager([Group("mla", "rows", 2 * num_kept, 1), Group("kda", "state", num_kept + 1, num_kept=num_kept)], prefix_cache=True)
        for number in range(num_kept):
            tokens = [number, 7]
            cache.reserve(number, 2)
            cache.commit(number, tokens)
            cache.release(number, tokens=tokens)
        assert num_kept == cache.index.num_snapshots
        begun = time.thread_time()
        for number in range(num_kept, num_kept + 2000):
            tokens = [number, 7]
            cache.reserve(number, 2)
            cache.commit(number, tokens)
            cache.release(number, tokens=tokens)
        return time.thread_time() - begun

    few, many = min(seconds(500) for _ in range(3)), min(seconds(20_000) for _ in range(3))
    assert many <= 3 * few, f"{few:.4f} s among few, {many:.4f} s among many"
