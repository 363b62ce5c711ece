"""Who may hold up whom, and how long: each bound under a virtual clock, beside a control in which the setting is off and the bound breaks."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence as Rows
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.cache.blocks import Group
from firstlight.cache.manager import CacheManager
from firstlight.models.registry import read
from firstlight.sched.fairness import affordable, divide, held_back, worth
from firstlight.sched.limits import Fairness, Limits
from firstlight.sched.policy import by_arrival, by_priority
from firstlight.sched.scheduler import Scheduler
from firstlight.sched.sequence import Batch, Priority, Sequence
from firstlight.spec.errors import ConfigError
from firstlight.spec.sampling import SamplingParams
from tests.engine.workloads import Tally, Workload, draw, drive
from tests.sched.test_shared_beginnings import simulated
from tests.sched.traffic import COST, DOUBLE_TOKENS, Arrival, Course, Traffic, machine, percentile, poisson
from tests.sched.world import World, alone, groups

DATA = Path(__file__).parents[1] / "data"
PRICED = Limits(fairness=Fairness(double_tokens=DOUBLE_TOKENS))
NO_LANE = Limits(chunk_tokens=2048, fairness=Fairness(lane_tokens=10**9))
"""A long prompt takes half of a step whoever waits, and that half takes longer and longer as its context grows."""
CHUNK_S = COST.step_s + PRICED.chunk_tokens * COST.prefill_token_s
INTERACTIVE, STANDARD, BACKGROUND = Priority

# --- a long prompt beside short ones ---


def short_ones(seed: int) -> list[Arrival]:
    """200 requests that keep the machine busy for about 65 % of the time."""
    return poisson(random.Random(seed), 200, 28.0, prompts=(256, 512), max_tokens=4)


def with_long(seed: int, limits: Limits, *, long: bool = True) -> list[Course]:
    """The short ones, and one of 100,000 tokens among the first of them."""
    shorts = short_ones(seed)
    arrivals = [*shorts, Arrival(shorts[20].at_s, 100_000, 4)] if long else shorts
    return Traffic(machine(limits), arrivals).run().courses


def first_tokens(courses: Rows[Course]) -> float:
    """99th percentile of the short ones' waits."""
    return percentile((course.wait_s for course in courses if course.seq.num_prompt <= 512), 0.99)


def lone_long() -> Course:
    return Traffic(machine(PRICED), [Arrival(0.0, 100_000, 4)]).run().courses[0]


def long_of(courses: Rows[Course]) -> Course:
    return next(course for course in courses if course.seq.num_prompt == 100_000)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_long_prompt_does_not_hold_up_short_ones(seed: int) -> None:
    """Nor do they hold it up beyond what their work takes."""
    alone, beside = with_long(seed, PRICED, long=False), with_long(seed, PRICED)
    assert first_tokens(beside) <= 2 * first_tokens(alone) + CHUNK_S
    assert long_of(beside).whole_s <= 1.5 * lone_long().whole_s
    assert first_tokens(with_long(seed, NO_LANE)) > 2 * first_tokens(alone) + CHUNK_S, "the control"


@pytest.mark.slow
def test_long_prompts_and_short_ones_over_many_seeds() -> None:
    lone_s = lone_long().whole_s
    ratios, stretches, controls = [], [], []
    for seed in range(20):
        alone, beside = first_tokens(with_long(seed, PRICED, long=False)), with_long(seed, PRICED)
        ratios.append((first_tokens(beside) - CHUNK_S) / alone)
        stretches.append(long_of(beside).whole_s / lone_s)
        controls.append((first_tokens(with_long(seed, NO_LANE)) - CHUNK_S) / alone)
    print(f"short {min(ratios):.2f} to {max(ratios):.2f}, long {max(stretches):.2f}, control {min(controls):.2f} to {max(controls):.2f}")
    assert max(ratios) <= 2.0
    assert max(stretches) <= 1.5
    assert min(controls) > 2.0


