"""torch's TCPStore for the workers of rank 0's node, served by a child process of the agent.

The agent never imports torch: that takes a second, holds the interpreter's lock and would stall the loop.
It holds the port, listens where the workers will connect once that is known, starts them, and hands the listening
socket to a child (`server.py`), which starts as the first of them loads torch, or connects.  Workers that connect
early wait in the socket's queue.  Every round gets a store of its own on the same socket, so no key of an earlier
round is ever read, and the port cannot be taken by another process in between.

If the agents also meet at this store (`--rdzv-backend static`), they do so before there is a round: then it is
served from `open` on, and holds the preset keys.

If no store can be served, a warning is logged, and the port is closed: workers that need it fail by themselves,
others never notice.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

import anyio

from aelastic.base.host.names import look_up
from aelastic.base.host.ports import LOOPBACKS, HeldPort
from aelastic.base.host.shortages import shortage_of
from aelastic.base.loop import clock
from aelastic.base.loop.growth import wait_opened
from aelastic.base.loop.threads import run_sync
from aelastic.errors import HostError, InputError
from aelastic.workers.tcpstore.child import Death, Fork, StoreProcess

T = TypeVar("T")

_log = logging.getLogger(__name__)

# Gives the workers a head start: their interpreters are starting, and on a busy machine the child would compete with
# them.  Measured on 2 cores: without it, their first output comes a sixth later, and the store no sooner.
HEAD_START_S = 0.1
# If something on this host ends or refuses the child, it is started this often in one round, each time after a longer
# pause.  A child that has lived for a while resets the count.
STARTS_MAX = 10
PAUSE_MAX_S = 10.0
LONG_LIFE_S = 60.0
# A store ends within milliseconds; a child that does not answer dies with its workers.
DROP_TIMEOUT_S = 5.0
# The name is in /etc/hosts on most hosts; otherwise a name server is asked.
NAME_TIMEOUT_S = 1.0


class StoreHost:
    """One port, and the stores that are served on it, one at a time.

    Args:
        env: the environment of the child process.
        is_bind_all: as in `HeldPort`.
    """

    def __init__(self, env: Mapping[str, str], *, is_bind_all: bool = False) -> None:
        self._is_bind_all = is_bind_all
        self._held: HeldPort | None = None
        self._listeners: list[socket.socket] = []  # of this port; the child forwards from others to the first
        self.is_on_loopback = False  # all workers are on this host
        self._first_loopback = LOOPBACKS[0]  # where most clients of `localhost` connect
        self._process = StoreProcess(env, "served the workers' store")
        self._answered = anyio.Event()  # set at each answer of the child
        self._called = anyio.Event()  # set when a store is wanted, while there is no child
        self._is_wanted = False  # a round is on, or the agents meet here
        self._is_new = False  # no workers have used the store
        self._presets: dict[str, str] = {}
        self._started_at = 0.0
        self._losses = 0  # of children in a row that ended soon, or could not be started

    def fork_from(self, fork: Fork) -> None:
        """Makes the child a fork of a process that has torch, so that it starts at once."""
        self._process.fork = fork

    async def find_loopback(self) -> None:
        """Finds out where most clients of `localhost` will connect; IPv4 if that is not known soon."""
        with suppress(OSError):
            addresses = await look_up("localhost", NAME_TIMEOUT_S)
            self._first_loopback = addresses[0].host  # torch's TCPStore takes the first address of a name

    def open(self, port: int, loopback: str = "") -> int:
        """Makes sure that we hold a port, and returns its number; the store of the last round is dropped.

        Args:
            port: 0 picks a free one.
            loopback: if all workers are on this host: the loopback address, or name, at which they find the store.

        Raises:
            InputError: the port is in use, or not allowed.
        """
        self._is_wanted = self._is_new = False
        self.hold(port)
        if loopback:
            first = self._first_loopback if loopback == "localhost" else loopback
            self.is_on_loopback = self.listen_at([first, *LOOPBACKS])
        if self._presets and self._listeners:
            self.serve()
            self._is_new = True
        else:
            self._process.send("drop")
        return self._port

    def hold(self, port: int) -> int:
        """Reserves a port, on which nothing listens yet, and returns its number.

        Args:
            port: 0 picks a free one.

        Raises:
            InputError: the port is in use, or not allowed.
        """
        if self._held is None:
            self._held = _refusing(lambda: HeldPort(port, "the workers' store", is_bind_all=self._is_bind_all), port)
        return self._port

    def listen_at(self, addresses: Sequence[str]) -> bool:
        """Listens where the workers will connect, as `HeldPort.listen_at` does, unless the agents meet here already.

        Raises:
            InputError: the port is in use.
        """
        held = self._held
        if held is None or (self._presets and self._listeners):
            return True  # it was closed, or others know where it is
        is_there = _refusing(lambda: held.listen_at(addresses), held.number)
        self._listeners = held.listeners
        return is_there

    @property
    def _port(self) -> int:
        assert self._held is not None
        return self._held.number

    def preset(self, key: str, value: str) -> None:
        """Sets a key of every store from now on, and of the one that is served."""
        self._presets[key] = value
        if self._is_wanted:
            self._process.send("set", key=key, value=value)

    def serve(self) -> None:
        """Serves a new store on the port.  Does not wait: the store comes up while the workers start."""
        self._is_wanted = True
        self._losses = 0
        if not self._is_new:  # else workers of other nodes may be connected to it already
            self._hand_over()
        self._is_new = False
        self._called.set()

    async def wait_dropped(self) -> None:
        """Returns when the store of the last round is gone, so that no worker of the next one can connect to it."""
        with anyio.move_on_after(DROP_TIMEOUT_S):
            while self._process.is_busy:
                await self._answered.wait()

    async def run(self) -> None:
        """Follows the child, and starts another if it dies.  Runs until cancelled."""
        await self._wait_needed()
        while True:
            if self._process.is_running:
                try:
                    await self._process.receive()
                except Death as death:
                    self._on_death(death)
                answered, self._answered = self._answered, anyio.Event()
                answered.set()
                continue
            await self._called.wait()
            if self._process.fork is None or self._losses:
                await anyio.sleep(min(HEAD_START_S * 2**self._losses, PAUSE_MAX_S))
            self._called = anyio.Event()
            if self._is_wanted and self._listeners:
                await self._start()

    async def _wait_needed(self) -> None:
        """Returns when a store will be needed: the child takes far more memory than the agent, and many jobs need none.

        A process of this machine loads torch, or connects.  Agents that meet at this store need it at once.
        """
        async with anyio.create_task_group() as tasks:

            async def wait_for(event: Awaitable[None]) -> None:
                await event
                tasks.cancel_scope.cancel()

            # From the beginning: workers may load torch before they are reported as started.
            tasks.start_soon(wait_for, _torch_loaded())
            await self._called.wait()
            if self._presets:
                tasks.cancel_scope.cancel()
            for listener in self._listeners:
                tasks.start_soon(wait_for, anyio.wait_readable(listener))

    async def aclose(self) -> None:
        """Ends the child and closes the port."""
        await self._process.aclose()
        self._close_port()

    async def _start(self) -> None:
        try:
            await self._process.start()
        except OSError as error:
            self._on_loss(f"the workers' store cannot be started ({shortage_of(error) or error})")
            return
        self._started_at = clock.now()
        self._hand_over()

    def _on_loss(self, what: str) -> None:
        """Starts another child, unless that has been tried too often."""
        self._losses += 1
        if self._losses < STARTS_MAX:
            if what:
                _log.warning("%s; starting another", what)
            self._called.set()
            return
        # Workers that connect later are refused at once, instead of waiting for minutes.
        self._close_port()
        _log.warning(
            "%s; no store is served until the next round: %d starts have failed",
            what,
            self._losses,
            extra={"topic": "the-store-of-the-workers-cannot-be-served"},
        )

    def _hand_over(self) -> None:
        if self._listeners:
            self._process.send("serve", *(each.fileno() for each in self._listeners), keys=self._presets)

    def _on_death(self, death: Death) -> None:
        if not self._is_wanted:
            return  # the next round starts another
        if clock.now() - self._started_at >= LONG_LIFE_S:
            self._losses = 0
        if death.has_worked:
            # Its keys are lost, so this round's workers will fail.  Those yet to connect must find a store.
            self._on_loss(f"the process that serves the workers' store died (exit code {death.code})")
        elif death.code == -signal.SIGKILL:  # out of memory, or killed by hand: nothing is wrong with torch
            self._on_loss("the process that serves the workers' store was killed (SIGKILL)")
        elif death.is_hopeless:
            self._close_port()
            _log.warning(
                "the workers' store cannot be served (exit code %s): check that %s can import torch",
                death.code,
                sys.executable,
                extra={"topic": "torch-is-not-installed"},
            )
        else:
            self._on_loss("")  # the quick way to load torch has failed; the careful one is tried next

    def _close_port(self) -> None:
        if self._held is not None:
            self._held.close()
        self._held, self._listeners = None, []


async def _torch_loaded() -> None:
    """Returns when a process loads torch; at once if this one has, whose workers may be its forks."""
    if "torch" in sys.modules:
        return
    spec = await run_sync(importlib.util.find_spec, "torch")
    if spec is None or not spec.submodule_search_locations:
        await anyio.sleep_forever()
        return
    await wait_opened(os.path.join(spec.submodule_search_locations[0], "lib", "libtorch_cpu.so"))


def _refusing(make: Callable[[], T], port: int) -> T:
    try:
        return make()
    except (OSError, OverflowError) as error:
        if shortage := shortage_of(error):
            raise HostError(
                f"port {port} cannot be opened for the workers' store: {shortage}",
                topic="the-store-of-the-workers-cannot-be-served",
            ) from None
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise InputError(
            f"port {port} cannot be opened for the workers' store ({reason}): choose another --master-port",
            topic="the-store-of-the-workers-cannot-be-served",
        ) from None
