"""What is said: one line per request with its id and its numbers, no text of a prompt, no key, and nothing that a client can forge."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from firstlight import LLM
from firstlight.serve.logs import LOGGERS, configure
from firstlight.spec.errors import ConfigError
from tests.serve.site import Site, prompt, small

KEY = 'sk-"quoted"-key'


@pytest.fixture
def llm() -> Iterator[LLM]:
    with small(verify_hits=1.0) as found:
        yield found


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


@pytest.fixture
def lines(stream: io.StringIO) -> Iterator[Any]:
    """Lines of JSON so far."""
    undo = configure(form="json", level="debug", secrets=[KEY], stream=stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    undo()


def accesses(lines: Any) -> list[dict[str, Any]]:
    return [line for line in lines() if line["logger"] == "firstlight.access"]


def test_one_line_per_request_with_its_numbers(llm: LLM, lines: Any) -> None:
    async def work() -> None:
        async with Site(llm) as client:
            for _ in range(2):
                await client.post("/v1/completions?key=hidden", json={"tokens": prompt(1, 40), "max_tokens": 5}, headers={"x-request-id": "mine-1"})
            await client.post("/v1/completions", json={"tokens": prompt(2, 9), "n": 3, "priority": "interactive", "max_tokens": 2})

    run(work())
    first, second, third = accesses(lines)
    assert {
        "request_id": "mine-1", "method": "POST", "path": "/v1/completions", "status": 200, "model": "asked", "priority": "standard", "stream": False,
        "prompt_tokens": 40, "cached_tokens": 0, "generated_tokens": 5, "finish": ["length"], "level": "info",
    }.items() <= first.items()
    assert 0 < first["first_token_s"] < first["duration_s"]
    assert 32 <= second["cached_tokens"] < 40
    assert ("interactive", 6, ["length"] * 3) == (third["priority"], third["generated_tokens"], third["finish"])
    assert 3 == len(set(third["seq_ids"]))
    assert 3 == len({first["request_id"], third["request_id"], ""})
    assert {"error", "failure", "trace_id", "left", "exception"} & first.keys() == set()


def test_request_ids_are_given_back_and_insane_ones_replaced(llm: LLM, lines: Any) -> None:
    async def work() -> None:
        async with Site(llm) as client:
            for given in ("mine-1:a.b_c", "x" * 129, "two words", 'quote"', ""):
                got = (await client.get("/health", headers={"x-request-id": given})).headers.get_list("x-request-id")
                assert 1 == len(got)
                assert (got == [given]) == (given == "mine-1:a.b_c")

    run(work())
    assert 5 == len({line["request_id"] for line in accesses(lines)})


def test_no_prompt_and_no_key_is_said(llm: LLM, stream: io.StringIO, lines: Any) -> None:
    """Not even where an error quotes the body, or where something logs a key on purpose."""
    async def work() -> None:
        async with Site(llm) as client:
            headers = {"authorization": f"Bearer {KEY}"}
            answer = await client.post("/v1/completions", json={"tokens": ["the secret of the prompt"]}, headers=headers)
            assert 400 == answer.status_code
            await client.post("/v1/completions", json={"tokens": "the secret of the prompt"}, headers=headers)
            logging.getLogger("firstlight").warning("the key is %s", KEY, extra={"fields": {"key": KEY}})

    run(work())
    said = stream.getvalue()
    assert "secret of" not in said and "sk-" not in said
    assert 2 == said.count("[hidden]")
    assert ["RequestError", "RequestError"] == [line["error"] for line in accesses(lines)]


def test_error_texts_are_said_when_asked_for(llm: LLM, lines: Any) -> None:
    async def work() -> None:
        async with Site(llm, texts_logged=True) as client:
            await client.post("/v1/completions", json={"tokens": []})

    run(work())
    (line,) = accesses(lines)
    assert "the prompt has no tokens" in line["error_text"]


def test_lines_of_a_request_bear_its_id(llm: LLM, lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of libraries too; at the same time others get their own."""
    async def work() -> None:
        site = Site(llm)
        ask = site.engine.generate

        def speaking(tokens: Any, *args: Any, **options: Any) -> Any:
            logging.getLogger("uvicorn.error").info("prompt of %d", len(tokens))
            return ask(tokens, *args, **options)

        monkeypatch.setattr(site.engine, "generate", speaking)
        async with site as client:
            asked = [client.post("/v1/completions", json={"tokens": prompt(1, n)}, headers={"x-request-id": f"id-{n}"}) for n in range(5, 9)]
            await asyncio.gather(*asked)
            logging.getLogger("firstlight").info("outside")

    run(work())
    assert {f"prompt of {n}": f"id-{n}" for n in range(5, 9)} == {
        line["message"]: line["request_id"] for line in lines() if line["logger"] == "uvicorn.error"}
    (outside,) = [line for line in lines() if line["message"] == "outside"]
    assert "request_id" not in outside


