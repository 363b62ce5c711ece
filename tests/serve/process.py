"""`firstlight serve` as a process of its own, as users start it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60.0


class Process:
    """A running server; `said` is what it wrote so far, `before` a program that runs in front of it."""

    def __init__(self, *arguments: str, before: str = "") -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        program = f"{before}\nimport sys; from firstlight.cli import main; sys.exit(main(['serve', *sys.argv[1:]]))"
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, "--port", "0", "--cache-bytes", "64MiB", *arguments], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self._wait_for(r"serving on (http://\S+)")

    @property
    def said(self) -> str:
        """Both of its outputs."""
        return "".join(self.lines)

    def stop(self, sig: int = signal.SIGTERM) -> int:
        """Send a signal, wait for the end, and give the exit code."""
        self.process.send_signal(sig)
        return self.wait()

    def wait(self) -> int:
        """The exit code."""
        code = self.process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        return code

    def rss_bytes(self) -> int:
        """Memory that it holds now."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        return int(re.search(r"VmRSS:\s+(\d+) kB", status).group(1)) * 1024  # type: ignore[union-attr]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    def _wait_for(self, pattern: str) -> str:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            match = re.search(pattern, self.said)
            if match is not None:
                return match.group(1)
            if self.process.poll() is not None:
                self._reader.join(LIMIT_S)
                raise AssertionError(f"the server ended with {self.process.returncode}: {self.said}")
            time.sleep(0.02)
        self.process.kill()
        raise AssertionError(f"the server did not come up: {self.said}")


@contextmanager
def server(*arguments: str) -> Iterator[Process]:
    """A server that ends with the block, by SIGTERM and well."""
    process = Process(*arguments)
    try:
        yield process
        if process.process.poll() is None:
            assert 0 == process.stop(), process.said
    finally:
        process.process.kill()
        process.process.wait()
