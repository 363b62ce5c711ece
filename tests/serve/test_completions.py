"""POST /v1/completions: streamed = whole, n and batches = alone, logprobs of prompts, and what ends an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from firstlight import LLM, SamplingParams
from tests.serve.conftest import Client, assert_alike

Serve = Callable[..., None]
PROMPTS = ["The first light", "of the morning", "\u65e5\u672c \u00f1", [72, 101, 108, 108, 111]]


def joined(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What the pieces of a stream add up to, by choice."""
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event["choices"]:
            whole = found.setdefault(choice["index"], {"index": choice["index"], "text": "", "logprobs": None, "finish_reason": None})
            assert whole["finish_reason"] is None, "something came after the end"
            whole["text"] += choice["text"]
            whole["finish_reason"] = choice["finish_reason"]
            if choice["logprobs"] is not None:
                lists = whole["logprobs"] = whole["logprobs"] or {name: [] for name in choice["logprobs"]}
                for name, items in choice["logprobs"].items():
                    lists[name] += items
    return found


@pytest.mark.parametrize("more", [
    {}, {"logprobs": 2}, {"echo": True}, {"echo": True, "logprobs": 1}, {"echo": True, "logprobs": 0, "max_tokens": 0}, {"n": 3},
    {"stop": ["e", "\ufffd"]}, {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5}, {"top_k": 5, "min_p": 0.05},
    {"n": 2, "stop": ["a"], "logprobs": 0, "echo": True},
])
def test_streamed_is_whole(serve: Serve, more: dict[str, Any]) -> None:
    async def test(client: Client) -> None:
        asked = {"prompt": PROMPTS[:3], "seed": 7, "max_tokens": 24, **more}
        whole = await client.complete(**asked)
        events = await client.events("/v1/completions", {**asked, "stream_options": {"include_usage": True}})
        assert_alike(whole["choices"], [choice for _, choice in sorted(joined(events).items())])
        usage = events[-1]["usage"]
        for counts in (usage, whole["usage"]):
            counts.pop("prompt_tokens_details")
        assert ([], whole["usage"]) == (events[-1]["choices"], usage)
        assert {None} == {event["usage"] for event in events[:-1]}
        assert len({event["id"] for event in events}) == 1

    serve(test)


def test_a_choice_among_many_is_what_it_is_alone(serve: Serve) -> None:
    """n and batches of prompts: index = prompt * n + k, and choice k has the seed k later. Another seed differs."""

    async def test(client: Client) -> None:
        many = await client.complete(PROMPTS[:3], n=3, seed=11, max_tokens=16)
        assert list(range(9)) == [choice["index"] for choice in many["choices"]]
        for place, prompt in enumerate(PROMPTS[:3]):
            for k in range(3):
                alone = await client.complete(prompt, seed=11 + k, max_tokens=16)
                assert alone["choices"][0]["text"] == many["choices"][3 * place + k]["text"]
        assert len({choice["text"] for choice in many["choices"]}) == 9

    serve(test)


def test_text_and_ids_are_one_prompt(serve: Serve, model: Callable[..., LLM]) -> None:
    """And both are what the library says without a server."""

    async def test(client: Client) -> None:
        text = await client.complete("Hello", seed=3, max_tokens=12, logprobs=1, return_token_ids=True)
        ids = await client.complete([72, 101, 108, 108, 111], seed=3, max_tokens=12, logprobs=1, return_token_ids=True)
        assert text["choices"] == ids["choices"]
        assert text["choices"] == (await client.complete("Hello", seed=3.0, max_tokens=12.0, logprobs=1.0, return_token_ids=True))["choices"]
        listed = await client.complete([[72, 101, 108, 108, 111]], seed=3, max_tokens=12, logprobs=1, return_token_ids=True)
        assert text["choices"] == listed["choices"]
        (out,) = model(seed=1).generate(["Hello"], SamplingParams(seed=3, max_tokens=12, logprobs=1))
        (choice,) = text["choices"]
        assert (out.text, out.tokens, out.finish_reason) == (choice["text"], choice["token_ids"], choice["finish_reason"])
        assert out.logprobs is not None
        assert [entry.logprob for entry in out.logprobs] == choice["logprobs"]["token_logprobs"]

    serve(test)


