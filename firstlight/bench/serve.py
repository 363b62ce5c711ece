"""Measure a server: meet it, warm it up, load it, and say how it went."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from firstlight.bench.client import Client, Dialogue
from firstlight.bench.content import Content
from firstlight.bench.exchange import Exchange
from firstlight.bench.load import Load, Record
from firstlight.bench.options import Options
from firstlight.bench.report import Run, report
from firstlight.bench.wire import Connect, Pool
from firstlight.bench.workload import plan, warm_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a test replaces: time, pauses, and the way to the server."""

    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    connect: Connect | None = None


def measure(options: Options, seen: Callable[[Exchange], None] = lambda _: None) -> tuple[dict[str, Any], Record]:
    """Run and report; the record is what pictures are drawn from."""
    return asyncio.run(measured(options, Surroundings(), seen))


async def measured(options: Options, around: Surroundings, seen: Callable[[Exchange], None] = lambda _: None) -> tuple[dict[str, Any], Record]:
    """The same inside of an event loop.

    Raises:
        RequestError: an option or the trace is wrong.
        PeerError: nobody answers, or not as an OpenAI server does.
    """
    planned, content, _ = plan(options), Content(options.seed, options.id_range), (options.limits, options.inputs, options.outputs)
    headers = {"content-type": "application/json", "accept": "text/event-stream", "user-agent": f"firstlight-bench/{version('firstlight')}"}
    if options.api_key is not None:
        headers["authorization"] = f"Bearer {options.api_key}"
    pool = Pool(options.url, headers, around.clock, around.connect)
    client = Client(options, pool, content, around.clock, around.sleep)
    try:
        await client.meet()
        if planned.widest is not None:
            content.check(*planned.widest)
        warm = [await client.ask(client.body(turn, Dialogue()), turn, around.clock()) for turn in warm_up(options)]
        load = Load(client, around.clock, around.sleep, think_s=options.think, duration_s=options.duration, seen=seen)
        begun, cpu_s = datetime.now(UTC).isoformat(timespec="seconds"), time.process_time()
        # what is there already need not be looked at again while we measure
        gc.collect()
        gc.freeze()
        try:
            record = await load.run(planned.conversations, options.num_clients if options.closed else None)
        finally:
            gc.unfreeze()
        cpu_s = time.process_time() - cpu_s
    finally:
        pool.close()
    num_cold = sum(exchange.fault is not None for exchange in warm)
    made = Run(
        options=options, server=client.server, record=record, begun=begun, cpu_s=cpu_s, num_left_out=planned.left_out, num_warmup_failed=num_cold
    )
    return report(made), record
