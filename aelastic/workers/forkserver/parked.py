"""A forked process that waits at its gate until it receives its task."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import anyio

from aelastic.base.host import proc_table
from aelastic.base.host.children import taken_status, wait_killed, waited_for
from aelastic.base.host.usage import pss_bytes
from aelastic.workers.forkserver.command import PythonCommand

# A process answers in a millisecond.  It hangs if it sleeps at this many looks in a row; if it only waits for a CPU, or
# for memory, it is given more time.
LOOK_INTERVAL_S = 0.01
SLEEPS_MAX = 5
LOOKS_MAX = 200
LENGTH_MAX = 65536


class NoAnswerError(Exception):
    """The process does not become a worker; the message gives the reason."""


class Parked:
    """One process, or one that was requested from the fork server.

    Args:
        gate: our end of its socket.
        forked_by: pid of the fork server.
    """

    def __init__(self, gate: socket.socket, forked_by: int) -> None:
        self._gate = gate
        self.forked_by = forked_by
        self.pid = 0  # until the fork server has reported it

    async def prepare(self, command: PythonCommand, env: Mapping[str, str], *, is_helper: bool = False) -> None:
        """Prepares the process to become a worker, stopping just short of `launch`.  Raises here if that cannot work.

        Args:
            env: the whole environment.
            is_helper: it becomes a helper of the agent, not a worker, and continues to ignore signals.

        Raises:
            NoAnswerError: it was not forked, cannot become that, or does not answer.
            OSError: its socket accepts nothing.
        """
        if not self.pid:
            pid = (await self._answer()).get("parked", 0)
            if not pid:
                raise NoAnswerError("the template has ended, or may not fork any more")
            self.pid = int(pid)
            waited_for.add(self.pid)
        request = {"kind": command.kind, "target": command.target, "env": dict(env), "is_helper": is_helper}
        self._send({**request, "cwd": _cwd(), "umask": _umask()}, [])
        answer = await self._answer()
        if "ready" not in answer:
            raise NoAnswerError(f"a parked process cannot be used: {answer.get('refused', 'it has ended')}")

    def launch(self, command: PythonCommand, fds: Mapping[int, int], learning: int | None = None) -> int:
        """Lets it run; returns its pid.

        It runs only after this message, and once it has received it no other start may follow: an agent with little CPU
        time could find a process ended, or asleep, that has already run, and would run the program twice.

        Args:
            fds: our descriptors to pass on, by their numbers in the process.
            learning: a descriptor to which it writes the names of the modules that it imports.

        Raises:
            OSError: it takes nothing.
        """
        request = {"command": command.command, "target": command.target, "argv": command.argv}
        self._send({**request, "fds": list(fds)}, [*fds.values(), *([] if learning is None else [learning])])
        return self.pid

    def _send(self, request: Mapping[str, Any], fds: Sequence[int]) -> None:
        with open(os.memfd_create("aelastic-worker"), "wb", buffering=0) as text:
            text.write(json.dumps(request).encode())
            socket.send_fds(self._gate, [b"request"], [text.fileno(), *fds])

    def let_go(self) -> None:
        """Closes our end: it runs on its own, and its follower waits for its status (the pid stays in `waited_for`)."""
        self._gate.close()

    async def _answer(self) -> dict[str, Any]:
        """Returns the next message; `{}` is the end.  A busy process is given the time that it needs.

        Counts looks, not seconds, and reads messages sent before a look after it: so the process is never judged by the
        time that we have slept.
        """
        sleeps = 0
        for look in range(1, LOOKS_MAX + 1):
            with anyio.move_on_after(LOOK_INTERVAL_S):
                return await receive(self._gate)
            entry = proc_table.process(self.pid or self.forked_by)
            is_over = entry is None or entry.state in "TtZX"
            # Until its pid is known, only the fork server can be seen to sleep, and that may be done.
            sleeps = sleeps + 1 if entry is not None and self.pid and entry.state not in "RD" else 0
            if is_over or sleeps == SLEEPS_MAX or look == LOOKS_MAX:
                if (message := message_from(self._gate)) is not None:
                    return message
                break
        raise NoAnswerError(f"{'a parked process' if self.pid else 'the template'} does not answer")

    async def end(self) -> None:
        """Ends it, whatever it is doing, and takes its status; leaves it behind if it survives SIGKILL."""
        try:
            if not self.pid:
                with anyio.CancelScope(shield=True), suppress(NoAnswerError):
                    self._gate.shutdown(socket.SHUT_WR)
                    self.pid = int((await self._answer()).get("parked", 0))
        finally:
            self._gate.close()
        if self.pid:
            proc_table.kill(self.pid)
            await wait_killed(self.pid)
            taken_status(self.pid)
            waited_for.discard(self.pid)


def _cwd() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""  # it was removed; parked processes are in the same one


def _umask() -> int:
    """Returns the umask without changing it, which other threads would see."""
    with open("/proc/self/status") as file:
        found = next((line for line in file if line.startswith("Umask:")), "Umask: 0022")
    return int(found.split()[1], 8)


def message_from(sock: socket.socket) -> dict[str, Any] | None:
    """Returns the next message of a fork server, or of a parked process; `{}`: it has ended, `None`: no message yet."""
    try:
        message = sock.recv(LENGTH_MAX)
    except BlockingIOError:
        return None
    except ConnectionResetError:
        return {}
    found: dict[str, Any] = json.loads(message) if message else {}
    return found


async def receive(sock: socket.socket) -> dict[str, Any]:
    """Waits for the next message; `{}`: the process has ended."""
    while (message := message_from(sock)) is None:
        await anyio.wait_readable(sock)
    return message


class Memory(NamedTuple):
    """The memory of a fork server and of the processes that wait to become workers."""

    parked: int  # number of these processes
    pss_bytes: int  # of all of them


def memory_of(leader: int) -> Memory:
    """Measures a fork server and its parked processes, which are in its session.  Runs in a thread."""
    pids = [entry.pid for entry in proc_table.session_members({leader})]
    return Memory(max(0, len(pids) - 1), pss_bytes(pids))
