"""The settings of scheduling: what a step may hold, and how far one request may hold up another."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, isnan

from firstlight.spec.errors import ConfigError

# Growth, in tokens per sequence, that must stay free when a sequence enters that was preempted so many times.
# After the last entry its whole need and that of all running ones must fit: then it cannot be preempted for want of blocks.
LOOKAHEAD_TOKENS = (32, 512)
MAX_PREEMPTIONS = len(LOOKAHEAD_TOKENS)

# A prefill with more chunks than this to go is long. Of more than LANE_SEQUENCES long ones, the first divide what is left to them.
LONG_CHUNKS = 4
LANE_SEQUENCES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Fairness:
    """How far one request may hold up another.

    `patience_s`: who waits rises one priority in so much time, and no short prompt passes a long one that has waited so long; inf: never.
    `shares`: by which interactive, standard and background prefills divide a step when all want it; what one leaves, others get.
    `lane_tokens`: what all long prefills together may take of a step in which short ones of their priority or a higher one want something.
    `high_water`, `low_water`: nobody enters beyond the first share of the cache in use, and then not before the second is reached.
    `double_tokens`: context at which a token costs twice what it costs at the start; None: it costs the same at any context.

    Raises: ConfigError when they contradict themselves.
    """

    patience_s: float = 30.0
    shares: tuple[int, int, int] = (8, 4, 1)
    lane_tokens: int = 128
    high_water: float = 1.0
    low_water: float = 1.0
    double_tokens: int | None = None

    def __post_init__(self) -> None:
        if isnan(self.patience_s) or self.patience_s <= 0:
            raise ConfigError(f"`patience_s` is {self.patience_s}", "Use seconds above 0, or inf for no aging.")
        if len(self.shares) != 3 or min(self.shares) < 0 or not any(self.shares):
            raise ConfigError(f"`shares` is {self.shares}", "Use three whole numbers from 0, one of them above.")
        if not (isfinite(self.high_water) and 0 < self.low_water <= self.high_water <= 1):
            raise ConfigError(f"`low_water` is {self.low_water} and `high_water` is {self.high_water}", "Use 0 < low_water <= high_water <= 1.")
        for name in ("lane_tokens", "double_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"`{name}` is {value}", "Use 1 or more.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one step may hold. At most `sequences_per_step` sequences own blocks at a time, and no more than there are tokens in a step.

    Raises: ConfigError when one of them is not above zero.
    """

    tokens_per_step: int = 2048
    sequences_per_step: int = 64
    chunk_tokens: int = 512
    fairness: Fairness = Fairness()

    def __post_init__(self) -> None:
        for name in ("tokens_per_step", "sequences_per_step", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"`{name}` is {getattr(self, name)}, no step could do anything", "Use 1 or more.")
