"""What an answer must look like, as a request states it, and the state that holds one answer to it. No torch, no grammar library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from firstlight.spec.errors import RequestError


class Constraint(Protocol):
    """What may come next in one answer, after the tokens accepted so far. Belongs to one sequence and survives its preemptions."""

    @property
    def done(self) -> bool:
        """Whether the answer is complete, so that nothing may follow."""

    def allowed(self) -> bytes | None:
        """One bit per token, the lowest of a byte first; None: anything may come.

        Raises: RequestError when nothing may come although the answer is not complete, or finding out took more than is allowed.
        """

    def accept(self, token: int) -> None:
        """Move on by the token that was chosen."""


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """One JSON value that is valid under `schema`; with `{"type": "object"}`, any object.

    `strict`: a keyword that cannot be enforced is an error; otherwise it is left out, and the rest is enforced.
    """

    schema: Mapping[str, Any] | bool
    strict: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.schema, (Mapping, bool)):
            raise RequestError(f"a JSON schema is {self.schema!r}", "Use an object.")


@dataclass(frozen=True, slots=True)
class Regex:
    """Text that a regular expression matches as a whole; neither look-around nor back-references, and digits and letters of words are ASCII.

    Source: syntax of the Rust crate regex.
    """

    pattern: str

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str) or not self.pattern:
            raise RequestError(f"a pattern is {self.pattern!r}", "Use a non-empty string.")


@dataclass(frozen=True, slots=True)
class Choice:
    """One of some texts."""

    options: tuple[str, ...]

    def __post_init__(self) -> None:
        options = self.options
        if not isinstance(options, (list, tuple)) or not options or any(not isinstance(text, str) or not text for text in options):
            raise RequestError(f"the options are {options!r}", "Use a list of non-empty strings.")
        object.__setattr__(self, "options", tuple(options))


Structure = JsonSchema | Regex | Choice
