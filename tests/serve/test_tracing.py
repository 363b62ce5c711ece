"""Traces as a collector gets them: spans of one request, their order in time, their parents, and nothing at all while they are off."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import SpanKind, StatusCode

from firstlight import LLM
from firstlight.serve.tracing import Tracing
from firstlight.serve.watch import tracing_to
from firstlight.spec.errors import ConfigError
from tests.serve.site import Site, prompt, small

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def llm() -> Iterator[LLM]:
    with small() as found:
        yield found


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


class Collected:
    """What would have been sent."""

    def __init__(self, **options: Any) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False, **options)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracing = Tracing(provider)

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())


def test_a_request_and_its_phases(llm: LLM) -> None:
    collected = Collected()

    async def work() -> None:
        async with Site(llm, tracing=collected.tracing) as client:
            begun_s = time.time()
            for _ in range(2):
                await client.post("/v1/completions", json={"tokens": prompt(1, 40), "max_tokens": 5, "priority": "interactive"})
            assert time.time() - begun_s < 30

    before_ns = time.time_ns()
    run(work())
    after_ns = time.time_ns()
    assert ["queue", "prefill", "decode", "text_completion tiny"] * 2 == [span.name for span in collected.spans]
    queue, prefill, decode, whole = collected.spans[4:]
    assert SpanKind.SERVER == whole.kind and whole.parent is None
    for phase in (queue, prefill, decode):
        assert phase.parent == whole.context
    times = [time_ns for span in (queue, prefill, decode) for time_ns in (span.start_time, span.end_time)]
    assert times == sorted(times) and times[1] == times[2] and times[3] == times[4]
    assert before_ns <= whole.start_time <= times[0] and times[-1] <= whole.end_time <= after_ns  # type: ignore[operator]
    assert times[-1] > times[3] > times[2], "prefill and decode take time"
    cached = llm.stats()["cached_tokens"]
    assert cached > 0
    assert {
        "http.request.method": "POST", "http.route": "/v1/completions", "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "firstlight", "gen_ai.request.model": "asked",
        "gen_ai.response.model": "tiny", "gen_ai.request.max_tokens": 5, "gen_ai.request.temperature": 0.0, "gen_ai.request.seed": 3,
        "gen_ai.response.id": "cmpl-1", "gen_ai.response.finish_reasons": ("length",), "gen_ai.usage.input_tokens": 40,
        "gen_ai.usage.output_tokens": 5, "gen_ai.usage.cache_read.input_tokens": cached, "firstlight.priority": "interactive",
    }.items() <= dict(whole.attributes or {}).items()
    assert {"firstlight.prompt_tokens": 40, "firstlight.cached_tokens": cached} == dict(prefill.attributes or {})
    assert {"firstlight.generated_tokens": 5} == dict(decode.attributes or {})


def test_names_are_those_of_the_conventions(llm: LLM) -> None:
    """Every gen_ai attribute is one that OpenTelemetry's own package lists; none of them holds text of the prompt or the answer."""
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_") and isinstance(value, str)}
    collected = Collected()

    async def work() -> None:
        async with Site(llm, tracing=collected.tracing) as client:
            await client.post("/v1/completions", json={"tokens": prompt(1, 9), "n": 2, "stream": False})

    run(work())
    ours = {name for span in collected.spans for name in span.attributes or {} if name.startswith("gen_ai.")}
    assert len(ours) > 12
    assert ours <= known
    assert not {name for name in ours if "message" in name or "instructions" in name or "prompt" in name}
    assert ["queue", "prefill", "decode"] * 2 == [span.name for span in collected.spans[:-1]]


def test_the_clients_trace_goes_on(llm: LLM) -> None:
    collected = Collected(sampler=ParentBased(ALWAYS_OFF))

    async def work() -> None:
        site = Site(llm, tracing=collected.tracing)
        async with site as client:
            for flag in ("01", "00"):
                await client.post("/v1/completions", json={"tokens": prompt(1, 9)}, headers={"traceparent": f"00-{TRACE}-{PARENT}-{flag}"})
            for broken in ("", "garbage", f"00-{'0' * 32}-{PARENT}-01"):
                await client.post("/v1/completions", json={"tokens": prompt(1, 9)}, headers={"traceparent": broken})

    run(work())
    assert 4 == len(collected.spans), "only the first is sampled, by its client"
    whole = collected.spans[-1]
    assert whole.parent is not None
    assert (TRACE, PARENT) == (f"{whole.parent.trace_id:032x}", f"{whole.parent.span_id:016x}")
    assert {int(TRACE, 16)} == {span.context.trace_id for span in collected.spans if span.context}


