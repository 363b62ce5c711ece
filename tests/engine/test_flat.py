"""The Python work of a decoded token does not grow with the context."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

from firstlight import LLM, SamplingParams

FIXTURE = Path(__file__).parents[1] / "data/kimi_k3_tiny"
NUM_DECODED = 8


def calls_per_token(llm: LLM, context: int) -> float:
    """Python and C function calls of decode steps after `context` tokens of prompt."""
    seq_id = llm.engine.submit([3 + i % 300 for i in range(context)], SamplingParams(max_tokens=NUM_DECODED + 4, temperature=0, ignore_eos=True))
    num_tokens = 0
    while num_tokens < 2:
        num_tokens += sum(event.token is not None for event in llm.engine.step())
    calls = 0

    def count(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    for _ in range(NUM_DECODED):
        llm.engine.step()
    sys.setprofile(None)
    llm.engine.cancel(seq_id)
    llm.engine.step()
    return calls / NUM_DECODED


def test_calls_per_decoded_token_are_flat() -> None:
    with LLM(FIXTURE, dtype="float32", cache_bytes=64_000_000, max_sequences=2) as llm:
        short, long = calls_per_token(llm, 1_000), calls_per_token(llm, 16_000)
    assert short > 100, "nothing was counted"
    assert abs(long - short) <= 0.02 * short, f"{short:.0f} calls at 1k, {long:.0f} at 16k"
