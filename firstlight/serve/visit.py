"""Who asked, and what came of it: one HTTP request from its first byte to the last of its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from firstlight.sched.sequence import Account, Event
from firstlight.spec.errors import CapacityError, PeerError, RequestError
from firstlight.spec.sampling import SamplingParams


@dataclass(slots=True)
class Visit:
    """One HTTP request. Times are those of the engine's clock; `wall_s` is `begun_s` as time since the epoch."""

    request_id: str
    method: str
    path: str
    begun_s: float
    wall_s: float
    clock: Callable[[], float]
    trace_id: str | None = None
    span: Any = None
    route: str | None = None
    status: int | None = None
    whole: bool = False
    ended_s: float = 0.0
    operation: str | None = None
    model: str | None = None
    response_id: str | None = None
    params: SamplingParams | None = None
    priority: str | None = None
    stream: bool = False
    num_choices: int = 1
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    first_token_s: float | None = None
    num_begun: int = 0
    seq_ids: dict[int, None] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    accounts: list[Account] = field(default_factory=list)
    error: Exception | None = None
    failure: str | None = None

    def asks(
        self, *, operation: str, model: str, params: SamplingParams, priority: str, num_prompt_tokens: int, response_id: str,
        num_choices: int = 1, stream: bool = False,
    ) -> None:
        """Enter what the body asks for, once it is understood; `operation` is "chat" or "text_completion"."""
        self.operation, self.model, self.params, self.priority, self.stream = operation, model, params, priority, stream
        self.num_prompt_tokens, self.response_id, self.num_choices = num_prompt_tokens, response_id, num_choices

    def begins(self) -> None:
        """Enter that a choice goes to the engine; if its client leaves soon, there is no event of it."""
        self.num_begun += 1

    def take(self, event: Event) -> None:
        """Enter an event of any of its sequences."""
        if event.token is not None:
            self.num_generated_tokens += 1
            if self.first_token_s is None:
                self.first_token_s = self.clock()
                self.num_cached_tokens = event.num_cached_tokens
        if event.seq_id not in self.seq_ids:
            self.seq_ids[event.seq_id] = None
        if event.finish is not None:
            self.finishes.setdefault(event.seq_id, event.finish)
            self.num_preemptions += event.num_preemptions
            self.failure = event.error or self.failure
            if event.account is not None:
                self.accounts.append(event.account)

    def stops(self, seq_id: int, finish: str = "stop") -> None:
        """Enter an end that the engine does not know of: a stop string in the text."""
        self.finishes[seq_id] = finish

    def fails(self, error: Exception) -> None:
        """Enter why it is answered with an error."""
        self.error = error

    @property
    def error_code(self) -> str | None:
        """The word that clients get for the error, if it has one."""
        return getattr(self.error, "code", None)

    @property
    def left(self) -> bool:
        """Whether the client went away before the answer was whole."""
        return self.status is None or not self.whole

    def finish_reasons(self) -> list[str]:
        """How each sequence ended; those that were left alone by their client say "abort"."""
        reasons = [self.finishes.get(seq_id, "abort") for seq_id in self.seq_ids]
        # What the engine refused has never run.
        refused = isinstance(self.error, RequestError | CapacityError | PeerError)
        return reasons if refused else reasons + ["abort"] * (self.num_begun - len(reasons))
