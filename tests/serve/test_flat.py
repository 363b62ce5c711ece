"""What the front end does per token does not depend on how much there was before: calls and bytes are counted, not time."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from firstlight.engine.sampler import TokenLogprobs
from firstlight.sched.sequence import Event
from firstlight.serve.chat import answer
from firstlight.serve.completions import complete
from firstlight.serve.reply import Reply
from tests.serve.conftest import Client, said

Serve = Callable[..., None]
BEGIN, END = 100, 300


class Counter:
    """Counts calls of functions, Python's and C's."""

    num_calls = 0

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        self.num_calls += event in ("call", "c_call")


async def cost(client: Client, handler: Any, content: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """(calls, bytes sent) for the tokens from BEGIN to END of an answer."""
    counter, sent = Counter(), [0]
    marks: dict[int, int] = {}

    async def events(job: Any, visit: Any) -> AsyncIterator[Event]:
        for place in range(END + 20):
            if place in (BEGIN, END):
                marks[place] = sent[0]
                sys.setprofile(counter if place == BEGIN else None)
            rated = TokenLogprobs(97, -1.0, ((97, -1.0), (98, -2.0))) if job.params.logprobs is not None else None
            yield Event(0, 97 + place % 7, "length" if place == END + 19 else None, logprobs=rated)

    async def send(message: Any) -> None:
        sent[0] += len(message.get("body", b""))

    with monkeypatch.context() as patch:
        patch.setattr(client.service, "events", events)
        # nothing is computed, so the context of the model need not hold the prompt
        patch.setattr(client.service, "check", lambda job, param: None)
        patch.setattr(client.service, "max_context", 1_000_000)
        patch.setattr(client.service, "longest_chars", 10_000_000)
        visit = client.service.watch.open({"type": "http", "method": "POST", "path": "/", "headers": []})
        try:
            await handler(client.service, {"model": "default", "max_tokens": 1000, "stream": True, **content}, Reply(send, write_s=9), visit)
        finally:
            sys.setprofile(None)
            client.service.watch.end(visit, {})
    return counter.num_calls, marks[END] - marks[BEGIN]


@pytest.mark.parametrize("more", [{}, {"stop": ["abcabcx", "zz"]}, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}])
@pytest.mark.parametrize("rated", [False, True])
def test_a_token_costs_the_same_after_any_prompt(serve: Serve, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], rated: bool) -> None:
    async def test(client: Client) -> None:
        for handler in (complete, answer):
            found = []
            for length in (1_000, 100_000):
                asked = {"prompt": "x" * length} if handler is complete else {"messages": said("x" * length), "thinking": {"type": "disabled"}}
                logprobs: Any = {} if not rated else {"logprobs": 1} if handler is complete else {"logprobs": True, "top_logprobs": 1}
                found.append(await cost(client, handler, {**asked, **more, **logprobs}, monkeypatch))
            (calls, num_bytes), (later_calls, later_bytes) = found
            assert 200 * 10 < calls
            assert later_calls == pytest.approx(calls, rel=0.01)
            assert later_bytes == pytest.approx(num_bytes, rel=0.02), "only numbers may be longer"

    serve(test)
