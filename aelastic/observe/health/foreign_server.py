"""Runs a health check server with torch's interface, supplied by the program: starts it, lets it poll, and stops it.

Its methods may block and may raise: each call has its own thread and a time limit.  Failures are logged, and never end
a job.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import anyio

from aelastic.health_check_server import (
    TIMEOUT_S,
    HealthCheckServer,
    HealthCheckServerFactory,
    NoHealthCheckServer,
    delegate,
)
from aelastic.observe.observer import Observer
from aelastic.observe.run_events import RunEvent

_log = logging.getLogger(__name__)

# A server that listens starts in milliseconds; one whose `start` serves returns only at the end.
START_TIMEOUT_S = 10.0
# Within an observer's time to close (`observer.CLOSE_TIMEOUT_S`).
STOP_TIMEOUT_S = 3.0
# `alive` returns whole seconds.
TICK_S = 1.0


def foreign_server_of(
    given: HealthCheckServer | HealthCheckServerFactory, read_port: Callable[[], int | None]
) -> ForeignServer | None:
    """Returns the observer that runs a given server; `None` if no server should run.

    Args:
        given: a server, ours or torch's; or a factory, which is called if there is a port.
        read_port: returns the port that the environment names, if any.

    Raises:
        InputError: the environment's value is invalid.
    """
    if isinstance(given, NoHealthCheckServer):
        return None
    made: Any = given
    if not isinstance(given, type) and hasattr(given, "start"):
        return ForeignServer(lambda _: made)
    if (port := read_port()) is None:
        return None
    return ForeignServer(lambda alive: made(alive_callback=alive, port=port, timeout=TIMEOUT_S))


class ForeignServer(Observer):
    """Observer that runs one server.

    Args:
        make: makes or returns the server; its argument returns when the agent's loop was last alive.
    """

    def __init__(self, make: Callable[[Callable[[], int]], HealthCheckServer]) -> None:
        self._make = make
        self._server: HealthCheckServer | None = None
        self._seen_alive = _now()

    def alive(self) -> int:
        """Returns when the agent's loop last ran, in seconds of the wall clock.  Callable from any thread."""
        return self._seen_alive

    def tell(self, event: RunEvent, now: float) -> None:
        """Does nothing: the server polls `alive`."""

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_call, "start", self._start, START_TIMEOUT_S, name="health check server: start")
            while True:
                self._seen_alive = _now()
                await anyio.sleep(TICK_S)

    def _start(self) -> None:
        self._server = server = self._make(self.alive)
        delegate(server, self.alive)
        server.start()

    def close(self) -> None:
        """Does nothing: nothing is open before `run`."""

    async def aclose(self) -> None:
        if self._server is not None:
            await _call("stop", self._server.stop, STOP_TIMEOUT_S)


async def _call(what: str, function: Callable[[], Any], timeout_s: float) -> None:
    """Calls a function in a thread; a daemon, so that the interpreter's end does not wait for it either."""
    loop, is_over = asyncio.get_running_loop(), asyncio.Event()

    def body() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001  the user's code; the job is worth more
            _log.warning(
                "the health check server's %s failed: %s: %s",
                what,
                type(error).__name__,
                error,
                extra={"topic": "a-health-check-server-failed"},
            )
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(is_over.set)

    threading.Thread(target=body, name=f"health check server: {what}", daemon=True).start()
    with anyio.move_on_after(timeout_s) as waited:
        await is_over.wait()
    if waited.cancelled_caught:
        _log.warning(
            "the health check server's %s did not return within %g s; the job continues without it",
            what,
            timeout_s,
            extra={"topic": "a-health-check-server-failed"},
        )


def _now() -> int:
    return int(datetime.now(UTC).timestamp())
