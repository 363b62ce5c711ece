"""One engine under several drivers: calls that step until their own requests have ended, and whoever steps by hand. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from threading import RLock
from typing import Any

from firstlight.engine.loop import Engine
from firstlight.sched.sequence import Event


class SharedEngine(Engine):
    """Whoever steps, steps for all: each event goes to the box of the call that claimed its request, or waits for the next `step`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._kept: list[Event] = []
        self._turn = RLock()
        self._boxes: dict[int, list[Event] | None] = {}

    def submit(self, *args: Any, **options: Any) -> int:
        """Queue a request between two steps."""
        with self._turn:
            return super().submit(*args, **options)

    def cancel(self, seq_id: int) -> None:
        """Cancel between two steps."""
        with self._turn:
            super().cancel(seq_id)

    def claim(self, seq_id: int, box: list[Event]) -> None:
        """Have the events of a request put into a box, until its end."""
        self._boxes[seq_id] = box

    def abandon(self, seq_ids: Iterable[int]) -> None:
        """Cancel those of these claimed requests that have not ended; nobody hears of them again."""
        for seq_id in seq_ids:
            if seq_id in self._boxes:
                self._boxes[seq_id] = None
                self.cancel(seq_id)

    def advance(self) -> None:
        """One step for the boxes; what belongs in none is kept. Threads take turns."""
        with self._turn:
            for event in super().step():
                box = self._boxes.get(event.seq_id, self._kept)
                if box is not None:
                    box.append(event)
                if event.finish is not None:
                    self._boxes.pop(event.seq_id, None)

    def step(self) -> list[Event]:
        """One step by hand: events of unclaimed requests, those from the steps of others first."""
        self.advance()
        events, self._kept = self._kept, []
        return events

    def idle(self) -> bool:
        """Whether nothing is left to do or to tell, to the hand either."""
        return super().idle() and not self._kept
