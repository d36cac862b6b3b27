"""The channels of a run: a control socket for users, and a page and a socket that workers share with their agent.

`agent.resources` opens and closes them.  If this host refuses a channel, the run continues without it.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import anyio

from aelastic.agent.group.worker_env import CONTROL_SOCKET_VARIABLE
from aelastic.base.host import control_sockets
from aelastic.base.loop import clock
from aelastic.base.loop.reports import RareWarnings, described
from aelastic.base.loop.sockets import wait_readable
from aelastic.training.notice.page import (
    BYTES,
    CALLS,
    FORM,
    FORM_1,
    FROZEN,
    NONE,
    PHASE,
    SAVE,
    SAVE_AT,
    SAVED_AT,
    STEP,
)

_log = logging.getLogger(__name__)

Serve: TypeAlias = Callable[[socket.socket], Coroutine[Any, Any, None]]

PAUSE_S = 0.1  # before it accepts again, after a connection could not be accepted
PATH_BYTES_MAX = 107  # `sun_path` in unix(7), without the terminating zero
CALLS_MAX = 1 << 53  # of `notice.due`: the largest number that messages can carry
NAME_BYTES_MAX = 32  # ten digits each for the attempt and the rank
_WORD = struct.Struct("q")
_WORDS = struct.Struct("8q")


class ControlSocket:
    """A UNIX socket through which this user reaches the job (`aelastic status` and similar commands).

    Listens from the beginning of a run to its end, and leaves a file that describes the run.

    Args:
        folder: where the socket is; created if it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._name = f"{os.getpid()}-{os.urandom(4).hex()}"
        self._listener: socket.socket | None = None
        self._warnings = RareWarnings(_log)

    def open(self) -> None:
        """Opens the socket; if that fails, the job runs without one."""
        try:
            self._listener = control_sockets.listen_at(self._folder, self._name)
        except OSError as error:
            _log.warning(
                "no control socket, so aelastic status cannot reach this job: %s: %s",
                self._folder,
                error,
                extra={"topic": "no-control-socket"},
            )

    async def run(self, serve: Callable[[socket.socket], Coroutine[Any, Any, None]]) -> None:
        """Serves clients.  Runs until cancelled."""
        if self._listener is None:
            return
        async with anyio.create_task_group() as tasks:
            while True:
                await wait_readable(self._listener)
                try:
                    conn, _ = self._listener.accept()
                except OSError:  # the client is gone; or no descriptors are left, and the client still waits
                    await anyio.sleep(PAUSE_S)
                    continue
                if control_sockets.user_of(conn) in {0, os.getuid()}:
                    tasks.start_soon(self._serve_one, serve, conn, name="a request")
                else:
                    conn.close()

    async def _serve_one(self, serve: Serve, conn: socket.socket) -> None:
        try:
            await serve(conn)
        except* (ConnectionError, TimeoutError):
            pass  # the client is gone, or sent nothing
        except* Exception as failed:  # noqa: BLE001  no client may end this agent or the job
            self._warnings.warn("aborted a connection to the control socket: %s", described(failed), now=clock.now())
        finally:
            conn.close()

    def close(self, record: dict[str, Any] | None) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            control_sockets.close(self._folder, self._name, record)


