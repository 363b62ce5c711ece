"""Who goes first: functions of a sequence and the time, smaller results first. A running sequence keeps the rank that it entered with."""

from __future__ import annotations

from collections.abc import Callable

from firstlight.sched.sequence import Sequence

Policy = Callable[[Sequence, float], tuple[float, ...]]

PATIENCE_S = 30.0


def by_arrival(seq: Sequence, now: float) -> tuple[float, ...]:
    """First come, first served; priorities are ignored."""
    return (seq.arrived_s,)


def by_priority(seq: Sequence, now: float) -> tuple[float, ...]:
    """Priority, then arrival; who waits rises one priority every PATIENCE_S, so nobody starves."""
    risen = int(max(0.0, now - seq.queued_s) / PATIENCE_S)
    return (max(0, seq.priority - risen), seq.arrived_s)
