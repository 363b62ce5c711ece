"""What a person sees in a browser, and what a scraper reads: the panel at `/`, its numbers at `/panel.json`, and `/metrics`.

The panel is one file without a fact in it, so it needs no key; the numbers are under the same rule as every other path.
"""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import firstlight
from firstlight.engine.meter import Histogram, StepRecord
from firstlight.serve.metrics import TIERS, Metrics
from firstlight.serve.refusal import refusal_of
from firstlight.serve.watch import Watch
from firstlight.spec.errors import RequestError

FILE = Path(__file__).with_name("panel.html")


def panel_routes(watch: Watch) -> list[Route]:
    """GET `/`, `/panel.json` and `/metrics`."""
    metrics, text = Metrics(watch), FILE.read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": policy(text), "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
    }

    async def panel(request: Request) -> Response:
        return Response(text, headers=headers, media_type="text/html; charset=utf-8")

    async def numbers(request: Request) -> Response:
        try:
            after = _after(request.query_params.get("after", "-1"))
        except RequestError as error:
            request.scope["visit"].fails(error)
            return refusal_of(error).response()
        return JSONResponse(snapshot(watch, after), headers={"Cache-Control": "no-store"})

    async def scrape(request: Request) -> Response:
        content, kind = metrics.render(request.headers.get("accept", ""))
        return Response(content, headers={"Content-Type": kind})

    return [Route("/", panel), Route("/panel.json", numbers), Route("/metrics", scrape)]


def policy(text: str) -> str:
    """Only the script and the style that stand in the file run, and they talk to this server only."""
    hashes = {tag: _hash(text, tag) for tag in ("script", "style")}
    return (
        f"default-src 'none'; script-src '{hashes['script']}'; style-src '{hashes['style']}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")


def snapshot(watch: Watch, after: int = -1) -> dict[str, Any]:
    """What is served, its limits, its load now, latencies since the start, and the steps with a greater number than `after`."""
    machine, engine, meter = watch.machine, watch.engine, watch.meter
    spec, limits, counts = machine.spec, machine.engine.scheduler.limits, machine.engine.counts()
    canary = machine.engine.canary
    return {
        "version": firstlight.__version__, "now_s": watch.now_s, "up_s": watch.now_s - watch.begun_s,
        "model": {
            "name": watch.model_name, "model_type": spec.name, "dtype": spec.dtype, "num_params": spec.num_params,
            "num_active_params": spec.num_active_params, "num_layers": len(spec.layers), "num_vocab": spec.num_vocab,
        },
        "limits": {
            "max_context": spec.max_context, "capacity_tokens": machine.cache.capacity_tokens, "max_sequences": limits.sequences_per_step,
            "max_step_tokens": limits.tokens_per_step, "chunk_tokens": limits.chunk_tokens, "tokens_per_block": machine.cache.tokens_per_block,
            "cache_bytes": machine.pool.num_bytes,
        },
        "engine": {"healthy": engine.healthy, "closing": engine.closing, "stalled_s": engine.stalled_s, "num_steps": meter.num_steps},
        "load": {
            "running": counts["running"], "waiting": dict(zip(TIERS, meter.waiting, strict=True)), "open": watch.num_open,
            "usage": machine.cache.usage(),
        },
        "totals": {
            "prompt_tokens": counts["entered_tokens"], "cached_tokens": counts["cached_tokens"], "reached_tokens": counts["reached_tokens"],
            "generated_tokens": meter.num_generated_tokens, "preemptions": counts["preemptions"], "recomputed_tokens": counts["recomputed_tokens"],
            "ends": _ends(watch), "rejections": {reason: count for reason, count in watch.rejections.copy().items() if count},
        },
        "groups": machine.cache.counts(), "prefix_cache": machine.cache.prefix_cache,
        "canary": None if canary is None else canary.counts(),
        "operators": [{"op": op, "backend": backend, "uses": count} for (op, backend), count in watch.operators().items()],
        "latency": {
            tier: {name: _quantiles(getattr(meter, name)[place]) for name in ("queue_s", "first_token_s", "inter_token_s", "request_s")}
            for place, tier in enumerate(TIERS)
        },
        "steps": [_point(record) for record in meter.steps(after)],
    }


def _ends(watch: Watch) -> dict[str, int]:
    found: dict[str, int] = {}
    for (_, finish), count in watch.ends.copy().items():
        found[finish] = found.get(finish, 0) + count
    return found


def _quantiles(histogram: Histogram) -> dict[str, float | int | None]:
    return {"count": sum(histogram.counts), "p50": histogram.quantile(0.5), "p95": histogram.quantile(0.95)}


def _point(record: StepRecord) -> list[float]:
    return [
        record.number, record.ended_s, record.seconds, record.num_prefill_tokens, record.num_decode_tokens, record.num_running, record.num_waiting]


def _after(text: str) -> int:
    if not re.fullmatch(r"-?\d{1,18}", text, re.ASCII):
        raise RequestError(f"`after` is {text[:40]!r}", "Use the number of the last step that was seen, or leave it out.")
    return int(text)


def _hash(text: str, tag: str) -> str:
    found = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    assert found is not None, f"{FILE.name} has no <{tag}>"
    return "sha256-" + b64encode(sha256(found.group(1).encode()).digest()).decode()
