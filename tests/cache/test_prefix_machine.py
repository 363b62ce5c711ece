"""The prefix cache under random verbs, beside a memory in which every row and every state remembers the tokens that it stands for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from firstlight.cache.blocks import BlockTable, Group
from firstlight.cache.keys import Chain, root_key
from firstlight.cache.manager import CacheManager

B = 4
LAYOUTS = {
    "hybrid": (Group("mla", "rows", 14, B), Group("kda", "state", 6, num_kept=3)),
    "two of each": (
        Group("mla", "rows", 12, B), Group("index", "rows", 17, B), Group("kda", "state", 5, num_kept=2), Group("conv", "state", 7, num_kept=4)),
    "rows": (Group("mla", "rows", 13, B),),
    "states": (Group("kda", "state", 5, num_kept=3),),
}
STEMS = [[random.Random(seed).randrange(50) for _ in range(24)] for seed in range(3)]
SEEDS = st.integers(0, 2**40)
MOST_RUNNING = 4

Tokens = tuple[int, ...]


def prompt(rng: random.Random) -> list[int]:
    """Cut from a stem, and gone on with in one of few ways."""
    return rng.choice(STEMS)[: rng.randint(0, 24)] + [rng.randint(0, 1) for _ in range(rng.randint(1, 7))]


@dataclass
class Running:
    """A sequence as a runner sees it."""

    tokens: list[int]
    num_prompt: int
    num_computed: int
    table: BlockTable
    salt: bytes = b""


@dataclass
class Archive:
    """What was listed once: content by group, to be brought back."""

    key: bytes
    parent: bytes
    num_tokens: int | None
    content: dict[str, tuple[Tokens | None, ...]] = field(default_factory=dict)


class Machine(RuleBasedStateMachine):
    """`memory` holds per block the prefixes that its slots stand for; None: nobody may read it."""

    @initialize(layout=st.sampled_from(sorted(LAYOUTS)), grid=st.sampled_from([0, 4, 6]))
    def start(self, layout: str, grid: int) -> None:
        self.groups = LAYOUTS[layout]
        self.cache = CacheManager(self.groups, identity=b"m", prefix_cache=True, snapshot_tokens=grid)
        self.rows = [group.name for group in self.groups if group.kind == "rows"]
        self.states = [group.name for group in self.groups if group.kind == "state"]
        self.memory = {group.name: {block: [None] * (B if group.kind == "rows" else 1) for block in range(group.num_blocks)} for group in self.groups}
        self.running: dict[int, Running] = {}
        self.names: dict[bytes, Tokens] = {}
        self.archive: list[Archive] = []

    # --- what the memory says

    def name(self, tokens: list[int], salt: bytes = b"") -> None:
        """Remember which prefix each key of these tokens stands for."""
        chain = Chain(root_key(b"m", salt), self.cache.tokens_per_block)
        chain.extend(tokens, len(tokens))
        for num_tokens in range(1, len(tokens) + 1):
            prefix = (*salt, *tokens[:num_tokens])
            assert prefix == self.names.setdefault(chain.key(tokens, num_tokens), prefix), "two prefixes of one key"

    def last_rows(self, key: bytes, count: int) -> list[Tokens]:
        """What the last rows of the prefix with this key stand for."""
        whole = self.names[key]
        return [whole[: len(whole) - left] for left in range(count - 1, -1, -1)]

    def listed(self) -> Iterator[tuple[str, int]]:
        for kind, blocks in self.cache.index.holdings():
            yield from zip(self.rows if kind == "rows" else self.states, blocks, strict=True)

    def picture(self) -> object:
        """Everything that a refused call must leave alone."""
        index = self.cache.index
        return (
            self.cache.counts(), [rows.key for rows in index.rows()], [(each.key, each.num_pins, each.num_uses) for each in index.snapshots()],
            {seq_id: {name: list(ids) for name, ids in each.table.blocks.items()} for seq_id, each in self.running.items()},
            {name: dict(ids) for name, ids in self.cache._fresh.items()}, {name: dict(ids) for name, ids in self.cache._scrub.items()})

    # --- the verbs

    @precondition(lambda self: len(self.running) < MOST_RUNNING)
    @rule(seed=SEEDS)
    def enter(self, seed: int) -> None:
        """A prompt, or one of the others gone on with, finds its prefix and its blocks."""
        rng = random.Random(seed)
        salt, tokens = rng.choice([b"", b"", b"z"]), prompt(rng)
        if self.running and rng.random() < 0.3:
            other = rng.choice(list(self.running.values()))
            salt, tokens = other.salt, other.tokens + [rng.randint(0, 1) for _ in range(rng.randint(0, 3))]
        self.name(tokens, salt)
        before = self.picture()
        prefix = self.cache.match(tokens, salt=salt)
        self.check_match(prefix.match, tokens, salt)
        assert before == self.picture(), "a question has changed something"
        if rng.random() < 0.1:
            prefix = prefix.cold()
        ahead, spare = rng.choice([(0, 0), (5, 0), (9, 2)])
        seq_id = min(set(range(MOST_RUNNING)) - set(self.running))
        table = self.cache.reserve(
            seq_id, len(tokens), prefix=prefix, upto=len(tokens) + ahead, spare={group.name: spare for group in self.groups})
        if table is None:
            assert before == self.picture(), "a refused reserve has changed something"
            alone = not self.running and not spare and self.cache.fits(len(tokens) + ahead)
            assert not (alone and not prefix.num_tokens), "what is only cached stands in the way"
            return
        self.running[seq_id] = Running(list(tokens), len(tokens), prefix.num_tokens, table, salt)

    def check_match(self, match: object, tokens: list[int], salt: bytes) -> None:
        """Every block of it is listed and holds what these tokens would leave there."""
        index = self.cache.index
        assert match.num_tokens < len(tokens)  # type: ignore[attr-defined]
        listed = {rows.key: rows for rows in index.rows()}
        for place, rows in enumerate(match.rows):  # type: ignore[attr-defined]
            assert listed[rows.key] is rows
            for name, block in zip(self.rows, rows.blocks, strict=True):
                assert [(*salt, *tokens[: at + 1]) for at in range(place * B, (place + 1) * B)] == self.memory[name][block]
        snapshot = match.snapshot  # type: ignore[attr-defined]
        if self.states and match.num_tokens:  # type: ignore[attr-defined]
            assert snapshot is not None and index.kept.lists(snapshot)
            assert match.num_tokens == snapshot.num_tokens  # type: ignore[attr-defined]
            for name, slot in zip(self.states, snapshot.slots, strict=True):
                assert [(*salt, *tokens[: snapshot.num_tokens])] == self.memory[name][slot]
        if self.rows:
            assert len(match.rows) == match.num_tokens // B  # type: ignore[attr-defined]

    @rule(seed=SEEDS)
    def ask(self, seed: int) -> None:
        rng = random.Random(seed)
        before = self.picture()
        for tokens in (prompt(rng), *STEMS):
            for salt in (b"", b"z"):
                self.check_match(self.cache.match(tokens, salt=salt).match, tokens, salt)
                self.cache.explain(tokens, salt=salt)
        assert before == self.picture()

    @precondition(lambda self: self.running)
    @rule(seed=SEEDS)
    def step(self, seed: int) -> None:
        """Some sequences compute some tokens, as scheduler and runner would do it; one may turn out to be spoiled."""
        rng = random.Random(seed)
        for _ in range(rng.randint(1, 6)):
            chosen = rng.sample(sorted(self.running), rng.randint(1, len(self.running)))
            ends = {seq_id: end for seq_id in chosen if (end := self.plan(seq_id, rng)) is not None}
            self.prepare()
            for seq_id, end in ends.items():
                self.compute(self.running[seq_id], end)
            self.copy("after")
            for seq_id, end in ends.items():
                self.running[seq_id].num_computed = end
                self.cache.commit(seq_id, self.running[seq_id].tokens, end)
                self.cache.check()
        if ends and rng.random() < 0.1:
            self.cache.release(chosen[0], scrub=True)
            del self.running[chosen[0]]

    def plan(self, seq_id: int, rng: random.Random) -> int | None:
        """How far a sequence goes in this step; None: it needs a block and gets none."""
        seq = self.running[seq_id]
        if seq.num_computed == len(seq.tokens):
            seq.tokens.append(rng.choice([0, 1, 50]))
            self.name(seq.tokens, seq.salt)
            before = self.picture()
            if self.cache.reserve(seq_id, len(seq.tokens)) is None:
                assert before == self.picture(), "a refused reserve has changed something"
                seq.tokens.pop()
                return None
        mark = self.cache.next_mark(seq_id, seq.num_computed, seq.num_prompt)
        end = min(seq.num_computed + rng.randint(1, 9), len(seq.tokens), mark or len(seq.tokens))
        if end == mark:
            self.cache.snapshot(seq_id, seq.tokens, mark)
        return end

    def prepare(self) -> None:
        self.moves = self.cache.take_transfers()
        fresh, scrub = self.cache.take_fresh(), self.cache.take_scrub()
        listed = set(self.listed())
        for name, block in listed:
            assert block not in fresh.get(name, ()), f"{name}: block {block} is listed and would be cleared as fresh"
            assert block not in scrub.get(name, ()), f"{name}: block {block} is listed and would be scrubbed"
        for blocks in (scrub, fresh):
            for name, ids in blocks.items():
                for block in ids:
                    self.memory[name][block] = [None] * len(self.memory[name][block])
        self.copy("before")

    def copy(self, when: str) -> None:
        for move in self.moves:
            if move.when == when:
                assert when == "after" or (move.group, move.target) not in set(self.listed()), "a stored block is written"
                self.memory[move.group][move.target] = list(self.memory[move.group][move.source])

    def compute(self, seq: Running, end: int) -> None:
        """Reads everything before its place and writes its own; nothing of it may be anybody else's."""
        salt, begin, listed = seq.salt, seq.num_computed, set(self.listed())
        for name in self.rows:
            ids = seq.table.blocks[name]
            for place in range(begin):
                assert (*salt, *seq.tokens[: place + 1]) == self.memory[name][ids[place // B]][place % B], f"{name}: row {place} is not its own"
            for place in range(begin, end):
                block = ids[place // B]
                if (name, block) in listed:
                    self.check_written_tail(name, block, place % B)
                self.memory[name][block][place % B] = (*salt, *seq.tokens[: place + 1])
        for name in self.states:
            slot = seq.table.blocks[name][0]
            assert (name, slot) not in listed, "a stored state is written"
            assert not begin or [(*salt, *seq.tokens[:begin])] == self.memory[name][slot], f"{name}: not its own state after {begin}"
            self.memory[name][slot] = [(*salt, *seq.tokens[:end])]

    def check_written_tail(self, name: str, block: int, place: int) -> None:
        """Only snapshots that end before this row hold the block."""
        index, group = self.cache.index, self.rows.index(name)
        assert block not in {rows.blocks[group] for rows in index.rows()}, "a published block is written"
        for snapshot in {*index.kept, *index.kept.pinned}:
            if snapshot.tail and snapshot.tail[group] == block:
                assert place >= snapshot.num_tokens % B, "a kept row is written"

    @precondition(lambda self: self.running)
    @rule(seed=SEEDS)
    def leave(self, seed: int) -> None:
        """An end, a preemption or a failure, in any state; a second time it is a no-op."""
        rng = random.Random(seed)
        seq_id = rng.choice(sorted(self.running))
        seq, how = self.running.pop(seq_id), rng.choice(["keep", "keep", "keep", "drop", "spoiled"])
        for _ in range(rng.randint(1, 2)):
            self.cache.release(seq_id, scrub=how == "spoiled", tokens=seq.tokens if how == "keep" else None)

    @rule(seed=SEEDS)
    def reset(self, seed: int) -> None:
        if seed % 5 == 0:
            self.cache.reset()
            assert (0, 0) == (self.cache.index.num_rows, self.cache.index.num_snapshots)
            assert all(self.cache.match(stem).num_tokens == 0 for stem in STEMS)

    @rule()
    def write_out(self) -> None:
        """Copy what is listed, as a tier would."""
        if not self.cache.index.num_rows + self.cache.index.num_snapshots:
            return
        self.archive = []
        for rows in self.cache.index.rows():
            content = {name: tuple(self.memory[name][block]) for name, block in zip(self.rows, rows.blocks, strict=True)}
            self.archive.append(Archive(rows.key, rows.parent, None, content))
        for snapshot in self.cache.index.snapshots():
            content = {name: tuple(self.memory[name][slot]) for name, slot in zip(self.states, snapshot.slots, strict=True)}
            content |= {name: tuple(self.memory[name][block]) for name, block in zip(self.rows if snapshot.tail else (), snapshot.tail, strict=True)}
            self.archive.append(Archive(snapshot.key, snapshot.parent, snapshot.num_tokens, content))

    @precondition(lambda self: self.archive)
    @rule(seed=SEEDS)
    def adopt(self, seed: int) -> None:
        """Bring some of it back, in any order; a part may turn out to be damaged."""
        rng = random.Random(seed)
        for each in rng.sample(self.archive, rng.randint(1, len(self.archive))):
            damaged = rng.random() < 0.2

            def fill(name: str, block: int, each: Archive = each, damaged: bool = damaged) -> bool:
                assert (name, block) not in set(self.listed()), "a stored block is written"
                assert all(block not in seq.table.blocks[name] for seq in self.running.values()), "a block in use is written"
                if damaged and name == list(each.content)[-1]:
                    return False
                self.memory[name][block] = list(each.content[name])
                return True

            known = {rows.key for rows in self.cache.index.rows()} if each.num_tokens is None else {snap.key for snap in self.cache.index.snapshots()}
            before = self.picture()
            if each.num_tokens is None:
                done = self.cache.adopt_rows(each.key, each.parent, fill)
            else:
                done = self.cache.adopt_snapshot(each.key, each.parent, each.num_tokens, fill)
            assert not (done and (damaged or each.key in known))
            if each.key in known:
                assert before == self.picture()
            self.cache.check()

    # --- what always holds

    @invariant()
    def conserved(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        counts = self.cache.counts()
        for group in self.groups:
            used = {block for seq in self.running.values() for block in seq.table.blocks[group.name]}
            assert len(used) == counts[group.name]["used"]
            if group.kind == "state":
                assert self.cache.index.num_snapshots <= min(each.num_kept for each in self.groups if each.kind == "state")

    @invariant()
    def truthful(self) -> None:
        """What is listed holds what its key says."""
        if not hasattr(self, "cache"):
            return
        for rows in self.cache.index.rows():
            for name, block in zip(self.rows, rows.blocks, strict=True):
                assert self.last_rows(rows.key, B) == self.memory[name][block]
        for snapshot in self.cache.index.snapshots():
            for name, slot in zip(self.states, snapshot.slots, strict=True):
                assert [self.names[snapshot.key]] == self.memory[name][slot]
            rest = snapshot.num_tokens % B
            for name, block in zip(self.rows if snapshot.tail else (), snapshot.tail, strict=True):
                assert self.last_rows(snapshot.key, rest) == self.memory[name][block][:rest]

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for seq_id in list(self.running):
            self.cache.release(seq_id)
        self.cache.check()
        assert 0.0 == self.cache.usage()
        assert 0 == self.cache.index.num_pinned
        self.cache.reset()
        assert all(count["free"] == count["total"] for count in self.cache.counts().values())


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=200, stateful_step_count=40)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grid", [0, 6])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_long_runs(layout: str, grid: int, seed: int) -> None:
    """The same verbs in a mix that fills the cache, far longer than a machine that is to be shrunk."""
    rng, machine = random.Random(seed), Machine()
    machine.start(layout=layout, grid=grid)
    num_hits = num_adopted = 0
    for _ in range(3000):
        verb = rng.choices(["enter", "step", "leave", "ask", "write_out", "adopt", "reset"], [30, 40, 22, 2, 3, 6, 0.5])[0]
        seed = rng.randrange(2**40)
        before, listed = set(machine.running), machine.picture()
        if verb == "write_out":
            machine.write_out()
        elif verb == "enter" and len(machine.running) < MOST_RUNNING:
            machine.enter(seed=seed)
            num_hits += any(machine.running[seq_id].num_computed for seq_id in set(machine.running) - before)
        elif (verb in ("step", "leave") and machine.running) or verb in ("ask", "reset") or (verb == "adopt" and machine.archive):
            getattr(machine, verb)(seed=seed)
            num_adopted += verb == "adopt" and listed != machine.picture()
        machine.conserved()
        machine.truthful()
    counts = machine.cache.index.counts
    machine.teardown()
    assert num_hits > 20
    assert num_adopted > 10
    assert counts.withdrawn > 10
    assert not machine.states or counts.evicted_snapshots > 100
    assert not machine.rows or counts.evicted_rows > 100
