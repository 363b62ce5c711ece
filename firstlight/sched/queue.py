"""Who waits: ordered lines per priority, and whoever came back; between them the policy is asked anew each time, so waiting can count."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection

from firstlight.sched.policy import Policy
from firstlight.sched.sequence import Priority, Sequence, Status

Line = list[tuple[tuple[float, ...], int]]


class WaitingQueue:
    """Sequences in the order of a policy, then of their ids. Among newcomers of a priority the order is the one of the moment of joining.

    Long ones stand in lines of their own, so that a line can be shut. Who was preempted waits anew, so an early arrival may have waited
    less than those behind it: these few are compared one by one.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lines: dict[tuple[Priority, bool], Line] = {(priority, long): [] for priority in Priority for long in (False, True)}
        self._members: dict[int, tuple[Sequence, tuple[float, ...], bool]] = {}
        self._returned: dict[int, Sequence] = {}
        self._num_tokens = dict.fromkeys(self._lines, 0)
        self._counts = dict.fromkeys(Priority, 0)

    def __len__(self) -> int:
        return len(self._members)

    def join(self, seq: Sequence, now: float, *, long: bool = False) -> None:
        """Stand in line; who comes back after a preemption joins anew."""
        seq.status, seq.queued_s = Status.WAITING, now
        key = self._policy(seq, now)
        self._members[seq.seq_id] = (seq, key, long)
        self._num_tokens[seq.priority, long] += len(seq.tokens)
        self._counts[seq.priority] += 1
        if seq.num_preemptions:
            self._returned[seq.seq_id] = seq
        else:
            insort(self._lines[seq.priority, long], (key, seq.seq_id))

    def leave(self, seq: Sequence) -> None:
        """Step out of line, from any place; no-op for who is not in it."""
        member = self._members.pop(seq.seq_id, None)
        if member is None:
            return
        _, key, long = member
        self._num_tokens[seq.priority, long] -= len(seq.tokens)
        self._counts[seq.priority] -= 1
        if self._returned.pop(seq.seq_id, None) is None:
            line = self._lines[seq.priority, long]
            del line[bisect_left(line, (key, seq.seq_id))]

    @property
    def has_long(self) -> bool:
        """Whether somebody waits in a line of long ones."""
        return any(count for (_, long), count in self._num_tokens.items() if long)

    def is_long(self, seq: Sequence) -> bool:
        """Whether a waiting sequence stands in a line of long ones."""
        return self._members[seq.seq_id][2]

    def head(self, now: float, *, lanes: Collection[Priority] = tuple(Priority)) -> Sequence | None:
        """Whose turn it is; of long ones, those count whose priority is among `lanes`."""
        heads = [self._members[line[0][1]][0] for (priority, long), line in self._lines.items() if line and (not long or priority in lanes)]
        heads += [seq for seq in self._returned.values() if seq.priority in lanes or not self.is_long(seq)]
        return min(heads, key=lambda seq: (self._policy(seq, now), seq.seq_id), default=None)

    def counts(self) -> dict[Priority, int]:
        """How many wait, per priority."""
        return dict(self._counts)

    def num_tokens(self, priority: Priority, *, long: bool) -> int:
        """Tokens of those who wait."""
        return self._num_tokens[priority, long]
