"""What is worth keeping: pure functions, so that a policy can be tried in a simulation. No torch."""

from __future__ import annotations


def worth(*, num_tokens: int, num_hits: int, age: int) -> float:
    """Value of a snapshot: tokens it saves per use, for the uses it had and one to come, fading with the uses of others since.

    All snapshots of a model have the same size, so tokens saved per byte order them as tokens saved do.
    """
    return num_tokens * (1 + num_hits) / (1 + age)
