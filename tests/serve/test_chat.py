"""POST /v1/chat/completions: streamed = whole, forms and tools, counts, and what the vendor's rules say."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from firstlight import LLM, SamplingParams, chat
from firstlight.serve.profiles import PROFILES
from firstlight.serve.service import Settings
from tests.serve.conftest import Client, assert_alike, said
from tests.serve.schema import check

Serve = Callable[..., None]
CHAT = "/v1/chat/completions"
PLAIN = {"thinking": {"type": "disabled"}}
SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}, "big": {"type": "boolean"}}, "required": ["kind", "big"],
          "additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"town": {"enum": ["Oslo", "Bergen"]}, "days": {"enum": [1, 2]}}, "required": ["town", "days"]}}}
CALL: dict[str, Any] = {**PLAIN, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 300}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the chunks add up to, in the shape of a whole answer's choices; the order of chunks is checked on the way."""
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            if choice["index"] not in found:
                assert {"role": "assistant", "content": ""} == delta, "the first chunk says the role"
                message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
                found[choice["index"]] = {"index": choice["index"], "message": message, "logprobs": None, "finish_reason": None}
                delta = {}
            whole = found[choice["index"]]
            message = whole["message"]
            assert whole["finish_reason"] is None, "something came after the end"
            whole["finish_reason"] = choice["finish_reason"]
            assert len(delta) <= 1
            for name in ("reasoning_content", "content"):
                if delta.get(name):
                    message[name] = (message.get(name) or "") + delta[name]
            for call in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    calls.append({"id": call["id"], "type": call["type"], "function": {**call["function"]}})
                else:
                    assert {"index", "function"} == set(call)
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            if choice["logprobs"] is not None:
                lists = whole["logprobs"] = whole["logprobs"] or {"content": [], "refusal": None}
                lists["content"] += choice["logprobs"]["content"]
    return [choice for _, choice in sorted(found.items())]


@pytest.mark.parametrize("more", [
    {}, PLAIN, {"n": 3}, {"logprobs": True, "top_logprobs": 2}, {**PLAIN, "logprobs": True}, {**PLAIN, "stop": ["e", "i"], "n": 2},
    {**PLAIN, "response_format": FORM}, {"reasoning_effort": "low", "response_format": FORM, "temperature": 0.7},
    CALL, {**CALL, "n": 2, "logprobs": True},
    {"tools": [WEATHER]},
])
def test_streamed_is_whole(serve: Serve, more: dict[str, Any]) -> None:
    """And both are as OpenAI's description says."""

    async def test(client: Client) -> None:
        asked = {"messages": said("Say something."), "seed": 7, "max_tokens": 40, **more}
        whole = await client.chat(**asked)
        check("CreateChatCompletionResponse", whole)
        events = await client.events(CHAT, {**asked, "stream_options": {"include_usage": True}})
        for event in events:
            check("CreateChatCompletionStreamResponse", event)
        assert_alike(whole["choices"], joined(events))
        for usage in (events[-1]["usage"], whole["usage"]):
            usage.pop("prompt_tokens_details")
        assert whole["usage"] == events[-1]["usage"]
        rated = [choice["logprobs"] for choice in whole["choices"]]
        if more.get("logprobs"):
            assert whole["usage"]["completion_tokens"] == sum(len(each["content"]) for each in rated)
            assert {more.get("top_logprobs", 0)} == {len(entry["top_logprobs"]) for each in rated for entry in each["content"]}
        else:
            assert {None} == set(rated)

    serve(test)


def test_forms_hold(serve: Serve) -> None:
    """A random model, held to a form, answers in it; a forced call is valid and says tool_calls; none may not call."""

    async def test(client: Client) -> None:
        for seed in range(2):
            formed = (await client.chat("x", seed=seed, max_tokens=200, response_format=FORM, **PLAIN))["choices"][0]
            assert "stop" == formed["finish_reason"]
            assert set(json.loads(formed["message"]["content"])) == {"kind", "big"}
            called = (await client.chat("x", seed=seed, max_tokens=400, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, **PLAIN))
            choice = called["choices"][0]
            (call,) = choice["message"]["tool_calls"]
            arguments = json.loads(call["function"]["arguments"])
            assert ("tool_calls", "weather") == (choice["finish_reason"], call["function"]["name"])
            assert arguments["town"] in ("Oslo", "Bergen") and arguments["days"] in (1, 2)
        short = (await client.chat("x", seed=1, max_tokens=3, tools=[WEATHER], tool_choice="required", **PLAIN))["choices"][0]
        assert ("length", None) == (short["finish_reason"], short["message"].get("tool_calls"))

    serve(test)


