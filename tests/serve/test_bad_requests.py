"""What is wrong gets the right 4xx in OpenAI's shape and names the field; it costs nobody else anything."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from firstlight.serve import body, extras, fields
from firstlight.serve.fields import IGNORED, REFUSED, ChatFields, CompletionFields
from firstlight.serve.limits import Limits
from firstlight.serve.service import Settings
from firstlight.spec.errors import ConfigError
from tests.serve.conftest import Client

Serve = Callable[..., None]
COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


def deep(levels: int) -> Any:
    """Lists in lists."""
    content: Any = 1
    for _ in range(levels):
        content = [content]
    return content


BAD: list[tuple[str, dict[str, Any], int, str | None]] = [
    # path, what is added to a good body, status, param
    (COMPLETE, {"model": "nobody"}, 404, "model"),
    (COMPLETE, {"model": None}, 400, "model"),
    (COMPLETE, {"model": 5}, 400, "model"),
    (COMPLETE, {"prompt": None}, 400, "prompt"),
    (COMPLETE, {"prompt": ""}, 400, "prompt"),
    (COMPLETE, {"prompt": []}, 400, "prompt"),
    (COMPLETE, {"prompt": [[]]}, 400, "prompt"),
    (COMPLETE, {"prompt": 7}, 400, "prompt"),
    (COMPLETE, {"prompt": {"text": "x"}}, 400, "prompt"),
    (COMPLETE, {"prompt": ["a", 5]}, 400, "prompt"),
    (COMPLETE, {"prompt": [1, "a"]}, 400, "prompt"),
    (COMPLETE, {"prompt": [1.5]}, 400, "prompt"),
    (COMPLETE, {"prompt": [True]}, 400, "prompt"),
    (COMPLETE, {"prompt": [[1], ["a"]]}, 400, "prompt"),
    (COMPLETE, {"prompt": [288]}, 400, "prompt"),
    (COMPLETE, {"prompt": [-1]}, 400, "prompt"),
    (COMPLETE, {"prompt": [10**30]}, 400, "prompt"),
    (COMPLETE, {"prompt": [5] * 3000}, 400, "prompt"),
    (COMPLETE, {"prompt": ["x"] * 300}, 400, "prompt"),
    (COMPLETE, {"prompt": ["x"] * 200, "n": 2}, 400, "n"),
    (COMPLETE, {"max_tokens": -1}, 400, "max_tokens"),
    (COMPLETE, {"max_tokens": 1.5}, 400, "max_tokens"),
    (COMPLETE, {"max_tokens": "9"}, 400, "max_tokens"),
    (COMPLETE, {"max_tokens": True}, 400, "max_tokens"),
    (COMPLETE, {"max_tokens": 10**30}, 400, "max_tokens"),
    (COMPLETE, {"max_tokens": 600}, 400, "max_tokens"),
    (COMPLETE, {"temperature": -0.1}, 400, "temperature"),
    (COMPLETE, {"temperature": 2.1}, 400, "temperature"),
    (COMPLETE, {"temperature": "hot"}, 400, "temperature"),
    (COMPLETE, {"temperature": [1]}, 400, "temperature"),
    (COMPLETE, {"top_p": 1.01}, 400, "top_p"),
    (COMPLETE, {"top_p": -1}, 400, "top_p"),
    (COMPLETE, {"top_k": -2}, 400, "top_k"),
    (COMPLETE, {"top_k": 0.5}, 400, "top_k"),
    (COMPLETE, {"min_p": 2}, 400, "min_p"),
    (COMPLETE, {"repetition_penalty": 0}, 400, "repetition_penalty"),
    (COMPLETE, {"presence_penalty": 2.5}, 400, "presence_penalty"),
    (COMPLETE, {"frequency_penalty": -3}, 400, "frequency_penalty"),
    (COMPLETE, {"n": 0}, 400, "n"),
    (COMPLETE, {"n": 129}, 400, "n"),
    (COMPLETE, {"n": 10**9}, 400, "n"),
    (COMPLETE, {"best_of": 3}, 400, "best_of"),
    (COMPLETE, {"n": 3, "best_of": 2}, 400, "best_of"),
    (COMPLETE, {"seed": 2**64}, 400, "seed"),
    (COMPLETE, {"seed": "1"}, 400, "seed"),
    (COMPLETE, {"stop": ["x"] * 17}, 400, "stop"),
    (COMPLETE, {"stop": "x" * 2000}, 400, "stop"),
    (COMPLETE, {"stop": ""}, 400, "stop"),
    (COMPLETE, {"stop": ["a", ""]}, 400, "stop"),
    (COMPLETE, {"stop": 5}, 400, "stop"),
    (COMPLETE, {"stop": [5]}, 400, "stop"),
    (COMPLETE, {"stop_token_ids": [300]}, 400, "stop_token_ids"),
    (COMPLETE, {"stop_token_ids": ["a"]}, 400, "stop_token_ids"),
    (COMPLETE, {"logprobs": 21}, 400, "logprobs"),
    (COMPLETE, {"logprobs": True}, 400, "logprobs"),
    (COMPLETE, {"logit_bias": {"999": 1}}, 400, "logit_bias"),
    (COMPLETE, {"logit_bias": {"a": 1}}, 400, "logit_bias"),
    (COMPLETE, {"logit_bias": {"5": 101}}, 400, "logit_bias"),
    (COMPLETE, {"logit_bias": [5]}, 400, "logit_bias"),
    (COMPLETE, {"min_tokens": 9, "max_tokens": 3}, 400, "min_tokens"),
    (COMPLETE, {"stream": "yes"}, 400, "stream"),
    (COMPLETE, {"stream_options": {"include_usage": True}}, 400, "stream_options"),
    (COMPLETE, {"stream": True, "stream_options": 5}, 400, "stream_options"),
    (COMPLETE, {"stream": True, "prompt": [288]}, 400, "prompt"),
    (COMPLETE, {"stream": True, "prompt": [5] * 3000}, 400, "prompt"),
    (COMPLETE, {"priority": "urgent"}, 400, "priority"),
    (COMPLETE, {"priority": 1}, 400, "priority"),
    (COMPLETE, {"priority": "Interactive"}, 400, "priority"),
    (COMPLETE, {"priority": "\u0131nteractive"}, 400, "priority"),
    (COMPLETE, {f"new_{number}": 1 for number in range(101)}, 400, None),
    (COMPLETE, {"suffix": "x"}, 400, "suffix"),
    (COMPLETE, {"max_token": 5}, 400, "max_token"),
    (COMPLETE, {"temprature": 0}, 400, "temprature"),
    (COMPLETE, {"guided_regex": "a"}, 400, "guided_regex"),
    (COMPLETE, {"structured": {"regex": "["}}, 400, "structured"),
    (COMPLETE, {"structured": {"regex": ""}}, 400, "structured"),
    (COMPLETE, {"structured": {"choice": []}}, 400, "structured"),
    (COMPLETE, {"structured": {"regex": "a"}, "ignore_eos": True}, 400, "ignore_eos"),
    (CHAT, {"model": "nobody"}, 404, "model"),
    (CHAT, {"messages": None}, 400, "messages"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": "hi"}, 400, "messages"),
    (CHAT, {"messages": ["hi"]}, 400, "messages"),
    (CHAT, {"messages": [{"content": "hi"}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "king", "content": "hi"}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,@@"}}]}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 100_000}]}, 400, "messages"),
    (COMPLETE, {"prompt": "x" * 100_000}, 400, "prompt"),
    (CHAT, {"max_tokens": 0}, 400, "max_tokens"),
    (CHAT, {"max_completion_tokens": 0}, 400, "max_completion_tokens"),
    (CHAT, {"max_completion_tokens": 600}, 400, "max_tokens"),
    (CHAT, {"top_logprobs": 3}, 400, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    (CHAT, {"logprobs": 3}, 400, "logprobs"),
    (CHAT, {"tools": {}}, 400, "tools"),
    (CHAT, {"tools": [None]}, 400, "tools"),
    (CHAT, {"tools": [{"type": "function"}]}, 400, "tools"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "9@"}}]}, 400, "tools"),
    (CHAT, {"tool_choice": "required"}, 400, "tool_choice"),
    (CHAT, {"tool_choice": "sometimes"}, 400, "tool_choice"),
    (CHAT, {"reasoning_effort": "colossal"}, 400, "reasoning_effort"),
    (CHAT, {"reasoning_effort": ""}, 400, "reasoning_effort"),
    (CHAT, {"thinking": {"type": "maybe"}}, 400, "thinking"),
    (CHAT, {"thinking": {"type": "enabled", "effort": 1}}, 400, "thinking"),
    (CHAT, {"response_format": {"type": "xml"}}, 400, "response_format"),
    (CHAT, {"response_format": {"type": "json_schema"}}, 400, "response_format"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}}, 400, "response_format"),
    (CHAT, {"modalities": ["audio"]}, 400, "modalities"),
    (CHAT, {"audio": {"voice": "ash", "format": "wav"}}, 400, "audio"),
    (CHAT, {"functions": [{"name": "f"}]}, 400, "functions"),
    (CHAT, {"web_search_options": {}}, 400, "web_search_options"),
    ("/tokenize", {"prompt": None}, 400, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": USER}, 400, "prompt"),
    ("/detokenize", {"tokens": [288]}, 400, "tokens"),
    ("/detokenize", {"tokens": "a"}, 400, "tokens"),
    ("/v1/cache/explain", {"prompt": ["a", "b"]}, 400, "prompt"),
    ("/v1/cache/explain", {"prompt": 5}, 400, "prompt"),
    ("/v1/cache/explain", {"prompt": [288]}, 400, "prompt"),
    ("/v1/cache/explain", {"prompt": [5] * 2049}, 400, "prompt"),
    ("/v1/cache/explain", {"prompt": "x" * 100_000}, 400, "prompt"),
    ("/tokenize", {"prompt": "x" * 100_000}, 400, "prompt"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
]

GOOD: dict[str, dict[str, Any]] = {
    COMPLETE: {"model": "default", "prompt": "hi", "max_tokens": 4}, CHAT: {"model": "default", "messages": USER, "max_tokens": 4},
    "/tokenize": {"prompt": "hi"}, "/detokenize": {"tokens": [72]}, "/v1/cache/explain": {"prompt": "hi"},
}

RAW: list[tuple[bytes, dict[str, str], int]] = [
    (b"", {}, 400), (b"{", {}, 400), (b"[]", {}, 400), (b"null", {}, 400), (b"5", {}, 400), (b'"x"', {}, 400),
    (b'{"model": "default", "prompt": "hi", "temperature": NaN}', {}, 400),
    (b'{"model": "default", "prompt": "hi", "temperature": Infinity}', {}, 400),
    (b'{"model": "default", "prompt": "\\ud800"}', {}, 400), (b"\xff\xfe{}", {}, 400), (b'{"prompt": "\xff"}', {}, 400),
    (json.dumps({"model": "default", "prompt": "hi", "metadata": deep(70)}).encode(), {}, 400),
    (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", {}, 400),
    (b'{"model": "default", "prompt": "hi"} trailing', {}, 400),
    (b'{"model": "default", "prompt": "hi", "seed": ' + b"9" * 5000 + b"}", {}, 400),
    (b"model=default", {"content-type": "application/x-www-form-urlencoded"}, 415), (b"{}", {"content-type": "text/plain"}, 415),
    (b"{}", {"content-encoding": "gzip"}, 415),
    (b" " * 300_000, {}, 413), (b"{}", {"content-length": "999999999999999999999"}, 413),
]


def test_bad_fields(serve: Serve) -> None:
    """Every row: status, field, a message of a fact and a fix; before and after, a probe gets the same answer."""

    async def test(client: Client) -> None:
        probe = {"prompt": "The first light", "seed": 4, "max_tokens": 12}
        before = (await client.complete(**probe))["choices"]
        for path, change, status, param in BAD:
            body = {**GOOD[path], **change}
            answer = await client.post(path, {name: value for name, value in body.items() if value is not None})
            error = answer.json()["error"] if answer.status_code >= 400 else {}
            assert (status, param) == (answer.status_code, error.get("param")), f"{path} {str(change)[:100]}: {answer.text[:300]}"
            assert error["message"].count(". ") >= 1
            assert "application/json" == answer.headers["content-type"]
        assert before == (await client.complete(**probe))["choices"]
        for path, body in GOOD.items():
            assert 200 == (await client.post(path, body)).status_code

    assert len(BAD) + len(RAW) > 60
    serve(test, max_tokens=500)


def test_messages_say_what_to_do(serve: Serve) -> None:
    """In plain words; what is wrong with a pattern is not the size of a schema."""

    async def test(client: Client) -> None:
        empty = (await client.post(CHAT, {"model": "default", "messages": []})).json()["error"]["message"]
        assert "`messages` is []. Send a list with at least one message, each an object." == empty
        wrong = (await client.post(COMPLETE, {**GOOD[COMPLETE], "structured": {"regex": "a("}})).json()["error"]["message"]
        assert "schemas" not in wrong
        assert "Correct the pattern" in wrong
        many = await client.post(COMPLETE, {**GOOD[COMPLETE], **{f"new_{number}": 1 for number in range(100)}})
        assert 200 == many.status_code

    serve(test)


def test_long_names_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing takes the time of both lengths together, for each known field."""
    compared: list[str] = []
    monkeypatch.setattr(fields, "get_close_matches", lambda name, *rest: compared.append(name) or [])
    _, ignored = fields.read(CompletionFields, {**GOOD[COMPLETE], "n" * 41: 1, "n" * 40: 1})
    assert (["n" * 41, "n" * 40], ["n" * 40]) == (ignored, compared)


