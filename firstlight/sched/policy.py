"""Who goes first: functions of a sequence and the time, smaller results first. A running sequence keeps the rank that it entered with."""

from __future__ import annotations

from collections.abc import Callable

from firstlight.sched.limits import Fairness
from firstlight.sched.sequence import Sequence

Policy = Callable[[Sequence, float], tuple[float, ...]]

PATIENCE_S = Fairness().patience_s


def by_arrival(seq: Sequence, now: float) -> tuple[float, ...]:
    """First come, first served; priorities are ignored."""
    return (seq.arrived_s,)


def by_priority(seq: Sequence, now: float, patience_s: float = PATIENCE_S) -> tuple[float, ...]:
    """Priority, then arrival; who waits rises one priority every `patience_s`, so nobody starves."""
    risen = int(max(0.0, now - seq.queued_s) / patience_s)
    return (max(0, seq.priority - risen), seq.arrived_s)


def rising(patience_s: float) -> Policy:
    """`by_priority` with a patience of its own."""
    return lambda seq, now: by_priority(seq, now, patience_s)
