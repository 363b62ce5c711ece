"""Blocks leave and come back: bit for bit or not at all, in this process or another, and a damaged one is an absent one.

Letters: T tokens, V vocabulary, B bytes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from firstlight import LLM, SamplingParams
from firstlight.cache import codec
from firstlight.cache.blocks import Group
from firstlight.cache.codec import PREFIX_BYTES, VERSION, Header, decode, encode
from firstlight.cache.manager import CacheManager
from firstlight.cache.pool import CachePool
from firstlight.cache.tier import BlockKey, CacheTier, Usage
from firstlight.models.registry import read
from tests.cache.tiers import Entry, MemoryTier, parts_of, places, restore, write_out

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
FOLDER = DATA / "kimi_k3_long"
TOLERANCE = 1e-4
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "cache_bytes": 8_000_000, "max_sequences": 4, "tokens_per_block": 4, "chunk_tokens": 8, "max_step_tokens": 32,
    "snapshot_tokens": 8, "poison_freed": True,
}
GREEDY = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
HEADER = Header(
    "kda", "state", "HKV WD", ((1, (("a", (2, 3), "float32"), ("b", (5,), "bfloat16"))), (3, (("a", (2, 3), "float32"),))), 16, 77, b"me", b"k")
PAYLOAD = random.Random(1).randbytes(91)
BLOB = encode(HEADER, PAYLOAD)


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(length)]


# --- the bytes


@given(
    st.binary(max_size=300), st.text(max_size=9), st.binary(max_size=20), st.binary(max_size=20), st.integers(0, 1 << 40),
    st.lists(st.tuples(st.integers(0, 92), st.lists(st.tuples(st.text(max_size=4), st.lists(st.integers(0, 9), max_size=3).map(tuple),
                                                              st.just("bfloat16")), max_size=3).map(tuple)), max_size=3).map(tuple))
def test_what_was_packed_comes_back(payload: bytes, group: str, identity: bytes, key: bytes, num_tokens: int, members: Any) -> None:
    header = Header(group, "rows", "L", members, 16, num_tokens, identity, key)
    for blob in (encode(header, payload), memoryview(encode(header, payload))):
        got = decode(blob, header)
        assert isinstance(got, memoryview)
        assert payload == bytes(got)


def test_every_flipped_bit_is_noticed() -> None:
    seen = set()
    for place in range(8 * len(BLOB)):
        spoiled = bytearray(BLOB)
        spoiled[place // 8] ^= 1 << place % 8
        got = decode(bytes(spoiled), HEADER)
        assert isinstance(got, str), f"bit {place} does not matter"
        seen.add(got)
    assert {"magic", "version", "truncated", "trailing", "checksum"} == seen


def test_every_truncation_is_noticed() -> None:
    for length in range(len(BLOB)):
        assert "truncated" == decode(BLOB[:length], HEADER)
    assert "trailing" == decode(BLOB + b"\0", HEADER)


@given(st.binary(max_size=200))
def test_noise_is_not_a_block(noise: bytes) -> None:
    assert isinstance(decode(noise, HEADER), str)
    assert isinstance(decode(BLOB[:8] + noise, HEADER), str)


def test_another_version_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "VERSION", VERSION + 1)
    newer = encode(HEADER, PAYLOAD)
    monkeypatch.undo()
    assert "version" == decode(newer, HEADER)


CHANGES: dict[str, Any] = {
    "group": "mla", "kind": "rows", "layout": "HVK WD", "members": HEADER.members[:1], "tokens_per_block": 8, "num_tokens": 78, "identity": b"you",
    "key": b"other",
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_field_of_the_header_must_be_equal(name: str) -> None:
    assert {field.name for field in dataclasses.fields(Header)} == set(CHANGES) <= set(get_args(codec.Reason))
    assert name == decode(BLOB, dataclasses.replace(HEADER, **{name: CHANGES[name]}))


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b'{"group":"kda"}', json.dumps({**json.loads(HEADER.to_bytes()), "more": 1}).encode()])
def test_a_signed_header_that_says_something_else(text: bytes) -> None:
    blob = codec._prefix(text, PAYLOAD) + text + PAYLOAD
    assert decode(blob, HEADER) in ("header", "kind")


# --- the pool


def pool_of(dtype: str = "float32", *, tokens_per_block: int = 4, identity: bytes = b"me", poison: bool = False) -> CachePool:
    groups = (Group("mla", "rows", 3, tokens_per_block), Group("kda", "state", 3))
    return CachePool(read(FOLDER).spec.with_dtype(dtype), groups, identity=identity, poison=poison)


def bits(pool: CachePool, group: str, block: int) -> bytes:
    return b"".join(tensor[block].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in pool._fields(group))


def fill_with_noise(pool: CachePool, seed: int) -> None:
    """Any bits, so denormals, infinities and NaN of every kind are among them."""
    rng = random.Random(seed)
    for group in pool.groups:
        for tensor in pool._fields(group):
            noise_B = torch.frombuffer(bytearray(rng.randbytes(tensor.nbytes)), dtype=torch.uint8)
            tensor.copy_(noise_B.view(tensor.dtype).view(tensor.shape))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("group", ["mla", "kda"])
def test_a_block_is_exact_and_alone(dtype: str, group: str) -> None:
    here, there = pool_of(dtype), pool_of(dtype, poison=True)
    fill_with_noise(here, 5)
    fill_with_noise(there, 6)
    before = [bits(there, group, block) for block in range(3)]
    assert there.write(group, 2, here.read(group, 1, b"key"), b"key")
    assert [before[0], before[1], bits(here, group, 1)] == [bits(there, group, block) for block in range(3)]
    assert not there.unusable
    assert here.read(group, 1, b"key") == there.read(group, 2, b"key")


def test_rows_behind_a_snapshot_do_not_leave() -> None:
    """A snapshot after 6 tokens, blocks of 4: two rows of its last block are its own."""
    pool = pool_of()
    fill_with_noise(pool, 1)
    blob = pool.read("mla", 0, b"key", num_tokens=6)
    assert pool.write("mla", 1, blob, b"key", num_tokens=6)
    for tensor in pool._fields("mla"):
        assert torch.equal(tensor[0, :2].view(torch.uint8), tensor[1, :2].view(torch.uint8))
        assert not tensor[1, 2:].any()
    assert not pool.write("mla", 1, blob, b"key", num_tokens=7)
    assert {"num_tokens": 1} == pool.unusable


@settings(max_examples=60)
@given(st.data(), st.sampled_from(["mla", "kda"]))
def test_damage_writes_nothing(drawn: st.DataObject, group: str) -> None:
    pool = pool_of("bfloat16")
    fill_with_noise(pool, 3)
    blob, before = pool.read(group, 0, b"key"), [bits(pool, group, block) for block in range(3)]
    what = drawn.draw(st.sampled_from(["flip", "cut", "grow", "swap"]))
    if what == "flip":
        place = drawn.draw(st.integers(0, 8 * len(blob) - 1))
        spoiled = bytearray(blob)
        spoiled[place // 8] ^= 1 << place % 8
    elif what == "cut":
        spoiled = bytearray(blob[: drawn.draw(st.integers(0, len(blob) - 1))])
    elif what == "grow":
        spoiled = bytearray(blob + drawn.draw(st.binary(min_size=1, max_size=40)))
    else:
        middle = drawn.draw(st.integers(1, len(blob) - 1))
        spoiled = bytearray(blob[middle:] + blob[:middle])
    if bytes(spoiled) == blob:
        return
    assert not pool.write(group, 1, bytes(spoiled), b"key")
    assert before == [bits(pool, group, block) for block in range(3)], "a part was written"
    assert 1 == sum(pool.unusable.values())


@pytest.mark.parametrize(
    ("stranger", "reason"),
    [
        (pool_of("bfloat16"), "members"), (pool_of(tokens_per_block=8), "tokens_per_block"), (pool_of(identity=b"you"), "identity"),
    ],
    ids=lambda value: value if isinstance(value, str) else "")
def test_blocks_of_strangers_are_refused(stranger: CachePool, reason: str) -> None:
    pool = pool_of()
    for group in ("mla", "kda"):
        if reason == "tokens_per_block" and group == "kda":
            continue
        assert not pool.write(group, 0, stranger.read(group, 0, b"key"), b"key")
    assert not pool.write("mla", 0, pool.read("mla", 0, b"key"), b"another key")
    assert not pool.write("mla", 0, pool.read("kda", 0, b"key"), b"key")
    assert {reason, "key", "group"} == set(pool.unusable)


def test_the_layout_of_the_state_has_a_name() -> None:
    """(K, V) for (V, K) is invisible in a shape when both are equal; the header says which it is."""
    pool = pool_of()
    text = pool.read("kda", 0, b"key")
    header = json.loads(text[PREFIX_BYTES : text.index(b"}", PREFIX_BYTES) + 1])
    assert "HKV WD WD WD" == header["layout"]
    fields = header["members"][0][1]
    assert [len(letters) for letters in header["layout"].split()] == [len(shape) for _, shape, _ in fields]
    recurrent = {name: shape for name, shape, _ in fields}["recurrent"]
    assert recurrent[1] == recurrent[2], "here the shape could not tell"


# --- a tier


@pytest.fixture(params=["memory"])
def tier(request: pytest.FixtureRequest) -> CacheTier:
    return MemoryTier(capacity_bytes=100)


def test_contract_of_a_tier(tier: CacheTier) -> None:
    one, two = BlockKey("kda", b"1"), BlockKey("mla", b"1")
    assert tier.get(one) is None
    tier.discard(one)
    assert tier.put(one, b"a" * 60)
    assert tier.put(two, b"b" * 30), "groups of one key are apart"
    assert (b"a" * 60, b"b" * 30) == (tier.get(one), tier.get(two))
    assert Usage(2, 90, 100) == tier.usage()
    assert not tier.put(BlockKey("kda", b"2"), b"c" * 11), "it is full"
    assert not tier.put(one, b"c" * 71)
    assert (b"a" * 60, b"b" * 30) == (tier.get(one), tier.get(two)), "a refused put has changed something"
    assert tier.put(one, b"d" * 70), "the same key again replaces"
    tier.discard(one)
    tier.discard(one)
    assert tier.get(one) is None
    assert Usage(1, 30, 100) == tier.usage()


# --- whole machines


@pytest.fixture(scope="module")
def cold() -> Iterator[LLM]:
    with LLM(FOLDER, dtype="float32", cache_bytes=8_000_000, max_sequences=2, prefix_cache=False) as llm:
        yield llm


@pytest.fixture(params=["float32", "bfloat16"])
def warm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(FOLDER, **OPTIONS | {"dtype": request.param}) as llm:
        yield llm


STEM = prompt(1, 42)
LONGER = STEM + prompt(2, 11)


def near_cold(cold: LLM, got_TV: Tensor, first: int, tokens: list[int]) -> None:
    assert float((got_TV - cold.logits(tokens)[first:]).abs().max()) <= TOLERANCE


def test_restored_is_as_if_it_had_never_left(warm: LLM, cold: LLM) -> None:
    cache, pool = parts_of(warm)
    warm.generate([STEM, prompt(3, 9)], GREEDY)
    tier = MemoryTier()
    entries = write_out(warm, tier)
    contents = {(entry, name): pool.read(name, block, entry.key, num_tokens=entry.num_tokens) for entry, name, block in places(warm)}
    assert 42 // 4 + 9 // 4 <= sum(1 for entry in entries if not entry.num_tokens)
    stayed_TV, stayed_from = warm.logits(LONGER, cached=True)
    assert len(STEM) - 1 == stayed_from
    warm.reset_prefix_cache()
    assert (0, 0) == (cache.index.num_rows, cache.index.num_snapshots)
    warm.generate([prompt(7, 60)], GREEDY)  # others write where it was
    assert len(entries) == restore(warm, tier, entries)
    found = {(entry, name): pool.read(name, block, entry.key, num_tokens=entry.num_tokens) for entry, name, block in places(warm)}
    assert contents.items() <= found.items()
    back_TV, back_from = warm.logits(LONGER, cached=True)
    assert stayed_from == back_from
    assert torch.equal(stayed_TV, back_TV)
    assert {} == warm.stats()["unusable_blocks"]
    if warm.spec.dtype == "float32":
        near_cold(cold, back_TV, back_from, LONGER)
    assert restore(warm, tier, entries) == 0, "what is listed is not listed again"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_process_goes_on(dtype: str, cold: LLM, tmp_path: Path) -> None:
    """Its hashes of strings are others, its keys are not."""
    options, tier = OPTIONS | {"dtype": dtype}, MemoryTier()
    with LLM(FOLDER, **options) as llm:
        llm.generate([STEM], GREEDY)
        entries = write_out(llm, tier)
        stayed_TV, stayed_from = llm.logits(LONGER, cached=True)
    (tmp_path / "parcel").write_bytes(pickle.dumps((tier.blobs, entries, LONGER, options)))
    program = "import sys; from tests.cache.tiers import restart; restart(*sys.argv[1:])"
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    subprocess.run([sys.executable, "-c", program, FOLDER, tmp_path / "parcel", tmp_path / "answer"], cwd=ROOT, env=environment, check=True)
    answer = torch.load(tmp_path / "answer")
    assert (stayed_from, len(entries), {}) == (answer["first"], answer["listed"], answer["unusable"])
    assert torch.equal(stayed_TV, answer["logits"])
    if dtype == "float32":
        near_cold(cold, answer["logits"], stayed_from, LONGER)


@pytest.mark.parametrize("change", ["dtype", "tokens_per_block", "model"])
def test_another_machine_refuses(change: str) -> None:
    tier = MemoryTier()
    with LLM(FOLDER, **OPTIONS) as llm:
        llm.generate([STEM], GREEDY)
        entries = [entry for entry in write_out(llm, tier) if change != "tokens_per_block" or not entry.num_tokens]
    folder = DATA / "kimi_k3_tiny" if change == "model" else FOLDER
    options = OPTIONS | {"dtype": {"dtype": "bfloat16"}, "tokens_per_block": {"tokens_per_block": 8}, "model": {}}[change]
    with LLM(folder, **options) as llm:
        cache, _ = parts_of(llm)
        before = cache.counts()
        assert 0 == restore(llm, tier, entries)
        assert before == cache.counts()
        assert len(entries) == sum(llm.stats()["unusable_blocks"].values())
        got_TV, first = llm.logits(LONGER, cached=True)
        assert 0 == first
        assert bool(got_TV.isfinite().all())


@pytest.mark.parametrize("num_rows", [4, 8, 10])
@pytest.mark.parametrize("at", [16, 32])
def test_no_group_reaches_further_than_the_shortest(cold: LLM, num_rows: int, at: int) -> None:
    """Rows for so many blocks of 4, a state behind 16 or 32 tokens: both or nothing."""
    tier = MemoryTier()
    with LLM(FOLDER, **OPTIONS) as llm:
        llm.generate([STEM], GREEDY)
        entries = write_out(llm, tier)
        llm.reset_prefix_cache()
        rows = [entry for entry in entries if not entry.num_tokens][:num_rows]
        states = [entry for entry in entries if entry.num_tokens == at]
        assert num_rows + 1 == restore(llm, tier, [*states, *rows])
        got_TV, first = llm.logits(LONGER, cached=True)
        assert (at if 4 * num_rows >= at else 0) == first
        near_cold(cold, got_TV, first, LONGER)


@pytest.mark.parametrize("seed", range(6))
def test_losses_and_damage_cost_time_only(cold: LLM, seed: int) -> None:
    """A tier that lost a part and spoiled another: what comes back is right, and every spoiled block is counted."""
    rng, tier = random.Random(seed), MemoryTier()
    with LLM(FOLDER, **OPTIONS) as llm:
        llm.generate([STEM, STEM[:20] + prompt(5, 15)], GREEDY)
        entries = write_out(llm, tier)
        llm.reset_prefix_cache()
        num_spoiled = 0
        for key in sorted(tier.blobs):
            lot = rng.random()
            if lot < 0.05:
                tier.discard(key)
            elif lot < 0.15:
                blob = bytearray(tier.blobs[key])
                blob[rng.randrange(len(blob))] ^= 1 << rng.randrange(8)
                tier.blobs[key], num_spoiled = bytes(blob), num_spoiled + 1
        assert len(entries) > restore(llm, tier, entries)
        assert 1 <= sum(llm.stats()["unusable_blocks"].values()) <= num_spoiled
        got_TV, first = llm.logits(LONGER, cached=True)
        near_cold(cold, got_TV, first, LONGER)


def test_a_full_tier_keeps_a_part(cold: LLM) -> None:
    with LLM(FOLDER, **OPTIONS) as llm:
        llm.generate([STEM], GREEDY)
        whole = MemoryTier()
        everything = write_out(llm, whole)
        tier = MemoryTier(capacity_bytes=whole.usage().num_bytes // 2)
        entries = write_out(llm, tier)
        assert 0 < len(entries) < len(everything)
        assert tier.usage().num_bytes <= tier.usage().capacity_bytes  # type: ignore[operator]
        llm.reset_prefix_cache()
        assert len(entries) == restore(llm, tier, entries)
        got_TV, first = llm.logits(LONGER, cached=True)
        near_cold(cold, got_TV, first, LONGER)


# --- room


def test_adopting_respects_the_quota_and_running_sequences() -> None:
    cache = CacheManager([Group("mla", "rows", 6, 4), Group("kda", "state", 4, num_kept=2)], prefix_cache=True)
    assert cache.reserve(0, 16) is not None
    keys = [bytes([n]) for n in range(9)]
    filled: list[tuple[str, int]] = []

    def fill(name: str, block: int) -> bool:
        filled.append((name, block))
        return True

    assert [True, True, True] == [cache.adopt_snapshot(keys[n], b"p", 8, fill) for n in range(3)]
    assert 2 == cache.index.num_snapshots, "the third takes the place of the first"
    assert [True, True, True] == [cache.adopt_rows(key, b"p", fill) for key in keys[:3]]
    assert 2 == cache.index.num_rows
    cache.check()
    assert cache.reserve(0, 24) is not None, "what is cached only makes room"
    filled.clear()
    before = cache.counts()
    assert not cache.adopt_rows(keys[7], b"p", fill)
    assert not cache.adopt_snapshot(keys[8], b"p", 9, fill), "there is no room for its rows"
    assert [] == filled
    assert before["mla"] == cache.counts()["mla"]
    cache.check()


@pytest.mark.parametrize("how", ["refuses", "breaks"])
def test_what_cannot_be_filled_takes_nothing(how: str) -> None:
    cache = CacheManager([Group("mla", "rows", 6, 4), Group("kda", "state", 4, num_kept=2)], prefix_cache=True)

    def fill(name: str, block: int) -> bool:
        if name == "mla" and how == "breaks":
            raise OSError("the disk is gone")
        return name != "mla"

    for adopt in (lambda: cache.adopt_rows(b"k", b"p", fill), lambda: cache.adopt_snapshot(b"k", b"p", 7, fill)):
        before = cache.counts()
        if how == "breaks":
            with pytest.raises(OSError):
                adopt()
        else:
            assert not adopt()
        assert before == cache.counts()
        cache.check()
    assert (0, 0) == (cache.index.num_rows, cache.index.num_snapshots)


def test_layouts_without_the_kind_adopt_nothing() -> None:
    rows, states = Group("mla", "rows", 6, 4), Group("kda", "state", 4, num_kept=2)
    assert not CacheManager([rows], prefix_cache=True).adopt_snapshot(b"k", b"p", 8, lambda name, block: True)
    assert not CacheManager([states], prefix_cache=True).adopt_rows(b"k", b"p", lambda name, block: True)
    assert not CacheManager([rows, states]).adopt_rows(b"k", b"p", lambda name, block: True)
    assert not CacheManager([rows, states]).adopt_snapshot(b"k", b"p", 8, lambda name, block: True)


def test_adopted_blocks_are_not_cleared_any_more() -> None:
    """A block that was handed out, or spoiled, and given back before any step is free, but on a list of blocks to clear."""
    cache = CacheManager([Group("mla", "rows", 1, 4)], prefix_cache=True)
    cache.reserve(0, 4)
    cache.release(0, scrub=True)
    assert cache.adopt_rows(b"k", b"p", lambda name, block: True)
    assert ({}, {}) == (cache.take_fresh(), cache.take_scrub())


def test_entries_tell_rows_and_snapshots_apart() -> None:
    with LLM(FOLDER, **OPTIONS) as llm:
        llm.generate([STEM], GREEDY)
        entries = [entry for entry, _, _ in places(llm)]
    assert Entry(entries[0].key, entries[0].parent) == entries[0]
    assert {0} < {entry.num_tokens for entry in entries}