def test_prompt_and_answer_are_those_of_the_library(serve: Serve, model: Callable[..., LLM]) -> None:
    """The same ids in and out, read by the same reader; counts as the vendor counts them."""

    async def test(client: Client) -> None:
        answer = await client.chat("Hello", seed=2, max_tokens=40, return_token_ids=True)
        (choice,) = answer["choices"]
        llm = model(seed=1)
        fmt = chat.load(str(llm.machine.folder))  # type: ignore[union-attr]
        ids = fmt.render(said("Hello"))
        (out,) = llm.generate([ids], SamplingParams(seed=2, max_tokens=40, stop_token_ids=tuple(fmt.end_ids)))
        reader = fmt.reader(tools=[])
        reader.push(out.tokens)
        reader.finish(out.finish_reason)  # type: ignore[arg-type]
        assert (out.tokens, reader.message.content) == (choice["token_ids"], choice["message"]["content"])
        assert reader.message.reasoning == choice["message"].get("reasoning_content")
        assert (len(ids) - fmt.num_pending, len(out.tokens)) == (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"])
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] <= len(out.tokens)
        tokenized = (await client.post("/tokenize", {"messages": said("Hello")})).json()
        assert (ids, len(ids)) == (tokenized["tokens"], tokenized["count"])
        again = await client.chat("Hello", seed=2, max_tokens=40)
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert 0 < cached <= again["usage"]["prompt_tokens"]
        explained = (await client.post("/v1/cache/explain", {"messages": said("Hello")})).json()
        assert len(ids) - 1 == explained["matched_tokens"]

    serve(test)


def test_an_answer_without_a_limit_ends_with_the_context(serve: Serve) -> None:
    async def test(client: Client) -> None:
        answer = await client.chat("Hello", seed=2, ignore_eos=True)
        num_ids = len((await client.post("/tokenize", {"messages": said("Hello")})).json()["tokens"])
        assert 400 == num_ids + answer["usage"]["completion_tokens"]
        assert "length" == answer["choices"][0]["finish_reason"]

    async def limited(client: Client) -> None:
        assert 9 == (await client.chat("Hello", seed=2, ignore_eos=True))["usage"]["completion_tokens"]
        assert 5 == (await client.chat("Hello", seed=2, ignore_eos=True, max_tokens=7, max_completion_tokens=5))["usage"]["completion_tokens"]

    serve(test, options={"max_context": 400})
    serve(limited, max_tokens=9)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinking", [{}, PLAIN])
def test_the_vendors_rules(serve: Serve, stream: bool, thinking: dict[str, Any]) -> None:
    """What its verifier wants accepted and refused. Source: tests/params of MoonshotAI/Kimi-Vendor-Verifier."""
    accepted: list[dict[str, Any]] = [
        {}, {"temperature": 0.6}, {"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.95}, {"presence_penalty": 0},
        {"frequency_penalty": 0}, {"n": 1},
    ]
    refused = [
        {"temperature": 1.1}, {"temperature": 2.0}, {"temperature": -0.1}, {"top_p": 0.8}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5},
        {"n": 2},
    ]

    async def test(client: Client) -> None:
        for fields in accepted:
            body = {"model": "default", "messages": said("x"), "max_tokens": 1, "stream": stream, **thinking, **fields}
            assert 200 == (await client.post(CHAT, body)).status_code
        for fields in refused:
            answer = await client.post(CHAT, {"model": "default", "messages": said("x"), "max_tokens": 1, "stream": stream, **thinking, **fields})
            assert (400, next(iter(fields))) == (answer.status_code, answer.json()["error"]["param"]), fields

    serve(test, Settings(profile=PROFILES["kimi"]))


def test_without_a_profile_the_ranges_are_openais(serve: Serve) -> None:
    async def test(client: Client) -> None:
        for fields in ({"temperature": 2.0}, {"top_p": 0.8}, {"presence_penalty": 0.5}, {"n": 2}):
            await client.chat("x", max_tokens=1, **fields)

    serve(test)
