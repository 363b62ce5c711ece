"""The panel without a browser: what it may load and run, what its numbers are, and that the two fit together."""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from collections.abc import Coroutine, Iterator
from hashlib import sha256
from html.parser import HTMLParser
from typing import Any

import pytest

from firstlight import LLM
from firstlight.serve.panel import FILE
from tests.serve.site import Site, prompt, small

TEXT = FILE.read_text(encoding="utf-8")


@pytest.fixture
def llm() -> Iterator[LLM]:
    with small() as found:
        yield found


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


class Outline(HTMLParser):
    """Tags with their attributes, ids, and the text inside script and style."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {"script": [], "style": []}
        self._open = ""
        self.feed(TEXT)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag

    def handle_data(self, data: str) -> None:
        if self._open in self.inside and data.strip():
            self.inside[self._open].append(data)
            self._open = ""


def test_only_what_stands_in_the_file_may_run(llm: LLM) -> None:
    """The policy holds the hashes of the one script and the one style, computed here from what a parser sees."""
    async def work() -> None:
        async with Site(llm) as client:
            answer = await client.get("/")
        assert (200, "text/html; charset=utf-8", TEXT) == (answer.status_code, answer.headers["content-type"], answer.text)
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        inside = Outline().inside
        for kind in ("script", "style"):
            (text,) = inside[kind]
            assert f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" == policy[f"{kind}-src"]
        assert ("'none'", "'self'", "'none'") == (policy["default-src"], policy["connect-src"], policy["frame-ancestors"])
        assert not re.search(r"unsafe|\*|https?:", answer.headers["content-security-policy"])

    run(work())


def test_nothing_comes_from_outside() -> None:
    outline = Outline()
    assert [] == [(tag, name) for tag, given in outline.tags for name in given if name == "style" or name.startswith("on") or name == "src"]
    assert ["data:image/svg+xml"] == [(given["href"] or "").partition(",")[0] for _, given in outline.tags if "href" in given]
    assert set(re.findall(r"https?://[^\"'\s]+", TEXT)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|innerHTML|eval\(|document\.write", TEXT)


def test_every_element_that_is_filled_is_there() -> None:
    filled = set(re.findall(r'(?:byId|put|rows|list)\("([a-z-]+)"', TEXT))
    assert len(filled) > 15
    ids = [given["id"] for _, given in Outline().tags if "id" in given]
    assert len(ids) == len(set(ids))
    assert filled <= set(ids)


def paths(value: Any, name: str = "") -> set[str]:
    """Dotted paths of everything in a JSON object."""
    if not isinstance(value, dict):
        return {name}
    return {name, *(path for key, inner in value.items() for path in paths(inner, f"{name}.{key}" if name else key))}


def test_the_script_reads_what_there_is(llm: LLM) -> None:
    """Each path that it follows from the numbers exists."""
    async def work() -> None:
        async with Site(llm) as client:
            numbers = (await client.get("/panel.json")).json()
        known = paths(numbers)
        used = set(re.findall(r"\bnow\.([a-z_]+(?:\.[a-z_]+)*)", TEXT)) - {"steps.length", "operators.map", "canary.mismatches", "canary.checked"}
        used |= {f"{part}.{name}" for part in ("model", "limits", "totals") for name in re.findall(rf"\b(?<!now\.){part}\.([a-z_]+)", TEXT)}
        assert len(used) > 25
        assert set() == used - known

    run(work())


def test_numbers_are_those_of_the_server(llm: LLM) -> None:
    async def work() -> None:
        site = Site(llm)
        async with site as client:
            before = (await client.get("/panel.json")).json()
            assert ([], {}, {}) == (before["steps"], before["totals"]["ends"], before["totals"]["rejections"])
            for _ in range(2):
                await client.post("/v1/completions", json={"tokens": prompt(1, 40), "max_tokens": 5})
            await client.post("/v1/completions", json={"tokens": []})
            answer = await client.get("/panel.json")
            now = answer.json()
            stats = llm.stats()
            last = now["steps"][-1][0]
            assert [] == (await client.get(f"/panel.json?after={last}")).json()["steps"]
            assert now["steps"][3:] == (await client.get(f"/panel.json?after={now['steps'][2][0]}")).json()["steps"]
        assert "no-store" == answer.headers["cache-control"]
        assert ("tiny", "kimi_k3", "float32") == tuple(now["model"][name] for name in ("name", "model_type", "dtype"))
        assert llm.spec.num_params == now["model"]["num_params"]
        assert (4, 32, llm.spec.max_context) == tuple(now["limits"][name] for name in ("max_sequences", "chunk_tokens", "max_context"))
        assert (80, stats["cached_tokens"], 10) == tuple(now["totals"][name] for name in ("prompt_tokens", "cached_tokens", "generated_tokens"))
        assert ({"length": 2}, {"invalid": 1}) == (now["totals"]["ends"], now["totals"]["rejections"])
        assert stats["groups"] == now["groups"]
        assert stats["computed_tokens"] == sum(step[3] + step[4] for step in now["steps"])
        assert last + 1 == len(now["steps"]) == now["engine"]["num_steps"]
        assert all(step[2] > 0 for step in now["steps"])
        latency = now["latency"]["standard"]
        assert 2 == latency["request_s"]["count"] == latency["first_token_s"]["count"]
        assert 0 < latency["first_token_s"]["p50"] <= latency["first_token_s"]["p95"]
        assert {"count": 0, "p50": None, "p95": None} == now["latency"]["background"]["queue_s"]
        assert {"portable", "reference"} == {use["backend"] for use in now["operators"]}

    run(work())


def test_nothing_private_is_in_the_numbers(llm: LLM) -> None:
    """No folder of the machine, no text."""
    async def work() -> None:
        async with Site(llm) as client:
            await client.post("/v1/completions", json={"tokens": prompt(1, 9)})
            text = (await client.get("/panel.json")).text
        assert llm.machine is not None
        assert str(llm.machine.folder) not in text and "/" not in text

    run(work())


@pytest.mark.parametrize("after", ["x", "1.5", "9" * 19, "", "%00"])
def test_a_wrong_number_is_refused(llm: LLM, after: str) -> None:
    async def work() -> None:
        async with Site(llm) as client:
            answer = await client.get(f"/panel.json?after={after}")
        assert 400 == answer.status_code
        assert "`after`" in answer.json()["error"]["message"]

    run(work())
