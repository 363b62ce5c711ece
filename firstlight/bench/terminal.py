"""A report for people: the tables on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from firstlight.bench.exchange import Exchange
from firstlight.bench.report import asked_when

COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
ROWS = {"ttft": "first token (TTFT)", "tpot": "per output token (TPOT)", "itl": "between chunks (ITL)", "e2e": "end to end"}


def show(made: Mapping[str, Any], stream: IO[str]) -> None:
    """Write the tables, then the errors and warnings."""
    console = Console(file=stream, highlight=False, width=None if stream.isatty() else 110)
    server = made["server"]
    console.print(f"[bold]{escape(server['model'])}[/] at {escape(server['url'])}, {asked_when(made)}, seed {made['settings']['seed']}")
    console.print(_latencies(made))
    console.print(_totals(made))
    for kind, error in made["errors"].items():
        console.print(f"[red]{error['count']} x {escape(kind)}[/]: {escape(error['example'])}")
    for warning in made["warnings"]:
        console.print(f"[yellow]note[/]: {escape(warning)}")


@contextmanager
def progress(stream: IO[str], num_requests: int | None) -> Iterator[Callable[[Exchange], None]]:
    """What to call behind each request; a bar where somebody watches."""
    if not stream.isatty():
        yield lambda exchange: None
        return
    with Progress(console=Console(file=stream), transient=True, refresh_per_second=2) as bar:
        task = bar.add_task("asking", total=num_requests)
        yield lambda exchange: bar.advance(task)


def _latencies(made: Mapping[str, Any]) -> Table:
    table = Table("milliseconds", *COLUMNS)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, title in ROWS.items():
        found = made["latency_s"][name]
        table.add_row(title, *(_milliseconds(found[column]) for column in COLUMNS) if found else ("-",) * len(COLUMNS))
    return table


def _totals(made: Mapping[str, Any]) -> Table:
    asked, speed, numbers, cost = made["requests"], made["throughput"], made["tokens"], made["own_cost"]
    table = Table(show_header=False)
    ends = {"failed": "failed", "abandoned": "abandoned", "refusals": "refused for a while", "left_out": "left out"}
    table.add_row("requests", ", ".join([f"{asked['succeeded']} of {asked['sent']} succeeded", *(f"{asked[key]} {word}" for key, word in ends.items()
                                                                                                if asked[key])]))
    table.add_row("in flight", f"{made['in_flight']['mean']:.1f} on average, {made['in_flight']['max']} at most")
    table.add_row("throughput", f"{speed['requests_per_s']:.2f} requests/s, {speed['output_tokens_per_s']:.1f} output tokens/s, "
                                f"{speed['input_tokens_per_s']:.1f} input tokens/s, over {made['duration_s']:.2f} s")
    table.add_row("tokens", f"{numbers['input'] if numbers['input'] is not None else '?'} in, {numbers['output']} out, {_cached(numbers)}")
    if made["goodput"] is not None:
        limits = ", ".join(f"{name} {limit:g} s" for name, limit in made["goodput"]["limits_s"].items())
        table.add_row("goodput", f"{made['goodput']['requests_per_s']:.2f} requests/s, {made['goodput']['share']:.1%} within {limits}")
    lag = (cost["loop_lag_s"] or {}).get("p99", 0.0)
    table.add_row("own cost", f"{cost['cpu_share']:.1%} of a core, event loop late by {lag * 1000:.2f} ms (p99)")
    return table


def _cached(numbers: Mapping[str, Any]) -> str:
    if numbers["cached"] is None:
        return "cached unknown"
    return f"{numbers['cached']} cached ({numbers['cached_share'] or 0:.1%})"


def _milliseconds(value: float) -> str:
    return f"{value * 1000:.2f}" if value < 1 else f"{value * 1000:,.0f}"
