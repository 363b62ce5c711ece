"""Numbers: percentiles agree with the standard library, every definition holds on planted times, failures are in their places."""

from __future__ import annotations

import random
import statistics
from array import array
from typing import Any

import pytest

from firstlight.bench.client import Server
from firstlight.bench.exchange import Exchange
from firstlight.bench.load import Record
from firstlight.bench.options import Options
from firstlight.bench.report import Run, gaps, good, percentile, report, summary
from firstlight.bench.wire import Fault


@pytest.mark.parametrize("count", [2, 3, 10, 101, 999])
def test_percentiles_agree_with_the_standard_library(count: int) -> None:
    rng = random.Random(count)
    values = sorted(rng.lognormvariate(0, 1) for _ in range(count))
    expected = statistics.quantiles(values, n=100, method="inclusive")
    assert expected == pytest.approx([percentile(values, percent) for percent in range(1, 100)])
    assert (values[0], values[-1]) == (percentile(values, 0), percentile(values, 100))


def test_a_summary_of_planted_values() -> None:
    found = summary(float(number) for number in reversed(range(1, 102)))
    assert {"count": 101, "mean": 51.0, "min": 1.0, "p50": 51.0, "p90": 91.0, "p95": 96.0, "p99": 100.0, "max": 101.0} == found
    assert summary([]) is None
    assert {1.5} == {value for name, value in (summary([1.5]) or {}).items() if name != "count"}


def exchange(due_s: float, *marks_s: float, end_s: float | None = None, **given: Any) -> Exchange:
    """A planted one."""
    given = {"begun_s": due_s, "num_asked": len(marks_s), "num_output": len(marks_s), "num_input": 10, **given}
    return Exchange(due_s, marks_s=array("d", marks_s), end_s=marks_s[-1] if end_s is None else end_s, **given)


def made(
    *exchanges: Exchange, end_s: float = 10.0, lags_s: tuple[float, ...] = (), cpu_s: float = 1.0, overhead_tokens: float | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The report of a run from 0 to `end_s`."""
    record = Record(0.0, end_s, list(exchanges), lags_s=array("d", lags_s))
    return report(Run(options=Options(**options), server=Server("m", overhead_tokens=overhead_tokens), record=record, begun="now", cpu_s=cpu_s))


FAILED = Fault("http_500", "boom")


def test_failed_requests_count_but_give_no_latency() -> None:
    found = made(exchange(0, 1, 2), exchange(0, 50, fault=FAILED), exchange(1, 4, fault=Fault("timeout", "late")), exchange(0, 3, fault=FAILED))
    assert (4, 1, 3) == tuple(found["requests"][name] for name in ("sent", "succeeded", "failed"))
    assert {"http_500": {"count": 2, "example": "boom"}, "timeout": {"count": 1, "example": "late"}} == found["errors"]
    assert (1, 1.0) == (found["latency_s"]["ttft"]["count"], found["latency_s"]["ttft"]["max"])
    assert any("3 of 4 requests failed" in warning for warning in found["warnings"])


def test_throughput_is_over_the_whole_run() -> None:
    found = made(exchange(0, 1, 2, 3), exchange(0, 2, 4), exchange(0, 1, fault=FAILED), end_s=8.0)
    assert {"requests_per_s": 0.25, "input_tokens_per_s": 2.5, "output_tokens_per_s": 0.625} == found["throughput"]


def test_goodput_needs_every_limit() -> None:
    fast, slow_start, slow_tokens, broken = exchange(0, 1, 2), exchange(0, 3, 3.5), exchange(0, 1, 6), exchange(0, 1, 2, fault=FAILED)
    limits = {"ttft": 1.0, "tpot": 1.0}
    assert [True, False, False, False] == [good(item, limits) for item in (fast, slow_start, slow_tokens, broken)]
    assert not good(fast, {"e2e": 1.9})
    assert good(exchange(0, 1), {"tpot": 0.001})
    found = made(fast, slow_start, slow_tokens, broken, slo="ttft=1,tpot=1", end_s=4.0)["goodput"]
    assert {"limits_s": limits, "requests": 1, "requests_per_s": 0.25, "share": 0.25} == found
    assert made(fast)["goodput"] is None


def test_gaps_and_late_starts() -> None:
    assert [1, 4] == gaps(exchange(0, 2, 3, 7))
    found = made(exchange(0, 3, begun_s=0.5))
    assert (0.5, 3.0) == (found["late_start_s"]["max"], found["latency_s"]["ttft"]["max"])
    assert any("began up to 500.0 ms late" in warning for warning in found["warnings"])


def test_what_was_in_flight() -> None:
    found = made(exchange(0, 4), exchange(2, 6), exchange(6, 8), end_s=8.0)["in_flight"]
    assert {"max": 2, "mean": 1.25} == found


def test_tokens_that_nobody_counts_are_unknown_not_zero() -> None:
    found = made(exchange(0, 1, 2, num_input=None, num_output=None))["tokens"]
    assert (None, None, None, "chunks", 2) == tuple(found[name] for name in ("input", "cached", "cached_share", "output_counted_by", "output"))


def test_cached_tokens_are_a_share_of_the_prompts_that_say_so() -> None:
    found = made(exchange(0, 1, num_cached=5), exchange(0, 1, num_cached=0), exchange(0, 1))["tokens"]
    assert (5, 0.25, 30) == (found["cached"], found["cached_share"], found["input"])


def test_hits_that_the_plan_does_not_explain_are_said() -> None:
    def said(overhead_tokens: float | None = None, **given: Any) -> bool:
        found = made(exchange(0, 1, num_cached=9, **given), overhead_tokens=overhead_tokens)
        return any("prompts from before" in warning for warning in found["warnings"])

    assert said()
    assert not said(overhead_tokens=8.5)
    assert not said(num_shared=9.0)


def test_the_tools_own_weight_is_said() -> None:
    found = made(exchange(0, 1), lags_s=(0.001,) * 90 + (0.02,) * 10, cpu_s=9.0)
    assert (0.9, 0.02) == (found["own_cost"]["cpu_share"], found["own_cost"]["loop_lag_s"]["p99"])
    assert 2 == sum("the tool" in warning for warning in found["warnings"])
    assert [] == made(exchange(0, 1), lags_s=(0.001,) * 100, cpu_s=1.0)["warnings"]


def test_short_answers_and_uncounted_tokens_are_said() -> None:
    assert any("1 answers are shorter" in warning for warning in made(exchange(0, 1, num_asked=5))["warnings"])
    assert any("a chunk counts as one" in warning for warning in made(exchange(0, 1, num_output=None))["warnings"])


def test_nothing_at_all_is_a_report_too() -> None:
    found = made(end_s=0.0)
    assert (0, None, 0.0) == (found["requests"]["sent"], found["latency_s"]["e2e"], found["throughput"]["requests_per_s"])
