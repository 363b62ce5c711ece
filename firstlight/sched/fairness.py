"""What is fair, in numbers: pure functions of a few settings, so that each can be tried alone."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt

from firstlight.sched.limits import Fairness
from firstlight.sched.sequence import Priority


def worth(num_tokens: int, begin: int, double_tokens: int | None) -> int:
    """What tokens from a position on cost, in tokens at the start of a prompt: each attends to all before it."""
    if double_tokens is None:
        return num_tokens
    return num_tokens + num_tokens * (2 * begin + num_tokens + 1) // (2 * double_tokens)


def affordable(room: int, begin: int, double_tokens: int | None) -> int:
    """The most tokens from a position on that are worth no more than `room`; one at least if there is any room."""
    if double_tokens is None or room <= 0:
        return max(0, room)
    linear = 2 * double_tokens + 2 * begin + 1
    return max(1, (isqrt(linear * linear + 4 * (2 * double_tokens * (room + 1) - 1)) - linear) // 2)


def divide(budget: int, shares: tuple[int, ...], wanted: Mapping[Priority, int]) -> dict[Priority, int]:
    """What each priority gets of a step: all that it wants or its share, and what others leave, in proportion; the first get the rest.

    All of the budget is given, or all that is wanted.
    """
    given = dict.fromkeys(wanted, 0)
    hungry = sorted(priority for priority, count in wanted.items() if count > 0)
    while budget > 0 and hungry:
        # who has no share at all gets what is left by those who have one
        total = sum(shares[priority] for priority in hungry)
        parts = {priority: budget * shares[priority] // total if total else budget // len(hungry) for priority in hungry}
        if not any(parts.values()):
            parts = {hungry[0]: budget}
        for priority, part in parts.items():
            got = min(part, wanted[priority] - given[priority])
            given[priority] += got
            budget -= got
        hungry = [priority for priority in hungry if given[priority] < wanted[priority]]
    return given


def held_back(used: float, extra: float, held: bool, fairness: Fairness) -> bool:
    """Whether a newcomer that takes a share of the cache waits: beyond the high watermark, and once somebody waits, until the low one."""
    return used + extra > fairness.high_water or (held and used > fairness.low_water)
