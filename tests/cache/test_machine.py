"""Blocks under random verbs: one owner per block, a refused reserve changes nothing, blocks never move, nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from firstlight.cache.blocks import BlockTable, Group
from firstlight.cache.manager import CacheManager
from firstlight.spec.errors import CapacityError

GROUPS = (Group("mla", "rows", 24, 4), Group("window", "rows", 17, 7), Group("kda", "state", 5))
SEQ_IDS = st.integers(0, 7)
LENGTHS = st.integers(1, 130)


def wanted(group: Group, num_tokens: int) -> int:
    """Blocks by the definition, counted one token at a time."""
    return 1 if group.kind == "state" else len({position // group.tokens_per_block for position in range(num_tokens)})


class Machine(RuleBasedStateMachine):
    """The manager beside a model of it: who owns which blocks, what is free, what must be announced."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = CacheManager(GROUPS)
        self.owned: dict[int, dict[str, list[int]]] = {}
        self.tables: dict[int, BlockTable] = {}
        self.fresh: dict[str, set[int]] = {group.name: set() for group in GROUPS}
        self.spoiled: dict[str, set[int]] = {group.name: set() for group in GROUPS}

    def free(self, group: Group) -> int:
        return group.num_blocks - sum(len(blocks[group.name]) for blocks in self.owned.values())

    def lacking(self, seq_id: int, group: Group, num_tokens: int) -> int:
        return max(0, wanted(group, num_tokens) - len(self.owned.get(seq_id, {}).get(group.name, [])))

    @rule(seq_id=SEQ_IDS, num_tokens=LENGTHS, ahead=st.integers(0, 40), spare=st.integers(0, 6), guarded=st.booleans())
    def reserve(self, seq_id: int, num_tokens: int, ahead: int, spare: int, guarded: bool) -> None:
        most = num_tokens + ahead if guarded else num_tokens
        left = {group.name: spare for group in GROUPS} if guarded else {}
        needs = {group.name: self.lacking(seq_id, group, most) for group in GROUPS}
        fits = all(need == 0 or need + left.get(group.name, 0) <= self.free(group) for group, need in zip(GROUPS, needs.values(), strict=True))
        table = self.cache.reserve(seq_id, num_tokens, upto=most if guarded else 0, spare=left)
        assert fits == (table is not None)
        if table is None:
            return
        assert self.tables.setdefault(seq_id, table) is table, "a table was replaced"
        held = self.owned.setdefault(seq_id, {group.name: [] for group in GROUPS})
        for group in GROUPS:
            got = list(table.blocks[group.name])
            before = held[group.name]
            assert before == got[: len(before)], "blocks moved"
            assert max(len(before), wanted(group, num_tokens)) == len(got)
            self.fresh[group.name].update(got[len(before) :])
            held[group.name] = got

    @precondition(lambda self: self.owned)
    @rule(pick=st.randoms(use_true_random=False))
    def commit(self, pick: object) -> None:
        seq_id = pick.choice(sorted(self.owned))  # type: ignore[attr-defined]
        rows = min(len(self.owned[seq_id][group.name]) * group.tokens_per_block for group in GROUPS if group.kind == "rows")
        tokens = [7] * rows
        self.cache.commit(seq_id, tokens, pick.randint(0, rows))  # type: ignore[attr-defined]
        assert [7] * rows == tokens

    @rule(seq_id=SEQ_IDS, scrub=st.booleans(), twice=st.booleans())
    def release(self, seq_id: int, scrub: bool, twice: bool) -> None:
        for _ in range(1 + twice):
            self.cache.release(seq_id, scrub=scrub)
        self.tables.pop(seq_id, None)
        for name, ids in self.owned.pop(seq_id, {}).items():
            if scrub:
                self.spoiled[name].update(ids)

    @rule()
    def take(self) -> None:
        for expected, taken in ((self.fresh, self.cache.take_fresh()), (self.spoiled, self.cache.take_scrub())):
            assert {name: ids for name, ids in expected.items() if ids} == {name: set(ids) for name, ids in taken.items()}
            assert all(len(set(ids)) == len(ids) for ids in taken.values())
            for ids in expected.values():
                ids.clear()
        assert {} == self.cache.take_fresh()
        assert {} == self.cache.take_scrub()

    @rule(lengths=st.dictionaries(SEQ_IDS, LENGTHS, max_size=4))
    def ask(self, lengths: dict[int, int]) -> None:
        growth = {group.name: sum(self.lacking(seq_id, group, num) for seq_id, num in lengths.items()) for group in GROUPS}
        assert growth == self.cache.growth(lengths)
        fits = all(sum(wanted(group, num) for num in lengths.values()) <= group.num_blocks for group in GROUPS)
        assert fits == self.cache.fits(*lengths.values())
        assert 0 == self.cache.match(list(range(20)), salt=b"a").num_tokens

    @invariant()
    def conserved(self) -> None:
        self.cache.check()
        counts = self.cache.counts()
        for group in GROUPS:
            ids = [block for blocks in self.owned.values() for block in blocks[group.name]]
            assert len(set(ids)) == len(ids), "a block has two owners"
            assert set(ids) <= set(range(group.num_blocks))
            count = counts[group.name]
            assert (group.num_blocks, self.free(group), len(ids)) == (count["total"], count["free"], count["used"])
            assert count["total"] == count["free"] + count["used"] + count["cached"]  # type: ignore[operator]
        assert max((group.num_blocks - self.free(group)) / group.num_blocks for group in GROUPS) == self.cache.usage()

    @invariant()
    def unmoved(self) -> None:
        for seq_id, blocks in self.owned.items():
            assert blocks == {name: list(ids) for name, ids in self.tables[seq_id].blocks.items()}

    def teardown(self) -> None:
        for seq_id in list(self.owned):
            self.cache.release(seq_id)
        assert 0.0 == self.cache.usage()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=40)


