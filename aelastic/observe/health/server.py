"""The HTTP server of an agent: probes, status, metrics, stacks.

Enabled by `TORCHELASTIC_HEALTH_CHECK_PORT`.  The server listens before anything is started, answers during rendezvous
and exit barrier, and closes at the end, or when a scraper has seen the end (`--linger`).  It runs on the agent's own
loop, so an answer of `/livez` proves that the loop runs.  aiohttp is imported, in a thread, on the first connection:
a start does not wait for it.

Clients may be slow, hostile, or ten thousand: `limits.py` bounds their connections, aiohttp their requests.  There is
no authentication: the loopback address is for this machine's users, and another address is the user's decision.  But a
web page must not ask through a browser of theirs: the name in `Host` is checked, and a request with an `Origin`
changes nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from importlib import import_module
from importlib.util import find_spec
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import anyio
import anyio.lowlevel

import aelastic
from aelastic.base.host.ports import is_address
from aelastic.base.host.usage import usage_of
from aelastic.base.loop import clock
from aelastic.base.loop.threads import run_sync
from aelastic.errors import InputError
from aelastic.health_check_server import HealthCheckServer as HealthCheckServer  # noqa: PLC0414  for its users
from aelastic.health_check_server import HealthCheckServerFactory
from aelastic.observe.exposition import TICK_S, Exposition
from aelastic.observe.health.address import HEALTH_PORT_VARIABLE, Address, close, listen_at, read_address, url_of
from aelastic.observe.health.limits import DROPPED, ConnectionLimits
from aelastic.observe.health.page import PAGE, POLICY
from aelastic.observe.health.stacks_endpoint import StacksEndpoint
from aelastic.observe.observer import CLOSE_TIMEOUT_S, Observer
from aelastic.observe.prometheus import CONTENT_TYPE, OPEN_CONTENT_TYPE, OPEN_METRICS, Family, Registry
from aelastic.observe.run_events import RunEnded, RunEvent, StacksTaken, StopAsked
from aelastic.observe.status import describe, readiness

if TYPE_CHECKING:
    import socket

    from aiohttp.web import BaseRequest, Response, Server

    from aelastic.observe.health.foreign_server import ForeignServer

_log = logging.getLogger(__name__)
# aiohttp's log lines about invalid requests, which only concern the clients.
_aiohttp_log = logging.getLogger(f"{__name__}.aiohttp")
_aiohttp_log.disabled = True

# The longest line of a request, and how many lines it may have; our paths have ten characters, browsers send 20 lines.
LINE_BYTES_MAX = 4096
HEADERS_MAX = 32
# A slow disk may take its time; an import that takes longer never ends.
IMPORT_TIMEOUT_S = 60.0
# Handlers end with their connections, which are already closed.
SHUTDOWN_TIMEOUT_S = 1.0
LOOK_AGAIN_S = 0.01

JSON_TYPE, TEXT_TYPE = "application/json", "text/plain; charset=utf-8"
CollectStacks = Callable[[str], Awaitable[StacksTaken]]


async def open_health(
    where: str,
    given: HealthCheckServer | HealthCheckServerFactory | None,
    collect_stacks: CollectStacks,
    expose: Callable[[], Exposition],
    linger_s: float = 0.0,
) -> HealthServer | ForeignServer | None:
    """Makes the server, if the environment or the program requests one.

    Args:
        where: the value of `TORCHELASTIC_HEALTH_CHECK_PORT`, or "".
        given: a server with torch's interface to use instead, or a factory for one.
        expose: makes the run's status and metrics.
        linger_s: how long the end of a run stays readable.

    Raises:
        InputError: the address cannot be used, or aiohttp is not installed.
    """
    if given is not None:
        from aelastic.observe.health.foreign_server import foreign_server_of

        return foreign_server_of(given, lambda: read_address(where).port if where.strip() else None)
    if not where.strip():
        return None
    address = read_address(where)
    if find_spec("aiohttp") is None:
        raise InputError(f"{HEALTH_PORT_VARIABLE}={where} needs aiohttp: pip install aiohttp, or unset the variable")
    if is_address(address.host):
        listener = listen_at(address)
    else:  # a name server may take its time
        listener = await run_sync(listen_at, address)
    level = logging.INFO if address.port else logging.WARNING  # the user does not know a port that was not chosen
    _log.log(level, "health checks are answered at %s", url_of(listener))
    return HealthServer(address, listener, collect_stacks, expose(), linger_s)


def request_counters(registry: Registry) -> tuple[Family, Family]:
    """Returns the server's own counters: requests answered, connections dropped."""
    answered = registry.counter("aelastic_http_requests_total", "Answered requests.", "path", "code")
    text = "Connections closed because of a limit."
    return answered, registry.counter("aelastic_http_connections_dropped_total", text, "reason", start=DROPPED)


