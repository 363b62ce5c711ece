"""What goes wrong, on purpose and on time: a runner around another one that fails by script. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from firstlight.engine.loop import Runner
from firstlight.sched.sequence import Batch, Chunk, StepResult
from firstlight.spec.errors import PeerError

_LOST = PeerError("a worker stopped answering, as the fault script says", "Take the fault out of the script.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Hits a step (counted from 0), a chunk of `seq_id`, one that covers `position`, or what meets all that are given.

    fail: that sequence alone has no result. spoil: its memory turns non-finite before the step. delay: the step takes `delay_s` longer.
    break: the step raises `error` before anything is computed; an error outside of our hierarchy stands for a mistake of ours.
    """

    kind: Literal["fail", "spoil", "delay", "break"]
    step: int | None = None
    seq_id: int | None = None
    position: int | None = None
    times: int = 1
    delay_s: float = 0.0
    error: BaseException = _LOST

    def hits(self, step: int, chunk: Chunk) -> bool:
        """Whether this chunk of this step is meant."""
        wanted = self.step in (None, step) and self.seq_id in (None, chunk.seq.seq_id)
        return wanted and (self.position is None or chunk.begin <= self.position < chunk.end)


class FaultyRunner:
    """Runs batches on `inner`; `spoil` ruins the memory of a chunk's sequence, `sleep` lets time pass.

    Without `spoil` the sequence is reported as failed, as a runner does that checks its logits. `log` keeps (step, kind, seq_id).
    """

    def __init__(
        self, inner: Runner, script: Iterable[Fault], *, spoil: Callable[[Chunk], None] | None = None,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        self.inner = inner
        self.num_steps = 0
        self.log: list[tuple[int, str, int]] = []
        self._spoil, self._sleep = spoil, sleep
        self._left = [(fault, fault.times) for fault in script]

    def run(self, batch: Batch) -> StepResult:
        """Run a batch and let happen what the script says, each fault at most once per step. Raises: the error of a "break"."""
        hits = self._take(batch)
        self.num_steps += 1
        for fault, _ in hits:
            if fault.kind == "break":
                raise fault.error
        errors: dict[int, str] = {}
        for fault, chunk in hits:
            if fault.kind == "spoil" and self._spoil is not None:
                self._spoil(chunk)
            elif fault.kind == "spoil":
                errors[chunk.seq.seq_id] = f"logits at position {chunk.end - 1} are not finite"
            elif fault.kind == "fail":
                errors[chunk.seq.seq_id] = f"request {chunk.seq.seq_id} failed at position {chunk.end - 1}, as the fault script says"
        delay_s = sum(fault.delay_s for fault, _ in hits)
        if delay_s and self._sleep is not None:
            self._sleep(delay_s)
        result = self.inner.run(batch)
        tokens = {seq_id: token for seq_id, token in result.next_tokens.items() if seq_id not in errors}
        return replace(result, next_tokens=tokens, seconds=result.seconds + delay_s, errors={**result.errors, **errors})

    def close(self) -> None:
        """Close the inner runner."""
        self.inner.close()

    def _take(self, batch: Batch) -> list[tuple[Fault, Chunk]]:
        hits, left = [], []
        for fault, times in self._left:
            chunk = next((chunk for chunk in batch.chunks if fault.hits(self.num_steps, chunk)), None)
            if chunk is not None:
                hits.append((fault, chunk))
                self.log.append((self.num_steps, fault.kind, chunk.seq.seq_id))
            if chunk is None or times > 1:
                left.append((fault, times - (chunk is not None)))
        self._left = left
        return hits
