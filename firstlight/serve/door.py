"""Who may enter: a bound on choices under way, and the closed door of a server that drains."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from firstlight.serve.refusal import bad, full, unavailable


class Door:
    """Counts choices under way, of which `num_running` are served at a time and `num_queued` may wait."""

    def __init__(self, num_running: int, num_queued: int, *, retry_s: int = 1) -> None:
        self.num_running, self.num_queued, self.retry_s = num_running, num_queued, retry_s
        self.num_inside = 0
        self._closed = False
        self._empty = asyncio.Event()

    @property
    def closed(self) -> bool:
        """Whether nobody enters any more."""
        return self._closed

    @property
    def most(self) -> int:
        """Choices that may be inside together."""
        return self.num_running + self.num_queued

    def check_open(self) -> None:
        """Raises: Refusal while the server drains."""
        if self._closed:
            raise unavailable("the server is shutting down", "Send the request to another server.", self.retry_s, "draining")

    @contextmanager
    def enter(self, count: int) -> Iterator[None]:
        """Be inside with so many choices. Raises: Refusal when closed, when full, or when so many could never enter."""
        self.check_open()
        if count > self.most:
            raise bad(f"the request asks for {count} choices, this server takes {self.most} at a time", "Ask for fewer at once.", "n")
        if self.num_inside + count > self.most:
            fact = f"{self.num_inside} choices are under way, of which {self.num_running} run at a time, and {count} more are too many"
            raise full(fact, self.retry_s)
        self.num_inside += count
        try:
            yield
        finally:
            self.num_inside -= count
            if self._closed and not self.num_inside:
                self._empty.set()

    def close(self) -> None:
        """Let nobody in any more; those inside stay."""
        self._closed = True
        if not self.num_inside:
            self._empty.set()

    async def emptied(self, timeout_s: float) -> bool:
        """Whether all have left within the time."""
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
