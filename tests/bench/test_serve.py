"""Whole runs against a scripted server in virtual time: planted latencies come out exactly, every error has its kind, the report is as documented."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from firstlight.bench.report import SCHEMA
from firstlight.spec.errors import PeerError, RequestError
from tests.bench.scripted import DONE, Asked, Line, event, measured_on, paths, speak, symbols

ROOT = Path(__file__).parents[2]
TRACE = ROOT / "tests" / "data" / "traces" / "mooncake" / "conversation_trace.jsonl.gz"


def test_planted_latencies_come_out_exactly() -> None:
    """First tokens after 0.5 s, then one each 0.25 s: five tokens in 1.5 s; six requests of two clients in 4.5 s."""
    made, _, _ = measured_on(speak(0.5, 0.25), requests=6, concurrency=2, input_tokens="20", output_tokens="5", slo="ttft=0.5,tpot=0.25,e2e=1.5")
    for name, value in {"ttft": 0.5, "tpot": 0.25, "itl": 0.25, "e2e": 1.5}.items():
        assert [value] * 7 == pytest.approx([made["latency_s"][name][key] for key in ("mean", "min", "p50", "p90", "p95", "p99", "max")]), name
    assert 24 == made["latency_s"]["itl"]["count"]
    assert 4.5 == pytest.approx(made["duration_s"])
    assert (120, 30, 1.0) == (made["tokens"]["input"], made["tokens"]["output"], made["goodput"]["share"])
    assert 30 / 4.5 == pytest.approx(made["throughput"]["output_tokens_per_s"])
    assert ([], {}) == ([text for text in made["warnings"] if "core" not in text], made["errors"])


def test_several_tokens_per_chunk_do_not_make_the_server_faster() -> None:
    """Four tokens every 0.25 s: gaps are per chunk, time per token counts the tokens behind the first one."""
    made, _, _ = measured_on(speak(0.5, 0.25, per_chunk=4), requests=2, concurrency=1, output_tokens="16")
    assert (0.25, 0.75 / 15, 4.0) == pytest.approx((made["latency_s"]["itl"]["p50"], made["latency_s"]["tpot"]["p50"], made["tokens"]["per_chunk"]))


def test_an_open_loop_asks_on_time_though_the_server_stalls() -> None:
    async def stall(asked: Asked, line: Line) -> None:
        if asked.fields["max_tokens"] > 1:
            await asyncio.sleep(max(0.0, 1020 - line.server.loop.time()))
        await speak(0, 0)(asked, line)

    made, _, server = measured_on(stall, requests=40, rate=4.0, arrivals="constant", output_tokens="3")
    begun = server.asked[0].at_s
    assert [number / 4 for number in range(40)] == pytest.approx([asked.at_s - begun for asked in server.asked])
    assert (40, 40) == (made["in_flight"]["max"], made["requests"]["succeeded"])
    assert 20 - begun + 1000 == pytest.approx(made["latency_s"]["ttft"]["max"])


def test_prompts_have_the_lengths_that_the_server_counts() -> None:
    """A server that makes three tokens of a word and adds eleven: what is asked for in tokens comes out in words."""

    async def count(asked: Asked, line: Line) -> None:
        line.head()
        line.chunk(event("a", finish="stop") + event(usage={"prompt_tokens": 3 * symbols(asked) + 11, "completion_tokens": 1}) + DONE)
        line.say(b"0\r\n\r\n")

    made, _, server = measured_on(count, requests=2, input_tokens="300", output_tokens="1")
    assert (3.0, 11.0) == (made["server"]["tokens_per_symbol"], made["server"]["overhead_tokens"])
    assert [100, 100] == [symbols(asked) for asked in server.asked]


def test_the_request_is_what_openai_servers_read() -> None:
    _, _, server = measured_on(speak(), requests=1, api_key="secret", body='{"top_p": 0.5, "temperature": 1}', output_tokens="7")
    asked = server.asked[0]
    assert ("POST", "/v1/completions", "Bearer secret") == (asked.method, asked.path, asked.headers["authorization"])
    prompt = asked.fields.pop("prompt")
    assert 128 == len(prompt.split())
    assert {
        "model": "scripted", "max_tokens": 7, "temperature": 1, "stream": True, "ignore_eos": True, "top_p": 0.5,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    } == asked.fields


def test_prompts_of_ids() -> None:
    _, _, server = measured_on(speak(), requests=2, token_ids="100:200", input_tokens="50")
    assert all(50 == len(asked.fields["prompt"]) and set(asked.fields["prompt"]) <= set(range(100, 200)) for asked in server.asked)


def test_a_key_is_never_written() -> None:
    made, _, _ = measured_on(speak(), requests=1, api_key="very-secret", details=True)
    assert "very-secret" not in json.dumps(made)


def test_what_the_server_does_not_know_is_left_out_and_said() -> None:
    async def strict(asked: Asked, line: Line) -> None:
        unknown = [name for name in ("ignore_eos", "continuous_usage_stats") if name in json.dumps(asked.fields)]
        await (asyncio.sleep(0, line.plain(400, {"error": unknown})) if unknown else speak()(asked, line))

    made, _, server = measured_on(strict, requests=2)
    assert (["include_usage"], 2) == (made["server"]["extras"], made["requests"]["succeeded"])
    assert "ignore_eos" not in server.asked[0].fields


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_turns_repeat_what_was_said(endpoint: str) -> None:
    async def reply(asked: Asked, line: Line) -> None:
        line.head()
        choice = {"text": " fine"} if endpoint == "completions" else {"delta": {"content": "fine"}}
        line.chunk(b"data: " + json.dumps({"choices": [{**choice, "finish_reason": "stop"}]}).encode() + b"\n\n" + DONE)
        line.say(b"0\r\n\r\n")

    made, _, server = measured_on(reply, requests=3, turns=3, concurrency=1, endpoint=endpoint, input_tokens="4", output_tokens="1")
    assert 3 == made["requests"]["succeeded"]
    if endpoint == "completions":
        said = [asked.fields["prompt"] for asked in server.asked]
        assert all(later.startswith(earlier + " fine ") for earlier, later in pairwise(said))
        assert [4, 9, 14] == [len(text.split()) for text in said]
    else:
        roles = [[message["role"] for message in asked.fields["messages"]] for asked in server.asked]
        assert [["user"], ["user", "assistant", "user"], ["user", "assistant", "user", "assistant", "user"]] == roles
        assert server.asked[1].fields["messages"] == server.asked[2].fields["messages"][:3]


def test_shared_prefixes_are_the_same_text() -> None:
    made, _, server = measured_on(speak(), requests=4, prefix_tokens=30, prefix_groups=2, input_tokens="10", concurrency=1)
    begins = [" ".join(asked.fields["prompt"].split()[:30]) for asked in server.asked]
    assert (begins[0], begins[1]) == (begins[2], begins[3])
    assert begins[0] != begins[1]
    assert 60 == made["tokens"]["shared_by_plan"]


def test_a_trace_is_replayed_with_its_times_and_its_shared_text() -> None:
    made, _, server = measured_on(speak(0.01, 0.0), trace=TRACE, requests=30, speed=10.0, scale_lengths=1 / 32, max_output=4)
    with gzip.open(TRACE, "rt", encoding="ascii") as stream:
        lines = [json.loads(line) for line in islice(stream, 30)]
    begun = server.asked[0].at_s
    assert [line["timestamp"] / 10_000 for line in lines] == pytest.approx([asked.at_s - begun for asked in server.asked], abs=1e-6)
    words = [asked.fields["prompt"].split() for asked in server.asked]
    assert all(first[:16] == words[0][:16] for first, line in zip(words, lines, strict=True) if line["hash_ids"][0] == lines[0]["hash_ids"][0])
    assert 1 < len({tuple(item[:40]) for item in words})
    assert made["tokens"]["input"] == pytest.approx(sum(line["input_length"] for line in lines) / 32, rel=0.02)
    assert 4 == max(asked.fields["max_tokens"] for asked in server.asked)


def test_blocks_too_short_to_tell_apart_are_refused() -> None:
    with pytest.raises(RequestError, match="too few to tell"):
        measured_on(speak(), trace=TRACE, scale_lengths=1 / 500)


async def broken(asked: Asked, line: Line) -> None:
    """Every request another way to fail, by its number; the probes before them are well."""
    number = len(line.server.asked) - 3
    if number in (2, 6):
        line.plain((500, 429)[number == 6], {"error": "no"})
    elif number == 3:
        line.head()
        line.chunk(event("a"))
        line.abort()
    elif number == 4:
        line.head()
        line.chunk(DONE)
        line.say(b"0\r\n\r\n")
    elif number == 5:
        line.head()
        line.chunk(event("a") + event(error={"message": "lost"}))
        line.say(b"0\r\n\r\n")
    elif number == 7:
        await asyncio.sleep(1000)
    else:
        await speak()(asked, line)


def test_every_error_is_counted_by_its_kind_with_an_example() -> None:
    made, _, _ = measured_on(broken, requests=10, concurrency=1, timeout=20.0, output_tokens="2")
    expected = {"http_500": "no", "http_429": "no", "disconnect": "closed", "empty": "without a token", "stream_error": "lost", "timeout": "20 s"}
    assert expected.keys() == made["errors"].keys()
    assert all(made["errors"][kind]["count"] == 1 and said in made["errors"][kind]["example"] for kind, said in expected.items())
    assert (10, 4, 6, 1) == tuple(made["requests"][name] for name in ("sent", "succeeded", "failed", "refusals"))


def test_a_full_server_is_asked_again_when_it_says_so() -> None:
    """Full until 1010, come back after three seconds: latency counts from the first try."""

    async def full(asked: Asked, line: Line) -> None:
        if asked.fields["max_tokens"] > 1 and line.server.loop.time() < 1010:
            line.plain(429, {"error": "full"}, {"retry-after": "3"})
        else:
            await speak(1.0)(asked, line)

    made, _, _ = measured_on(full, requests=1, concurrency=1, retries=5, output_tokens="2")
    refusals = made["requests"]["refusals"]
    assert (1, 2, 3) == (made["requests"]["succeeded"], min(refusals, 2), max(refusals, 3))
    assert 3.0 * refusals + 1.0 == pytest.approx(made["latency_s"]["ttft"]["max"])
    made, _, _ = measured_on(full, requests=1, concurrency=1, retries=1, output_tokens="2")
    assert (1, 2) == (made["errors"]["http_429"]["count"], made["requests"]["refusals"])


@pytest.mark.parametrize(("status", "advice"), [(401, "--api-key"), (404, "--url"), (500, "logs")])
def test_a_server_that_refuses_the_first_request_ends_the_run(status: int, advice: str) -> None:
    async def refuse(asked: Asked, line: Line) -> None:
        line.plain(status, {"error": "nope"})

    with pytest.raises(PeerError, match=f"http_{status}.*nope.*{advice}"):
        measured_on(refuse, requests=1)


def documented() -> set[str]:
    """Fields that docs/bench.md defines: the first column of its tables; `a.{b,c}` stands for two."""
    text = (ROOT / "docs" / "bench.md").read_text(encoding="utf-8")
    found = set()
    for line in re.findall(r"^\| (`[a-z_].*?`) \|", text, re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", line):
            head, _, rest = name.partition("{")
            found |= {head + part.strip() + rest.partition("}")[2] for part in rest.partition("}")[0].split(",")} if rest else {name}
    return found


def test_the_report_is_as_documented() -> None:
    """Every field is defined, every definition is a field; settings are the options, errors and details have names of their own."""
    made, _, _ = measured_on(broken, requests=10, concurrency=2, timeout=20.0, output_tokens="2", slo="ttft=1", details=True)
    found = set()
    for path in paths(made):
        path = re.sub(r"^errors\.\w+", "errors.KIND", re.sub(r"\.(count|mean|min|p50|p90|p95|p99|max)$", "", path) if "_s." in path else path)
        found.add(re.sub(r"^settings\..*", "settings", re.sub(r"^server\.listed.*", "server.listed", re.sub(r"limits_s\..*", "limits_s", path))))
    found |= {f"details.{name}" for row in made["details"] for name in row} - {"details"}
    assert documented() == found - {"details"}
    assert SCHEMA == made["schema"]
    assert SCHEMA in (ROOT / "docs" / "bench.md").read_text(encoding="utf-8")


def test_the_same_options_ask_the_same() -> None:
    def prompts(**given: Any) -> list[str]:
        return [asked.fields["prompt"] for asked in measured_on(speak(), requests=5, concurrency=1, input_tokens="uniform:5:60", **given)[2].asked]

    assert prompts() == prompts()
    assert prompts() != prompts(seed=1)
