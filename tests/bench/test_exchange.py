"""Streams as servers write them: when tokens came, how many, and what was wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from firstlight.bench.exchange import Exchange, Stream
from firstlight.bench.wire import Fault
from tests.bench.scripted import DONE, event


def read(*pieces: tuple[float, bytes], status: int = 200, kind: str = "text/event-stream", broken: Fault | None = None) -> tuple[Exchange, Stream]:
    """A reply whose pieces come at these times."""
    exchange = Exchange(due_s=10.0, begun_s=10.0)
    stream = Stream(exchange, keep_text=True)
    stream.head(status, {"content-type": kind})
    for at_s, piece in pieces:
        stream.body(piece, at_s)
        exchange.end_s = at_s
    exchange.fault = stream.close(broken)
    return exchange, stream


def delta(finish: str | None = None, **fields: Any) -> bytes:
    """One event of a chat stream."""
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}).encode() + b"\n\n"


def counted(tokens: int) -> dict[str, int]:
    """Usage on the way."""
    return {"prompt_tokens": 7, "completion_tokens": tokens}


def test_times_of_a_plain_stream() -> None:
    exchange, _ = read((11, event("a")), (11.5, event("b")), (12.5, event("c", finish="length")), (13, event(usage=counted(3)) + DONE))
    assert (1.0, 0.75, 3.0) == (exchange.ttft_s, exchange.tpot_s, exchange.e2e_s)
    assert (3, "length", None) == (exchange.num_tokens, exchange.finish, exchange.fault)
    assert [11, 11.5, 12.5] == list(exchange.marks_s)


def test_usage_on_the_way_counts_chunks_of_several_tokens() -> None:
    """Two tokens in the first chunk, none in the second (held back), three in the last: 1.5 s for the three behind the first chunk."""
    exchange, _ = read(
        (11, event("ab", usage=counted(2))), (12, event("", usage=counted(2))), (12.5, event("cde", usage=counted(5), finish="stop")), (13, DONE)
    )
    assert ([11, 12.5], [2, 5]) == (list(exchange.marks_s), list(exchange.counts))
    assert (2, 0.5, 5) == (exchange.num_first, exchange.tpot_s, exchange.num_tokens)


def test_usage_at_the_end_counts_tokens_that_chunks_cannot_show() -> None:
    exchange, _ = read((11, event("ab")), (12, event("cdef", finish="stop")), (12, event(usage=counted(5))), (12, DONE))
    assert ([], 5, 0.25) == (list(exchange.counts), exchange.num_tokens, exchange.tpot_s)


def test_a_token_without_text_counts_where_the_server_says_so() -> None:
    exchange, _ = read((11, event("", usage=counted(1))), (12, event("x", usage=counted(2))), (12, DONE))
    assert (1.0, 2) == (exchange.ttft_s, len(exchange.marks_s))


def test_without_usage_a_chunk_is_a_token() -> None:
    exchange, _ = read((11, event("ab")), (12, event("c", finish="stop")), (12, DONE))
    assert (None, 2, 1.0) == (exchange.num_output, exchange.num_tokens, exchange.tpot_s)


def test_one_token_has_no_time_per_further_token() -> None:
    assert read((11, event("a", finish="length") + event(usage=counted(1)) + DONE))[0].tpot_s is None


def test_chat_thoughts_and_tools_are_tokens_and_only_the_answer_is_kept() -> None:
    exchange, stream = read(
        (11, delta(role="assistant", content="")), (12, delta(reasoning_content="hm")), (13, delta(content="yes")),
        (14, delta(tool_calls=[{"index": 0, "function": {"name": "f", "arguments": ""}}])), (15, delta(finish="tool_calls")), (15, DONE),
    )
    assert ([12, 13, 14], ["yes"]) == (list(exchange.marks_s), stream.text)


@pytest.mark.parametrize("details", [{"prompt_tokens_details": {"cached_tokens": 5}}, {"prompt_cache_hit_tokens": 5}])
def test_cached_tokens_by_either_name(details: dict[str, Any]) -> None:
    assert 5 == read((11, event("a", finish="stop")), (11, event(usage=counted(1) | details)))[0].num_cached
    assert read((11, event("a", finish="stop")), (11, event(usage=counted(1))))[0].num_cached is None


def test_lines_as_the_standard_allows_them() -> None:
    """Comments, other fields, CRLF, no space behind the colon, an event over two lines, any cut."""
    text = b': hi\r\nevent: message\r\ndata:{"choices": [{"text": "a",\r\ndata: "finish_reason": "stop"}]}\r\n\r\n' + DONE
    for size in range(1, 40):
        pieces = [(11.0, text[place : place + size]) for place in range(0, len(text), size)]
        exchange, stream = read(*pieces)
        assert (1, "stop", None, ["a"]) == (len(exchange.marks_s), exchange.finish, exchange.fault, stream.text)


@pytest.mark.parametrize(
    ("pieces", "kind", "said"),
    [
        ([event("a"), event(error={"message": "out of memory"})], "stream_error", "out of memory"),
        ([event("a"), b'error: {"message": "slot gone"}\n\n'], "stream_error", "slot gone"),
        ([event("a")], "disconnect", "without a finish reason"),
        ([DONE], "empty", "without a token"),
        ([event("", finish="stop"), DONE], "empty", "finish reason stop"),
        ([event("a"), b"data: {half\n\n", DONE], "malformed", "half"),
        ([b'data: {"choices": ["text"]}\n\n', DONE], "malformed", "another shape"),
        ([b'data: {"choices": [{"text": "a"}], "usage": 3}\n\n', DONE], "malformed", "another shape"),
        ([b'data: {"choices": [{"text": "a"}], "usage": {"completion_tokens": "x"}}\n\n', DONE], "malformed", "another shape"),
    ],
)
def test_what_can_be_wrong_in_a_stream(pieces: list[bytes], kind: str, said: str) -> None:
    fault = read(*((11.0, piece) for piece in pieces))[0].fault
    assert fault is not None and kind == fault.kind and said in fault.message


def test_a_broken_connection_is_said_unless_the_server_said_more() -> None:
    broken = Fault("disconnect", "closed")
    assert broken == read((11, event("a")), broken=broken)[0].fault
    first = read((11, event(error={"message": "no"})), broken=broken)[0].fault
    assert first is not None and "stream_error" == first.kind


def test_refusals_carry_the_servers_words() -> None:
    assert Fault("http_400", '{"error": "too long"}') == read((11, b'{"error": "too long"}'), status=400, kind="application/json")[0].fault
    assert Fault("malformed", "<html>") == read((11, b"<html>"), kind="text/html")[0].fault
    assert Fault("http_503", "no message") == read(status=503)[0].fault