def test_a_refused_reserve_takes_from_no_group() -> None:
    cache = CacheManager([Group("mla", "rows", 10, 4), Group("kda", "state", 1)])
    assert cache.reserve(0, 8) is not None
    before = cache.counts()
    assert cache.reserve(1, 4) is None, "rows are free, the only state is not"
    assert before == cache.counts()
    assert {"mla": (0, 1), "kda": (0,)} == cache.take_fresh()


def test_ids_are_64_bit_and_given_out_in_a_fixed_order() -> None:
    tables = []
    for _ in range(2):
        cache = CacheManager([Group("mla", "rows", 8, 2)])
        first = cache.reserve(0, 6)
        assert first is not None
        cache.reserve(1, 4)
        cache.release(0)
        table = cache.reserve(2, 10)
        assert table is not None
        assert "q" == table.blocks["mla"].typecode
        tables.append((list(first.blocks["mla"]), list(table.blocks["mla"])))
    assert ([0, 1, 2], [0, 1, 2, 5, 6]) == tables[0] == tables[1]


def test_capacity_is_the_longest_lone_sequence() -> None:
    cache = CacheManager(GROUPS)
    assert 96 == cache.capacity_tokens
    assert cache.fits(96)
    assert not cache.fits(97)
    assert cache.reserve(0, 96) is not None
    assert cache.reserve(1, 1) is None
    assert CacheManager([Group("kda", "state", 2)]).capacity_tokens is None


def test_scrubbing_can_be_asked_for_again() -> None:
    cache = CacheManager([Group("mla", "rows", 8, 2)])
    cache.reserve(0, 3)
    cache.release(0, scrub=True)
    taken = cache.take_scrub()
    assert {"mla": (0, 1)} == taken
    cache.mark_scrub(taken)
    assert taken == cache.take_scrub()


def test_a_group_without_blocks_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"cache group mla has 0 blocks of 16 tokens\. Raise cache_bytes"):
        CacheManager([Group("mla", "rows", 0, 16)])


@pytest.mark.parametrize("harm", ["lost", "doubled", "short"])
def test_check_notices(harm: str) -> None:
    cache = CacheManager(GROUPS)
    table = cache.reserve(0, 9)
    assert table is not None
    cache.check()
    if harm == "lost":
        table.blocks["mla"].pop()
    elif harm == "doubled":
        table.blocks["mla"][1] = table.blocks["mla"][0]
    else:
        cache.commit(0, [1] * 13)
    with pytest.raises(AssertionError, match="mla"):
        cache.check()
