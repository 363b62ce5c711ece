"""What can be measured from outside: every metric with its meaning, read when somebody scrapes.

Nothing is counted here. The loop, the caches and the visits count as they go, in plain numbers; a scrape turns these into Prometheus families.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

import firstlight
from firstlight.engine.meter import Histogram
from firstlight.ops.registry import REFERENCE
from firstlight.sched.sequence import Priority
from firstlight.serve.watch import Watch

Value = float | Histogram
Read = Callable[[Watch], Iterable[tuple[tuple[str, ...], Value]]]
TIERS = tuple(priority.name.lower() for priority in Priority)


@dataclass(frozen=True, slots=True)
class Measure:
    """One metric: its name without the suffix that its kind adds, what it means, its labels, and where its values come from."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: tuple[str, ...]
    read: Read

    @property
    def shown(self) -> str:
        """The name as a query says it."""
        return self.name + {"counter": "_total", "gauge": "", "histogram": "_bucket"}[self.kind]

    def family(self, watch: Watch) -> Metric:
        """The values of this moment."""
        if self.kind == "histogram":
            histograms = HistogramMetricFamily(self.name, self.meaning, labels=self.labels)
            for labels, found in self.read(watch):
                assert isinstance(found, Histogram)
                histograms.add_metric(labels, _buckets(found), found.total)
            return histograms
        numbers = (CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily)(self.name, self.meaning, labels=self.labels)
        for labels, found in self.read(watch):
            assert not isinstance(found, Histogram)
            numbers.add_metric(labels, found)
        return numbers


class Metrics(Collector):
    """A registry of its own, with all measures of a server and those of its process."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def collect(self) -> Iterator[Metric]:
        """Every family, of the same moment as nearly as can be."""
        for measure in MEASURES:
            yield measure.family(self._watch)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The exposition and its content type, in the format that the Accept header of a scraper prefers."""
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):
            # a version that is no number: whoever asks so odd gets the plain format
            encode, content_type = choose_encoder("")
        return encode(self._registry), content_type