def test_slow_work_leaves_the_event_loop(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rendering, encoding, decoding and the parsing of a long body are left to other threads."""

    async def test(client: Client) -> None:
        tokenizer, threads = client.service.tokenizer, {}
        loop = threading.get_ident()

        def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def made(*given: Any, **options: Any) -> Any:
                threads.setdefault(name, set()).add(threading.get_ident())
                return call(*given, **options)

            return made

        for name in ("encode", "decode"):
            monkeypatch.setattr(tokenizer, name, watched(name, getattr(tokenizer, name)))
        monkeypatch.setattr(extras, "render", watched("render", extras.render))
        for path, content in [
            ("/tokenize", {"prompt": "hi"}), ("/tokenize", {"messages": USER}), ("/detokenize", {"tokens": [72]}),
            ("/v1/cache/explain", {"prompt": "hi"}), ("/v1/cache/explain", {"messages": USER}),
        ]:
            assert 200 == (await client.post(path, content)).status_code
        assert {"encode", "decode", "render"} == set(threads)
        monkeypatch.setattr(body, "parse", watched("parse", body.parse))
        assert 200 == (await client.post("/tokenize", {"prompt": "hi", "note": "x" * 2**20})).status_code
        assert all(loop not in found for found in threads.values()), threads
        assert "parse" in threads

    serve(test)


def test_bad_bodies(serve: Serve) -> None:
    async def test(client: Client) -> None:
        for raw, headers, status in RAW:
            answer = await client.http.post(COMPLETE, content=raw, headers={"content-type": "application/json", **headers})
            assert status == answer.status_code, f"{raw[:60]!r} {headers}: {answer.text[:200]}"
            assert {"message", "type", "param", "code"} == set(answer.json()["error"])
        await client.complete("hi", max_tokens=2)

    serve(test, body_bytes=200_000 + 100)


def test_a_body_of_unknown_length_is_read_up_to_the_limit(serve: Serve) -> None:
    """No Content-Length: reading ends where the limit is, not where the client ends."""
    num_sent = 0

    async def test(client: Client) -> None:
        async def pieces() -> Any:
            nonlocal num_sent
            for _ in range(1000):
                num_sent += 1
                yield b" " * 1000

        answer = await client.http.post(COMPLETE, content=pieces(), headers={"content-type": "application/json"})
        assert (413, "close") == (answer.status_code, answer.headers["connection"])
        assert num_sent < 60

    serve(test, body_bytes=50_000)


def test_paths_and_methods(serve: Serve) -> None:
    async def test(client: Client) -> None:
        for method, path, status in [
            ("GET", "/nothing", 404), ("POST", "/v1/embeddings", 404), ("GET", COMPLETE, 405), ("PUT", CHAT, 405), ("POST", "/v1/models", 405),
            ("GET", "/v1/models/nobody", 404), ("GET", "/v1/models/", 404), ("DELETE", "/health", 405),
        ]:
            answer = await client.http.request(method, path)
            assert status == answer.status_code, (method, path, answer.text)
            assert {"message", "type", "param", "code"} == set(answer.json()["error"])
            assert ("allow" in answer.headers) == (status == 405)
        assert 200 == (await client.http.get("/v1/models/default")).status_code

    serve(test)


def test_keys(serve: Serve) -> None:
    """Any of the keys opens everything; without one only what says nothing about the model answers."""
    keys = ("first-key", "second-key")

    async def test(client: Client) -> None:
        for header, status in [
            (None, 401), ("Bearer wrong", 401), ("Bearer first-ke", 401), ("Bearer first-key2", 401), ("first-key", 401), ("Basic first-key", 401),
            ("Bearer", 401), ("Bearer first-key", 200), ("bearer second-key", 200), ("Bearer \xe9", 401),
        ]:
            headers = {} if header is None else {"authorization": header.encode("latin-1")}
            for path in ("/v1/models", "/metrics"):
                answer = await client.http.get(path, headers=headers)
                assert status == answer.status_code, (header, path)
                if status == 401:
                    assert "invalid_api_key" == answer.json()["error"]["code"]
                    assert "Bearer" == answer.headers["www-authenticate"]
                    assert "first-key" not in answer.text
        assert {200} == {(await client.http.get(path)).status_code for path in ("/health", "/ready", "/")}

    serve(test, Settings(keys=keys))


def test_fields_without_effect_are_named(serve: Serve) -> None:
    """Known and unknown ones; where the server is told to, unknown ones are refused."""

    async def lenient(client: Client) -> None:
        answer = await client.post(COMPLETE, {**GOOD[COMPLETE], "user": "me", "store": True, "brand_new": 1, "metadata": None, "x\r\ny": 1, "": 1})
        assert (200, "user, store, brand_new, x??y, ?") == (answer.status_code, answer.headers["x-ignored-fields"])
        assert "x-ignored-fields" not in (await client.post(COMPLETE, GOOD[COMPLETE])).headers

    async def strict(client: Client) -> None:
        assert 200 == (await client.post(COMPLETE, {**GOOD[COMPLETE], "user": "me"})).status_code
        answer = await client.post(COMPLETE, {**GOOD[COMPLETE], "brand_new": 1})
        assert (400, "brand_new") == (answer.status_code, answer.json()["error"]["param"])

    serve(lenient)
    serve(strict, Settings(unknown_refused=True))


def test_the_document_names_every_field() -> None:
    """What is read, set aside or refused stands in docs/http.md."""
    text = (Path(__file__).parents[2] / "docs" / "http.md").read_text(encoding="utf-8")
    known = {*CompletionFields.model_fields, *ChatFields.model_fields, *IGNORED, *REFUSED}
    assert [] == sorted(name for name in known if f"`{name}`" not in text)


def test_limits_need_sense() -> None:
    nans = ({name: math.nan} for name in ("request_s", "stall_s", "drain_s"))
    for wrong in ({"body_bytes": 0}, {"max_tokens": 0}, {"drain_s": -1.0}, {"num_queued": -1}, *nans):
        with pytest.raises(ConfigError):
            Limits(**wrong)  # type: ignore[arg-type]