def test_a_step_with_a_short_prompt_holds_one_lane_of_a_long_one() -> None:
    """At any context: what grows with it is priced in, so the lane gets shorter."""
    sizes: list[tuple[int, int]] = []

    def see(batch: Batch) -> None:
        prefills = [chunk for chunk in batch.chunks if chunk.end - chunk.begin > 1]
        if len({chunk.seq.num_prompt > 512 for chunk in prefills}) == 2:
            sizes.extend((chunk.begin, chunk.end - chunk.begin) for chunk in prefills if chunk.seq.num_prompt > 512)

    shorts = short_ones(0)
    Traffic(machine(PRICED), [*shorts, Arrival(shorts[20].at_s, 100_000, 4)], see).run()
    assert len(sizes) > 100
    assert all(worth(size, begin, DOUBLE_TOKENS) <= PRICED.fairness.lane_tokens for begin, size in sizes)
    assert 128 >= max(size for _, size in sizes) > 100 > 90 > min(size for _, size in sizes)


def test_a_lone_long_prompt_takes_half_steps() -> None:
    """Fewer of them than in chunks, and none longer than half a step of short prompts."""
    sizes: list[tuple[int, int]] = []
    run = Traffic(
        machine(PRICED), [Arrival(0.0, 100_000, 1)], lambda batch: sizes.extend((c.begin, c.end - c.begin) for c in batch.chunks)
    ).run()
    assert worth(100_000, 0, DOUBLE_TOKENS) // 1024 < run.num_steps < 1.1 * worth(100_000, 0, DOUBLE_TOKENS) / 1024
    assert all(worth(size, begin, DOUBLE_TOKENS) <= 1024 for begin, size in sizes)
    longest_s = 1024 * COST.prefill_token_s
    assert all(size * COST.prefill_token_s + size * (begin + size / 2) * COST.context_token_s < 1.01 * longest_s for begin, size in sizes)


def test_a_few_thousand_tokens_do_not_wait_for_a_hundred_thousand() -> None:
    """Under a stream of short ones that never lets the machine idle: long ones divide their lane."""
    shorts = [Arrival(number * 0.02, 400, 1) for number in range(400)]
    run = Traffic(machine(PRICED), [*shorts, Arrival(0.5, 100_000, 1), Arrival(0.6, 3000, 1)]).run()
    medium, long = (next(course for course in run.courses if course.seq.num_prompt == size) for size in (3000, 100_000))
    assert medium.end_s is not None and long.end_s is not None
    assert medium.end_s < long.end_s / 2


@pytest.mark.parametrize("patience_s", [5.0, math.inf])
def test_short_prompts_pass_a_long_one_that_finds_no_memory_but_not_for_ever(patience_s: float) -> None:
    """The cache is as large as the long prompt, and never empty by itself."""
    shorts = [Arrival(number * 0.025, 400, 10) for number in range(600)]
    limits = Limits(fairness=Fairness(patience_s=patience_s, double_tokens=DOUBLE_TOKENS))
    scheduler = machine(limits, num_blocks=1255)
    courses = Traffic(scheduler, [*shorts, Arrival(1.0, 20_000, 4)]).run().courses
    long = next(course for course in courses if course.seq.num_prompt == 20_000)
    assert long.began_s is not None
    passed = [course for course in courses if 1.0 < course.seq.arrived_s and course.wait_s < 0.5]
    assert passed, "all wait behind the long one"
    if math.isinf(patience_s):
        assert long.began_s > shorts[-1].at_s, "the control"
    else:
        rest_s = max(course.end_s - course.began_s for course in courses if course is not long and course.end_s and course.began_s)
        assert 1.0 + patience_s <= long.began_s <= 1.0 + patience_s + rest_s


# --- aging ---


def starved(priority: Priority, patience_s: float) -> tuple[Course, float]:
    """One request below a stream of interactive ones at 1.5 times what eight slots serve, and the longest that one of those took."""
    stream = poisson(random.Random(3), 1500, 80.0, prompts=(64, 128), max_tokens=20, priority=INTERACTIVE)
    limits = Limits(sequences_per_step=8, fairness=Fairness(patience_s=patience_s))
    run = Traffic(machine(limits), [*stream, Arrival(0.5, 300, 4, priority)])
    run.run(until=lambda: any(course.end_s is not None for course in run.courses if course.seq.priority is priority))
    low = next(course for course in run.courses if course.seq.priority is priority)
    served = [course.end_s - course.began_s for course in run.courses if course.end_s is not None and course.began_s is not None]
    return low, max(served)


