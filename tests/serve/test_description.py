"""OpenAI's description makes the requests: whatever it can make gets an answer that it describes, and never a 5xx."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from tests.serve.process import Process
from tests.serve.schema import check_stream, description

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance]
OPERATIONS = [("/models", "GET"), ("/models/{model}", "GET"), ("/completions", "POST"), ("/chat/completions", "POST")]


def fitted(body: Any) -> Any:
    """A request that is valid for OpenAI, made small and sent to this model; what this server refuses by its documents is left out."""
    if not isinstance(body, dict):
        return body
    body = {name: value for name, value in body.items() if name not in ("suffix", "best_of", "audio", "modalities", "functions", "function_call")}
    body = {name: value for name, value in body.items() if name not in ("web_search_options", "stream_options", "logit_bias", "top_logprobs")}
    body |= {"model": "default", "max_tokens": 6, "n": min(body["n"], 3) if isinstance(body.get("n"), int) else None}
    body.pop("max_completion_tokens", None)
    if isinstance(body.get("prompt"), list):
        body["prompt"] = [_small(each) for each in body["prompt"][:8]]
    return body


def _small(prompt: Any) -> Any:
    if isinstance(prompt, list):
        return [_small(each) for each in prompt[:20]]
    return prompt % 288 if type(prompt) is int else prompt


def exercise(url: str, path: str, method: str, num_cases: int, *, valid: bool) -> Counter[int]:
    """Send cases and check every answer; how often which status came, and under -1 how many events of streams."""
    schema = schemathesis.openapi.from_dict(copy.deepcopy(description()))
    statuses: Counter[int] = Counter()
    mode = GenerationMode.POSITIVE if valid else GenerationMode.NEGATIVE

    @settings(max_examples=num_cases, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=schema[path][method].as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        if valid and method == "POST":
            case.body = fitted(case.body)
        response = case.call(base_url=f"{url}/v1", timeout=60)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)
        if response.headers["content-type"][0].startswith("text/event-stream"):
            statuses[-1] += check_stream(path, response.content.decode())

    run()
    return statuses


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_answers_are_as_described(running: Process, path: str, method: str) -> None:
    statuses = exercise(running.url, path, method, 12, valid=True)
    if path in ("/models", "/completions"):
        assert statuses[200], statuses


@pytest.mark.slow
@pytest.mark.parametrize("valid", [True, False])
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_answers_are_as_described_for_long(running: Process, path: str, method: str, valid: bool) -> None:
    if method == "GET" and not valid:
        pytest.skip("a GET without parameters cannot be wrong")
    statuses = exercise(running.url, path, method, 300, valid=valid)
    print(f"\n{method} {path} valid={valid}: {dict(statuses)}")
    assert (statuses[200] > 0) == (valid and path != "/models/{model}"), statuses
