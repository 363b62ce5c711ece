"""Stop strings in text that arrives in pieces: the leftmost match of the whole text, whatever the pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopFinder:
    """Releases text as soon as no stop string can begin in it; work per character does not grow with the text.

    Of matches that overlap, the one that begins first wins, even if another one ends before it.
    Source: Aho and Corasick, Efficient string matching, CACM 18(6), 1975.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self.stopped: str | None = None
        self._include_stop = include_stop
        self._held = ""
        self._node = 0
        self._match: tuple[int, str] | None = None
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._fallback = [0]
        self._ending: list[str] = [""]
        for stop in stops:
            self._add(stop)
        self._link()

    def feed(self, text: str) -> str:
        """Text that no stop string reaches; empty once stopped."""
        if self.stopped is not None:
            return ""
        held = self._held + text
        for end in range(len(self._held) + 1, len(held) + 1):
            self._node = self._step(self._node, held[end - 1])
            ending = self._ending[self._node]
            if ending and (self._match is None or end - len(ending) < self._match[0]):
                self._match = (end - len(ending), ending)
            if self._match is not None and self._match[0] <= end - self._depth[self._node]:
                return self._stop(held)
        kept = len(held) - self._depth[self._node]
        self._held = held[kept:]
        if self._match is not None:
            self._match = (self._match[0] - kept, self._match[1])
        return held[:kept]

    def finish(self) -> str:
        """What is still held, now that this text ends; a match that waited for a longer one counts. The next `feed` begins another text."""
        if self._match is not None and self.stopped is None:
            return self._stop(self._held)
        rest, self._held = self._held, ""
        self._node = 0
        return rest

    def _stop(self, held: str) -> str:
        assert self._match is not None
        begin, self.stopped = self._match
        self._held = ""
        return held[: begin + len(self.stopped)] if self._include_stop else held[:begin]

    def _step(self, node: int, letter: str) -> int:
        while node and letter not in self._next[node]:
            node = self._fallback[node]
        return self._next[node].get(letter, 0)

    def _add(self, stop: str) -> None:
        node = 0
        for letter in stop:
            if letter not in self._next[node]:
                self._next[node][letter] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._fallback.append(0)
                self._ending.append("")
            node = self._next[node][letter]
        self._ending[node] = stop

    def _link(self) -> None:
        """Give every node its longest proper suffix in the tree, and the longest stop string that ends there."""
        queue = deque(self._next[0].values())
        while queue:
            parent = queue.popleft()
            for letter, child in self._next[parent].items():
                self._fallback[child] = self._step(self._fallback[parent], letter)
                self._ending[child] = self._ending[child] or self._ending[self._fallback[child]]
                queue.append(child)
