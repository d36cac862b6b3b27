"""The agent's handle on the fork server's process: its start, its socket, its output, its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from aelastic.base.host import proc_table
from aelastic.base.host.children import start_helper, wait_ended, wait_killed, waited_for
from aelastic.workers.forkserver.command import PythonCommand
from aelastic.workers.forkserver.parked import Parked, message_from

_PROGRAM = Path(__file__).with_name("program.py")
END_TIMEOUT_S = 1.0  # then it is killed
PRINTED_CHARS_MAX = 200


class ServerProcess:
    """The process, and those that replace it later.

    Args:
        command: a command with its interpreter and options.
        env: its environment.
        differing: names of variables that differ from worker to worker, or from start to start.
        is_learned: its modules are those that the first workers have imported.
    """

    def __init__(
        self, command: PythonCommand, env: Mapping[str, str], differing: Sequence[str], *, is_learned: bool
    ) -> None:
        self._command, self._env, self._differing, self._is_learned = command, env, differing, is_learned
        self._popen: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._printed = os.memfd_create("aelastic-preload")  # the output of modules

    def start(self, modules: tuple[str, ...], *, is_beside_workers: bool) -> None:
        """Starts it; `is_beside_workers`: it imports while workers run.

        Raises:
            OSError: it cannot be started.
        """
        settings = {
            "modules": modules,
            "is_learned": self._is_learned,
            "is_beside_workers": is_beside_workers,
            "differing": self._differing,
            "mask": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        }
        with ExitStack() as opened:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            opened.enter_context(ours)
            ours.setblocking(False)
            with theirs, open(os.memfd_create("aelastic-preload"), "wb", buffering=0) as file:
                file.write(json.dumps(settings).encode())
                numbers = (theirs.fileno(), file.fileno())
                command = [self._command.interpreter, *self._command.options, str(_PROGRAM), *map(str, numbers)]
                os.ftruncate(self._printed, 0)
                os.lseek(self._printed, 0, os.SEEK_SET)  # the next process writes to it as well
                self._popen = start_helper(
                    command,
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=self._printed,
                    stderr=self._printed,
                    pass_fds=numbers,
                )
            opened.pop_all()
        self._control = ours

    @property
    def pid(self) -> int:
        """The pid of the last one that was started; -1 if none was."""
        return -1 if self._popen is None else self._popen.pid

    @property
    def is_there(self) -> bool:
        """Whether its end of the socket is not known to be closed."""
        return self._control is not None

    async def receive(self) -> dict[str, Any]:
        """Waits for its next message; `{}`: it has ended, or its end of the socket is closed.

        A child process started by a module may keep that open for longer.
        """
        assert self._control is not None
        while True:
            is_there = proc_table.is_alive(self.pid)
            if (message := message_from(self._control)) is not None:
                return message
            if not is_there:
                return {}
            async with anyio.create_task_group() as tasks:
                for wait in (partial(wait_ended, self.pid), partial(anyio.wait_readable, self._control)):
                    tasks.start_soon(_cancel_after, wait, tasks.cancel_scope)

    def fork(self) -> Parked:
        """Requests a fork, which announces itself at its gate.

        Raises:
            OSError: no descriptors are left, or it accepts no more requests.
        """
        assert self._control is not None
        with ExitStack() as opened:
            gate, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            opened.enter_context(gate)
            with theirs:
                gate.setblocking(False)
                socket.send_fds(self._control, [b"gate"], [theirs.fileno()])
            opened.pop_all()
        return Parked(gate, self.pid)

    def retire(self) -> None:
        """Closes its end of the socket, which makes it end."""
        if self._control is not None:
            self._control.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        if self._popen is not None:
            self._popen.kill()

    async def take_status(self, *, is_importing: bool) -> int | None:
        """Closes the socket, which makes the process end, and returns its exit code; `None`: it survives SIGKILL."""
        assert self._control is not None and self._popen is not None
        self._control.close()
        self._control = None
        with anyio.move_on_after(END_TIMEOUT_S):
            await wait_ended(self.pid)
        self._popen.kill()
        if is_importing:  # nothing was forked on request
            proc_table.kill_group(self.pid)
        await wait_killed(self.pid)
        exitcode = self._popen.poll()
        waited_for.discard(self.pid)
        return exitcode

    def read_printed(self) -> str:
        """Returns the last line of the modules' output."""
        text = os.pread(self._printed, 65536, 0).decode(errors="replace").strip()
        return repr(text.splitlines()[-1][:PRINTED_CHARS_MAX]) if text else ""

    def close(self) -> None:
        if self._printed >= 0:
            os.close(self._printed)
            self._printed = -1


async def _cancel_after(wait: Callable[[], Awaitable[None]], scope: anyio.CancelScope) -> None:
    await wait()
    scope.cancel()