class NoticePages:
    """The agent's end of the pages of `aelastic.notice`: a file for each worker of the current generation.

    Read and written through a descriptor, not mapped: a script that truncates its file would kill an agent that maps
    it.

    Args:
        folder: where the files are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._paths: dict[int, Path] = {}
        self._fds: dict[int, int] = {}
        self._have_asked: set[int] = set()  # in an earlier round of this generation
        self.generation, self.phase, self.save_at, self.kill_at = 0, NONE, 0, 0.0

    def begin(self, generation: int, local_ranks: Sequence[int]) -> Mapping[int, str]:
        """Creates the pages of a generation; returns the paths, by local rank.  Omits pages that cannot be created."""
        self.close()
        self.generation, self._have_asked = generation, set()
        for rank in local_ranks:
            path = self._folder / f"notice_{generation}_{rank}"
            with suppress(OSError):
                self._fds[rank] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                self._paths[rank] = path
                os.ftruncate(self._fds[rank], BYTES)
                self._write(rank, FORM, FORM_1)
        return {rank: str(path) for rank, path in self._paths.items()}

    def renew(self, local_rank: int) -> None:
        """Clears the page of a worker, for the process that replaces it."""
        if (fd := self._fds.get(local_rank)) is not None:
            with suppress(OSError):
                os.pwrite(fd, bytes(BYTES), 0)
            self._write(local_rank, FORM, FORM_1)

    def set_phase(self, phase: int, save_at: int = 0, kill_at: float = 0.0) -> None:
        """Holds all ranks at their next call, names the call at which they save, or lets them continue.

        Args:
            save_at: that call.
            kill_at: when the time for that is up, and ranks that should have ended by then are killed.
        """
        self.phase, self.save_at = phase, save_at if phase == SAVE else 0 if phase == NONE else self.save_at
        self.kill_at = kill_at
        for rank in self._fds:
            if phase == SAVE:
                self._write(rank, SAVE_AT, save_at)
            self._write(rank, PHASE, phase)

    def calls(self) -> Mapping[int, int]:
        """Returns how often each rank has called `notice.due`, by local rank; omits ranks that have not."""
        seen = {rank: self._look(rank) for rank in self._fds}
        asked = {rank: words[CALLS] for rank, words in seen.items() if words}
        return {rank: calls for rank, calls in asked.items() if calls > 0 or rank in self._have_asked}

    def begin_round(self) -> None:
        """Remembers which ranks have called: in the new round, those that continue in place count from 0."""
        self._have_asked |= self.calls().keys()
        self.set_phase(NONE)

    def steps(self) -> Mapping[int, int]:
        """Returns the newest step that each rank has committed (recovery in place), by local rank; omits others."""
        seen = {rank: self._look(rank) for rank in self._fds}
        return {rank: words[STEP] for rank, words in seen.items() if words and words[STEP] > 0}

    def saved(self) -> set[int]:
        """Returns the local ranks that have acknowledged the call at which they had to save."""
        seen = {rank: self._look(rank) for rank in self._fds}
        return {rank for rank, words in seen.items() if words and words[SAVED_AT] == self.save_at > 0}

    def waiting(self, now: float, *, are_ending: bool) -> Collection[int]:
        """Returns the local ranks that the agent makes wait; until their time is up they are not hanging.

        Args:
            now: the time.
            are_ending: workers were asked to save and end; the others may wait for them.
        """
        if now >= self.kill_at:
            return ()
        if self.phase == FROZEN or are_ending:
            return self._fds.keys()
        return self.saved() if self.phase == SAVE else ()

    def is_saving(self, rank: int) -> bool:
        """Whether a local rank is at the call at which it must save, or has ended there."""
        words = self._look(rank) if rank in self._fds and self.phase == SAVE else ()
        return bool(words) and words[CALLS] == self.save_at > 0

    def _look(self, rank: int) -> Sequence[int]:
        """Returns all words; none if the script has damaged them, or their disk is gone: other nodes get the counts."""
        try:
            data = os.pread(self._fds[rank], BYTES, 0)
        except OSError:
            return ()
        words = _WORDS.unpack(data) if len(data) == BYTES else (0,)
        is_whole = words[FORM] == FORM_1 and 0 <= words[CALLS] <= CALLS_MAX
        return words if is_whole else ()

    def _write(self, rank: int, word: int, value: int) -> None:
        with suppress(OSError):  # the disk is full, or gone: the worker does not see the change
            os.pwrite(self._fds[rank], _WORD.pack(value), word * _WORD.size)

    def close(self) -> None:
        for rank, fd in self._fds.items():
            os.close(fd)
            self._paths[rank].unlink(missing_ok=True)
        self._paths, self._fds, self.phase, self.save_at, self.kill_at = {}, {}, NONE, 0, 0.0


class ControlSockets:
    """Paths of the workers' control sockets (torch: `torch.distributed.elastic.control_plane`).

    Under `worker_main`, a worker serves HTTP on the Unix socket that `TORCH_WORKER_SERVER_SOCKET` names; this class
    creates none.  Each worker of each attempt has its own path in the run's scratch folder: torch rejects a path that
    exists, and does not remove its own.

    The variable is also the agent's mark: every process that a worker starts inherits it, and the scratch folder's name
    is random.

    A path of more than 107 bytes cannot be bound.  If the temporary folder is that deep, the path goes through one of
    the agent's descriptors.  It leads to the same folder, so there is nothing more to remove.

    Args:
        scratch: the folder of the sockets; it need not exist yet.
    """

    def __init__(self, scratch: Path) -> None:
        self._folder: int | None = None
        self._prefix = str(scratch)
        if len(os.fsencode(scratch)) + NAME_BYTES_MAX >= PATH_BYTES_MAX:
            with suppress(OSError):  # creating the scratch folder will fail and name the reason
                scratch.parent.mkdir(parents=True, exist_ok=True)
                self._folder = os.open(scratch.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                self._prefix = f"/proc/{os.getpid()}/fd/{self._folder}/{scratch.name}"

    @property
    def mark(self) -> str:
        """A string that the environment of every process of this run contains, and of no other process."""
        return f"{CONTROL_SOCKET_VARIABLE}={self._prefix}/"

    def path(self, attempt: int, local_rank: int) -> str:
        return f"{self._prefix}/control_{attempt}_{local_rank}"

    def in_place_path(self, attempt: int, local_rank: int) -> str:
        """Returns the path of the socket on which a worker that recovers in place reaches its agent."""
        return f"{self._prefix}/in_place_{attempt}_{local_rank}"

    def mark_env(self, env: dict[str, str]) -> dict[str, str]:
        """Returns the environment of a process of this run that is not a worker."""
        return {**env, CONTROL_SOCKET_VARIABLE: f"{self._prefix}/none"}

    def close(self) -> None:
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None
