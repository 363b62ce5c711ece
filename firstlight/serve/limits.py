"""What one client may cost: sizes, counts and times, each with its default."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from firstlight.spec.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Settings of the server that no request can change.

    `num_queued`: choices that may wait beyond those that run. `most_unread`: events that a slow reader may leave before it is cut off.
    `stall_s`: a step that takes longer counts as stuck. `max_tokens`: of an answer; None: what the context leaves.
    """

    body_bytes: int = 32 * 2**20
    body_s: float = 60.0
    json_depth: int = 64
    num_prompts: int = 256
    num_choices: int = 256
    num_stops: int = 16
    stop_chars: int = 1024
    max_tokens: int | None = None
    num_queued: int = 256
    most_unread: int = 8192
    write_s: float = 60.0
    request_s: float = 3600.0
    drain_s: float = 30.0
    stall_s: float = 120.0
    retry_s: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and math.isnan(value):
                raise ConfigError(f"the limit `{field.name}` is {value}, which nothing can be compared with", "Use a number above 0.")
            if value is not None and value <= 0 and field.name not in ("num_queued", "drain_s"):
                raise ConfigError(f"the limit `{field.name}` is {value}, no request could pass", "Use a number above 0.")
            if value is not None and value < 0:
                raise ConfigError(f"the limit `{field.name}` is {value}", "Use 0 or more.")