class HealthServer(Observer):
    """HTTP server of one run.

    Args:
        address: the user's address.
        listener: where clients connect; closed at the end.
        collect_stacks: takes the workers' stacks; its argument is the reason.
        exposition: the run's status and metrics.
        linger_s: how long the end of a run that was not asked to stop stays readable, unless a scraper reads it.
    """

    def __init__(
        self,
        address: Address,
        listener: socket.socket,
        collect_stacks: CollectStacks,
        exposition: Exposition,
        linger_s: float = 0.0,
    ) -> None:
        self.close_timeout_s = CLOSE_TIMEOUT_S + linger_s
        self._linger_s = linger_s
        self._is_stop_asked = self._has_ended = False
        self._is_over = anyio.Event()  # the end was read, or the agent was asked to stop
        self._listener = listener
        self._stacks = StacksEndpoint(collect_stacks)
        bound = listener.getsockname()[0]
        self._hosts = {address.host.lower(), "localhost"} if ip_address(bound).is_loopback else None
        self._exposition = exposition
        self._requests, self._dropped = request_counters(self._exposition.metrics.registry)
        self._limits: ConnectionLimits | None = None
        self._server: Server | None = None
        self._routes: dict[str, tuple[str, Callable[[BaseRequest], Awaitable[Response]]]] = {
            "/": ("GET", self._index),
            "/livez": ("GET", self._livez),
            "/readyz": ("GET", self._readyz),
            "/healthz": ("GET", self._livez),
            "/status": ("GET", self._get_status),
            "/metrics": ("GET", self._get_metrics),
            "/stacks": ("POST", self._post_stacks),
        }

    def tell(self, event: RunEvent, now: float) -> None:  # noqa: ARG002  the exposition keeps what happened
        self._is_stop_asked |= isinstance(event, StopAsked)
        self._has_ended |= isinstance(event, RunEnded)

    async def run(self) -> None:
        try:
            await self._answer_requests()
        finally:
            if not self._linger_s:
                await self._shut_down()

    async def aclose(self) -> None:
        try:
            if self._linger_s and self._has_ended and not self._is_stop_asked:
                await self._linger()
        finally:
            await self._shut_down()

    def give_up(self) -> None:
        self._is_over.set()

    async def _linger(self) -> None:
        """Continues to answer, so that a periodic scraper sees how the run ended."""
        _log.warning(
            "the run is over: waiting up to %g s for a request of %s/metrics; SIGTERM ends the wait",
            self._linger_s, url_of(self._listener),
        )  # fmt: skip
        with anyio.move_on_after(self._linger_s):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._answer_requests, name="health: linger")
                await self._is_over.wait()
                with anyio.move_on_after(SHUTDOWN_TIMEOUT_S):
                    while self._limits:  # noqa: ASYNC110  the answer is on its way; aiohttp closes its connection
                        await anyio.sleep(LOOK_AGAIN_S)
                tasks.cancel_scope.cancel()

    async def _answer_requests(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._tick, name="health: tick")
            if self._limits is None:
                self._limits = await self._open_limits()
            await self._limits.run()

    async def _shut_down(self) -> None:
        self.close()
        server, self._server = self._server, None
        if server is not None:
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()  # lets connections notice that they are closed
                await server.shutdown(SHUTDOWN_TIMEOUT_S)

    def close(self) -> None:
        """Stops listening, even if the run never began."""
        close(self._listener)
        if self._limits is not None:
            self._limits.drop_all()

    async def _open_limits(self) -> ConnectionLimits:
        """Waits for the first connection, and returns the limits that accept connections."""
        await anyio.wait_readable(self._listener)
        with anyio.fail_after(IMPORT_TIMEOUT_S):
            web = await run_sync(import_module, "aiohttp.web", abandon_on_cancel=True)
        self._server = web.Server(
            self._handle,
            handler_cancellation=True,
            access_log=None,
            logger=_aiohttp_log,
            tcp_keepalive=False,
            keepalive_timeout=0,
            lingering_time=0,
            auto_decompress=False,
            max_line_size=LINE_BYTES_MAX,
            max_field_size=LINE_BYTES_MAX,
            max_headers=HEADERS_MAX,
            read_bufsize=LINE_BYTES_MAX,
        )
        return ConnectionLimits(self._listener, self._server, self._dropped.inc)

    async def _tick(self) -> None:
        while True:
            await anyio.sleep(TICK_S)
            if self._limits is not None:
                self._limits.drop_slow(asyncio.get_running_loop().time())

    # Answers.

    async def _handle(self, request: BaseRequest) -> Response:
        assert self._limits is not None
        self._limits.has_asked(request.protocol)
        response = await self._answer(request)
        response.headers["Cache-Control"] = "no-store"
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.force_close()
        self._requests.inc(request.path if request.path in self._routes else "other", response.status)
        return response

    async def _answer(self, request: BaseRequest) -> Response:
        if not self._is_welcome(request):
            return _text("only people and programs on this machine may use this page, not other web pages\n", 403)
        allowed, answer = self._routes.get(request.path, ("", None))
        if answer is None:
            return _text(f"no such page; try {', '.join(self._routes)}\n", 404)
        if request.method != allowed and (request.method, allowed) != ("HEAD", "GET"):
            response = _text(f"use {allowed}\n", 405)
            response.headers["Allow"] = "GET, HEAD" if allowed == "GET" else allowed
            return response
        try:
            return await answer(request)
        except Exception:  # noqa: BLE001  no answer is worth the job
            _log.warning("cannot answer %s %s", request.method, request.path, exc_info=True)
            return _text("a bug in aelastic: see the agent's log\n", 500)

    def _is_welcome(self, request: BaseRequest) -> bool:
        """Returns false for a request that a web page may have made."""
        if request.method not in {"GET", "HEAD"} and "Origin" in request.headers:
            return False
        if self._hosts is None or "Host" not in request.headers:
            return True
        with suppress(ValueError):
            # A page's own name may lead here (DNS rebinding); an address does not.
            host = urlsplit(f"//{request.headers['Host']}").hostname or ""
            host = host.rstrip(".")  # as some resolvers write it
            return host in self._hosts or host.endswith(".localhost") or is_address(host)
        return False

    async def _index(self, request: BaseRequest) -> Response:
        if "text/html" in request.headers.get("Accept", ""):
            response = _text(PAGE, content_type="text/html; charset=utf-8")
            response.headers["Content-Security-Policy"] = POLICY
            return response
        lines = [f"{method:4} {path}" for path, (method, _) in self._routes.items() if path != "/"]
        return _text("\n".join([f"aelastic {aelastic.__version__}", *lines, ""]))

    async def _livez(self, request: BaseRequest) -> Response:
        if "verbose" not in request.query:
            return _text("ok\n")
        name, why = request.path.strip("/"), readiness(self.run_state, self._exposition.kernel_states())[1]
        return _text(
            f"[+]loop ok: {self._exposition.lag_s * 1000:.1f} ms late when last measured\n"
            f"[ ]workers are not part of it: {why}\n{name} check passed\n"
        )

    async def _readyz(self, request: BaseRequest) -> Response:
        is_ready, why = readiness(self.run_state, self._exposition.kernel_states())
        if is_ready and "verbose" not in request.query:
            return _text("ok\n")
        sign, end = ("+", "passed") if is_ready else ("-", "failed")
        return _text(f"[{sign}]workers: {why}\nreadyz check {end}\n", 200 if is_ready else 503)

    async def _get_status(self, _: BaseRequest) -> Response:
        await self._exposition.catch_up()
        used, kernel = self._exposition.usage(), self._exposition.kernel_states()
        described = describe(self.run_state, clock.now(), datetime.now(UTC), used, kernel)
        agent = usage_of("self")
        described["agent"] = {
            "version": aelastic.__version__,
            "pid": os.getpid(),
            "cpu_s": None if agent is None else agent.cpu_s,
            "rss_bytes": None if agent is None else agent.rss_bytes,
            "loop_lag_s": round(self._exposition.lag_s, 6),
        }
        return _text(json.dumps(described, indent=2) + "\n", content_type=JSON_TYPE)

    async def _get_metrics(self, request: BaseRequest) -> Response:
        if self._has_ended and request.method == "GET":
            self._is_over.set()
        await self._exposition.catch_up()
        is_open = OPEN_METRICS in request.headers.get("Accept", "")
        text = self._exposition.metrics_text(is_open=is_open)
        return _text(text, content_type=OPEN_CONTENT_TYPE if is_open else CONTENT_TYPE)

    async def _post_stacks(self, request: BaseRequest) -> Response:
        if not self.run_state.running:
            return _text(f"no worker runs: {readiness(self.run_state)[1]}\n", 503)
        collection = await self._stacks.take()
        taken = collection.taken
        if taken is None:
            return _text(f"cannot take the stacks: {collection.error}\n", 500)
        if not taken.source:
            return _text("no worker runs any more\n", 503)
        compared = "" if self.run_state.compared is None else self.run_state.compared[0].text
        if JSON_TYPE in request.headers.get("Accept", ""):
            workers = [
                {"local_rank": rank, "source": source, "text": collection.texts.get(rank)}
                for rank, source in sorted(taken.source.items())
            ]
            summary = {"generation": taken.generation, "compared": compared or None, "folder": taken.path or None}
            return _text(json.dumps({**summary, "workers": workers}, indent=2) + "\n", content_type=JSON_TYPE)
        parts = [
            f"--- local rank {rank}, by {source}\n{collection.texts.get(rank, '')}".rstrip()
            for rank, source in sorted(taken.source.items())
        ]
        head = f"generation {taken.generation}, in {taken.path or 'no file'}"
        return _text("\n\n".join([*filter(None, [compared]), head, *parts]) + "\n")


def _text(text: str, status: int = 200, content_type: str = TEXT_TYPE) -> Response:
    from aiohttp.web import Response

    return Response(body=text.encode(errors="replace"), status=status, headers={"Content-Type": content_type})