@pytest.mark.parametrize("priority", [STANDARD, BACKGROUND])
def test_nobody_starves(priority: Priority) -> None:
    """A request of priority p enters within p * patience_s and the time of one that runs."""
    patience_s = 2.0
    low, service_s = starved(priority, patience_s)
    assert low.began_s is not None
    bound_s = priority * patience_s + service_s
    assert priority * patience_s <= low.began_s - 0.5 <= bound_s
    control, _ = starved(priority, math.inf)
    assert control.began_s is not None
    assert control.began_s - 0.5 > 3 * bound_s, "the control"


# --- slots, memory and tokens for those who come first ---


def taken(what: str, *, off: bool) -> World:
    """A machine whose slots, memory or tokens per step background requests have taken; `off`: without what should help."""
    fairness = Fairness(shares=(0, 0, 1)) if off and what == "tokens" else Fairness()
    tokens_per_step, slots = {"slots": (16, 4), "memory": (16, 8), "tokens": (64, 12)}[what]
    limits = Limits(tokens_per_step=tokens_per_step, sequences_per_step=slots, chunk_tokens=8, fairness=fairness)
    world = World(groups(36 if what == "memory" else 400, 12), limits, policy=by_arrival if off and what != "tokens" else by_priority)
    length, count = {"slots": (8, 6), "memory": (20, 6), "tokens": (30, 8)}[what]
    for number in range(count):
        world.add(number, length, 40, priority=BACKGROUND)
    for _ in range(1 if what == "tokens" else 12):
        world.step()
    return world


@pytest.mark.parametrize("what", ["slots", "memory", "tokens"])
def test_interactive_starts_in_the_next_step(what: str) -> None:
    """k = 1, whatever those below have taken."""
    steps = {}
    for off in (False, True):
        world = taken(what, off=off)
        before = world.scheduler.counts()
        high = world.add(99, 30, 3, priority=INTERACTIVE)
        count = 0
        while not high.num_computed:
            world.step()
            count += 1
        steps[off] = count
        if not off:
            assert (what != "tokens") == (world.scheduler.counts()["displaced"] > before["displaced"])
        world.drain(2000)
        for number in (0, 5):
            seq = world.sequences[number]
            assert alone(number, seq.num_prompt, 40) == tuple(seq.tokens[seq.num_prompt :]), "who gave way ends as if it had not"
    assert 1 == steps[False]
    assert steps[True] > 1, "the control"


@pytest.mark.parametrize(("shares", "least", "most"), [((8, 4, 1), 14, 14), ((1, 1, 0), 0, 2)])
def test_a_background_prefill_has_its_share(shares: tuple[int, int, int], least: int, most: int) -> None:
    """Beside interactive prefills without end: a ninth of each step when its share is an eighth of theirs, and all that they leave."""
    limits = Limits(tokens_per_step=130, sequences_per_step=8, chunk_tokens=64, fairness=Fairness(shares=shares))
    world = World(groups(4000, 8), limits, memory=False)
    low = world.add(0, 250, 1, priority=BACKGROUND)
    got = []
    for number in range(9):
        before = low.num_computed
        world.step()
        got.append(low.num_computed - before)
        world.add(1 + number, 130, 1, priority=INTERACTIVE)
    assert [64, 64] == got[:2], "one interactive chunk leaves more than a share"
    assert least <= min(got[2:]) and max(got[2:]) <= most, got
    world.drain(100)


@given(
    budget=st.integers(0, 5000), shares=st.tuples(*[st.integers(0, 9)] * 3).filter(any),
    wanted=st.dictionaries(st.sampled_from(Priority), st.integers(0, 5000)))
def test_shares_are_kept_and_nothing_is_left(budget: int, shares: tuple[int, int, int], wanted: dict[Priority, int]) -> None:
    given_ = divide(budget, shares, wanted)
    assert min(budget, sum(wanted.values())) == sum(given_.values())
    total = sum(shares[priority] for priority, count in wanted.items() if count)
    for priority, got in given_.items():
        assert got <= wanted[priority]
        least = budget * shares[priority] // total if total else 0
        assert got >= min(wanted[priority], least)


