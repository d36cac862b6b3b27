"""torch's TCPStore for the workers of rank 0's node, served by a child process of the agent.

The agent never imports torch: that takes a second, holds the interpreter's lock and would stall the loop.
It binds the port once, starts the workers, and hands the listening socket to the child (`store_server.py`),
which imports torch while the workers do.  Workers that connect early wait in the socket's queue.  Every
round gets a store of its own on the same socket, so no key of an earlier round is ever read, and the port
can't be taken by somebody else in between.

If no store can be served, that is told, and the port is closed: workers that need it fail by themselves,
others never notice.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import anyio

from aelastic.children import wait_ended, waited_for
from aelastic.errors import InputError

_log = logging.getLogger(__name__)

# Thousands of workers connect at the same moment; the kernel caps this at net.core.somaxconn.
BACKLOG = 4096
# The workers go first: so long they start their interpreters, and on a machine that is full of them the child would
# take that time from them.  Measured on 2 cores: without it the first line comes a sixth later, the store no sooner.
HEAD_START_S = 0.1
# A killed process is gone at once, unless the kernel holds it (it may be importing torch from a dead network disk).
END_TIMEOUT_S = 5.0
_SERVER = Path(__file__).with_name("store_server.py")


class StoreHost:
    """One port, and one store after the other on it.

    Args:
        env: the environment of the child process.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self._listener: socket.socket | None = None
        self._popen: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._called = anyio.Event()  # set by `serve`, while there is no child
        self._is_wanted = False  # a round is on
        self._has_served = False  # the child that runs now, or ran last
        self._mode = "quick"  # "careful" once the quick way to import torch has failed

    def open(self, port: int) -> int:
        """Makes sure that we hold a port, and gives its number; the store of the last round is dropped.

        Args:
            port: 0 picks a free one.

        Raises:
            InputError: the port is in use, or not allowed.
        """
        self._is_wanted = False
        self._say(b"drop")
        if self._listener is None:
            self._listener = _listen(port)
        number: int = self._listener.getsockname()[1]
        return number

    def serve(self) -> None:
        """Serves a new store on the port.  Does not wait: the store comes up while the workers start."""
        self._is_wanted = True
        self._hand_over()
        self._called.set()

    async def run(self) -> None:
        """Follows the child, and starts another should it die.  Runs until cancelled."""
        while True:
            if self._popen is None:
                await self._called.wait()
                await anyio.sleep(HEAD_START_S)
                self._called = anyio.Event()
                if self._is_wanted and self._listener is not None:
                    self._start()
            else:
                await self._listen_to_child()

    async def _listen_to_child(self) -> None:
        assert self._control is not None
        await anyio.wait_readable(self._control)
        try:
            answer = self._control.recv(64)
        except ConnectionError:
            answer = b""
        if answer:
            self._has_served = True
        else:
            await self._on_death()

    async def aclose(self) -> None:
        """Ends the child and closes the port."""
        if self._popen is not None:
            self._popen.kill()
            await self._forget()
        self._close_port()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._popen = subprocess.Popen(
                # -P: the folder of the program holds our modules, not ones it may import.
                [sys.executable, "-P", str(_SERVER), str(theirs.fileno()), self._mode],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a Ctrl-C at the terminal is not for it
            )
        waited_for.add(self._popen.pid)
        self._control = ours
        self._has_served = False
        self._hand_over()

    def _hand_over(self) -> None:
        if self._listener is not None:
            self._say(b"serve", self._listener.fileno())

    def _say(self, what: bytes, *descriptors: int) -> None:
        if self._control is not None:
            try:
                socket.send_fds(self._control, [what], descriptors)
            except OSError:
                pass  # it has died; `run` finds that out and sees to it

    async def _on_death(self) -> None:
        code = await self._forget()
        if not self._is_wanted:
            return  # the next round starts another
        if self._has_served:
            # Its keys are lost, so this round's workers will fail.  Those yet to connect must not wait for nobody.
            _log.warning("the process that serves the workers' store died (exit code %s); starting another", code)
        elif self._mode == "quick":
            self._mode = "careful"
        else:
            self._close_port()
            _log.warning(
                "the workers' store can't be served (exit code %s): can %s import torch?", code, sys.executable
            )
            return
        self._start()

    async def _forget(self) -> int | None:
        assert self._popen is not None and self._control is not None
        popen, control = self._popen, self._control
        self._popen = self._control = None
        control.close()
        with anyio.move_on_after(END_TIMEOUT_S) as waited:
            await wait_ended(popen.pid)
        if waited.cancelled_caught:
            _log.warning("process %d, which served the workers' store, survives SIGKILL", popen.pid)
        waited_for.discard(popen.pid)
        return popen.poll()

    def _close_port(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def _listen(port: int) -> socket.socket:
    """A listening socket on all interfaces, IPv6 and IPv4."""
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
        return socket.create_server(("", port), backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise InputError(f"port {port} can't be opened for the workers' store ({reason}): choose another") from None
