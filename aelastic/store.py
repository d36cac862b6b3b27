"""torch's TCPStore for the workers of rank 0's node, served by a child process of the agent.

The agent never imports torch: that takes a second, holds the interpreter's lock and would stall the loop.
It binds the port, starts the workers, and hands the listening socket to the child (`store_server.py`), which
imports torch while the workers do.  Workers that connect early wait in the socket's queue.  Every
round gets a port and a store of its own, so no key of an earlier round is ever read.

If no store can be served, that is told, and the port is closed: workers that need it fail by themselves,
others never notice.
"""

from __future__ import annotations

import logging
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
_SERVER = Path(__file__).with_name("store_server.py")


def open_listener(port: int) -> socket.socket:
    """A listening socket on all interfaces, IPv6 and IPv4; `port` 0 picks a free one.

    Raises:
        InputError: the port is in use, or not allowed.
    """
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
        return socket.create_server(("", port), backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"port {port} can't be opened for the workers' store ({reason}): choose another") from None


class StoreHost:
    """Serves one store after the other, each on a socket that the agent has opened.

    Args:
        env: the environment of the child process.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self._popen: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._listener: socket.socket | None = None  # kept until its store serves
        self._mode = "quick"  # "careful" once the quick way to import torch has failed
        self._wanted = anyio.Event()

    def serve(self, listener: socket.socket) -> None:
        """Serves a new store on the socket, which is ours from now on, and drops the store before.

        Does not wait: the store comes up while the workers start.
        """
        self._drop_listener()
        self._listener = listener
        if self._popen is None:
            self._start()
        self._hand_over()
        self._wanted.set()

    async def run(self) -> None:
        """Follows the child, and starts another should it die before its store serves.  Runs until cancelled."""
        while True:
            await self._wanted.wait()
            assert self._control is not None
            await anyio.wait_readable(self._control)
            answer = self._control.recv(4096).decode()
            if not answer:
                await self._on_death()
            elif self._listener is not None and answer == f"serving {self._listener.getsockname()[1]}":
                self._drop_listener()

    async def aclose(self) -> None:
        """Ends the child and closes the port."""
        self._drop_listener()
        if self._popen is not None:
            self._popen.kill()
            await self._forget()

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

    def _hand_over(self) -> None:
        assert self._control is not None and self._listener is not None
        try:
            socket.send_fds(self._control, [b"serve"], [self._listener.fileno()])
        except OSError:
            pass  # it has died; `run` finds that out and sees to it

    async def _on_death(self) -> None:
        code = await self._forget()
        if self._listener is None:
            self._wanted = anyio.Event()
            _log.warning("the process that serves the workers' store died (exit code %s)", code)
        elif self._mode == "quick":
            self._mode = "careful"
            self._start()
            self._hand_over()
        else:
            self._wanted = anyio.Event()
            self._drop_listener()
            _log.warning("the workers' store can't be served (exit code %s): can this Python import torch?", code)

    async def _forget(self) -> int | None:
        assert self._popen is not None and self._control is not None
        popen = self._popen
        self._control.close()
        await wait_ended(popen.pid)
        code = popen.poll()
        waited_for.discard(popen.pid)
        self._popen = self._control = None
        return code

    def _drop_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
