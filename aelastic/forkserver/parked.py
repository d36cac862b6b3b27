"""A forked process that waits at its gate until it is told what to be."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from typing import Any

import anyio

from aelastic.forkserver.command import PythonCommand
from aelastic.host import proc_table
from aelastic.host.reaping import wait_ended, waited_for
from aelastic.host.usage import pss_bytes
from aelastic.observe.run_events import ForkServerMeasured

# It answers in a millisecond.  One that sleeps at so many looks in a row hangs; one that only waits for a CPU, or for
# memory, is given more.
LOOK_INTERVAL_S = 0.01
SLEEPS_MAX = 5
CPU_TIMEOUT_S = 2.0
LENGTH_MAX = 65536


class NoAnswerError(Exception):
    """The process does not become a worker; the text says why."""


class Parked:
    """One process, or one that the fork server has been asked for.

    Args:
        gate: our end of its socket.
        forked_by: pid of the fork server.
    """

    def __init__(self, gate: socket.socket, forked_by: int) -> None:
        self._gate = gate
        self.forked_by = forked_by
        self.pid = 0  # until it has said it

    async def announced(self) -> None:
        """Returns when it waits for what it is to be.

        Raises:
            NoAnswerError: it was not forked, or does not answer.
        """
        if not self.pid:
            pid = (await self._answer()).get("parked", 0)
            if not pid:
                raise NoAnswerError("the fork server has ended, or may fork no more")
            self.pid = int(pid)
            waited_for.add(self.pid)

    def launch(
        self,
        command: PythonCommand,
        env: Mapping[str, str],
        fds: Mapping[int, int],
        learning: int | None = None,
        *,
        is_helper: bool = False,
    ) -> int:
        """Says what it is to be; gives its pid.

        Args:
            env: the whole environment.
            fds: a descriptor of ours for each that it is to have, by its number there.
            learning: where it is to write the names of the modules that it imports.
            is_helper: it becomes no worker but a helper of the agent, which goes on to ignore signals.

        Raises:
            OSError: it takes nothing.
        """
        request = {
            "command": command.command,
            "argv": command.argv,
            "kind": command.kind,
            "target": command.target,
            "env": dict(env),
            "cwd": _cwd(),
            "umask": _umask(),
            "fds": list(fds),
            "is_learning": learning is not None,
            "is_helper": is_helper,
        }
        with open(os.memfd_create("aelastic-worker"), "wb", buffering=0) as text:
            text.write(json.dumps(request).encode())
            socket.send_fds(
                self._gate, [b"worker"], [text.fileno(), *fds.values(), *([] if learning is None else [learning])]
            )
        return self.pid

    async def confirmed(self) -> None:
        """Returns when it runs its program.

        Raises:
            NoAnswerError: it cannot, or does not answer.
        """
        answer = await self._answer()
        if "running" not in answer:
            raise NoAnswerError(f"a forked process cannot be used: {answer.get('refused', 'it has ended')}")
        self._gate.close()  # its status is waited for by what follows it: the pid stays in `waited_for`

    def let_go(self) -> None:
        """It is on its own; what it answers is not heard."""
        self._gate.close()

    async def _answer(self) -> dict[str, Any]:
        """The next message; `{}` is the end.  A process that has something to do is given the time for it."""
        with anyio.move_on_after(CPU_TIMEOUT_S):
            sleeps = 0
            while sleeps < SLEEPS_MAX:
                with anyio.move_on_after(LOOK_INTERVAL_S):
                    return await receive(self._gate) or {}
                entry = proc_table.process(self.pid or self.forked_by)
                if entry is None or entry.state in "TtZX":
                    break
                # Until its pid is known, what sleeps is only the fork server, which may be done.
                sleeps = sleeps + 1 if self.pid and entry.state not in "RD" else 0
        raise NoAnswerError(f"{'a forked process' if self.pid else 'the fork server'} does not answer")

    async def end(self) -> None:
        """Ends it, wherever it is; returns when its status is taken."""
        try:
            if not self.pid:
                with anyio.CancelScope(shield=True), anyio.move_on_after(CPU_TIMEOUT_S):
                    self._gate.shutdown(socket.SHUT_WR)
                    self.pid = int((await receive(self._gate) or {}).get("parked", 0))
        finally:
            self._gate.close()
        if self.pid:
            proc_table.kill(self.pid)
            with anyio.CancelScope(shield=True):
                await wait_ended(self.pid)
            _reap(self.pid)
            waited_for.discard(self.pid)


def _cwd() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""  # it was removed; what is parked is there, too


def _umask() -> int:
    """Without changing it, which other threads would see."""
    with open("/proc/self/status") as file:
        found = next((line for line in file if line.startswith("Umask:")), "Umask: 0022")
    return int(found.split()[1], 8)


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass  # another part of this process took its status


async def receive(sock: socket.socket) -> dict[str, Any] | None:
    """The next message of a fork server, or of a parked process; `None` is its end."""
    while True:
        try:
            message = sock.recv(LENGTH_MAX)
        except BlockingIOError:
            await anyio.wait_readable(sock)
            continue
        except ConnectionResetError:
            return None
        found: dict[str, Any] | None = json.loads(message) if message else None
        return found


def memory_of(leader: int) -> ForkServerMeasured:
    """Of a fork server and what it has parked, which stays in its session.  In a thread."""
    pids = [entry.pid for entry in proc_table.session_members({leader})]
    return ForkServerMeasured(max(0, len(pids) - 1), pss_bytes(pids))
