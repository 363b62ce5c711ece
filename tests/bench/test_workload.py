"""Workloads: a trace shares exactly what its hashes say, plans depend on the seed alone, counts are met."""

from __future__ import annotations

import gzip
import json
import statistics
from itertools import islice, pairwise, takewhile
from pathlib import Path
from typing import Any

import pytest

from firstlight.bench.content import Content
from firstlight.bench.options import Options
from firstlight.bench.workload import Conversation, Kind, plan, warm_up
from firstlight.spec.errors import RequestError

TRACE = Path(__file__).parents[1] / "data" / "traces" / "mooncake" / "conversation_trace.jsonl.gz"


def conversations(**given: Any) -> list[Conversation]:
    """A whole plan."""
    return list(plan(Options(**given)).conversations)


def lines(count: int) -> list[dict[str, Any]]:
    """The first requests of the trace, read by other means."""
    with gzip.open(TRACE, "rt", encoding="ascii") as stream:
        return [json.loads(line) for line in islice(stream, count)]


def shared(first: list[Any], second: list[Any]) -> int:
    """How much two lists have in common from the start."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


@pytest.mark.parametrize("scale", [1.0, 1 / 32])
def test_prompts_of_a_trace_share_whole_blocks_exactly_as_its_hashes_say(scale: float) -> None:
    """Of every pair: the equal leading symbols are the equal leading blocks, and less than one block more."""
    count = 60 if scale == 1 else 200
    content, block = Content(0, range(1000, 30_000)), round(512 * scale)
    prompts = [content.joined(item.turns[0].pieces) for item in conversations(trace=TRACE, scale_lengths=scale, requests=count)]
    names = [line["hash_ids"] for line in lines(count)]
    assert any(shared(names[0], other) for other in names[1:])
    for first in range(count):
        for second in range(first):
            blocks, found = shared(names[first], names[second]), shared(prompts[first], prompts[second])  # type: ignore[arg-type]
            whole = min(blocks * block, len(prompts[first]), len(prompts[second]))
            assert whole <= found <= whole + 1, (first, second)


def test_lengths_and_times_of_a_trace() -> None:
    made, given = conversations(trace=TRACE, requests=300, speed=10.0), lines(300)
    assert [line["input_length"] for line in given] == [sum(size for _, size in item.turns[0].pieces) for item in made]
    assert [line["output_length"] for line in given] == [item.turns[0].num_output for item in made]
    assert [line["timestamp"] / 1000 / 10 for line in given] == [item.due_s for item in made]


def test_what_a_trace_shares_is_what_an_endless_cache_would_find() -> None:
    made, seen, expected = conversations(trace=TRACE, requests=500), set[int](), []
    for line in lines(500):
        found = sum(1 for _ in takewhile(lambda name: name in seen, line["hash_ids"]))
        expected.append(min(found * 512, line["input_length"]))
        seen.update(line["hash_ids"])
    assert expected == [item.turns[0].num_shared for item in made]
    assert sum(expected) > 0


def test_long_prompts_of_a_trace_are_left_out_and_counted() -> None:
    planned = plan(Options(trace=TRACE, longest=4000))
    made = list(planned.conversations)
    assert (12_031, True) == (len(made) + planned.left_out, planned.left_out > 0)
    assert 4000 >= max(sum(size for _, size in item.turns[0].pieces) for item in made)


def test_a_trace_can_be_asked_by_clients_or_at_a_rate() -> None:
    assert [None] * 5 == [item.due_s for item in conversations(trace=TRACE, requests=5, concurrency=2)]
    assert [0, 0.5, 1, 1.5, 2] == [item.due_s for item in conversations(trace=TRACE, requests=5, rate=2.0, arrivals="constant")]


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", '{"timestamp": 0}', '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}',
     '{"timestamp": "x", "input_length": 6, "output_length": 1, "hash_ids": [1]}',
     '{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}',
     '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [-1]}', "[1]"],
)
def test_a_trace_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RequestError):
        conversations(trace=path)


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(TRACE.read_bytes()[:5000])
    with pytest.raises(RequestError, match="not lines of JSON"):
        conversations(trace=path)


def test_poisson_arrivals_have_their_rate_and_spread() -> None:
    due = [item.due_s or 0.0 for item in conversations(rate=20.0, requests=4000)]
    gaps = [later - earlier for earlier, later in pairwise(due)]
    assert 1 / 20 == pytest.approx(statistics.mean(gaps), rel=0.05)
    assert 1 / 20 == pytest.approx(statistics.stdev(gaps), rel=0.1)


def test_another_rate_asks_the_same_and_another_seed_something_else() -> None:
    slow, fast = (conversations(rate=rate, input_tokens="uniform:5:500") for rate in (1.0, 50.0))
    assert [item.turns for item in slow] == [item.turns for item in fast]
    assert [item.turns for item in slow] != [item.turns for item in conversations(rate=1.0, input_tokens="uniform:5:500", seed=1)]


def test_shared_prefixes_go_round() -> None:
    made = conversations(prefix_tokens=64, prefix_groups=3, requests=7)
    assert [Kind.PREFIX.named(number % 3) for number in range(7)] == [item.turns[0].pieces[0][0] for item in made]
    assert [0, 0, 0, 64, 64, 64, 64] == [item.turns[0].num_shared for item in made]


def test_turns_add_up_to_the_requests() -> None:
    made = conversations(turns=3, requests=7, input_tokens="10", output_tokens="4")
    assert [3, 3, 1] == [len(item.turns) for item in made]
    assert [0, 14, 28] == [turn.num_shared for turn in made[0].turns]
    names = [name for item in made for turn in item.turns for name, _ in turn.pieces]
    assert len(names) == len(set(names)) == 7


def test_a_duration_alone_has_no_last_request() -> None:
    assert 1000 == len(list(islice(plan(Options(duration=5.0)).conversations, 1000)))


def test_warm_up_says_what_nobody_says_later() -> None:
    options = Options(warmup=3, prefix_tokens=8, requests=50)
    warm = {name for turn in warm_up(options) for name, _ in turn.pieces}
    later = {name for item in plan(options).conversations for turn in item.turns for name, _ in turn.pieces}
    assert (3, set()) == (len(warm), warm & later)