def render_table() -> str:
    """The page docs/metrics.md."""
    lines = [
        "# Metrics", "",
        "What `GET /metrics` says, in the format of Prometheus or of OpenMetrics, as the scraper asks. Times are in seconds, sizes in bytes,",
        "lengths in tokens; the names say which. Beside these there are the usual `process_` metrics.", "",
        "| metric | kind | labels | meaning |", "|---|---|---|---|",
    ]
    lines += [f"| `{m.shown}` | {m.kind} | {', '.join(f'`{label}`' for label in m.labels)} | {m.meaning} |" for m in MEASURES]
    return "\n".join(lines) + "\n"


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Cumulative counts; made from one copy, because the engine may be adding."""
    total, found = 0, []
    for bound, count in zip([*map(repr, histogram.bounds), "+Inf"], histogram.counts[:], strict=True):
        total += count
        found.append((bound, float(total)))
    return found


def _one(read: Callable[[Watch], Value]) -> Read:
    return lambda watch: [((), read(watch))]


def _each_priority(read: Callable[[Watch], Iterable[Value]]) -> Read:
    return lambda watch: [((tier,), value) for tier, value in zip(TIERS, read(watch), strict=True)]


def _total(name: str) -> Read:
    return _one(lambda watch: watch.machine.engine.counts()[name])


def _blocks(watch: Watch) -> Iterator[tuple[tuple[str, ...], Value]]:
    for name, group in watch.machine.cache.counts().items():
        for use in ("free", "used", "cached"):
            yield (name, str(group["kind"]), use), float(group[use])


def _capacity(watch: Watch) -> Iterator[tuple[tuple[str, ...], Value]]:
    for name, group in watch.machine.cache.counts().items():
        yield (name, str(group["kind"])), float(group["total"])


def _reached(watch: Watch) -> Iterator[tuple[tuple[str, ...], Value]]:
    """Rows may be known further than the last snapshot of a state; what all groups know is reused."""
    counts = watch.machine.engine.counts()
    for name, group in watch.machine.cache.counts().items():
        yield (name, str(group["kind"])), float(counts["reached_tokens" if group["kind"] == "rows" else "cached_tokens"])


def _evicted(watch: Watch) -> Iterator[tuple[tuple[str, ...], Value]]:
    counts = watch.machine.cache.index.counts
    yield ("rows",), float(counts.evicted_rows)
    yield ("snapshots",), float(counts.evicted_snapshots)


def _held_back(watch: Watch) -> Iterator[tuple[tuple[str, ...], Value]]:
    counts = watch.machine.engine.counts()
    for reason in ("slots", "memory", "watermark"):
        yield (reason,), float(counts[f"held_back_{reason}"])


def _uses(watch: Watch) -> Iterator[tuple[tuple[str, ...], Value]]:
    for (op, backend), count in watch.operators().items():
        yield (op, backend), float(count)


def _canary(name: str) -> Read:
    return lambda watch: [] if watch.machine.engine.canary is None else [((), watch.machine.engine.canary.counts()[name])]


def _build(watch: Watch) -> Iterator[tuple[tuple[str, ...], Value]]:
    import torch

    yield (firstlight.__version__, platform.python_version(), torch.__version__), 1.0


MEASURES: tuple[Measure, ...] = (
    Measure("firstlight_requests", "counter", "Answers that ended, one per choice: stop, length, abort (the client left) or error.",
            ("priority", "finish"), lambda watch: [(key, float(count)) for key, count in watch.ends.copy().items()]),
    Measure("firstlight_requests_rejected", "counter", "Requests answered with an error status, by reason.", ("reason",),
            lambda watch: [((reason,), float(count)) for reason, count in watch.rejections.copy().items()]),
    Measure("firstlight_requests_running", "gauge", "Sequences that hold cache blocks and are computed.", (), _total("running")),
    Measure("firstlight_requests_waiting", "gauge", "Sequences that wait for their first or next turn.", ("priority",),
            _each_priority(lambda watch: watch.meter.waiting)),
    Measure("firstlight_http_requests_open", "gauge", "HTTP requests that have not been answered to the end.", (),
            _one(lambda watch: watch.num_open)),
    Measure("firstlight_http_responses", "counter", "HTTP responses; 499 stands for a client that left before there was one.",
            ("method", "route", "status"),
            lambda watch: [((method, route, str(status)), float(n)) for (method, route, status), n in watch.responses.copy().items()]),
    Measure("firstlight_queue_seconds", "histogram", "From arrival until a sequence is first given cache blocks.", ("priority",),
            _each_priority(lambda watch: watch.meter.queue_s)),
    Measure("firstlight_time_to_first_token_seconds", "histogram", "From arrival at the engine to the first token.", ("priority",),
            _each_priority(lambda watch: watch.meter.first_token_s)),
    Measure("firstlight_inter_token_seconds", "histogram", "From one token of a sequence to its next one, each of them.", ("priority",),
            _each_priority(lambda watch: watch.meter.inter_token_s)),
    Measure("firstlight_time_per_output_token_seconds", "histogram",
            "The mean time per token after the first, of each sequence that the engine ended.", ("priority",),
            _each_priority(lambda watch: watch.meter.per_token_s)),
    Measure("firstlight_request_seconds", "histogram", "From arrival at the engine to the end of a sequence.", ("priority",),
            _each_priority(lambda watch: watch.meter.request_s)),
    Measure("firstlight_request_prompt_tokens", "histogram", "Length of the prompt of each sequence that ended.", (),
            _one(lambda watch: watch.meter.prompt_tokens)),
    Measure("firstlight_request_generated_tokens", "histogram", "Length of the answer of each sequence that ended.", (),
            _one(lambda watch: watch.meter.answer_tokens)),
    Measure("firstlight_prompt_tokens", "counter", "Prompt tokens of sequences that were given blocks, cached ones included.", (),
            _total("entered_tokens")),
    Measure("firstlight_cached_tokens", "counter", "Prompt tokens that were reused from the prefix cache instead of being computed.", (),
            _total("cached_tokens")),
    Measure("firstlight_generated_tokens", "counter", "Tokens that were sampled for a client.", (),
            _one(lambda watch: watch.meter.num_generated_tokens)),
    Measure("firstlight_computed_tokens", "counter", "Tokens that went through the model, repeated work and checks included.", ("phase",),
            lambda watch: [(("prefill",), watch.meter.num_prefill_tokens), (("decode",), watch.meter.num_decode_tokens)]),
    Measure("firstlight_recomputed_tokens", "counter", "Tokens that were computed again after a preemption.", (), _total("recomputed_tokens")),
    Measure("firstlight_preemptions", "counter", "Running sequences whose blocks were taken away.", (), _total("preemptions")),
    Measure("firstlight_admissions_held_back", "counter", "Steps in which the next sequence could not enter: no slot, no memory, or a watermark.",
            ("reason",), _held_back),
    Measure("firstlight_step_seconds", "histogram", "Time of a step: schedule, run, update.", (), _one(lambda watch: watch.meter.step_s)),
    Measure("firstlight_step_tokens", "histogram", "Tokens computed in a step.", (), _one(lambda watch: watch.meter.step_tokens)),
    Measure("firstlight_cache_blocks", "gauge", "Cache blocks of a group: free, used by sequences, or cached only.",
            ("group", "kind", "use"), _blocks),
    Measure("firstlight_cache_capacity_blocks", "gauge", "Cache blocks of a group in all.", ("group", "kind"), _capacity),
    Measure("firstlight_cache_capacity_tokens", "gauge", "Length of the longest sequence that an empty cache holds; 0: no group grows.", (),
            _one(lambda watch: watch.machine.cache.capacity_tokens or 0)),
    Measure("firstlight_cache_bytes", "gauge", "Memory of all cache groups together.", (), _one(lambda watch: watch.machine.pool.num_bytes)),
    Measure("firstlight_cache_usage_ratio", "gauge", "Share of the fullest group that running sequences use, 0 to 1.", (),
            _one(lambda watch: watch.machine.cache.usage())),
    Measure("firstlight_prefix_cache_on", "gauge", "1 while prefixes are kept; a wrong hit that is found switches them off for good.", (),
            _one(lambda watch: float(watch.machine.cache.prefix_cache))),
    Measure("firstlight_prefix_reached_tokens", "counter",
            "How far a group knew the prompts that entered. Rows ahead of states: snapshots are lacking. Nothing: nothing was known.",
            ("group", "kind"), _reached),
    Measure("firstlight_prefix_rows", "gauge", "Full blocks that a prompt can find.", (), _one(lambda watch: watch.machine.cache.index.num_rows)),
    Measure("firstlight_prefix_snapshots", "gauge", "States that a prompt can resume from.", (),
            _one(lambda watch: watch.machine.cache.index.num_snapshots)),
    Measure("firstlight_prefix_evictions", "counter", "Cached blocks and snapshots that gave way to others.", ("kind",), _evicted),
    Measure("firstlight_prefix_withdrawn", "counter", "Cached blocks and snapshots taken back because a sequence that used them failed.", (),
            _one(lambda watch: watch.machine.cache.index.counts.withdrawn)),
    Measure("firstlight_canary_checks", "counter", "Prefix hits that were computed again without the cache; absent when none are chosen.", (),
            _canary("checked")),
    Measure("firstlight_canary_mismatches", "counter", "Those whose logits were wrong.", (), _canary("mismatches")),
    Measure("firstlight_canary_largest_difference_ratio", "gauge", "The largest relative difference of logits found so far.", (), _canary("largest")),
    Measure("firstlight_cache_unusable_blocks", "counter", "Blocks from outside that could not be used, by what was wrong.", ("flaw",),
            lambda watch: [((flaw,), float(count)) for flaw, count in watch.machine.pool.unusable.copy().items()]),
    Measure("firstlight_operator_uses", "gauge", "Uses of an operator in the model, by the back-end that serves them.", ("op", "backend"), _uses),
    Measure("firstlight_operator_reference_uses", "gauge", "Uses that no back-end serves, so that the reference computes them.", (),
            _one(lambda watch: sum(count for (_, backend), count in watch.operators().items() if backend == REFERENCE))),
    Measure("firstlight_operator_fallbacks", "gauge", "Uses that a preferred back-end declined.", (),
            _one(lambda watch: watch.machine.binder.num_fallbacks)),
    Measure("firstlight_engine_healthy", "gauge", "0 once a mistake of ours has ended the stepping thread.", (),
            _one(lambda watch: float(watch.engine.healthy))),
    Measure("firstlight_engine_stalled_seconds", "gauge", "Time without a finished step although there is work.", (),
            _one(lambda watch: watch.engine.stalled_s)),
    Measure("firstlight_max_context_tokens", "gauge", "Tokens of prompt and answer together at most.", (),
            _one(lambda watch: watch.machine.spec.max_context)),
    Measure("firstlight_max_sequences", "gauge", "Sequences that can be computed at a time.", (),
            _one(lambda watch: watch.machine.engine.scheduler.limits.sequences_per_step)),
    Measure("firstlight_build_info", "gauge", "Always 1; the versions are its labels.", ("version", "python", "torch"), _build),
    Measure("firstlight_model_info", "gauge", "Always 1; what is served is its labels.", ("model", "model_type", "dtype"),
            lambda watch: [((watch.model_name, watch.machine.spec.name, watch.machine.spec.dtype), 1.0)]),
)
"""In the order in which they are shown."""
