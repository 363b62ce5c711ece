"""OpenAI's npm package, unmodified, against a server process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serve.node import FOLDER, needs_npm, run
from tests.serve.process import LIMIT_S, Process, server
from tests.serve.schema import check

KEY = "a-key-for-npm"


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    with server("--api-key", KEY, "--dtype", "float32") as found:
        yield found


@pytest.fixture(scope="module")
def found(process: Process) -> dict[str, Any]:
    """What the client saw; it asks everything in one go."""
    return run("client.mjs", process.url, KEY)


def direct(process: Process, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer without any client."""
    answer = httpx.post(process.url + path, json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=LIMIT_S)
    assert 200 == answer.status_code, answer.text
    return answer.json()


def message(answer: dict[str, Any]) -> dict[str, Any]:
    (choice,) = answer["choices"]
    return choice["message"]


def test_the_lock_names_no_registry() -> None:
    """Versions and hashes, so that any mirror serves, and nothing but what was locked."""
    locked = json.loads((FOLDER / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    assert {"node_modules/openai", "node_modules/playwright-core"} == set(filter(None, locked))
    assert [] == [place for place, entry in locked.items() if "resolved" in entry or (place and not entry["integrity"].startswith("sha512-"))]


@needs_npm
def test_models(found: dict[str, Any]) -> None:
    assert ["default"] == found["models"]
    check("Model", found["model"])


@needs_npm
def test_completions(found: dict[str, Any], process: Process) -> None:
    whole, chunks = found["completion"], found["completionChunks"]
    check("CreateCompletionResponse", whole)
    texts = [""] * 4
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    said = [choice["text"] for choice in whole["choices"]]
    assert said == texts
    assert len(set(said)) > 1
    assert 32 == whole["usage"]["completion_tokens"] == chunks[-1]["usage"]["completion_tokens"]
    answer = direct(process, "/v1/completions", found["asked"]["prompts"])
    assert said == [choice["text"] for choice in answer["choices"]]


@needs_npm
def test_chat(found: dict[str, Any], process: Process) -> None:
    whole, chunks = found["chat"], found["chatChunks"]
    check("CreateChatCompletionResponse", whole)
    for chunk in chunks:
        check("CreateChatCompletionStreamResponse", chunk)
    answer = direct(process, "/v1/chat/completions", found["asked"]["talk"])
    said = message(answer)["content"]
    assert said
    assert said == message(whole)["content"] == message(found["chatGathered"])["content"]
    assert said == "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert [whole["choices"][0]["finish_reason"]] == reasons
    assert [[], False] == [chunks[-1]["choices"], any(chunk.get("usage") for chunk in chunks[:-1])]
    counts = [each["usage"]["completion_tokens"] for each in (answer, whole, chunks[-1], found["chatGathered"])]
    assert [counts[0]] * 4 == counts
    assert "from-npm" == found["requestId"]


@needs_npm
def test_tool_calls(found: dict[str, Any]) -> None:
    """Whole, put together from a stream, and run by the package's own loop."""
    check("CreateChatCompletionResponse", found["call"])
    for answer in (found["call"], found["callGathered"]):
        assert "tool_calls" == answer["choices"][0]["finish_reason"]
        (call,) = message(answer)["tool_calls"]
        assert ("function", "pick") == (call["type"], call["function"]["name"])
        assert json.loads(call["function"]["arguments"])["size"] in ("small", "large")
    calls = [message(found[name])["tool_calls"][0]["function"]["arguments"] for name in ("call", "callGathered")]
    assert calls[0] == calls[1]
    (given,) = found["callsRun"]
    assert given in ({"size": "small"}, {"size": "large"})


@needs_npm
def test_forms(found: dict[str, Any]) -> None:
    check("CreateChatCompletionResponse", found["form"])
    answers = [message(found[name])["content"] for name in ("form", "formGathered")]
    assert answers[0] == answers[1]
    assert json.loads(answers[0]) in ({"size": "small"}, {"size": "large"})


@needs_npm
@pytest.mark.parametrize(("name", "kind", "status", "code", "param"), [
    ("temperature", "BadRequestError", 400, "invalid_value", "temperature"), ("messages", "BadRequestError", 400, "invalid_value", "messages"),
    ("stream", "BadRequestError", 400, "invalid_value", "top_p"), ("context", "BadRequestError", 400, "context_length_exceeded", "prompt"),
    ("model", "NotFoundError", 404, "model_not_found", "model"), ("key", "AuthenticationError", 401, "invalid_api_key", None),
])
def test_refusals(name: str, kind: str, status: int, code: str, param: str | None, found: dict[str, Any]) -> None:
    """Each arrives as the class that the package has for it, with the server's own words."""
    refused = found["refusals"][name]
    assert (kind, status, code, param) == (refused["kind"], refused["status"], refused["code"], refused["param"])
    assert refused["type"] and refused["requestID"]
    assert refused["message"].startswith(f"{status} ") and len(refused["message"]) > 30


@needs_npm
def test_leaving_cancels(found: dict[str, Any]) -> None:
    """A stream and a whole answer of 20,000 tokens: left early, and the server runs nothing any more."""
    assert {"read": 2, "during": 1, "after": 0} == found["leftStream"]
    left = found["leftWhole"]
    assert ("APIUserAbortError", 1, 0) == (left["kind"], left["during"], left["after"])