@given(begin=st.integers(0, 10**6), room=st.integers(0, 5000), double=st.one_of(st.none(), st.integers(1, 10**6)))
def test_what_is_affordable_is_exact(begin: int, room: int, double: int | None) -> None:
    size = affordable(room, begin, double)
    assert size <= room
    assert worth(size, begin, double) <= room or size == 1
    assert room == 0 or worth(size + 1, begin, double) > room
    assert worth(size, begin, double) == sum(worth(1, 0, None) for _ in range(size)) or double is not None


# --- watermarks of cache use ---

BOUNDED = Fairness(high_water=0.8, low_water=0.5)


def overloaded(fairness: Fairness) -> dict[str, float]:
    """Long answers at more than the machine serves, in a cache for a third of those that have a slot."""
    numbers = random.Random(1)
    arrivals = [
        dataclasses.replace(each, max_tokens=numbers.randint(300, 900))
        for each in poisson(numbers, 100, 20.0, prompts=(64, 256), max_tokens=1)
    ]
    scheduler = machine(Limits(fairness=fairness), num_blocks=1200)
    run = Traffic(scheduler, arrivals).run()
    assert len(arrivals) == sum(course.seq.finish == "length" for course in run.courses)
    assert 0.0 == scheduler.cache.usage()
    counts = scheduler.counts()
    return {"preemptions": counts["preemptions"], "holds": counts["holds"], "end_s": max(course.end_s or 0.0 for course in run.courses)}


def test_watermarks_spare_running_sequences_without_thrashing_or_loss_of_time() -> None:
    free, bounded, jumpy = overloaded(Fairness()), overloaded(BOUNDED), overloaded(Fairness(high_water=0.8, low_water=0.8))
    assert free["preemptions"] >= 20, "the control"
    assert bounded["preemptions"] <= 0.5 * free["preemptions"]
    assert bounded["holds"] <= 0.05 * 100
    assert jumpy["holds"] >= 4 * bounded["holds"], "the control without a distance between the two"
    assert bounded["end_s"] <= 1.05 * free["end_s"]


def test_watermarks_never_keep_out_the_only_one() -> None:
    """Though it alone takes the whole cache; cached blocks that nobody uses do not count."""
    world = World(groups(24, 4), Limits(tokens_per_step=64, sequences_per_step=4, chunk_tokens=32, fairness=Fairness(high_water=0.1, low_water=0.1)))
    for number in range(3):
        world.add(number, 90, 6)
    world.step()
    assert 1 == world.scheduler.counts()["running"]
    assert {"held": 2, "holds": 1} == {name: world.scheduler.counts()[name] for name in ("held", "holds")}
    world.drain(60)


def test_what_is_only_cached_does_not_count_as_use() -> None:
    """Two enter together a cache that is full of what others left behind."""
    layout = [Group("mla", "rows", 60, 16), Group("kda", "state", 8, num_kept=4)]
    scheduler = Scheduler(Limits(fairness=Fairness(high_water=0.8, low_water=0.5)), CacheManager(layout, prefix_cache=True))
    Traffic(scheduler, [Arrival(10.0 * number, 300, 4) for number in range(5)]).run()
    full = scheduler.cache.counts()["mla"]
    assert 1 - int(full["free"]) / 60 > 0.8 and 0.0 == scheduler.cache.usage("rows"), "the control: most is taken, nothing is in use"
    for number in (10, 11):
        scheduler.add(Sequence(number, [number, *[5] * 299], 300, SamplingParams(max_tokens=4)))
    scheduler.schedule(100.0)
    assert (2, 0, 0) == tuple(scheduler.counts()[name] for name in ("running", "held", "holds"))


@pytest.mark.parametrize(("used", "extra", "held", "expected"), [
    (0.5, 0.3, False, False), (0.5, 0.31, False, True), (0.79, 0.0, False, False),
    (0.51, 0.0, True, True), (0.5, 0.1, True, False), (0.5, 0.4, True, True), (0.0, 0.9, False, True),
])
def test_held_back(used: float, extra: float, held: bool, expected: bool) -> None:
    assert expected == held_back(used, extra, held, BOUNDED)


