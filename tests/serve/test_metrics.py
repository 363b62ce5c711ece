"""What a scrape says, read back by Prometheus' own parsers and compared with what was asked and answered."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Coroutine, Iterator
from itertools import pairwise
from typing import Any

import prometheus_client
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from firstlight import LLM
from firstlight.serve.metrics import MEASURES, Metrics
from firstlight.serve.watch import REASONS
from tests.serve.site import Site, prompt, small

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
OPENMETRICS = {"accept": "application/openmetrics-text; version=1.0.0"}


@pytest.fixture
def llm() -> Iterator[LLM]:
    with small() as found:
        yield found


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def samples(text: str, parse: Any = parse_text) -> Samples:
    """(name, labels) -> value; the parsers check buckets, types and repetitions."""
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in parse(text) for s in family.samples}


def value(found: Samples, name: str, **labels: str) -> float:
    return found[name, tuple(sorted(labels.items()))]


def total(found: Samples, name: str, **labels: str) -> float:
    """The sum over all labels that are not given."""
    return sum(number for (each, given), number in found.items() if each == name and labels.items() <= dict(given).items())


def test_both_formats_say_the_same(llm: LLM) -> None:
    async def work() -> None:
        site = Site(llm)
        async with site as client:
            await client.post("/v1/completions", json={"tokens": prompt(1, 40)})
            text = await client.get("/metrics")
            strict = await client.get("/metrics", headers=OPENMETRICS)
        assert "text/plain; version=0.0.4; charset=utf-8" == text.headers["content-type"]
        assert strict.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
        first, second = samples(text.text), samples(strict.text, parse_openmetrics)
        ours = {key for key in first if key[0].startswith("firstlight_") and not re.search("http|stalled", key[0])}
        assert len(ours) > 200
        assert {key: first[key] for key in ours} == {key: second[key] for key in ours}

    run(work())


@pytest.mark.parametrize("accept", ["application/openmetrics-text;version=x", "application/openmetrics-text; version=1.x.0", ";;=,="])
def test_an_odd_accept_header_gets_the_plain_format(llm: LLM, accept: str) -> None:
    async def work() -> None:
        async with Site(llm) as client:
            answer = await client.get("/metrics", headers={"accept": accept})
        assert (200, "text/plain; version=0.0.4; charset=utf-8") == (answer.status_code, answer.headers["content-type"])
        assert samples(answer.text)

    run(work())


def test_every_measure_is_there_and_no_other() -> None:
    async def work() -> None:
        with small(verify_hits=1.0) as llm:
            site = Site(llm)
            async with site as client:
                for _ in range(2):
                    await client.post("/v1/completions", json={"tokens": prompt(1, 40)})
                text = (await client.get("/metrics")).text
        declared = {measure.name for measure in MEASURES}
        found = {family.name: family for family in parse_text(text)}
        assert declared == {name for name in found if name.startswith("firstlight_")}
        silent = {name for name in declared if not found[name].samples}
        assert {"firstlight_cache_unusable_blocks"} == silent
        for measure in MEASURES:
            labels = {name for sample in found[measure.name].samples for name in sample.labels} - {"le"}
            assert measure.name in silent or set(measure.labels) == labels, measure.name
            assert measure.kind == found[measure.name].type
        assert {"process_resident_memory_bytes", "process_cpu_seconds"} <= set(found)

    run(work())


def test_names_follow_the_conventions() -> None:
    """Base units at the end, and none of those that are not base units; the suffix _total belongs to counters."""
    names = [measure.name for measure in MEASURES]
    assert len(names) == len(set(names))
    for measure in MEASURES:
        assert re.fullmatch(r"firstlight_[a-z]+(_[a-z]+)*", measure.name), measure.name
        assert not re.search(r"_(ms|milliseconds|minutes|kb|mb|mib|percent|total|count|sum|bucket)$", measure.name), measure.name
        assert measure.meaning.endswith(".") and "|" not in measure.meaning
        if measure.kind == "histogram":
            assert re.search(r"_(seconds|tokens)$", measure.name), measure.name


def test_values_are_those_of_the_requests(llm: LLM) -> None:
    async def work() -> None:
        site = Site(llm)
        async with site as client:
            asked = [
                {"tokens": prompt(1, 40), "max_tokens": 5}, {"tokens": prompt(1, 40), "max_tokens": 5},
                {"tokens": prompt(2, 7), "max_tokens": 3, "priority": "interactive"}, {"tokens": prompt(3, 9), "max_tokens": 2, "n": 3},
            ]
            for body in asked:
                assert 200 == (await client.post("/v1/completions", json=body)).status_code
            for body in ({"tokens": []}, {"tokens": prompt(1, 9), "max_tokens": 10**6}, {"tokens": [10**6]}):
                assert 400 == (await client.post("/v1/completions", json=body)).status_code
            assert 404 == (await client.get("/nothing/at/all")).status_code
            assert 405 == (await client.get("/v1/completions")).status_code
            assert [500, 500] == [(await client.get(f"/v1/items/{number}")).status_code for number in range(2)]
            found = samples((await client.get("/metrics")).text)
        get, each = value, total
        assert 40 + 40 + 7 + 3 * 9 == get(found, "firstlight_prompt_tokens_total")
        assert 5 + 5 + 3 + 3 * 2 == get(found, "firstlight_generated_tokens_total")
        assert {"interactive": 1.0, "standard": 5.0, "background": 0.0} == {
            tier: get(found, "firstlight_request_seconds_count", priority=tier) for tier in ("interactive", "standard", "background")}
        assert (5.0, 1.0) == tuple(get(found, "firstlight_requests_total", priority=p, finish="length") for p in ("standard", "interactive"))
        assert 6.0 == get(found, "firstlight_request_prompt_tokens_count")
        assert get(found, "firstlight_prompt_tokens_total") == get(found, "firstlight_request_prompt_tokens_sum")
        assert get(found, "firstlight_generated_tokens_total") == get(found, "firstlight_request_generated_tokens_sum")
        assert 5 + 5 + 3 + 6 - 6 == each(found, "firstlight_inter_token_seconds_count")
        cached = llm.stats()["cached_tokens"]
        assert 32 <= cached == get(found, "firstlight_cached_tokens_total") < 48
        assert each(found, "firstlight_computed_tokens_total") + cached == get(found, "firstlight_prompt_tokens_total") + 19 - 6
        assert (1.0, 2.0, 1.0, 2.0, 0.0) == tuple(
            get(found, "firstlight_requests_rejected_total", reason=r) for r in ("capacity", "invalid", "method", "mistake", "full"))
        assert 4.0 == get(found, "firstlight_http_responses_total", method="POST", route="/v1/completions", status="200")
        assert 2.0 == get(found, "firstlight_http_responses_total", method="GET", route="/v1/items/{item}", status="500")
        assert 1.0 == get(found, "firstlight_http_responses_total", method="GET", route="other", status="404")
        assert 1.0 == get(found, "firstlight_http_requests_open"), "the scrape itself"
        for name, group in llm.stats()["groups"].items():
            uses = {use: get(found, "firstlight_cache_blocks", group=name, kind=group["kind"], use=use) for use in ("free", "used", "cached")}
            assert {use: group[use] for use in uses} == uses
            assert group["total"] == sum(uses.values()) == get(found, "firstlight_cache_capacity_blocks", group=name, kind=group["kind"])
        assert llm.machine is not None
        assert sum(llm.machine.binder.choices.values()) == each(found, "firstlight_operator_uses")
        assert get(found, "firstlight_operator_reference_uses") == each(found, "firstlight_operator_uses", backend="reference") > 0

    run(work())


def test_rows_that_cannot_be_resumed_show(llm: LLM) -> None:
    """A broken cache and a prompt that nobody knew look different."""
    async def work() -> None:
        site = Site(llm)
        async with site as client:
            await client.post("/v1/completions", json={"tokens": prompt(1, 64)})
            await client.post("/v1/completions", json={"tokens": [*prompt(1, 40), 1, 2, 3]})
            found = samples((await client.get("/metrics")).text)
        reached = {dict(labels)["kind"]: number for (name, labels), number in found.items() if name == "firstlight_prefix_reached_tokens_total"}
        assert {"rows": 32.0, "state": 0.0} == reached

    run(work())


def test_counters_never_fall(llm: LLM) -> None:
    """Scraped by another thread as fast as it can while requests come, end, and are left alone."""
    async def work() -> None:
        site = Site(llm)
        metrics, found, done = Metrics(site.watch), list[Samples](), threading.Event()

        def scrape() -> None:
            while not done.is_set():
                found.append(samples(metrics.render()[0].decode()))

        thread = threading.Thread(target=scrape)
        async with site as client:
            thread.start()
            for turn in range(4):
                await asyncio.gather(*(client.post("/v1/completions", json={"tokens": prompt(seed % 3, 30), "max_tokens": 6}) for seed in range(6)))
                if turn == 2:
                    llm.reset_prefix_cache()
            done.set()
            thread.join()
        assert len(found) > 5
        growing = re.compile(r"_(total|bucket|count|sum)$")
        for earlier, later in pairwise(found):
            for key, number in earlier.items():
                assert not growing.search(key[0]) or number <= later[key], key

    run(work())


def test_scraping_while_idle_and_busy(llm: LLM) -> None:
    async def work() -> None:
        site = Site(llm)
        async with site as client:
            idle = samples((await client.get("/metrics")).text)
            assert 0.0 == value(idle, "firstlight_requests_running") == value(idle, "firstlight_engine_stalled_seconds")
            asked = [client.post("/v1/completions", json={"tokens": prompt(seed, 30), "max_tokens": 50}) for seed in range(7)]
            answers = asyncio.gather(*asked)
            busy = idle
            while not value(busy, "firstlight_requests_waiting", priority="standard"):
                await asyncio.sleep(0.005)
                busy = samples((await client.get("/metrics")).text)
            assert 0.0 < value(busy, "firstlight_requests_running") <= 4.0
            assert 8.0 == value(busy, "firstlight_http_requests_open")
            assert value(busy, "firstlight_cache_usage_ratio") > 0
            await answers
            after = samples((await client.get("/metrics")).text)
        assert 0.0 == value(after, "firstlight_requests_running") == total(after, "firstlight_requests_waiting")
        assert value(after, "firstlight_admissions_held_back_total", reason="slots") > 0

    run(work())


def test_two_servers_in_one_process_and_no_global_registry(llm: LLM) -> None:
    async def work() -> None:
        with small() as second:
            async with Site(llm) as client, Site(second) as other:
                await client.post("/v1/completions", json={"tokens": prompt(1, 9)})
                texts = [(await each.get("/metrics")).text for each in (client, other)]
        assert [1.0, 0.0] == [total(samples(text), "firstlight_http_responses_total", status="200") for text in texts]

    run(work())
    assert [] == [family.name for family in prometheus_client.REGISTRY.collect() if family.name.startswith("firstlight")]


def test_reasons_are_few() -> None:
    """They are label values: a closed list, whatever clients send."""
    assert len({*REASONS.values()}) < 12