def test_a_mistake_of_ours_is_an_error_with_a_traceback(llm: LLM, lines: Any) -> None:
    async def work() -> None:
        async with Site(llm) as client:
            assert 500 == (await client.get("/v1/items/7", headers={"x-request-id": "bad-1"})).status_code

    run(work())
    (line,) = accesses(lines)
    assert ("error", 500, "ZeroDivisionError", "planted", "bad-1") == tuple(
        line[name] for name in ("level", "status", "error", "error_text", "request_id"))


def test_a_client_that_leaves(llm: LLM, lines: Any) -> None:
    """In the middle of a stream: what it got is counted, and the line says that it left."""
    async def work() -> None:
        site = Site(llm)
        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "headers": [(b"x-request-id", b"gone")], "query_string": b"",
            "http_version": "1.1", "scheme": "http", "root_path": "", "server": ("site", 80), "client": None,
        }
        body = json.dumps({"tokens": prompt(1, 9), "max_tokens": 100, "stream": True}).encode()
        sent: list[Any] = []
        enough = asyncio.Event()
        given = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Any:
            for message in given:
                return message
            await enough.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) == 4:
                enough.set()

        async with site:
            await site.app(scope, receive, send)
            assert 0 == site.watch.num_open

    run(work())
    (line,) = accesses(lines)
    assert (True, 200, ["abort"], "gone") == tuple(line[name] for name in ("left", "status", "finish", "request_id"))
    assert 3 <= line["generated_tokens"] < 100


def test_machines_that_ask_every_second_are_quiet(llm: LLM, stream: io.StringIO) -> None:
    undo = configure(form="json", level="info", stream=stream)

    async def work() -> None:
        async with Site(llm) as client:
            for path in ("/health", "/metrics", "/panel.json", "/"):
                assert 200 == (await client.get(path)).status_code
            assert 400 == (await client.get("/panel.json?after=x")).status_code

    run(work())
    undo()
    assert [400] == [json.loads(line)["status"] for line in stream.getvalue().splitlines()]


def test_the_checks_of_hits_say_which_sequence(llm: LLM, lines: Any) -> None:
    """The line of a wrong hit can be joined with the access line of the request by its number."""
    assert llm.machine is not None and llm.machine.engine.canary is not None
    llm.machine.engine.canary.tolerance = -1.0

    async def work() -> None:
        async with Site(llm) as client:
            for _ in range(2):
                await client.post("/v1/completions", json={"tokens": prompt(1, 40)})
            while not llm.engine.idle():
                await asyncio.sleep(0.01)

    run(work())
    (wrong,) = [line for line in lines() if "resumed from a cached prefix" in line["message"]]
    assert wrong["seq_id"] in accesses(lines)[1]["seq_ids"]
    assert "error" == wrong["level"]


def test_text_lines_can_be_read_and_not_forged(stream: io.StringIO) -> None:
    undo = configure(form="text", level="info", stream=stream)
    log = logging.getLogger("firstlight.anything")
    name = "x\n2026-01-01T00:00:00.000Z error   \x1b[31mforged"
    log.info("a model named %s", name, extra={"fields": {"status": 200, "count": 200, "word": "two words", "no": None, "s": 0.123456}})
    log.debug("not said")
    try:
        raise ZeroDivisionError("planted")
    except ZeroDivisionError:
        log.exception("it broke")
    undo()
    first, forged, second, *traceback = stream.getvalue().splitlines()
    assert first[10] == "T" and first[23] == "Z"
    assert first[25:] == "info    a model named x"
    assert forged == '    2026-01-01T00:00:00.000Z error   \\u001b[31mforged count=200 word="two words" s=0.1235'
    assert second.endswith("error   it broke")
    assert "ZeroDivisionError: planted" == traceback[-1]


def test_what_was_configured_is_undone() -> None:
    before = [(name, logging.getLogger(name).handlers[:], logging.getLogger(name).level, logging.getLogger(name).propagate) for name in LOGGERS]
    undo = configure(form="json", level="error", stream=io.StringIO())
    assert all(logging.getLogger(name).level == logging.ERROR for name in LOGGERS)
    undo()
    assert before == [(name, logging.getLogger(name).handlers, logging.getLogger(name).level, logging.getLogger(name).propagate) for name in LOGGERS]


@pytest.mark.parametrize("given", [{"form": "xml"}, {"level": "loud"}])
def test_unknown_settings_are_refused(given: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="Use one of"):
        configure(**given)  # type: ignore[arg-type]
