"""What an answer came to, in tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from firstlight.serve.text import Piece


@dataclass(slots=True)
class Usage:
    """Each prompt counts once, however many choices it has; `num_reasoning` None: the answer has no such part."""

    num_prompt: int = 0
    num_generated: int = 0
    num_cached: int = 0
    num_reasoning: int | None = None

    def add_prompt(self, num_tokens: int) -> None:
        """Another prompt."""
        self.num_prompt += num_tokens

    def take(self, piece: Piece, *, first: bool) -> None:
        """Enter a piece; what was cached is told with the end of the first choice of each prompt."""
        self.num_generated += len(piece.tokens)
        if first and piece.finish is not None:
            self.num_cached = min(self.num_cached + piece.num_cached, self.num_prompt)

    def content(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        found: dict[str, Any] = {
            "prompt_tokens": self.num_prompt, "completion_tokens": self.num_generated, "total_tokens": self.num_prompt + self.num_generated,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }
        if self.num_reasoning is not None:
            found["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning}
        return found
