"""Is a warm answer the cold one? A share of prefix hits is computed again without the cache, and the logits are compared. No torch."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from firstlight.sched.sequence import Event, Priority, Sequence
from firstlight.spec.errors import ConfigError
from firstlight.spec.sampling import SamplingParams

log = logging.getLogger("firstlight")

TOLERANCES = {"float32": 1e-3, "bfloat16": 0.3, "float16": 0.1}
"""Largest |warm - cold| / |cold| over a row of logits (euclidean). A wrong state is off by about 1; rounding in bf16 by a tenth at most."""


@dataclass(slots=True)
class Canary:
    """Chooses hits, remembers their logits until the cold ones are there, and counts.

    One mismatch is enough: the caller must stop using the cache.
    """

    fraction: float
    tolerance: float
    seed: int = 0
    num_checked: int = 0
    num_mismatches: int = 0
    largest: float = 0.0
    _warm: dict[int, tuple[int, Any]] = field(default_factory=dict)
    _watched: dict[int, Sequence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= 1:
            raise ConfigError(f"`verify_hits` is {self.fraction}", "Use a share from 0 to 1.")

    def watch(self, seq: Sequence) -> None:
        """Have the logits of a request's first token kept if it is one of those to check; a function of its id and the seed."""
        digest = blake2b(f"{self.seed}:{seq.seq_id}".encode(), digest_size=8).digest()
        seq.watched = int.from_bytes(digest, "little") < self.fraction * 2**64 and not seq.collect and not seq.cold
        if seq.watched:
            self._watched[seq.seq_id] = seq

    def shadow(self, event: Event, seq_id: int) -> Sequence | None:
        """The same prompt under another id, to be computed cold and behind everybody else; None: there is nothing to check."""
        seq = self._watched.pop(event.seq_id, None)
        if seq is None or event.logits is None or not event.num_cached_tokens:
            return None
        self._warm[seq_id] = (seq.seq_id, event.logits)
        return Sequence(
            seq_id, seq.tokens[: seq.num_prompt], seq.num_prompt, SamplingParams(max_tokens=1, temperature=0), Priority.BACKGROUND,
            arrived_s=seq.arrived_s, salt=seq.salt, cold=True, watched=True)

    def owns(self, seq_id: int) -> bool:
        """Whether this is a shadow, of which no client knows."""
        return seq_id in self._warm

    def judge(self, event: Event) -> bool:
        """Enter a shadow's event; False: the warm logits were wrong."""
        of, warm = self._warm[event.seq_id]
        if event.finish is not None:
            del self._warm[event.seq_id]
            if event.error is not None:
                log.warning("the check of request %d's prefix hit ended with an error: %s", of, event.error, extra={"fields": {"seq_id": of}})
        if event.logits is None:
            return True
        self.num_checked += 1
        difference = float((warm - event.logits).norm() / event.logits.norm())
        self.largest = max(self.largest, difference)
        if difference <= self.tolerance:
            return True
        self.num_mismatches += 1
        log.error("request %d resumed from a cached prefix and its logits are off by %.3g (allowed %.3g)", of, difference, self.tolerance,
            extra={"fields": {"seq_id": of}})
        return False

    def counts(self) -> dict[str, float]:
        """Hits checked, mismatches, the largest relative difference so far."""
        return {"checked": self.num_checked, "mismatches": self.num_mismatches, "largest": self.largest}
