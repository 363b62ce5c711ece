"""What is said while serving: lines to read or lines of JSON, each with the id of the request that it is about. Standard library only.

No prompt, no answer and no key is part of a line.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, TextIO

from firstlight.spec.errors import ConfigError

LOGGERS = ("firstlight", "uvicorn", "opentelemetry")
FORMS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
HIDDEN = "[hidden]"
SAID = {"method", "path", "status"}
"""Fields of an access line that its message says too; lines to read leave them out."""

MARKS: ContextVar[Mapping[str, str]] = ContextVar("firstlight_marks", default={})  # noqa: B039  (a mapping nobody changes)
"""Fields of the request whose task is running. Lines of libraries get them too, and nothing is computed from them."""


def configure(*, form: str = "text", level: str = "info", secrets: Iterable[str] = (), stream: TextIO | None = None) -> Callable[[], None]:
    """Send the lines of LOGGERS to a stream (None: stderr), and return what undoes it. `secrets` are blotted out wherever they turn up."""
    for name, value, known in (("log_form", form, FORMS), ("log_level", level, LEVELS)):
        if value not in known:
            raise ConfigError(f"`{name}` is {value!r}", f"Use one of {', '.join(known)}.")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter((JsonLines if form == "json" else TextLines)(secrets))
    handler.addFilter(_stamp)
    before = [(logging.getLogger(name), logging.getLogger(name).level, logging.getLogger(name).propagate) for name in LOGGERS]
    for logger, _, _ in before:
        logger.addHandler(handler)
        logger.setLevel(level.upper())
        logger.propagate = False

    def undo() -> None:
        for logger, old, propagate in before:
            logger.removeHandler(handler)
            logger.setLevel(old)
            logger.propagate = propagate

    return undo


def _stamp(record: logging.LogRecord) -> bool:
    """Put the request's fields on a record while its task is still the current one."""
    record.marks = MARKS.get()
    return True


class _Lines(logging.Formatter):
    """What a client sent cannot look like a record of its own."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        super().__init__()
        self._secrets = sorted({form for secret in secrets if secret for form in (secret, json.dumps(secret)[1:-1])}, key=len, reverse=True)

    def format(self, record: logging.LogRecord) -> str:
        """The line, with every secret blotted out."""
        line = self.line(record, {**getattr(record, "marks", {}), **getattr(record, "fields", {})})
        for secret in self._secrets:
            line = line.replace(secret, HIDDEN)
        return line

    def line(self, record: logging.LogRecord, fields: Mapping[str, Any]) -> str:
        """The line as such."""
        return record.getMessage()


class JsonLines(_Lines):
    """One JSON object per line: time (UTC), level, logger, message, the fields, and a traceback as `exception`."""

    def line(self, record: logging.LogRecord, fields: Mapping[str, Any]) -> str:
        """The object; fields never replace the first four."""
        first = {"time": _time(record.created), "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        said = {**first, **{name: value for name, value in fields.items() if name not in first and value is not None}}
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)


class TextLines(_Lines):
    """Time (UTC), level, message, then `name=value`; a traceback follows on lines of its own."""

    def line(self, record: logging.LogRecord, fields: Mapping[str, Any]) -> str:
        """Values that hold more than one word stand in quotes."""
        tail = [f"{name}={_word(value)}" for name, value in fields.items() if value is not None and name not in SAID]
        line = " ".join([_time(record.created), f"{record.levelname.lower():7}", _indented(record.getMessage()), *tail])
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _time(created: float) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(created))}.{int(created % 1 * 1000):03d}Z"


def _word(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return text if text.isprintable() and text and not set(text) & set(" \"=") else json.dumps(text)


def _indented(text: str) -> str:
    """Further lines stand behind a margin, where no line of ours begins; what cannot be printed is spelled out."""
    return "\n    ".join(line if line.isprintable() else json.dumps(line)[1:-1] for line in text.split("\n"))
