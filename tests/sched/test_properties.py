"""Everybody finishes within a bound, budgets hold, nothing leaks, the order is the policy's, and no schedule changes a token."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.sched.limits import LONG_CHUNKS, MAX_PREEMPTIONS, Fairness, Limits
from firstlight.sched.policy import PATIENCE_S, Policy, by_arrival, by_priority
from firstlight.sched.sequence import Batch, Priority, Sequence, Status
from firstlight.spec.errors import CapacityError, ConfigError, RequestError
from firstlight.spec.sampling import SamplingParams
from tests.sched.world import TOKENS_PER_BLOCK, World, alone, groups

SMALL = Limits(tokens_per_step=16, sequences_per_step=4, chunk_tokens=8)


def solo_steps(length: int, max_tokens: int, chunk_tokens: int) -> int:
    """Steps of a request that has the machine for itself."""
    return -(-length // chunk_tokens) + max_tokens - 1


WORK = st.lists(
    st.tuples(
        st.integers(1, 60), st.integers(1, 20), st.sampled_from(Priority), st.integers(0, 30),
        st.sampled_from(["keep", "keep", "keep", "abort", "preempt"]), st.integers(0, 40), st.booleans(),
    ),
    min_size=1, max_size=12,
)
WATERMARKS = st.sampled_from([(1.0, 1.0), (0.8, 0.5), (0.5, 0.5), (0.1, 0.01)])
FAIRNESS = st.builds(
    lambda patience_s, shares, lane_tokens, water, double_tokens: Fairness(
        patience_s=patience_s, shares=shares, lane_tokens=lane_tokens, high_water=water[0], low_water=water[1], double_tokens=double_tokens),
    st.sampled_from([0.001, 0.1, 30.0]), st.sampled_from([(8, 4, 1), (1, 1, 1), (0, 0, 1), (1, 0, 0)]), st.sampled_from([1, 3, 128]), WATERMARKS,
    st.sampled_from([None, 1, 10, 1000]),
)
LIMITS = st.builds(
    Limits, tokens_per_step=st.sampled_from([1, 3, 16, 64]), sequences_per_step=st.sampled_from([1, 2, 5]),
    chunk_tokens=st.sampled_from([1, 5, 8, 64]), fairness=FAIRNESS,
)
POLICIES = st.sampled_from([by_arrival, by_priority])


@settings(max_examples=250)
@given(work=WORK, limits=LIMITS, num_blocks=st.integers(20, 34), num_states=st.integers(1, 5), policy=POLICIES)
def test_random_work(
    work: list[tuple[int, int, Priority, int, str, int, bool]], limits: Limits, num_blocks: int, num_states: int, policy: Policy
) -> None:
    world = World(groups(num_blocks, num_states), limits, policy=policy)
    added: dict[int, Sequence] = {}
    # Every step advances somebody by a token, and nobody starts over more often than allowed.
    bound = sum((length + max_tokens) * (2 + MAX_PREEMPTIONS) for length, max_tokens, *_ in work) + 30
    while not world.scheduler.idle() or len(added) < len(work):
        assert world.num_steps < bound, world.scheduler.counts()
        for number, (length, max_tokens, priority, arrives, *_) in enumerate(work):
            if number not in added and arrives <= world.num_steps:
                added[number] = world.add(number, length, max_tokens, priority=priority)

        def act(batch: Batch | None, in_flight: bool) -> None:
            for number, (*_, action, when, flying) in enumerate(work):
                if number in added and when == world.num_steps - in_flight and flying == in_flight:
                    if action == "abort":
                        world.scheduler.cancel(added[number].seq_id)
                    elif action == "preempt":
                        world.preempt(added[number])

        act(None, False)
        world.step(lambda batch: act(batch, True))
    world.check_empty()
    for number, seq in added.items():
        expected = alone(number, seq.num_prompt, seq.sampling.max_tokens)
        assert expected[: seq.num_generated] == tuple(seq.tokens[seq.num_prompt :])
        assert seq.finish == "length" or work[number][4] == "abort"
        if seq.finish == "length":
            assert seq.num_generated == seq.sampling.max_tokens


def split_need(need: int, share: float) -> tuple[int, int]:
    """(prompt, max_tokens) that together fill so many rows; the last sampled token needs none."""
    length = max(1, min(need, round(need * share)))
    return length, need - length + 1


@pytest.mark.parametrize("share", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_one_request_at_the_edge_of_capacity(extra: int, share: float) -> None:
    num_blocks = 24
    length, max_tokens = split_need((num_blocks + extra) * TOKENS_PER_BLOCK, share)
    world = World(groups(num_blocks, 4), SMALL)
    if extra > 0:
        with pytest.raises(CapacityError) as refused:
            world.add(0, length, max_tokens)
        most = num_blocks * TOKENS_PER_BLOCK + 1 - length
        assert f"needs {length + max_tokens - 1} tokens of cache (prompt {length}), an empty cache holds 96." in str(refused.value)
        assert (f"Lower max_tokens to {most} or less" if most > 0 else "Shorten the prompt") in str(refused.value)
        assert world.scheduler.idle()
        if most > 0:
            world.add(0, length, most)
        return
    seq = world.add(0, length, max_tokens)
    world.drain(solo_steps(length, max_tokens, SMALL.chunk_tokens))
    assert ("length", 0) == (seq.finish, seq.num_preemptions)


@pytest.mark.parametrize(("num_blocks", "num_rounds", "least"), [(24, 250, 10), (100, 200, 30)])
def test_requests_together_at_the_edge_of_capacity(num_blocks: int, num_rounds: int, least: int) -> None:
    """Two to four requests that need 1.0 to 1.3 times the cache: no slower than one after the other, and little is thrown away."""
    draw = random.Random(7)
    thrown, useful, preempted = 0, 0, 0
    for _ in range(num_rounds):
        count = draw.randint(2, 4)
        total = round(num_blocks * TOKENS_PER_BLOCK * draw.uniform(1.0, 1.3))
        even = [total * part // count for part in range(1, count)]
        cuts = even if draw.random() < 0.5 else sorted(draw.sample(range(1, total), count - 1))
        needs = [end - begin for begin, end in zip([0, *cuts], [*cuts, total], strict=True)]
        world = World(groups(num_blocks, 4), SMALL, memory=num_blocks < 50)
        steps = 0
        for number, need in enumerate(needs):
            length, max_tokens = split_need(need, draw.choice([0.05, 0.1, 0.3, 0.6, 1.0]))
            if need > num_blocks * TOKENS_PER_BLOCK:
                with pytest.raises(CapacityError, match=f"needs {need} tokens of cache"):
                    world.add(number, length, max_tokens)
            else:
                world.add(number, length, max_tokens, priority=draw.choice(list(Priority)))
                steps += solo_steps(length, max_tokens, SMALL.chunk_tokens)
        world.drain(steps)
        for number, seq in world.sequences.items():
            assert "length" == seq.finish, number
        counts = world.scheduler.counts()
        assert counts["recomputed_tokens"] <= MAX_PREEMPTIONS * sum(needs)
        thrown += counts["recomputed_tokens"]
        preempted += counts["preemptions"]
        useful += counts["computed_tokens"] - counts["recomputed_tokens"]
    assert preempted >= least, "the edge was not reached"
    assert thrown <= 0.2 * useful, f"{preempted} preemptions threw {thrown} tokens away beside {useful}"


def test_a_thousand_aborts_in_all_phases() -> None:
    """The pool is conserved after each, and what a probe says before, amid and after does not change."""
    draw = random.Random(11)
    world = World(groups(40, 6), Limits(tokens_per_step=24, sequences_per_step=6, chunk_tokens=8))
    expected = alone(999, 21, 9)
    phases: set[str] = set()
    probes, alive = [world.add(999, 21, 9)], []

    def abort(batch: Batch | None) -> None:
        if not alive:
            return
        seq = alive.pop(draw.randrange(len(alive)))
        flying = batch is not None and any(chunk.seq is seq for chunk in batch.chunks)
        stage = "prefill" if seq.num_pending > 1 else "decode"
        name = seq.status.value if seq.status is not Status.RUNNING else stage
        phases.add(name + (" in flight" if flying else "") + (" again" if seq.num_preemptions and seq.status is Status.WAITING else ""))
        for _ in range(draw.randint(1, 2)):
            world.scheduler.cancel(seq.seq_id)
        world.cache.check()

    num_aborts = 0
    while num_aborts < 1000:
        while len(alive) < 9:
            alive.append(world.add(draw.randrange(500), draw.randint(1, 60), draw.randint(1, 40), priority=draw.choice(list(Priority))))
        if draw.random() < 0.2:
            world.preempt(draw.choice(alive))
        if draw.random() < 0.5:
            abort(None)
            num_aborts += 1
        world.scheduler.cancel(10**9)
        if draw.random() < 0.5:
            world.step(abort)
            num_aborts += 1
        else:
            world.step()
        if Status.FINISHED is probes[-1].status:
            probes.append(world.add(999, 21, 9))
    world.drain(3000)
    assert {"waiting", "waiting again", "prefill", "prefill in flight", "decode", "decode in flight", "finished"} <= phases
    assert len(probes) > 5
    for probe in probes:
        assert (expected, "length") == (tuple(probe.tokens[21:]), probe.finish)


def test_an_abort_in_flight_is_told_once_and_its_token_is_not() -> None:
    world = World(groups(20, 2), SMALL)
    seq = world.add(1, 5, 9)
    world.step()
    before = len(seq.tokens)
    events = world.step(lambda batch: [world.scheduler.cancel(seq.seq_id) for _ in range(2)] and None)
    assert [("abort", None)] == [(event.finish, event.token) for event in events]
    assert before == len(seq.tokens)
    world.scheduler.cancel(seq.seq_id)
    assert world.scheduler.idle()
    world.check_empty()


def test_a_waiting_abort_is_told_by_the_next_step() -> None:
    world = World(groups(20, 1), SMALL)
    world.add(1, 5, 9)
    second = world.add(2, 5, 9)
    world.step()
    world.scheduler.cancel(second.seq_id)
    assert ["abort"] == [event.finish for event in world.step() if event.seq_id == second.seq_id]


def test_interactive_enters_a_machine_full_of_background_at_once() -> None:
    world = World(groups(60, 8), SMALL)
    lows = [world.add(number, 6, 30, priority=Priority.BACKGROUND) for number in range(4)]
    for _ in range(5):
        world.step()
    high = world.add(9, 6, 3, priority=Priority.INTERACTIVE)
    world.step()
    assert Status.RUNNING is high.status
    assert [0, 0, 0, 1] == [seq.num_preemptions for seq in lows], "only the last one gives way"
    world.drain(200)
    for number, seq in enumerate(lows):
        assert alone(number, 6, 30) == tuple(seq.tokens[6:])


def test_interactive_enters_when_decodes_take_every_token() -> None:
    world = World(groups(60, 8), Limits(tokens_per_step=4, sequences_per_step=4, chunk_tokens=8))
    for number in range(4):
        world.add(number, 3, 30, priority=Priority.BACKGROUND)
    for _ in range(5):
        world.step()
    high = world.add(9, 6, 3, priority=Priority.INTERACTIVE)
    world.step()
    assert 1 == high.num_computed
    world.drain(200)


def test_priority_takes_blocks_too_but_not_in_vain() -> None:
    world = World(groups(20, 8), SMALL)
    low = world.add(0, 20, 40, priority=Priority.BACKGROUND)
    middle = world.add(1, 10, 4, priority=Priority.INTERACTIVE)
    for _ in range(4):
        world.step()
    large = world.add(2, 76, 2, priority=Priority.INTERACTIVE)
    while Status.FINISHED is not middle.status:
        world.step()
        assert 0 == low.num_preemptions or Status.RUNNING is large.status, "preempted for nothing"
    world.drain(200)
    assert alone(0, 20, 40) == tuple(low.tokens[20:])


def test_who_gave_way_does_not_come_back_in_the_same_step() -> None:
    """Many need a block at once: the last gives way, then one that had risen by waiting; the last would now fit again, ahead of it."""
    world = World(groups(225, 30), Limits(tokens_per_step=512, sequences_per_step=30, chunk_tokens=512), memory=False)
    risen = world.add(0, 100, 60, priority=Priority.BACKGROUND)
    world.clock.advance(2 * PATIENCE_S + 1)
    for number in range(20):
        world.add(1 + number, 3, 38, priority=Priority.INTERACTIVE, arrived_s=-1.0)
    last = world.add(30, 3, 40)
    while 0 == risen.num_preemptions:
        world.step()
    assert [Status.WAITING] * 2 == [risen.status, last.status]
    world.step()
    assert Status.RUNNING is last.status
    world.drain(200)


def test_the_first_among_equals_keeps_its_blocks() -> None:
    world = World(groups(30, 4), SMALL)
    members = [world.add(number, 8, 80) for number in range(3)]
    world.drain(3 * 90)
    assert 0 == members[0].num_preemptions
    assert sum(seq.num_preemptions for seq in members) > 0
    for number, seq in enumerate(members):
        assert alone(number, 8, 80) == tuple(seq.tokens[8:])


def test_who_was_preempted_often_enough_is_left_alone_by_those_who_came_later() -> None:
    """Even by one of higher priority, and even when that one already stands in the step."""
    given_way = 0
    for offset in range(4):
        world = World(groups(22, 4), SMALL)
        low = world.add(0, 8, 60, priority=Priority.BACKGROUND)
        for _ in range(MAX_PREEMPTIONS):
            world.step()
            world.preempt(low)
        world.step()
        high = world.add(1, 8 + offset, 60, priority=Priority.INTERACTIVE)
        world.drain(150)
        assert MAX_PREEMPTIONS == low.num_preemptions
        given_way += high.num_preemptions
        assert alone(0, 8, 60) == tuple(low.tokens[8:])
        assert alone(1, 8 + offset, 60) == tuple(high.tokens[8 + offset :])
    assert given_way > 0, "the cache was large enough"


def test_a_flood_of_interactive_work_preempts_a_sequence_boundedly_and_cannot_starve_it() -> None:
    world = World(groups(60, 8), Limits(tokens_per_step=16, sequences_per_step=2, chunk_tokens=8))
    low = world.add(0, 30, 40, priority=Priority.BACKGROUND)
    for number in range(1, 1500):
        world.add(number % 50, 6, 6, priority=Priority.INTERACTIVE)
        world.step()
        world.clock.advance(0.5)
        if Status.FINISHED is low.status:
            break
    assert Status.FINISHED is low.status
    assert 1 <= low.num_preemptions <= MAX_PREEMPTIONS
    assert world.clock() < 4 * PATIENCE_S + 80
    assert alone(0, 30, 40) == tuple(low.tokens[30:])


def test_the_order_holds_while_waiting_raises_priorities() -> None:
    """An overloaded machine whose clock runs long enough for everybody to rise; World compares each admission with the policy."""
    preempted = risen = 0
    for number in range(20):
        draw = random.Random(number)
        world = World(groups(24, 4), SMALL, memory=False)
        for _ in range(150):
            if draw.random() < 0.25:
                world.add(draw.randrange(99), draw.randint(1, 20), draw.randint(30, 60), priority=draw.choice(list(Priority)))
            world.clock.advance(draw.uniform(0, PATIENCE_S / 10))
            risen += any(seq.status is Status.WAITING and world.clock() - seq.queued_s > PATIENCE_S for seq in world.sequences.values())
            world.step()
        world.drain(sum(solo_steps(seq.num_prompt, 60, 8) for seq in world.sequences.values()) * (1 + MAX_PREEMPTIONS))
        preempted += world.scheduler.counts()["preemptions"]
    assert preempted > 50 and risen > 500, (preempted, risen)


def test_by_arrival_ignores_priority() -> None:
    world = World(groups(60, 8), Limits(sequences_per_step=1), policy=by_arrival)
    low = world.add(0, 6, 4, priority=Priority.BACKGROUND, arrived_s=0.0)
    high = world.add(1, 6, 4, priority=Priority.INTERACTIVE, arrived_s=0.5)
    world.drain(8)
    assert world.first_token_s[low.seq_id] < world.first_token_s[high.seq_id]
    assert 0 == low.num_preemptions


def test_waiting_raises_a_priority() -> None:
    seq = Sequence(0, [1], 1, SamplingParams(), Priority.BACKGROUND, arrived_s=4.0, queued_s=10.0)
    assert [2, 1, 0, 0] == [by_priority(seq, 10.0 + waited)[0] for waited in (0.0, PATIENCE_S, 2 * PATIENCE_S, 9 * PATIENCE_S)]
    assert 2 == by_priority(seq, 0.0)[0], "a clock that lags does not push back"


@pytest.mark.parametrize("num_long", [1, 3])
@pytest.mark.parametrize("chunk_tokens", [512, 2048])
def test_short_requests_are_not_stuck_behind_long_ones(num_long: int, chunk_tokens: int) -> None:
    limits = Limits(tokens_per_step=2048, sequences_per_step=64, chunk_tokens=chunk_tokens)
    world = World(groups(num_long * 25_500 + 1000, 64), limits, memory=False)
    longs = [world.add(number, 100_000, 2) for number in range(num_long)]
    for _ in range(3):
        world.step()
    begun = world.clock()
    shorts = [world.add(10 + number, 101, 4) for number in range(20)]
    while any(Status.FINISHED is not seq.status for seq in shorts):
        world.step()
    waits = sorted(world.first_token_s[seq.seq_id] - begun for seq in shorts)
    # Twenty prompts of 101 tokens are two steps of 2,048 tokens when half of each belongs to the long ones.
    assert waits[-1] <= 4 * world.runner.cost.step_s + 4 * 2048 * world.runner.cost.prefill_token_s + 0.6, waits[-1]
    world.drain(num_long * 100_000 // 512)
    assert all("length" == seq.finish for seq in longs)


def test_long_prompts_alone_get_whole_steps() -> None:
    world = World(groups(600, 4), Limits(tokens_per_step=64, sequences_per_step=4, chunk_tokens=16), memory=False)
    for number in range(4):
        world.add(number, 16 * LONG_CHUNKS * 8, 1)
    world.step()
    world.step()
    tokens = [0]
    while not world.scheduler.idle():
        world.step(lambda batch: tokens.append(batch.num_tokens))
    assert 64 == min(tokens[1:-4])


def test_long_prompts_enter_as_they_get_their_turn() -> None:
    """As many as a step has chunks; more would only hold blocks."""
    world = World(groups(4000, 8), Limits(tokens_per_step=64, sequences_per_step=8, chunk_tokens=16), memory=False)
    for number in range(8):
        world.add(number, 16 * LONG_CHUNKS * 8, 1)
    tokens: list[int] = []
    for _ in range(4):
        world.step(lambda batch: tokens.append(batch.num_tokens))
        assert 4 == world.scheduler.counts()["running"]
    assert [64] * 4 == tokens


def test_long_prompts_get_whole_steps_beside_one_that_cannot_enter() -> None:
    world = World(groups(400, 8), Limits(tokens_per_step=64, sequences_per_step=8, chunk_tokens=16), memory=False)
    for number in range(5):
        world.add(number, 16 * LONG_CHUNKS * 8, 1)
    for _ in range(3):
        world.step()
    tokens: list[int] = []
    for _ in range(10):
        world.step(lambda batch: tokens.append(batch.num_tokens))
    assert 3 == world.scheduler.counts()["running"]
    assert [48] * 10 == tokens


def test_forced_chunks_go_beyond_the_budget_one_at_a_time() -> None:
    world = World(groups(40, 4), Limits(tokens_per_step=6, sequences_per_step=4, chunk_tokens=4))
    for number in range(3):
        world.add(number, 10, 1, collect=True, split=(8, 2))
    tokens: list[int] = []
    while not world.scheduler.idle():
        world.step(lambda batch: tokens.append(batch.num_tokens))
    assert 30 == sum(tokens)
    assert 8 == max(tokens)


@pytest.mark.parametrize("split", [(3, 1, 7), (11,), (1,) * 11, (2, 2), (10, 1)])
def test_forced_chunks(split: tuple[int, ...]) -> None:
    """Sizes are kept even beyond the budget, beside decodes, and after a preemption."""
    world = World(groups(40, 4), Limits(tokens_per_step=6, sequences_per_step=4, chunk_tokens=4))
    world.add(1, 3, 30)
    for _ in range(2):
        world.step()
    seq = world.add(2, 11, 2, split=split)
    sizes: list[int] = []

    def see(batch: Batch) -> None:
        sizes.extend(chunk.end - chunk.begin for chunk in batch.chunks if chunk.seq is seq)

    world.step(see)
    world.preempt(seq)
    sizes.clear()
    while Status.FINISHED is not seq.status:
        world.step(see)
    assert split == tuple(sizes[: len(split)])
    assert 12 == sum(sizes), "the prompt and the first sampled token"
    assert "length" == seq.finish
    assert alone(2, 11, 2) == tuple(seq.tokens[11:])


def test_collecting_ends_with_the_prompt_and_tells_every_chunk() -> None:
    world = World(groups(40, 4), SMALL)
    seq = world.add(2, 21, 1, collect=True)
    events = [event for _ in range(3) for event in world.step()]
    assert [0, 8, 16] == [event.begin for event in events if event.finish is None]
    assert ["length"] == [event.finish for event in events if event.finish is not None]
    assert 21 == len(seq.tokens)
    assert world.scheduler.idle()


def test_finish_reasons() -> None:
    free = alone(3, 10, 12)
    stop = next(index for index in range(3, 12) if free[index] not in free[:index])

    def run(max_tokens: int = 12, **fields: object) -> tuple[str | None, int]:
        world = World(groups(40, 4), SMALL)
        eos = {free[stop]} if fields.pop("eos", True) else set()
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, **fields)  # type: ignore[arg-type]
        seq = world.add(3, 10, max_tokens, sampling=sampling, stop_ids=eos)
        world.drain(20)
        return seq.finish, seq.num_generated

    assert ("stop", stop + 1) == run()
    assert ("stop", stop + 1) == run(max_tokens=stop + 1), "the stop token is also the last allowed"
    assert ("length", stop) == run(max_tokens=stop)
    assert ("length", 12) == run(ignore_eos=True)
    assert ("stop", stop + 1) == run(ignore_eos=True, stop_token_ids=(free[stop],))
    assert ("length", 12) == run(eos=False)
    assert ("stop", stop + 1) == run(min_tokens=stop + 1)
    assert ("length", 12) == run(min_tokens=stop + 2)


def test_the_context_ends_a_sequence() -> None:
    world = World(groups(40, 4), SMALL, max_context=16)
    seq = world.add(0, 10, 100)
    last = world.add(1, 15, 100)
    collected = world.add(2, 16, 1, collect=True)
    world.drain(20)
    assert ("length", 16) == (seq.finish, len(seq.tokens))
    assert ("length", 16) == (last.finish, len(last.tokens))
    assert "length" == collected.finish
    for length, collect in ((16, False), (17, True)):
        with pytest.raises(CapacityError, match=f"prompt of {length} tokens, the context of 16 leaves 1[56] for it. Shorten"):
            world.add(3, length, 1, collect=collect)


def test_an_id_serves_once_at_a_time() -> None:
    world = World(groups(40, 4), SMALL)
    seq = world.add(0, 4, 2)
    with pytest.raises(RequestError, match="request 0 is still being served"):
        world.scheduler.add(seq)


def test_limits_must_allow_something() -> None:
    with pytest.raises(ConfigError, match="`chunk_tokens` is 0"):
        Limits(chunk_tokens=0)


def test_an_overloaded_machine_computes_little_twice() -> None:
    draw = random.Random(3)
    world = World(groups(400, 16), Limits(tokens_per_step=512, sequences_per_step=16, chunk_tokens=128), memory=False)
    total = 0
    for number in range(150):
        length, max_tokens = draw.randint(5, 200), draw.randint(75, 300)
        total += length + max_tokens
        world.add(number, length, max_tokens, priority=draw.choice(list(Priority)))
    world.drain(total // 3)
    counts = world.scheduler.counts()
    assert counts["preemptions"] > 20, "the machine was not overloaded"
    assert counts["recomputed_tokens"] <= 0.3 * total
