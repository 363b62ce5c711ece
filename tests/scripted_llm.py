"""An LLM that says what it was told to say, through the face that the command line uses; the tokenizer is a real one.

As a script it runs the command line on top of itself: REPLY (JSON list of ids), WAIT_S per token, FOLDER of the tokenizer, then arguments.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from firstlight.sched.sequence import Priority
from firstlight.spec.sampling import SamplingParams
from firstlight.text.generation import GenerationDefaults
from firstlight.text.tokenizer import load_tokenizer

EOS = 258


class Engine:
    """Gives one scripted token per step; counts what it was asked."""

    def __init__(self, reply: list[int], wait_s: float, error: str | None) -> None:
        self.reply, self.wait_s, self.error = reply, wait_s, error
        self.submitted: list[tuple[list[int], SamplingParams, str]] = []
        self.cancelled: list[int] = []
        self.num_steps = 0
        self._left: list[int] | None = None

    def submit(self, tokens: list[int], params: SamplingParams, *, priority: str = "standard") -> int:
        assert Priority[priority.upper()] is Priority.STANDARD
        self.submitted.append((tokens, params, priority))
        self._left = list(self.reply)
        return 7

    def cancel(self, seq_id: int) -> None:
        assert 7 == seq_id
        self.cancelled.append(seq_id)
        self._left = None

    def step(self) -> list[SimpleNamespace]:
        assert self._left is not None, "stepped after the end"
        time.sleep(self.wait_s)
        self.num_steps += 1
        params = self.submitted[-1][1]
        event = SimpleNamespace(seq_id=7, token=None, finish=None, error=None, num_cached_tokens=3)
        foreign = SimpleNamespace(seq_id=6, token=65, finish="stop", error=None, num_cached_tokens=0)
        if self.error is not None and self.num_steps > 2:
            event.finish, event.error, self._left = "error", self.error, None
            return [event]
        event.token = self._left.pop(0)
        if event.token == EOS and not params.ignore_eos:
            event.finish = "stop"
        elif not self._left or self.num_steps == params.max_tokens:
            event.finish = "length"
        if event.finish:
            self._left = None
        return [foreign, event]

    def idle(self) -> bool:
        return self._left is None


def scripted(folder: Path, reply: list[int], *, wait_s: float = 0.0, error: str | None = None, made: list[Any] | None = None) -> type:
    """The class to put in the place of LLM; `made` collects its instances."""

    class LLM:
        def __init__(self, path: str, *, progress: Callable[[int, int], None] | None = None, **options: Any) -> None:
            if progress is not None:
                for done in range(0, 101, 20):
                    progress(done, 100)
                    time.sleep(wait_s)
            self.path, self.options, self.closed = path, options, False
            self.tokenizer = load_tokenizer(folder)
            self.defaults = GenerationDefaults.read(folder)
            self.engine = Engine(reply, wait_s, error)
            if made is not None:
                made.append(self)

        def tokens_of(self, prompt: str | list[int]) -> list[int]:
            if isinstance(prompt, list):
                return prompt
            assert self.tokenizer is not None
            return [*self.tokenizer.prefix_ids, *self.tokenizer.encode(prompt)]

        def close(self) -> None:
            self.closed = True

    return LLM


def installed(llm: type) -> ModuleType:
    """A module that stands for firstlight.engine.llm."""
    module = ModuleType("firstlight.engine.llm")
    module.LLM = llm  # type: ignore[attr-defined]
    return module


if __name__ == "__main__":
    sys.modules["firstlight.engine.llm"] = installed(scripted(Path(sys.argv[3]), json.loads(sys.argv[1]), wait_s=float(sys.argv[2])))
    from firstlight.cli import main

    sys.exit(main(sys.argv[4:]))