@pytest.mark.parametrize("num_prompt", [1, 2, 40])
def test_logprobs_of_a_prompt_are_those_of_its_logits(serve: Serve, model: Callable[..., LLM], num_prompt: int) -> None:
    """Chunks of 16, cold and after the same prompt was cached: one value per token, none for the first; what follows is not changed by asking."""
    prompt = [(7 * place + 3) % 250 for place in range(num_prompt)]

    async def test(client: Client) -> None:
        plain = await client.complete(prompt, seed=1, max_tokens=6, ignore_eos=True)
        for max_tokens in (0, 1, 6):
            rated = await client.complete(prompt, seed=1, max_tokens=max_tokens, logprobs=3, echo=True, ignore_eos=True)
            (choice,) = rated["choices"]
            lists = choice["logprobs"]
            assert {num_prompt + max_tokens} == set(map(len, lists.values()))
            assert (None, None) == (lists["token_logprobs"][0], lists["top_logprobs"][0])
            expected_TV = model(seed=1).logits(prompt).double().log_softmax(-1)
            for place in range(1, num_prompt):
                assert lists["token_logprobs"][place] == pytest.approx(float(expected_TV[place - 1, prompt[place]]), abs=1e-4)
                best = max(lists["top_logprobs"][place].values())
                assert best == pytest.approx(float(expected_TV[place - 1].max()), abs=1e-4)
                assert len(lists["top_logprobs"][place]) in (3, 4)
            assert (max_tokens, num_prompt) == (rated["usage"]["completion_tokens"], rated["usage"]["prompt_tokens"])
            if max_tokens == 6:
                assert choice["text"].endswith(plain["choices"][0]["text"])
            assert 0 == rated["usage"]["prompt_tokens_details"]["cached_tokens"]

    serve(test, options={"chunk_tokens": 16})


def test_stops(serve: Serve) -> None:
    """A stop string and a stop token end an answer before themselves, and a request that asks for all of it shows where."""

    async def test(client: Client) -> None:
        full = await client.complete(PROMPTS[0], seed=5, max_tokens=40, return_token_ids=True, ignore_eos=True)
        text, tokens = full["choices"][0]["text"], full["choices"][0]["token_ids"]
        mark = text[10:13]
        stopped = await client.complete(PROMPTS[0], seed=5, max_tokens=40, stop=mark, ignore_eos=True)
        assert (text[: text.index(mark)], "stop") == (stopped["choices"][0]["text"], stopped["choices"][0]["finish_reason"])
        assert stopped["usage"]["completion_tokens"] < 40
        kept = await client.complete(PROMPTS[0], seed=5, max_tokens=40, stop=[mark], ignore_eos=True, include_stop_str_in_output=True)
        assert text[: text.index(mark) + 3] == kept["choices"][0]["text"]
        token = tokens[9]
        ended = await client.complete(PROMPTS[0], seed=5, max_tokens=40, stop_token_ids=[token], return_token_ids=True, ignore_eos=True)
        assert tokens[: tokens.index(token) + 1] == ended["choices"][0]["token_ids"]
        assert "stop" == ended["choices"][0]["finish_reason"]
        assert "length" == full["choices"][0]["finish_reason"]

    serve(test)


def test_a_stop_token_is_not_text_in_a_chat_either(serve: Serve) -> None:
    """Ordinary tokens that end an answer are left out; its ids show where it ended."""

    async def test(client: Client) -> None:
        asked: dict[str, Any] = {"seed": 5, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True, "thinking": {"type": "disabled"}}
        full = (await client.chat("hi", **asked))["choices"][0]
        token = next(token for place, token in enumerate(full["token_ids"]) if place >= 3 and 65 <= token < 123)
        tokens = full["token_ids"][: full["token_ids"].index(token) + 1]
        ended = (await client.chat("hi", **asked, stop_token_ids=[token]))["choices"][0]
        assert (tokens, "stop") == (ended["token_ids"], ended["finish_reason"])
        shown = ended["message"]["content"] or ""
        assert full["message"]["content"].startswith(shown + chr(token))
        assert chr(token) not in shown

    serve(test)


def test_usage_counts_what_happened(serve: Serve) -> None:
    """Cached tokens are those of the engine; running counts in a stream grow to the final one; a salt keeps namespaces apart."""

    async def test(client: Client) -> None:
        prompt = list(range(64))
        cold = await client.complete(prompt, max_tokens=4, temperature=0)
        warm = await client.complete(prompt, max_tokens=4, temperature=0)
        other = await client.complete(prompt, max_tokens=4, temperature=0, cache_salt="another tenant")
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (cold, warm, other)]
        assert [0, 63, 0] == cached
        assert cold["choices"] == warm["choices"] == other["choices"]
        options = {"include_usage": True, "continuous_usage_stats": True}
        asked = {"prompt": prompt, "max_tokens": 9, "ignore_eos": True, "logprobs": 0, "stream_options": options}
        events = await client.events("/v1/completions", asked)
        assert [*range(1, 10), 9] == [event["usage"]["completion_tokens"] for event in events]
        batch = await client.complete([prompt, prompt[:5]], n=2, max_tokens=3, ignore_eos=True)
        assert (69, 12, 81) == tuple(batch["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens"))
        explained = (await client.post("/v1/cache/explain", {"prompt": prompt})).json()
        assert (63, 1) == (explained["matched_tokens"], explained["minimum_reusable_tokens"])

    serve(test)


def test_slow_clients_do_not_disturb_fast_ones(serve: Serve) -> None:
    """Many requests at once, mixed: each gets what it gets alone."""

    async def test(client: Client) -> None:
        kinds: list[dict[str, Any]] = [{"prompt": prompt, "seed": seed, "max_tokens": 5 + 3 * seed} for seed in range(4) for prompt in PROMPTS]
        alone = [(await client.complete(**kind))["choices"] for kind in kinds]
        together = await asyncio.gather(*(client.complete(**kind) for kind in kinds))
        assert alone == [answer["choices"] for answer in together]

    serve(test)
