"""Every error a user can meet, and the shape of its message: the fact with its values, then the fix.

FirstlightError
|- ConfigError      a config.json (or option) says something that cannot be, or that nobody reads
|- CheckpointError  a file or tensor of the checkpoint is missing, extra, damaged or misshapen
|- PlanError        a parallel plan does not fit the model or the machine
|- CoverageError    an operator that the model needs has no back-end here
|- PrecisionError   a comparison with a reference fell short
|- CapacityError    more memory, slots or context than there can ever be
|- RequestError     a request that cannot be served as it is; costs nobody else anything
`- PeerError        another process stopped answering
"""

from __future__ import annotations


class FirstlightError(Exception):
    """Base of all errors that are not our own mistakes."""

    def __init__(self, fact: str, fix: str) -> None:
        super().__init__(f"{fact.rstrip('. ')}. {fix}")
        self.fact = fact
        self.fix = fix

    def __reduce__(self) -> tuple[type[FirstlightError], tuple[str, str]]:
        return type(self), (self.fact, self.fix)


class ConfigError(FirstlightError):
    """The configuration is wrong, incomplete or not understood."""


class CheckpointError(FirstlightError):
    """The checkpoint on disk does not hold what the model needs, exactly once."""


class PlanError(FirstlightError):
    """A parallel plan that cannot work."""


class CoverageError(FirstlightError):
    """No back-end of the given order serves an operator."""


class PrecisionError(FirstlightError):
    """A result differs from its reference by more than the stated tolerance."""


class CapacityError(FirstlightError):
    """A need that no amount of waiting can meet."""


class RequestError(FirstlightError):
    """One request is invalid; the engine and its neighbours are unharmed."""


class PeerError(FirstlightError):
    """A worker or remote peer failed or timed out."""
