"""Crowds for minutes: no error, no growing memory, nothing left behind."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections import Counter
from typing import Any

import httpx
import pytest

from tests.serve.process import Process, server

NUM_CLIENTS = 64
SOAK_S = 300.0
MOST_BYTES_PER_MIN = 2**20
PATHS = ("/v1/completions", "/v1/chat/completions")


def content(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """One of the kinds of requests that real clients mix."""
    asked: dict[str, Any] = {"model": "default", "max_tokens": rng.randint(1, 60), "seed": rng.randint(0, 9), "stream": rng.random() < 0.8}
    if rng.random() < 0.2:
        asked["n"] = 2
    if rng.random() < 0.3:
        asked["stop"] = ["e"]
    text = "".join(rng.choice("abcdefgh ") for _ in range(rng.randint(1, 300)))
    if rng.random() < 0.5:
        return PATHS[0], {**asked, "prompt": text, **({"logprobs": 1, "echo": True} if rng.random() < 0.2 else {})}
    return PATHS[1], {**asked, "messages": [{"role": "user", "content": text}], "thinking": {"type": rng.choice(["enabled", "disabled"])}}


async def client(url: str, index: int, until_s: float, found: Counter[str]) -> None:
    """Ask, read or leave, and ask again."""
    rng = random.Random(index)
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        while time.monotonic() < until_s:
            path, asked = content(rng)
            leaves_after = rng.randint(0, 12) if rng.random() < 0.3 else None
            if not asked["stream"]:
                answer = await http.post(path, json=asked)
                found[f"whole {answer.status_code}"] += 1
                continue
            async with http.stream("POST", path, json=asked) as stream:
                lines = []
                async for line in stream.aiter_lines():
                    lines += [line] if line else []
                    if leaves_after is not None and len(lines) >= leaves_after:
                        break
                else:
                    assert "data: [DONE]" == lines[-1], lines[-1]
                    assert all("error" not in json.loads(line[6:]) for line in lines[:-1])
                found[f"{'left' if leaves_after is not None else 'stream'} {stream.status_code}"] += 1


async def soak(process: Process, seconds: float) -> tuple[Counter[str], list[tuple[float, int]]]:
    """All clients at once; what came back, and memory once a second."""
    found: Counter[str] = Counter()
    begun_s = time.monotonic()
    sizes = []

    async def watch() -> None:
        while time.monotonic() < begun_s + seconds:
            sizes.append((time.monotonic() - begun_s, process.rss_bytes()))
            await asyncio.sleep(1)

    await asyncio.gather(watch(), *(client(process.url, index, begun_s + seconds, found) for index in range(NUM_CLIENTS)))
    return found, sizes


def slope(sizes: list[tuple[float, int]]) -> float:
    """Bytes per minute of the straight line through the points (least squares)."""
    mean_s, mean = sum(at for at, _ in sizes) / len(sizes), sum(size for _, size in sizes) / len(sizes)
    return 60 * sum((at - mean_s) * (size - mean) for at, size in sizes) / sum((at - mean_s) ** 2 for at, _ in sizes)


def gauge(process: Process, name: str) -> list[float]:
    """Values of a metric, over all its labels."""
    return [float(line.split()[-1]) for line in httpx.get(f"{process.url}/metrics").text.splitlines() if line.startswith(name)]


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 300)
def test_a_crowd_for_minutes() -> None:
    # A small cache is full within the first minute; until then its pages are new to the process.
    arguments = ["--max-context", "1024", "--max-sequences", "32", "--cache-bytes", "8MiB", "--log-level", "warning"]
    with server(*arguments) as process:
        found, sizes = asyncio.run(soak(process, SOAK_S))
        later = [(at, size) for at, size in sizes if at > 60]
        sizes_mib = [size >> 20 for _, size in (sizes[0], later[0], later[-1])]
        print(f"\n{dict(found)}, {slope(later) / 2**20:.3f} MiB/min after the first minute; MiB at first, after it and at the end: {sizes_mib}")
        assert {"200"} == {kind.split()[1] for kind in found}, found
        assert slope(later) < MOST_BYTES_PER_MIN
        deadline = time.monotonic() + 30
        while any(gauge(process, "firstlight_requests_running") + gauge(process, "firstlight_requests_waiting")):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert [0.0] == gauge(process, "firstlight_cache_usage_ratio"), "blocks are held by nobody"
        assert 200 == httpx.get(f"{process.url}/health").status_code
        asyncio.run(_last_ones(process))
        assert "Traceback" not in process.said


async def _last_ones(process: Process) -> None:
    """Streams under way when SIGTERM comes are whole."""
    async with httpx.AsyncClient(base_url=process.url, timeout=120) as http:
        asked = {"model": "default", "prompt": "x", "max_tokens": 100, "ignore_eos": True, "stream": True}
        answers = [asyncio.ensure_future(http.post(PATHS[0], json=asked)) for _ in range(8)]
        while sum(gauge(process, "firstlight_requests_running")) < 8:
            await asyncio.sleep(0.01)
        process.process.send_signal(signal.SIGTERM)
        assert [True] * 8 == [(await answer).text.endswith("data: [DONE]\n\n") for answer in answers]
        assert 0 == await asyncio.to_thread(process.wait)
