"""Who waits: one ordered line per priority, and whoever came back; between them the policy is asked anew each time, so waiting can count."""

from __future__ import annotations

from bisect import bisect_left, insort

from firstlight.sched.policy import Policy
from firstlight.sched.sequence import Priority, Sequence, Status


class WaitingQueue:
    """Sequences in the order of a policy, then of their ids. Among newcomers of a priority the order is the one of the moment of joining.

    Who was preempted waits anew, so an early arrival may have waited less than those behind it: these few are compared one by one.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lines: dict[Priority, list[tuple[tuple[float, ...], int]]] = {priority: [] for priority in Priority}
        self._members: dict[int, tuple[Sequence, tuple[float, ...]]] = {}
        self._returned: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._members) + len(self._returned)

    def join(self, seq: Sequence, now: float) -> None:
        """Stand in line; who comes back after a preemption joins anew."""
        seq.status, seq.queued_s = Status.WAITING, now
        if seq.num_preemptions:
            self._returned[seq.seq_id] = seq
            return
        key = self._policy(seq, now)
        self._members[seq.seq_id] = (seq, key)
        insort(self._lines[seq.priority], (key, seq.seq_id))

    def leave(self, seq: Sequence) -> None:
        """Step out of line, from any place; no-op for who is not in it."""
        self._returned.pop(seq.seq_id, None)
        member = self._members.pop(seq.seq_id, None)
        if member is not None:
            line = self._lines[seq.priority]
            del line[bisect_left(line, (member[1], seq.seq_id))]

    def head(self, now: float) -> Sequence | None:
        """Whose turn it is."""
        heads = [self._members[line[0][1]][0] for line in self._lines.values() if line]
        return min([*heads, *self._returned.values()], key=lambda seq: (self._policy(seq, now), seq.seq_id), default=None)
