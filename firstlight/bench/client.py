"""The client of an OpenAI server: what it accepts is asked for once, then requests are written and their replies measured."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

from firstlight.bench.content import Content
from firstlight.bench.exchange import Exchange, Stream
from firstlight.bench.options import ENDPOINTS, Options
from firstlight.bench.wire import Fault, Pool
from firstlight.bench.workload import Kind, Turn
from firstlight.spec.errors import PeerError

EXTRAS = ("continuous_usage_stats", "ignore_eos", "include_usage")
"""What not every server knows, in the order in which it is given up."""
REFUSALS = (400, 422)
FULL = (429, 503)
PROBE_SYMBOLS = (32, 96)
MOST_PAUSE_S = 60.0


@dataclass(slots=True)
class Server:
    """What is known of the other side."""

    model: str = ""
    listed: dict[str, Any] | None = None
    software: str | None = None
    extras: list[str] = field(default_factory=lambda: list(EXTRAS))
    tokens_per_symbol: float = 1.0
    overhead_tokens: float | None = None
    """Prompt tokens of an empty request: what the chat format adds. None: the server does not count."""


@dataclass(slots=True)
class Dialogue:
    """What one conversation has said so far."""

    text: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)


class Client:
    """Asks one server. Time, pause and connection are given, so that a test may plant all of them."""

    def __init__(self, options: Options, pool: Pool, content: Content, clock: Callable[[], float], sleep: Callable[[float], Awaitable[None]]) -> None:
        self.options, self.pool, self.content = options, pool, content
        self.clock, self.sleep = clock, sleep
        self.server = Server()
        self._path = ENDPOINTS[options.endpoint]
        self._fields = options.fields

    def body(self, turn: Turn, dialogue: Dialogue) -> bytes:
        """The request of a turn, which becomes part of what was said."""
        made = self.content.joined(turn.pieces)
        if isinstance(made, list):
            return self._written({"prompt": made}, turn.num_output)
        if self.options.endpoint == "chat":
            dialogue.messages.append({"role": "user", "content": made.lstrip()})
            return self._written({"messages": dialogue.messages}, turn.num_output)
        dialogue.text += made
        return self._written({"prompt": dialogue.text}, turn.num_output)

    def _written(self, asked: dict[str, Any], num_output: int) -> bytes:
        extras = self.server.extras
        fields = {"model": self.server.model, **asked, "max_tokens": num_output, "temperature": self.options.temperature, "stream": True}
        stream = {name: True for name in ("include_usage", "continuous_usage_stats") if name in extras}
        if stream:
            fields["stream_options"] = stream
        if "ignore_eos" in extras and self.options.ignore_eos:
            fields["ignore_eos"] = True
        return json.dumps({**fields, **self._fields}, separators=(",", ":")).encode()

    async def ask(self, body: bytes, turn: Turn, due_s: float, dialogue: Dialogue | None = None) -> Exchange:
        """Send a request and measure its reply; the answer becomes part of the dialogue, if there is one to go on."""
        exchange = Exchange(due_s, self.clock(), turn.num_output, turn.num_shared)
        try:
            async with asyncio.timeout(self.options.timeout):
                stream, exchange.fault = await self._send(body, exchange, dialogue is not None)
        except TimeoutError:
            stream, exchange.fault = None, Fault("timeout", f"not over after {self.options.timeout:g} s")
        exchange.end_s = self.clock()
        if dialogue is not None and stream is not None and stream.text is not None:
            self._answered("".join(stream.text), dialogue)
        return exchange

    async def _send(self, body: bytes, exchange: Exchange, keep_text: bool) -> tuple[Stream, Fault | None]:
        """As often as it takes, while the server says that it is full and retries are left."""
        while True:
            stream = Stream(exchange, keep_text)
            fault = stream.close(await self.pool.send("POST", self._path, body, stream))
            if fault is None or stream.status not in FULL:
                return stream, fault
            exchange.num_refused += 1
            if exchange.num_refused > self.options.retries:
                return stream, fault
            await self.sleep(_pause_s(stream.headers.get("retry-after", "")))

    def _answered(self, answer: str, dialogue: Dialogue) -> None:
        if self.options.endpoint == "chat":
            dialogue.messages.append({"role": "assistant", "content": answer})
        else:
            dialogue.text += answer

    async def meet(self) -> None:
        """Find the model, what the server accepts, and how many tokens it makes of a word.

        Raises:
            PeerError: nobody answers there, or not as an OpenAI server does.
        """
        listed = await self._models()
        self.server.model = self.options.model or (str(listed[0].get("id")) if listed else "")
        if not self.server.model:
            raise PeerError(f"{self.options.url}/models lists no model", "Name one with --model.")
        self.server.listed = next((item for item in listed if item.get("id") == self.server.model), None)
        short = await self._probe(PROBE_SYMBOLS[0])
        long = await self._probe(PROBE_SYMBOLS[1])
        if short.num_input is None or long.num_input is None:
            return
        rate = (long.num_input - short.num_input) / (PROBE_SYMBOLS[1] - PROBE_SYMBOLS[0])
        if rate > 0:
            self.server.tokens_per_symbol = self.content.tokens_per_symbol = rate
            self.server.overhead_tokens = round(short.num_input - rate * PROBE_SYMBOLS[0], 3)

    async def _models(self) -> Sequence[dict[str, Any]]:
        """The models that the server lists; none where it has no list but a model was named."""
        stream = Stream(Exchange(0.0, 0.0), keep_text=False)
        plain = Plain(stream)
        try:
            async with asyncio.timeout(self.options.timeout):
                fault = await self.pool.send("GET", "/models", b"", plain)
        except TimeoutError:
            fault = Fault("timeout", f"no list of models after {self.options.timeout:g} s")
        self.server.software = stream.headers.get("server")
        if fault is not None:
            raise PeerError(f"{self.options.url} does not answer: {fault.message}", "Start the server, or give its address with --url.")
        try:
            found = json.loads(plain.text)["data"] if stream.status == 200 else None
        except (ValueError, KeyError, TypeError):
            found = None
        if isinstance(found, list):
            return [item for item in found if isinstance(item, dict)]
        if self.options.model is None or stream.status == 401:
            raise PeerError(
                f"{self.options.url}/models answers {stream.status}: {plain.text[:200].decode('utf-8', 'replace')!r}",
                "Give the address up to /v1 with --url, the key with --api-key, or a model with --model.",
            )
        return []

    async def _probe(self, num_symbols: int) -> Exchange:
        """One token behind a prompt of so many symbols; whatever makes the server refuse it is left out from then on."""
        length = num_symbols * self.content.tokens_per_symbol
        turn = Turn(((Kind.WARM.named((1 << 12) + num_symbols), length),), 1)
        while True:
            dialogue = Dialogue()
            exchange = await self.ask(self.body(turn, dialogue), turn, self.clock())
            fault = exchange.fault
            if fault is not None and fault.kind in {f"http_{status}" for status in REFUSALS} and self.server.extras:
                self.server.extras.pop(0)
            elif fault is not None and fault.kind != "empty":
                raise PeerError(f"{self.options.url}{self._path} answers a first request with {fault.kind}: {fault.message}", _advice(fault))
            else:
                return exchange


class Plain:
    """Receives a reply that is one text."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.text = stream, b""

    def head(self, status: int, headers: Any) -> None:
        """As the stream does."""
        self.stream.head(status, headers)

    def body(self, piece: bytes, at_s: float) -> None:
        """All of it."""
        self.text += piece


def _pause_s(retry_after: str) -> float:
    """Retry-After as seconds or as a date; one second where it says nothing."""
    if retry_after.isdecimal():
        return min(float(retry_after), MOST_PAUSE_S)
    try:
        wanted = parsedate_to_datetime(retry_after).timestamp() - time.time()
    except ValueError:
        return 1.0
    return max(0.0, min(wanted, MOST_PAUSE_S))


def _advice(fault: Fault) -> str:
    if fault.kind in ("http_401", "http_403"):
        return "Give the key with --api-key."
    if fault.kind == "http_404":
        return "Give the address up to /v1 with --url, and a model that it serves with --model."
    return "Try `--endpoint` the other way round, or see what the server logs."
