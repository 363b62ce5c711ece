"""A server from its start to its end: the socket first, then the model, then requests; SIGTERM drains."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import uvicorn

from firstlight.engine.async_engine import AsyncEngine
from firstlight.engine.llm import LLM
from firstlight.serve.app import build_app
from firstlight.serve.logs import configure
from firstlight.serve.service import Service, Settings
from firstlight.serve.summary import first_request, summary
from firstlight.serve.watch import Watch, tracing_to
from firstlight.spec.errors import ConfigError

log = logging.getLogger("firstlight")
T = TypeVar("T")

KEEP_ALIVE_S = 65
"""How long an idle connection stays: longer than what is usual in front of servers."""
STUCK_S = 15
"""What is granted beyond the drain to a step under way before the process ends without it."""

AT_ONCE_S = 1
"""The same after a second signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where to listen, and what to say where. `insecure` allows other machines in without a key."""

    host: str = "127.0.0.1"
    port: int = 8000
    insecure: bool = False
    log_form: str = "text"
    log_level: str = "info"
    otlp: str | None = None
    otlp_share: float = 1.0


def run(model: str, options: Mapping[str, Any], settings: Settings, place: Place) -> int:
    """Serve until a signal says stop; the exit code. Raises: FirstlightError for whatever is wrong before that."""
    _check_exposure(place, settings)
    undo = configure(form=place.log_form, level=place.log_level, secrets=settings.keys)
    try:
        with _bound(place) as listening:
            _say(f"loading {model} ...")
            with LLM(model, **options) as llm:
                return asyncio.run(_serve(llm, settings, place, listening))
    finally:
        undo()


async def _serve(llm: LLM, settings: Settings, place: Place, listening: socket.socket) -> int:
    tracing = None if place.otlp is None else tracing_to(place.otlp, share=place.otlp_share)
    engine = AsyncEngine(llm.engine)
    watch = Watch(llm, engine, model_name=settings.names[0], texts_logged=settings.texts_logged, tracing=tracing)
    service = Service(llm, settings, engine=engine, watch=watch)
    server: Server | None = None
    try:
        config = uvicorn.Config(
            build_app(service), log_config=None, access_log=False, lifespan="off", ws="none", server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=STUCK_S)
        server = Server(config, service, place)
        _say(summary(service))
        await server.serve(sockets=[listening])
        return server.code
    finally:
        await _ended(service.close(), AT_ONCE_S if server is not None and server.force_exit else STUCK_S)


class Server(uvicorn.Server):
    """The first signal drains, the second ends at once; both are an end as asked for, so the exit code is 0."""

    def __init__(self, config: uvicorn.Config, service: Service, place: Place) -> None:
        super().__init__(config)
        self.service, self.place = service, place
        self.code = 0
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say where."""
        await super().startup(sockets)
        assert sockets
        _say(first_request(self.service, _url(sockets[0])))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal has come; it may have come at any moment, so the loop is told."""
        self._loop.call_soon_threadsafe(self._stop, sig)

    def _stop(self, sig: int) -> None:
        if self._draining is None:
            log.info("%s: no new requests, %d choices under way", signal.Signals(sig).name, self.service.door.num_inside)
            self._draining = asyncio.ensure_future(self._drain())
        else:
            log.warning("%s again: ending at once", signal.Signals(sig).name)
            self.should_exit = self.force_exit = True

    async def _drain(self) -> None:
        if not await _ended(self.service.drain(), self.service.limits.drain_s + STUCK_S):
            log.warning("requests under way were cut off after %g s", self.service.limits.drain_s)
        self.should_exit = True


async def _ended(work: Coroutine[Any, Any, T], most_s: float) -> T:
    """The result of what waits for the engine's thread. A thread in the middle of a step cannot be ended; if it stays there, the process goes."""
    try:
        async with asyncio.timeout(most_s):
            return await work
    except TimeoutError:
        log.critical("a step does not end: leaving without it")
        logging.shutdown()
        os._exit(1)


def _check_exposure(place: Place, settings: Settings) -> None:
    """Raises: ConfigError when others could use the server without a key and nobody said so."""
    try:
        local = ipaddress.ip_address(place.host).is_loopback
    except ValueError:
        local = place.host == "localhost"
    if not local and not settings.keys and not place.insecure:
        raise ConfigError(f"--host {place.host} lets other machines in, and there is no key", "Add --api-key or --api-key-file, or say --insecure.")


def _bound(place: Place) -> socket.socket:
    """The socket, taken before the model is read, so that a wrong address costs no time. Raises: ConfigError."""
    made: socket.socket | None = None
    if not 0 <= place.port < 2**16:
        raise ConfigError(f"cannot listen on port {place.port}", f"Choose another --port, up to {2**16 - 1}.")
    try:
        family, kind, _, _, address = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        made = socket.socket(family, kind)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except (OSError, OverflowError) as error:
        if made is not None:
            made.close()
        raise ConfigError(f"cannot listen on {place.host} port {place.port} ({error})", "Choose another --host or --port.") from None
    return made


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
