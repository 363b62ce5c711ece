"""Whose turn it is: the line of waiting sequences."""

from __future__ import annotations

import random

from firstlight.sched.policy import PATIENCE_S, by_arrival, by_priority
from firstlight.sched.queue import WaitingQueue
from firstlight.sched.sequence import Priority, Sequence
from firstlight.spec.sampling import SamplingParams


def sequence(seq_id: int, priority: Priority, arrived_s: float) -> Sequence:
    return Sequence(seq_id, [1], 1, SamplingParams(), priority, arrived_s)


def leaving_order(queue: WaitingQueue, now: float) -> list[int]:
    order = []
    while (head := queue.head(now)) is not None:
        order.append(head.seq_id)
        queue.leave(head)
        assert len(queue) == 0 or queue.head(now) is not head
    assert 0 == len(queue)
    return order


def test_order_is_policy_then_id_whatever_the_order_of_joining() -> None:
    draw = random.Random(5)
    for policy in (by_priority, by_arrival):
        members = [sequence(number, draw.choice(list(Priority)), draw.choice([0.0, 1.0, 2.5])) for number in range(60)]
        gone = draw.sample(members, 20)
        queue = WaitingQueue(policy)
        for seq in draw.sample(members, 60):
            queue.join(seq, 3.0)
        for seq in gone:
            queue.leave(seq)
            queue.leave(seq)
        expected = sorted(set(members) - set(gone), key=lambda seq: (policy(seq, 3.0), seq.seq_id))
        assert [seq.seq_id for seq in expected] == leaving_order(queue, 3.0)


def test_waiting_lets_a_low_priority_pass_newcomers_but_not_elders() -> None:
    queue = WaitingQueue(by_priority)
    low, elder = sequence(0, Priority.BACKGROUND, 10.0), sequence(1, Priority.INTERACTIVE, 5.0)
    newcomer = sequence(2, Priority.INTERACTIVE, 11.0)
    for seq in (low, elder, newcomer):
        queue.join(seq, 11.0)
    assert elder is queue.head(11.0)
    queue.leave(elder)
    assert newcomer is queue.head(11.0 + PATIENCE_S)
    assert low is queue.head(11.0 + 2 * PATIENCE_S)


def test_who_came_back_does_not_hide_one_that_waited_longer() -> None:
    """An elder that ran and was preempted waits anew; behind it stands one of its own priority that has risen meanwhile."""
    queue = WaitingQueue(by_priority)
    elder, patient, newcomer = sequence(0, Priority.BACKGROUND, 0.0), sequence(1, Priority.BACKGROUND, 1.0), sequence(2, Priority.STANDARD, 101.0)
    queue.join(patient, 1.0)
    elder.num_preemptions = 1
    queue.join(elder, 100.0)
    queue.join(newcomer, 101.0)
    assert 3 == len(queue)
    assert [1, 2, 0] == leaving_order(queue, 102.0)


def test_coming_back_stands_before_those_that_arrived_later() -> None:
    queue = WaitingQueue(by_priority)
    first, second = sequence(0, Priority.STANDARD, 1.0), sequence(1, Priority.STANDARD, 2.0)
    queue.join(second, 2.0)
    queue.join(first, 50.0)
    assert [0, 1] == leaving_order(queue, 50.0)
