"""One trace per request: the request, and in it the queue, the prefill and the decode of each of its sequences.

Imported only when traces are asked for, so that OpenTelemetry is optional. Attributes follow its conventions for generative AI.
Source: semantic conventions gen-ai 1.42 (gen_ai.*), HTTP (http.*, url.*), W3C Trace Context.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import firstlight
from firstlight.sched.sequence import Account
from firstlight.serve.visit import Visit
from firstlight.spec.errors import ConfigError

EXPORT_TIMEOUT_S = 5.0


class Tracing:
    """Turns visits into spans. A parent that the client names by `traceparent` also decides whether there is a trace."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("firstlight", firstlight.__version__)
        self._context = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str, *, share: float = 1.0) -> Tracing:
        """Send to an OTLP collector over HTTP, in batches and in another thread; a bare host gets the standard path."""
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"the address for traces is {endpoint!r}", "Use http://HOST:4318.")
        if not 0 <= share <= 1:
            raise ConfigError(f"the share of requests to trace is {share}", "Use a number from 0 to 1.")
        url = endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
        provider = TracerProvider(
            resource=Resource.create({"service.name": "firstlight", "service.version": firstlight.__version__}),
            sampler=ParentBased(TraceIdRatioBased(share)), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url, timeout=EXPORT_TIMEOUT_S)))
        return cls(provider)

    def begin(self, visit: Visit, headers: Mapping[str, str]) -> None:
        """Open the request's span under the client's own, if it has one."""
        parent = self._context.extract(headers)
        span = self._tracer.start_span(
            visit.method, context=parent, kind=SpanKind.SERVER, start_time=_ns(visit.wall_s),
            attributes={"http.request.method": visit.method, "url.path": visit.path, "firstlight.request_id": visit.request_id})
        visit.span = span
        if span.get_span_context().is_valid:
            visit.trace_id = f"{span.get_span_context().trace_id:032x}"

    def end(self, visit: Visit, model_name: str) -> None:
        """Close it, with all that is known by now, and add the phases of its sequences."""
        span: Span = visit.span
        if span.is_recording():
            span.update_name(f"{visit.operation} {model_name}" if visit.operation else f"{visit.method} {visit.route or ''}".strip())
            span.set_attributes(dict(_attributes(visit, model_name)))
            for account in visit.accounts:
                self._phases(visit, account)
            if visit.error is not None or visit.failure is not None or (visit.status or 0) >= 500:
                # Texts of errors may quote a prompt: the kind is told, the text only if it is ours.
                span.set_status(Status(StatusCode.ERROR, visit.failure))
        span.end(_ns(visit.wall_s + visit.ended_s - visit.begun_s))

    def close(self) -> None:
        """Send what is left; waits for it as long as one attempt may take."""
        # An exporter that cannot reach its collector tries again for longer than a server should take to end.
        sending = Thread(target=self._provider.shutdown, name="firstlight-traces", daemon=True)
        sending.start()
        sending.join(EXPORT_TIMEOUT_S)

    def _phases(self, visit: Visit, account: Account) -> None:
        entered_s, first_s = account.entered_s, account.first_token_s
        times = [account.arrived_s, entered_s, first_s, account.ended_s]
        counts: dict[str, dict[str, str | int]] = {
            "queue": {"firstlight.priority": account.priority.name.lower()},
            "prefill": {"firstlight.prompt_tokens": account.num_prompt, "firstlight.cached_tokens": visit.num_cached_tokens},
            "decode": {"firstlight.generated_tokens": account.num_generated},
        }
        context = set_span_in_context(visit.span)
        for place, (name, attributes) in enumerate(counts.items()):
            begin_s = times[place]
            if begin_s is None:
                return
            end_s = next(time_s for time_s in times[place + 1 :] if time_s is not None)
            offset_s = visit.wall_s - visit.begun_s
            phase = self._tracer.start_span(name, context=context, start_time=_ns(begin_s + offset_s), attributes=attributes)
            phase.end(_ns(end_s + offset_s))


def _attributes(visit: Visit, model_name: str) -> Iterator[tuple[str, Any]]:
    if visit.route is not None:
        yield "http.route", visit.route
    if visit.status is not None:
        yield "http.response.status_code", visit.status
    if visit.error is not None:
        yield "error.type", type(visit.error).__name__
    elif visit.failure is not None or (visit.status or 0) >= 500:
        yield "error.type", str(visit.status) if visit.failure is None else "error"
    if visit.operation is None or visit.params is None:
        return
    params = visit.params
    yield "gen_ai.operation.name", visit.operation
    yield "gen_ai.provider.name", "firstlight"
    yield "gen_ai.request.model", visit.model or model_name
    yield "gen_ai.request.stream", visit.stream
    yield "gen_ai.request.max_tokens", params.max_tokens
    yield "gen_ai.request.temperature", float(params.temperature)
    yield "gen_ai.request.top_p", float(params.top_p)
    if params.top_k:
        yield "gen_ai.request.top_k", params.top_k
    yield "gen_ai.request.frequency_penalty", float(params.frequency_penalty)
    yield "gen_ai.request.presence_penalty", float(params.presence_penalty)
    if params.seed is not None:
        yield "gen_ai.request.seed", params.seed
    if visit.num_choices != 1:
        yield "gen_ai.request.choice.count", visit.num_choices
    yield "gen_ai.response.model", model_name
    if visit.response_id is not None:
        yield "gen_ai.response.id", visit.response_id
    yield "gen_ai.response.finish_reasons", visit.finish_reasons()
    yield "gen_ai.usage.input_tokens", visit.num_prompt_tokens
    yield "gen_ai.usage.output_tokens", visit.num_generated_tokens
    yield "gen_ai.usage.cache_read.input_tokens", visit.num_cached_tokens
    if visit.first_token_s is not None:
        yield "gen_ai.response.time_to_first_chunk", visit.first_token_s - visit.begun_s
    yield "firstlight.priority", visit.priority or "standard"
    yield "firstlight.preemptions", visit.num_preemptions


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
