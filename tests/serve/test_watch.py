"""What the real server's endings look like from outside: every way in which a request can end is counted and said once."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from firstlight.serve.limits import Limits
from firstlight.serve.logs import configure
from firstlight.serve.service import Settings
from tests.serve.conftest import Client

KEY = "the-key"
WITH_KEY = {"authorization": f"Bearer {KEY}"}


@pytest.fixture
def lines() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Access lines so far."""
    stream = io.StringIO()
    undo = configure(form="json", level="info", secrets=[KEY], stream=stream)
    yield lambda: [line for line in map(json.loads, stream.getvalue().splitlines()) if line["logger"] == "firstlight.access"]
    undo()


async def metrics(client: Client, name: str, label: str) -> dict[str, float]:
    """The values of one metric that are not zero, under one of their labels."""
    text = (await client.http.get("/metrics", headers=WITH_KEY)).text
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples if sample.name == name and sample.value]
    return {sample.labels[label]: sample.value for sample in found}


def test_a_stop_string_is_a_stop(serve: Any, lines: Any) -> None:
    """The engine is told to give up, because it knows no text; for everybody else this is an end as wanted."""
    async def work(client: Client) -> None:
        whole = await client.complete("once upon", max_tokens=30, temperature=0, ignore_eos=True)
        text = whole["choices"][0]["text"]
        got = await client.complete("once upon", max_tokens=30, temperature=0, ignore_eos=True, stop=[text[5:8]])
        assert "stop" == got["choices"][0]["finish_reason"]
        assert {"length": 1.0, "stop": 1.0} == await metrics(client, "firstlight_requests_total", "finish")

    serve(work)
    assert [["length"], ["stop"]] == [line["finish"] for line in lines()]


def test_usage_and_access_line_agree(serve: Any, lines: Any) -> None:
    usages = []

    async def work(client: Client) -> None:
        for prompt, count in (([5] * 40, 1), ([5] * 40, 2)):
            usages.append((await client.complete(prompt, max_tokens=6, temperature=0, ignore_eos=True, n=count))["usage"])
        events = await client.events(
            "/v1/completions", {"prompt": "abc", "max_tokens": 4, "ignore_eos": True, "stream_options": {"include_usage": True}})
        usages.append(events[-1]["usage"])

    serve(work)
    assert [(40, 6), (40, 12)] == [(usage["prompt_tokens"], usage["completion_tokens"]) for usage in usages[:2]]
    assert [(usage["prompt_tokens"], usage["completion_tokens"]) for usage in usages] == [
        (line["prompt_tokens"], line["generated_tokens"]) for line in lines()]
    assert usages[0]["prompt_tokens_details"]["cached_tokens"] == lines()[0]["cached_tokens"] == 0
    assert usages[1]["prompt_tokens_details"]["cached_tokens"] == lines()[1]["cached_tokens"] > 0


def test_each_refusal_has_its_reason(serve: Any, lines: Any) -> None:
    async def work(client: Client) -> None:
        def ask(content: Any, **options: Any) -> Any:
            return client.post("/v1/completions", content, headers=options.pop("headers", WITH_KEY), **options)

        good = {"model": "default", "prompt": [1, 2], "max_tokens": 2}
        answers = [
            await ask(good, headers={}), await ask(good, headers={"authorization": "Bearer nonsense"}), await ask({**good, "max_tokens": -1}),
            await ask({**good, "prompt": [1] * 5000}), await ask({**good, "prompt": [1] * 500_000}), await ask({**good, "model": "other"}),
            await client.http.get("/nothing", headers=WITH_KEY), await client.http.get("/v1/completions", headers=WITH_KEY), await ask(good),
        ]
        assert [401, 401, 400, 400, 413, 404, 404, 405, 200] == [answer.status_code for answer in answers]
        client.service.door.close()
        assert 503 == (await ask(good)).status_code
        assert {"key": 2.0, "invalid": 1.0, "capacity": 1.0, "too_large": 1.0, "unknown": 1.0, "method": 1.0, "unavailable": 1.0} == await metrics(
            client, "firstlight_requests_rejected_total", "reason")
        assert 2.0 == (await metrics(client, "firstlight_http_responses_total", "status"))["401"]

    serve(work, Settings(keys=(KEY,), unknown_refused=True, limits=Limits(body_bytes=100_000)), options={"max_context": 2048})
    assert KEY not in json.dumps(lines())
    assert [401, 401, 400, 400, 413, 404, 404, 405, 200, 503] == [line["status"] for line in lines()]
    assert all("error" in line for line in lines() if line["status"] >= 400)


def test_a_full_server_says_so(serve: Any, lines: Any) -> None:
    async def work(client: Client) -> None:
        body = {"model": "default", "prompt": [1, 2, 3], "max_tokens": 20, "ignore_eos": True}
        answers = await asyncio.gather(*(client.post("/v1/completions", body) for _ in range(6)))
        statuses = sorted(answer.status_code for answer in answers)
        assert {200, 429} == set(statuses)
        assert {"full": float(statuses.count(429))} == await metrics(client, "firstlight_requests_rejected_total", "reason")

    serve(work, num_queued=1, options={"max_sequences": 2})
    assert {"info"} == {line["level"] for line in lines()}


def test_what_may_be_seen_without_a_key(serve: Any) -> None:
    """The panel itself; not its numbers."""
    async def work(client: Client) -> None:
        statuses = {path: (await client.http.get(path)).status_code for path in ("/", "/panel.json", "/metrics")}
        assert {"/": 200, "/panel.json": 401, "/metrics": 401} == statuses
        assert [200] * 2 == [(await client.http.get(path, headers=WITH_KEY)).status_code for path in ("/panel.json", "/metrics")]

    serve(work, Settings(keys=(KEY,)))


def test_a_client_that_leaves_while_it_is_answered(serve: Any, lines: Any) -> None:
    async def work(client: Client) -> None:
        body = {"model": "default", "prompt": [1, 2, 3], "max_tokens": 1500, "ignore_eos": True, "stream": True}
        sent = asyncio.Event()
        given = iter([{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}])

        async def receive() -> Any:
            for message in given:
                return message
            await sent.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if b"data" in message.get("body", b""):
                sent.set()

        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b"", "http_version": "1.1",
            "scheme": "http", "root_path": "", "server": ("test", 80), "client": None, "asgi": {"version": "3.0"},
        }
        await client.http._transport.app(scope, receive, send)  # type: ignore[attr-defined]
        await client.emptied()
        assert {"abort": 1.0} == await metrics(client, "firstlight_requests_total", "finish")

    serve(work)
    (line,) = lines()
    assert (True, ["abort"]) == (line["left"], line["finish"])
    assert line["generated_tokens"] < 1500
