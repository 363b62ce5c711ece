"""The command on real sockets: against a server of the standard library, and against our own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from firstlight.cli import main
from tests.bench.scripted import DONE, event


class Speaker(BaseHTTPRequestHandler):
    """Answers with max_tokens words; a prompt with ids gets an error instead."""

    protocol_version = "HTTP/1.1"
    num_answered = 0

    def do_GET(self) -> None:
        text = b'{"data": [{"id": "speaker"}]}'
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if isinstance(asked["prompt"], list) and asked["max_tokens"] > 1:
            self.send_error(500, "no ids")
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        usage = {"prompt_tokens": len(asked["prompt"].split()) if isinstance(asked["prompt"], str) else 0, "completion_tokens": asked["max_tokens"]}
        for number in range(asked["max_tokens"]):
            self._chunk(event(" word", finish="length" if number + 1 == asked["max_tokens"] else None))
        self._chunk(event(usage=usage) + DONE)
        self.wfile.write(b"0\r\n\r\n")
        Speaker.num_answered += 1

    def _chunk(self, piece: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Speaker) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def test_tables_on_the_terminal(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main(["bench", "serve", "--url", url, "--requests", "9", "--output-tokens", "5", "--slo", "e2e=30"])
    said = capsys.readouterr().out
    assert all(words in said for words in ("speaker", "9 of 9 succeeded", "1152 in, 45 out, cached unknown", "100.0% within e2e 30 s", "p99"))


def test_one_object_and_the_same_in_a_file_and_a_picture(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, drawn = tmp_path / "report.json", tmp_path / "report.svg"
    assert 0 == main(["bench", "serve", "--url", url, "--rate", "200", "--requests", "20", "--json", "--out", str(out), "--picture", str(drawn)])
    captured = capsys.readouterr()
    made = json.loads(captured.out)
    assert ("", made) == (captured.err, json.loads(out.read_text(encoding="utf-8")))
    assert (20, 640, "open") == (made["requests"]["succeeded"], made["tokens"]["output"], made["loop"]["kind"])
    assert ElementTree.parse(drawn).getroot().tag.endswith("svg")


def test_failures_are_exit_code_1_and_are_shown(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert 1 == main(["bench", "serve", "--url", url, "--requests", "3", "--token-ids", "5:99"])
    said = capsys.readouterr().out
    assert "0 of 3 succeeded, 3 failed" in said
    assert "3 x http_500" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rate", "-1"], "--rate is -1.0, not above 0"), (["--url", "http://127.0.0.1:1/v1"], "does not answer"),
        (["--trace", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--out", "/nowhere/report.json"], "/nowhere/report.json"), (["--slo", "x=1"], "--slo holds"),
    ],
)
def test_wrong_input_is_exit_code_2_and_one_message(url: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == main(["bench", "serve", *([] if "--url" in arguments else ["--url", url]), *arguments])
    captured = capsys.readouterr()
    assert ("", 1) == (captured.out, captured.err.count("\n"))
    assert said in captured.err


def test_an_interrupt_leaves_a_report(url: str, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    command = ["bench", "serve", "--url", url, "--rate", "30", "--duration", "600", "--out", str(out)]
    program = "import sys; from firstlight.cli import main; sys.exit(main(sys.argv[1:]))"
    enough = Speaker.num_answered + 10  # two probes and two for warming up among them
    child = subprocess.Popen([sys.executable, "-c", program, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while Speaker.num_answered < enough and child.poll() is None:
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    said, errors = child.communicate(timeout=60)
    assert (130, "") == (child.returncode, errors)
    assert "the run was interrupted" in said
    assert json.loads(out.read_text(encoding="utf-8"))["requests"]["interrupted"]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Our own server with the embedded model, and its log."""
    log = tmp_path_factory.mktemp("serve") / "log"
    program = "import sys; from firstlight.cli import main; sys.exit(main(sys.argv[1:]))"
    with log.open("w", encoding="utf-8") as stream:
        child = subprocess.Popen(
            [sys.executable, "-c", program, "serve", "--port", "0", "--cache-bytes", "64MiB", "--log-format", "json"],
            stdout=stream, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        found = None
        for _ in range(600):
            found = re.search(r"serving on (http://[\d.:]+)", log.read_text(encoding="utf-8"))
            if found or child.poll() is not None:
                break
            time.sleep(0.1)
        assert found, log.read_text(encoding="utf-8")
        yield f"{found[1]}/v1", log
    finally:
        child.terminate()
        child.wait(60)


def test_our_own_server_end_to_end(ours: tuple[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """What the tool counts is what the server logged of the same requests."""
    url, log = ours
    arguments = ["--requests", "5", "--concurrency", "1", "--warmup", "0", "--prefix-tokens", "50", "--input-tokens", "20", "--output-tokens", "4"]
    assert 0 == main(["bench", "serve", "--url", url, "--json", *arguments])
    made = json.loads(capsys.readouterr().out)
    assert (5, {}, 0) == (made["requests"]["succeeded"], made["errors"], made["requests"]["short_answers"])
    assert ["continuous_usage_stats", "ignore_eos", "include_usage"] == made["server"]["extras"]
    assert (5.0, 5 * 70, 5 * 4) == (made["server"]["tokens_per_symbol"], made["tokens"]["input"], made["tokens"]["output"])
    rows: list[dict[str, Any]] = []
    for _ in range(100):  # the server writes its line behind the last byte
        rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if "cached_tokens" in line and line.startswith("{")]
        if len(rows) == 7:
            break
        time.sleep(0.05)
    assert 7 == len(rows)
    assert sum(row["cached_tokens"] for row in rows[2:]) == made["tokens"]["cached"]
    assert 3 * 32 <= made["tokens"]["cached"]


def test_our_own_server_replays_a_trace(ours: tuple[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    trace = Path(__file__).parents[1] / "data" / "traces" / "mooncake" / "conversation_trace.jsonl.gz"
    arguments = ["--trace", str(trace), "--limit", "3", "--scale-lengths", "0.03125", "--longest", "300", "--max-output", "3", "--speed", "60"]
    assert 0 == main(["bench", "serve", "--url", ours[0], "--json", *arguments])
    assert 3 == json.loads(capsys.readouterr().out)["requests"]["succeeded"]
