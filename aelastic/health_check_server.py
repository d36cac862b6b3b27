"""The interface of custom health check servers (torch: `…elastic.agent.server.health_check_server`).

A subclass written for torch's also works with this one, and with the agent: `Supervisor(spec, health_check_server=…)`
takes a server, or a factory for one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

# The value that torch's agent passes.
TIMEOUT_S = 60


class HealthCheckServer:
    """Base class of servers that report whether an agent is alive; it does not listen (torch: `HealthCheckServer`).

    Args:
        alive_callback: returns when the agent was last seen running, in seconds since the epoch; safe in any thread.
        port: port to listen on.
        timeout: seconds without a sign of life after which the agent is considered dead.
    """

    def __init__(self, alive_callback: Callable[[], int], port: int, timeout: int) -> None:
        self._alive_callback = alive_callback
        self._port = port
        self._timeout = timeout

    def start(self) -> None:
        """Called once, before the rendezvous."""

    def stop(self) -> None:
        """Called once, when the job is over."""

    @property
    def alive_callback(self) -> Callable[[], int]:
        """The callback given to the constructor."""
        return self._alive_callback


class NoHealthCheckServer(HealthCheckServer):
    """Tells the agent to start no server, for programs that have already started one."""

    def __init__(self) -> None:
        super().__init__(lambda: 0, 0, TIMEOUT_S)


def create_healthcheck_server(alive_callback: Callable[[], int], port: int, timeout: int) -> HealthCheckServer:
    """Creates a server that does not listen (torch: `create_healthcheck_server`)."""
    return HealthCheckServer(alive_callback, port, timeout)


def delegate(server: Any, alive: Callable[[], int]) -> None:
    """Connects a torch server that was created before its agent (torch's proxy) with the agent's `alive` callback."""
    set_delegate = getattr(getattr(server, "alive_callback", None), "set_delegate", None)
    if set_delegate is not None:
        set_delegate(alive)


class HealthCheckServerFactory(Protocol):
    """Creates a server: a subclass of `HealthCheckServer`, or a function like `create_healthcheck_server`."""

    def __call__(self, alive_callback: Callable[[], int], port: int, timeout: int) -> HealthCheckServer: ...