# --- what stays the same ---


def outcomes(workload: Workload, fairness: Fairness, priorities: Rows[str]) -> tuple[list[tuple[list[int], str | None]], dict[str, int]]:
    """What each request of a workload got, in a memory that knows every row's owner."""
    jobs = tuple(dataclasses.replace(job, priority=priority) for job, priority in zip(workload.jobs, priorities, strict=True))
    workload = dataclasses.replace(workload, jobs=jobs)
    engine = simulated(read(DATA / "kimi_k3_tiny").spec, workload)
    old = engine.scheduler
    engine.scheduler = type(old)(dataclasses.replace(old.limits, fairness=fairness), old.cache, max_context=old.max_context)
    results = drive(engine, engine.scheduler.cache, workload, Tally())
    return results, engine.scheduler.counts()


def test_priorities_change_no_token() -> None:
    """Every request gets what it gets when nobody else is there, whatever the settings and whoever is preempted."""
    settings = [
        Fairness(), Fairness(patience_s=1e-3, shares=(0, 0, 1), lane_tokens=1), Fairness(high_water=0.5, low_water=0.2, double_tokens=9),
    ]
    names = [priority.name.lower() for priority in Priority]
    spec = read(DATA / "kimi_k3_tiny").spec
    preempted = displaced = num_tokens = 0
    for seed in range(40):
        workload = draw(seed, spec.num_vocab)
        numbers = random.Random(seed)
        lone = [
            outcomes(dataclasses.replace(workload, jobs=(dataclasses.replace(job, split=(), preempt_steps=(), cancel_step=None),)), Fairness(),
                     ["standard"])[0][0][0]
            for job in workload.jobs
        ]
        for fairness in settings:
            results, counts = outcomes(workload, fairness, [numbers.choice(names) for _ in workload.jobs])
            for expected, (tokens, finish) in zip(lone, results, strict=True):
                assert expected[: len(tokens)] == tokens
                assert finish == "abort" or len(tokens) == len(expected)
                num_tokens += len(tokens)
            preempted += counts["preemptions"]
            displaced += counts["displaced"]
    assert preempted > 100 and displaced > 20 and num_tokens > 1000, (preempted, displaced, num_tokens)


def test_counts_say_who_waits_and_who_gave_way() -> None:
    world = World(groups(60, 8), Limits(tokens_per_step=16, sequences_per_step=2, chunk_tokens=8))

    def counts() -> tuple[int, ...]:
        found = world.scheduler.counts()
        return tuple(found[name] for name in ("waiting", "waiting_interactive", "waiting_standard", "waiting_background", "displaced", "preemptions"))

    for number in range(3):
        world.add(number, 6, 30, priority=BACKGROUND)
    world.step()
    world.add(3, 6, 3, priority=INTERACTIVE)
    world.add(4, 6, 3)
    assert (3, 1, 1, 1, 0, 0) == counts()
    world.step()
    assert (3, 0, 0, 3, 2, 2) == counts()
    world.drain(200)


@pytest.mark.parametrize(("fields", "said"), [
    ({"patience_s": 0.0}, "`patience_s` is 0.0"), ({"patience_s": math.nan}, "`patience_s` is nan"), ({"shares": (1, 2)}, "`shares` is"),
    ({"shares": (0, 0, 0)}, "`shares` is"), ({"shares": (1, -1, 1)}, "`shares` is"), ({"lane_tokens": 0}, "`lane_tokens` is 0"),
    ({"double_tokens": 0}, "`double_tokens` is 0"), ({"high_water": 0.5, "low_water": 0.6}, "`low_water` is 0.6 and `high_water` is 0.5"),
    ({"high_water": 1.1}, "`low_water` is 1.0 and `high_water` is 1.1"), ({"low_water": 0.0}, "`low_water` is 0.0"),
])
def test_settings_that_contradict_themselves_are_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Fairness(**fields)  # type: ignore[arg-type]
