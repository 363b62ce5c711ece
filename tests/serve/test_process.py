"""The server as a process: what it says at first, what signals do, what real connections do, and real clients."""

from __future__ import annotations

import json
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from firstlight.cli import main
from tests.serve.process import LIMIT_S, Process, server
from tests.serve.schema import check

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"model": "default", "prompt": "The first light", "ignore_eos": True, "seed": 1}
PLAIN = {"thinking": {"type": "disabled"}}


@pytest.fixture(scope="module")
def client(running: Process) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


def under_way(process: Process, key: str = "none") -> int:
    """Sequences in its engine."""
    state = httpx.get(f"{process.url}/metrics", headers={"Authorization": f"Bearer {key}"}).text
    names = ("firstlight_requests_running", "firstlight_requests_waiting")
    return sum(int(float(line.split()[-1])) for line in state.splitlines() if line.startswith(names))


def test_it_says_what_it_is(running: Process) -> None:
    """The start-up summary, and a line to try it with that works."""
    for word in ("model", "memory", "context", "prefixes    reused from 1 token on", "limits", "keys", "not served", "State:"):
        assert word in running.said
    command = next(line for line in running.said.splitlines() if line.startswith("  curl "))
    url, body = command.split()[1], command[command.index("-d '") + 4 : -1]
    answer = httpx.post(url, content=body, headers={"Content-Type": "application/json"}, timeout=LIMIT_S)
    assert 200 == answer.status_code
    check("CreateChatCompletionResponse", answer.json())


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    check("Model", model.model_dump())
    assert model == client.models.retrieve("default")
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.models.retrieve("nobody")


def test_the_python_client_completes(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "default", "prompt": ["a", "b"], "max_tokens": 8, "seed": 1, "logprobs": 1, "n": 2}
    whole = client.completions.create(**asked)
    check("CreateCompletionResponse", whole.model_dump(exclude_unset=True))
    texts = [""] * 4
    for chunk in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        check("CreateCompletionResponse", {**chunk.model_dump(exclude_unset=True, exclude_none=True), "choices": []})
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [choice.text for choice in whole.choices] == texts
    assert chunk.usage is not None and whole.usage is not None
    assert whole.usage.completion_tokens == chunk.usage.completion_tokens


def test_the_python_client_chats(client: openai.OpenAI) -> None:
    """Through its own accumulator of streams, which is strict about the order of chunks."""
    asked: dict[str, Any] = {
        "model": "default", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 300, "seed": 3, "extra_body": PLAIN,
        "tool_choice": "required", "parallel_tool_calls": False,
        "tools": [{"type": "function", "function": {"name": "pick", "strict": True, "parameters": {
            "type": "object", "properties": {"size": {"type": "string", "enum": ["small", "large"]}}, "required": ["size"],
            "additionalProperties": False}}}],
    }
    whole = client.chat.completions.create(**asked)
    check("CreateChatCompletionResponse", whole.model_dump(exclude_unset=True))
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    (call,), (streamed,) = (each.choices[0].message.tool_calls or [] for each in (whole, final))
    assert call.function.arguments == streamed.function.arguments  # type: ignore[union-attr]
    assert json.loads(call.function.arguments)["size"] in ("small", "large")  # type: ignore[union-attr]
    assert ("tool_calls", "tool_calls") == (whole.choices[0].finish_reason, final.choices[0].finish_reason)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="default", messages=[], max_tokens=1)
    assert ("messages", "invalid_value") == (refused.value.param, refused.value.code)


def test_leaving_a_real_connection_cancels(running: Process) -> None:
    """A stream that is closed by its client, and a whole answer whose connection is cut."""
    with httpx.stream("POST", running.url + COMPLETE, json={**LONG, "max_tokens": 20_000, "stream": True}, timeout=LIMIT_S) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert 1 == under_way(running)
    host, port = running.url.removeprefix("http://").split(":")
    body = json.dumps({**LONG, "max_tokens": 20_000}).encode()
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {COMPLETE} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        deadline = time.monotonic() + LIMIT_S
        while under_way(running) != 1:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    while under_way(running):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_sigterm_drains() -> None:
    """Three are under way: they finish whole, a newcomer is sent away, and the process ends with 0."""
    with server("--drain-timeout", "60") as process, ThreadPoolExecutor(4) as threads:
        def ask(stream: bool) -> httpx.Response:
            return httpx.post(process.url + COMPLETE, json={**LONG, "max_tokens": 120, "stream": stream}, timeout=LIMIT_S)

        answers = [threads.submit(ask, stream) for stream in (False, True, True)]
        deadline = time.monotonic() + LIMIT_S
        while under_way(process) != 3:
            assert time.monotonic() < deadline, process.said
            time.sleep(0.01)
        process.process.send_signal(signal.SIGTERM)
        refused = httpx.get(f"{process.url}/ready")
        while refused.status_code == 200:
            refused = httpx.get(f"{process.url}/ready")
        refused = httpx.post(process.url + COMPLETE, json={**LONG, "max_tokens": 1}, timeout=LIMIT_S)
        assert (503, True) == (refused.status_code, int(refused.headers["retry-after"]) > 0)
        whole, *streams = [answer.result() for answer in answers]
        assert 120 == whole.json()["usage"]["completion_tokens"]
        for stream in streams:
            assert stream.text.endswith('"finish_reason":"length"}]}\n\ndata: [DONE]\n\n')
        assert 0 == process.wait(), process.said
        assert "Traceback" not in process.said


