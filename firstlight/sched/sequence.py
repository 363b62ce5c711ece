"""The words between scheduler, loop and runner: sequence, chunk, batch, result, event. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

from firstlight.cache.blocks import BlockTable, Transfer
from firstlight.cache.keys import Chain
from firstlight.spec.sampling import SamplingParams
from firstlight.spec.structured import Constraint


class Priority(IntEnum):
    """Smaller goes first."""

    INTERACTIVE = 0
    STANDARD = 1
    BACKGROUND = 2


class Status(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """The tokens of one request; the only mutable thing that the loop passes around.

    `num_computed` catches up with `len(tokens)`: that is the one rule of scheduling. `queued_s`: since when it waits, arrival or preemption.
    `entered_s`: when it was first given blocks. `last_token_s` is kept by whoever measures. `chain`: keys of its blocks, kept while it waits.
    `constraint`: what its answer is held to; it has accepted every generated token.
    """

    seq_id: int
    tokens: list[int]
    num_prompt: int
    sampling: SamplingParams
    priority: Priority = Priority.STANDARD
    arrived_s: float = 0.0
    salt: bytes = b""
    num_computed: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_lost: int = 0
    status: Status = Status.WAITING
    finish: str | None = None
    error: str | None = None
    collect: bool = False
    cold: bool = False
    watched: bool = False
    split: tuple[int, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    queued_s: float = 0.0
    entered_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    chain: Chain | None = None
    constraint: Constraint | None = None

    @property
    def num_generated(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens still to compute: 1 for a decode, more for a prefill or a recompute."""
        return len(self.tokens) - self.num_computed

    @property
    def complete(self) -> bool:
        """Whether its structure lets nothing follow."""
        return self.constraint is not None and self.constraint.done

    def append(self, token: int) -> None:
        """Enter a sampled token."""
        self.tokens.append(token)
        if self.constraint is not None:
            self.constraint.accept(token)

    def account(self, now: float) -> Account:
        """What it came to, if it ends now."""
        return Account(self.priority, self.num_prompt, self.num_generated, self.arrived_s, self.entered_s, self.first_token_s, now)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [begin, end) of a sequence, computed in this step into the blocks of `table`."""

    seq: Sequence
    begin: int
    end: int
    table: BlockTable

    @property
    def samples(self) -> bool:
        """Whether the last token's logits yield a new token; true only until `Scheduler.update` has appended it."""
        return self.end == len(self.seq.tokens) and not self.seq.collect

    @property
    def continues(self) -> bool:
        """Whether the states in the table are this sequence's own; else they start at zero, whatever the length of the chunk."""
        return self.begin > 0


@dataclass(frozen=True, slots=True)
class Batch:
    """All work of one step, in this order: zero `scrub`, poison or zero `fresh`, `transfers` before, compute, `transfers` after.

    `fresh` are blocks that changed hands; `scrub` are blocks whose last owner failed.
    """

    chunks: tuple[Chunk, ...]
    transfers: tuple[Transfer, ...] = ()
    fresh: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    scrub: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(chunk.end - chunk.begin for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a runner gives back: one token per sampling chunk, or why a sequence failed."""

    next_tokens: Mapping[int, int]
    seconds: float
    errors: Mapping[int, str] = field(default_factory=dict)
    logprobs: Mapping[int, Any] = field(default_factory=dict)
    logits: Mapping[int, Any] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Account:
    """What a request came to, told with its end. Units: seconds of the engine's clock; None: it did not come so far."""

    priority: Priority
    num_prompt: int
    num_generated: int
    arrived_s: float
    entered_s: float | None
    first_token_s: float | None
    ended_s: float


@dataclass(frozen=True, slots=True)
class Event:
    """Something a client wants to know: a token, an end, or both; or what the positions from `begin` on yield. An end has an account.

    `prompt_logprobs`: of the prompt's tokens from begin + 1 on; after a preemption they come again.
    """

    seq_id: int
    token: int | None
    finish: str | None
    error: str | None = None
    logprobs: Any = None
    logits: Any = None
    begin: int = 0
    watched: bool = False
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    account: Account | None = None
    prompt_logprobs: Any = None
