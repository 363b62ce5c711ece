"""Options: all problems at once, in words."""

from __future__ import annotations

from typing import Any

import pytest

from firstlight.bench.options import Options
from firstlight.spec.errors import RequestError


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"concurrency": 0}, "--concurrency is 0"),
        ({"rate": 0.0}, "--rate is 0.0"),
        ({"rate": float("inf")}, "--rate is inf"),
        ({"url": "localhost:8000"}, "--url is"),
        ({"url": "http://me:secret@host/v1"}, "--url holds a name or password"),
        ({"endpoint": "embeddings"}, "--endpoint is"),
        ({"arrivals": "bursts"}, "--arrivals is"),
        ({"rate": 1.0, "concurrency": 2}, "both --concurrency"),
        ({"token_ids": "3:9", "turns": 2}, "--token-ids is given"),
        ({"trace": "x", "prefix_tokens": 4}, "--trace is given"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        Options(**given)


def test_all_problems_come_together() -> None:
    with pytest.raises(RequestError, match=r"--turns is 0.*--timeout is -1"):
        Options(turns=0, timeout=-1)


@pytest.mark.parametrize(
    ("given", "name"),
    [({"slo": "ttft:1"}, "limits"), ({"slo": "speed=1"}, "limits"), ({"body": "[]"}, "fields"), ({"body": "{"}, "fields"),
     ({"token_ids": "5"}, "id_range"), ({"token_ids": "5:6"}, "id_range")],
)
def test_what_cannot_be_read_is_refused(given: dict[str, Any], name: str) -> None:
    with pytest.raises(RequestError):
        getattr(Options(**given), name)


def test_what_is_read() -> None:
    options = Options(slo="ttft=0.5, tpot=.05", body='{"top_p": 0.9}', token_ids="10:20")
    assert {"ttft": 0.5, "tpot": 0.05} == options.limits
    assert {"top_p": 0.9} == options.fields
    assert range(10, 20) == options.id_range


def test_the_loop_follows_from_what_is_given() -> None:
    assert (True, 4, 32) == (Options().closed, Options().num_clients, Options().num_requests)
    assert (False, 32) == (Options(rate=2.0).closed, Options(rate=2.0).num_requests)
    assert (False, None) == (Options(trace="t").closed, Options(trace="t").num_requests)
    assert (True, None) == (Options(trace="t", concurrency=2).closed, Options(duration=3.0).num_requests)