STUCK = """
import time
import firstlight.serve.run as run
from firstlight.engine.runner import TorchRunner
run.STUCK_S = 1
TorchRunner.run = lambda self, batch: time.sleep(1000)
"""


def test_a_step_that_never_ends() -> None:
    """/health says it, and SIGTERM still ends the process: with 1, because what was under way is lost."""
    process = Process("--drain-timeout", "0.1", "--stall-timeout", "0.2", before=STUCK)
    try:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(process.url + COMPLETE, json={**LONG, "max_tokens": 1}, timeout=0.5)
        health = httpx.get(f"{process.url}/health")
        assert (503, True) == (health.status_code, "no step has ended" in health.json()["reason"])
        assert 1 == process.stop(), process.said
        assert "a step does not end" in process.said
    finally:
        process.process.kill()
        process.process.wait()


def test_a_second_signal_does_not_wait_for_a_stuck_step() -> None:
    """Not for the drain, and not for the step."""
    process = Process("--drain-timeout", "1000", before=STUCK.replace("STUCK_S = 1", "STUCK_S = 1000"))
    try:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(process.url + COMPLETE, json={**LONG, "max_tokens": 1}, timeout=0.5)
        process.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + LIMIT_S
        while "choices under way" not in process.said:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert 1 == process.stop(), process.said
        assert "a step does not end" in process.said
    finally:
        process.process.kill()
        process.process.wait()


@pytest.mark.parametrize(("arguments", "said"), [
    (["--host", "0.0.0.0"], "--host 0.0.0.0 lets other machines in"), (["--host", "::"], "lets other machines in"),
    (["--host", "no.such.host.invalid"], "lets other machines in"), (["--port", "99999"], "cannot listen on"),
    (["--profile", "acme"], "--profile is 'acme'. Use one of openai, kimi."), (["--max-body", "much"], "--max-body is 'much'"),
    (["--api-key", " "], "an API key is empty"), (["--api-key-file", "/nowhere"], "cannot be read"), (["--max-tokens", "0"], "`max_tokens` is 0"),
    (["--request-timeout", "nan"], "`request_s` is nan"), (["--stall-timeout", "nan"], "`stall_s` is nan"),
    (["--drain-timeout", "nan"], "`drain_s` is nan"), (["--seed", str(2**64)], f"`seed` is {2**64}"), (["--seed", str(-(2**63) - 1)], "`seed` is -"),
    (["--tool-call-ids", "odd"], "--tool-call-ids is 'odd'"), (["--log-level", "loud"], "`log_level` is 'loud'"), (["/nowhere"], "/nowhere"),
])
def test_what_cannot_be_served_is_said(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, one line, before any weight is read."""
    assert 2 == main(["serve", *(arguments if "--port" in arguments else ["--port", "0", *arguments])])
    captured = capsys.readouterr()
    assert said in captured.err
    assert "Traceback" not in captured.err


def test_a_port_that_is_taken(running: Process, capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == main(["serve", "--port", running.url.rpartition(":")[2]])
    assert "Choose another --host or --port." in capsys.readouterr().err


def test_keys_and_names_and_a_second_signal(tmp_path: Path) -> None:
    """A key file, two names, a profile; no key is ever said. The second of two signals ends the process at once, and well."""
    file = tmp_path / "keys"
    file.write_text("file-key-1\n\nfile-key-2\n", encoding="utf-8")
    arguments = ["--api-key", "line-key-3", "--api-key-file", str(file), "--profile", "kimi"]
    arguments += ["--served-model-name", "kimi-k3", "--served-model-name", "k3"]
    with server(*arguments, "--host", "127.0.0.1", "--log-level", "debug") as process:
        for key in ("file-key-1", "file-key-2", "line-key-3"):
            client = openai.OpenAI(base_url=f"{process.url}/v1", api_key=key, max_retries=0)
            assert ["kimi-k3", "k3"] == [model.id for model in client.models.list().data]
        assert "k3" == client.completions.create(model="k3", prompt="x", max_tokens=1).model
        with pytest.raises(openai.BadRequestError, match="the profile 'kimi' allows 0 to 1"):
            client.completions.create(model="k3", prompt="x", temperature=1.5)
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{process.url}/v1", api_key="wrong", max_retries=0).models.list()
        assert 401 == httpx.get(f"{process.url}/v1/models", headers={"X-Request-Id": "mine"}).status_code
        with ThreadPoolExecutor(1) as threads:
            asked = {**LONG, "model": "k3", "max_tokens": 30_000}
            answer = threads.submit(httpx.post, process.url + COMPLETE, json=asked, headers={"Authorization": "Bearer line-key-3"}, timeout=LIMIT_S)
            deadline = time.monotonic() + LIMIT_S
            while under_way(process, "line-key-3") != 1:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            process.process.send_signal(signal.SIGINT)
            while "choices under way" not in process.said:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert 0 == process.stop(signal.SIGINT), process.said
            assert answer.exception(LIMIT_S) is not None or answer.result().status_code >= 500
    assert "mine" in process.said
    assert not any(key in process.said for key in ("file-key-1", "file-key-2", "line-key-3"))