def test_errors_show_without_their_texts(llm: LLM) -> None:
    collected = Collected()

    async def work() -> None:
        async with Site(llm, tracing=collected.tracing) as client:
            await client.post("/v1/completions", json={"tokens": ["the secret of the prompt"]})
            await client.get("/v1/items/7")
            await client.get("/health")

    run(work())
    bad, mistake = collected.spans
    assert ("text_completion tiny", "GET /v1/items/{item}") == (bad.name, mistake.name)
    assert [StatusCode.ERROR] * 2 == [span.status.status_code for span in (bad, mistake)]
    assert [("RequestError", 400), ("ZeroDivisionError", 500)] == [
        ((span.attributes or {})["error.type"], (span.attributes or {})["http.response.status_code"]) for span in (bad, mistake)]
    assert not any("secret" in span.to_json() for span in collected.spans)


def test_lines_bear_the_trace(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    collected = Collected()
    caplog.set_level("INFO", logger="firstlight")

    async def work() -> None:
        async with Site(llm, tracing=collected.tracing) as client:
            await client.post("/v1/completions", json={"tokens": prompt(1, 9)}, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})

    run(work())
    (record,) = [record for record in caplog.records if record.name == "firstlight.access"]
    assert TRACE == record.fields["trace_id"]  # type: ignore[attr-defined]


class Collector(BaseHTTPRequestHandler):
    """An OTLP collector that keeps what it gets."""

    got: list[tuple[str, ExportTraceServiceRequest]]

    def do_POST(self) -> None:
        message = ExportTraceServiceRequest()
        message.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
        type(self).got.append((self.path, message))
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_collector_gets_them(llm: LLM) -> None:
    Collector.got = []
    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()

    async def work() -> None:
        async with Site(llm, tracing=tracing_to(f"http://127.0.0.1:{server.server_port}")) as client:
            await client.post("/v1/completions", json={"tokens": prompt(1, 9)})

    run(work())
    server.shutdown()
    server.server_close()
    ((path, message),) = Collector.got
    assert "/v1/traces" == path
    (resource,) = message.resource_spans
    assert "firstlight" == {item.key: item.value.string_value for item in resource.resource.attributes}["service.name"]
    assert ["queue", "prefill", "decode", "text_completion tiny"] == [span.name for scope in resource.scope_spans for span in scope.spans]


def test_a_collector_that_is_not_there_costs_nothing(llm: LLM) -> None:
    async def work() -> None:
        site = Site(llm, tracing=tracing_to("http://127.0.0.1:9"))
        async with site as client:
            assert 200 == (await client.post("/v1/completions", json={"tokens": prompt(1, 9)})).status_code

    run(work())


@pytest.mark.parametrize(("endpoint", "share"), [("localhost:4318", 1.0), ("ftp://host", 1.0), ("http://", 1.0), ("http://host", 1.5)])
def test_wrong_settings_are_refused(endpoint: str, share: float) -> None:
    with pytest.raises(ConfigError, match="Use "):
        tracing_to(endpoint, share=share)


def test_off_means_not_even_imported() -> None:
    """And without the package, asking for traces says what to install."""
    program = (
        "import sys, firstlight.serve.panel, firstlight.serve.watch as watch\n"
        "print(any(name.startswith('opentelemetry') for name in sys.modules))\n"
        "sys.modules['opentelemetry'] = None\n"
        "try:\n    watch.tracing_to('http://host:4318')\n"
        "except watch.ConfigError as error:\n    print(error)")
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    first, second = found.stdout.splitlines()
    assert "False" == first
    assert "pip install 'firstlight[otel]'" in second and "http://host:4318" in second
