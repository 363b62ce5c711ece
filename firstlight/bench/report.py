"""What a run says in numbers. docs/bench.md defines every one of them; a change of a field is a change of SCHEMA."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

from firstlight.bench.client import Server
from firstlight.bench.exchange import Exchange
from firstlight.bench.load import Record
from firstlight.bench.options import Options

SCHEMA = "firstlight.bench.serve/1"
PERCENTILES = (50, 90, 95, 99)
MOST_LAG_S = 0.005
MOST_CPU = 0.8
UNPLANNED_HITS = 0.1
SILENT = ("api_key", "as_json", "out", "picture", "details")
"""Options that say nothing about the measurement, or that nobody should read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything that a report is made of."""

    options: Options
    server: Server
    record: Record
    begun: str
    """Date and time, UTC."""
    cpu_s: float
    """What this process used while it measured."""
    num_left_out: int = 0
    num_warmup_failed: int = 0


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks, of values in rising order."""
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (place - low)


def summary(values: Iterable[float]) -> dict[str, float] | None:
    """Count, mean, least, percentiles and most; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    found = {f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES}
    return _rounded({"count": len(ordered), "mean": sum(ordered) / len(ordered), "min": ordered[0], **found, "max": ordered[-1]})


def gaps(exchange: Exchange) -> list[float]:
    """Between one chunk with tokens and the next."""
    return [later - earlier for earlier, later in pairwise(exchange.marks_s)]


def good(exchange: Exchange, limits: Mapping[str, float]) -> bool:
    """Succeeded within every limit; what an answer does not have (time per further token of a single one) it does not exceed."""
    values = {"ttft": exchange.ttft_s, "tpot": exchange.tpot_s, "e2e": exchange.e2e_s}
    return exchange.fault is None and all((values[name] or 0.0) <= limit for name, limit in limits.items())


def report(run: Run) -> dict[str, Any]:
    """The whole report as plain values."""
    record, options = run.record, run.options
    sound = [exchange for exchange in record.exchanges if exchange.fault is None]
    span_s = record.end_s - record.begun_s
    made: dict[str, Any] = {
        "schema": SCHEMA,
        "begun": run.begun,
        "tool": {"name": "firstlight", "version": _version("firstlight"), "python": platform.python_version(), "machine": machine()},
        "server": {"url": options.url, **asdict(run.server)},
        "settings": {
            name: value if value is None or isinstance(value, bool | int | float) else str(value)
            for name, value in asdict(options).items() if name not in SILENT
        },
        "loop": {"kind": "closed" if options.closed else "open", "clients": options.num_clients if options.closed else None},
        "requests": counts(run, sound),
        "duration_s": round(span_s, 6),
        "latency_s": latencies(sound),
        "late_start_s": summary(exchange.late_s for exchange in record.exchanges),
        "in_flight": _in_flight(record, span_s),
        "tokens": tokens(sound),
        "throughput": throughput(sound, span_s),
        "goodput": goodput(record.exchanges, options.limits, span_s),
        "errors": errors(record.exchanges),
        "own_cost": own_cost(run, span_s),
    }
    made["warnings"] = warnings(made)
    if options.details:
        made["details"] = [_detail(exchange, record.begun_s) for exchange in record.exchanges]
    return made


def counts(run: Run, sound: Sequence[Exchange]) -> dict[str, Any]:
    """What became of the requests; sent = succeeded + failed."""
    sent = run.record.exchanges
    return {
        "sent": len(sent), "succeeded": len(sound), "failed": len(sent) - len(sound), "abandoned": run.record.num_abandoned,
        "left_out": run.num_left_out, "warmup_failed": run.num_warmup_failed, "refusals": sum(exchange.num_refused for exchange in sent),
        "interrupted": run.record.interrupted,
        "short_answers": sum(exchange.num_tokens < exchange.num_asked for exchange in sound),
    }


def latencies(sound: Sequence[Exchange]) -> dict[str, Any]:
    """Of the requests that succeeded."""
    return {
        "ttft": summary(exchange.ttft_s for exchange in sound if exchange.ttft_s is not None),
        "tpot": summary(exchange.tpot_s for exchange in sound if exchange.tpot_s is not None),
        "itl": summary(gap for exchange in sound for gap in gaps(exchange)),
        "e2e": summary(exchange.e2e_s for exchange in sound),
    }


def tokens(sound: Sequence[Exchange]) -> dict[str, Any]:
    """Tokens as the server counts them; where it does not, output is the number of chunks and the rest is unknown."""
    inputs = [exchange.num_input for exchange in sound if exchange.num_input is not None]
    known = [exchange for exchange in sound if exchange.num_cached is not None and exchange.num_input is not None]
    output, num_chunks = sum(exchange.num_tokens for exchange in sound), sum(len(exchange.marks_s) for exchange in sound)
    cached, prompt = sum(exchange.num_cached or 0 for exchange in known), sum(exchange.num_input or 0 for exchange in known)
    return _rounded({
        "input": sum(inputs) if inputs else None,
        "output": output,
        "output_counted_by": "server" if all(exchange.num_output is not None for exchange in sound) else "chunks",
        "counted_on_the_way": bool(sound) and all(exchange.counts for exchange in sound),
        "chunks": num_chunks,
        "per_chunk": output / num_chunks if num_chunks else None,
        "cached": cached if known else None,
        "cached_share": cached / prompt if prompt else None,
        "shared_by_plan": sum(exchange.num_shared for exchange in sound),
    })


def throughput(sound: Sequence[Exchange], span_s: float) -> dict[str, Any]:
    """Per second of the whole run, from its begin to its last byte."""
    if span_s <= 0:
        return {"requests_per_s": 0.0, "input_tokens_per_s": 0.0, "output_tokens_per_s": 0.0}
    return _rounded({
        "requests_per_s": len(sound) / span_s,
        "input_tokens_per_s": sum(exchange.num_input or 0 for exchange in sound) / span_s,
        "output_tokens_per_s": sum(exchange.num_tokens for exchange in sound) / span_s,
    })


def goodput(exchanges: Sequence[Exchange], limits: Mapping[str, float], span_s: float) -> dict[str, Any] | None:
    """Requests within all limits; those that failed are not among them, but count in the share."""
    if not limits:
        return None
    num_good = sum(good(exchange, limits) for exchange in exchanges)
    rate, share = (num_good / span_s, num_good / len(exchanges)) if exchanges and span_s > 0 else (0.0, 0.0)
    return _rounded({"limits_s": dict(limits), "requests": num_good, "requests_per_s": rate, "share": share})


def errors(exchanges: Sequence[Exchange]) -> dict[str, Any]:
    """Kind -> how many and the first message, the most frequent kind first."""
    faults = [exchange.fault for exchange in exchanges if exchange.fault is not None]
    first = {fault.kind: fault.message for fault in reversed(faults)}
    return {kind: {"count": count, "example": first[kind]} for kind, count in Counter(fault.kind for fault in faults).most_common()}


def own_cost(run: Run, span_s: float) -> dict[str, Any]:
    """What the tool itself took, and how late its event loop was."""
    num_chunks = sum(len(exchange.marks_s) for exchange in run.record.exchanges)
    return _rounded({
        "cpu_s": run.cpu_s,
        "cpu_share": run.cpu_s / span_s if span_s > 0 else 0.0,
        "cpu_us_per_chunk": run.cpu_s / num_chunks * 1e6 if num_chunks else None,
        "loop_lag_s": summary(run.record.lags_s),
    })


def warnings(made: Mapping[str, Any]) -> list[str]:
    """What a reader must know before quoting a number."""
    cost, numbers, asked = made["own_cost"], made["tokens"], made["requests"]
    lag = (cost["loop_lag_s"] or {}).get("p99", 0.0)
    late = (made["late_start_s"] or {}).get("p99", 0.0)
    framed = (made["server"]["overhead_tokens"] or 0.0) * asked["succeeded"]  # what the chat format puts around every prompt
    ideal = (numbers["shared_by_plan"] + framed) / numbers["input"] if numbers["input"] else 0.0
    checks = (
        (asked["failed"], f"{asked['failed']} of {asked['sent']} requests failed; latencies are those of the others"),
        (asked["interrupted"], "the run was interrupted"),
        (asked["warmup_failed"], f"{asked['warmup_failed']} requests for warming up failed: the server may have been cold"),
        (lag > MOST_LAG_S, f"the tool's own event loop was {lag * 1000:.1f} ms late (p99): ask less, or measure from a machine with more to spare"),
        (cost["cpu_share"] > MOST_CPU, f"the tool itself used {cost['cpu_share']:.0%} of a core: it may be what limits the numbers"),
        (late > MOST_LAG_S, f"requests began up to {late * 1000:.1f} ms late (p99); latencies include that"),
        (asked["short_answers"], f"{asked['short_answers']} answers are shorter than asked for: the server does not know ignore_eos or ends earlier"),
        (numbers["output"] and numbers["output_counted_by"] == "chunks", "the server does not count tokens: a chunk counts as one"),
        ((numbers["cached_share"] or 0.0) > ideal + UNPLANNED_HITS,
         f"{numbers['cached_share'] or 0:.0%} of the prompt tokens were cached, but plan and chat format share {ideal:.0%}: the server knew these "
         "prompts from before; take another --seed or an empty cache"),
    )
    return [text for found, text in checks if found]


def asked_when(made: Mapping[str, Any]) -> str:
    """The loop of a report in words."""
    settings, num_clients = made["settings"], made["loop"]["clients"]
    if num_clients:
        return f"closed loop of {num_clients}"
    rate = f"{settings['arrivals']} {settings['rate']:g}/s" if settings["rate"] else f"times of the trace x {settings['speed']:g}"
    return f"open loop, {rate}"


def machine() -> dict[str, Any]:
    """Where the tool ran."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text(encoding="utf-8", errors="replace").splitlines() if listing.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {"system": f"{platform.system()} {platform.release()}", "cpu": next(names, platform.machine()), "cores": cores}


def _detail(exchange: Exchange, begun_s: float) -> dict[str, Any]:
    return _rounded({
        "due_s": exchange.due_s - begun_s, "late_s": exchange.late_s, "ttft_s": exchange.ttft_s, "tpot_s": exchange.tpot_s, "e2e_s": exchange.e2e_s,
        "input": exchange.num_input, "output": exchange.num_tokens, "cached": exchange.num_cached, "finish": exchange.finish,
        "refusals": exchange.num_refused, "error": None if exchange.fault is None else exchange.fault.kind,
    })


def _in_flight(record: Record, span_s: float) -> dict[str, Any]:
    """Most at once, and the mean over the run."""
    ends = sorted((at, step) for exchange in record.exchanges for at, step in ((exchange.begun_s, 1), (exchange.end_s, -1)))
    now = most = 0
    for _, step in ends:
        now += step
        most = max(most, now)
    busy = sum(exchange.end_s - exchange.begun_s for exchange in record.exchanges)
    return _rounded({"max": most, "mean": busy / span_s if span_s > 0 else 0.0})


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: round(value, 7) if isinstance(value, float) else value for name, value in values.items()}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
