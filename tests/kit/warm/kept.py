"""The test's side of `keeper.py`: a job's first process, with the interface of `subprocess.Popen`, and its descendants."""

from __future__ import annotations

import atexit
import marshal
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

from aelastic.base.host import proc_table
from kit.warm.descendants import descendants

_TESTS = Path(__file__).parents[2]
CLOSE_LIMIT_S = 60.0

Stream = int | IO[Any] | None


class KeptProcess:
    """A job's first process; closing it ends it and all of its descendants.

    Args:
        command: the program and its arguments.
        env: its whole environment.
        cwd: its working folder.
        streams: its standard streams, each as for `subprocess.Popen`.
        is_warm: fork an agent from a process that has imported aelastic, instead of executing the program.
        start_new_session: as in `subprocess.Popen`.
    """

    def __init__(
        self,
        command: Sequence[str | os.PathLike[str]],
        env: Mapping[str, str],
        cwd: str | os.PathLike[str],
        streams: tuple[Stream, Stream, Stream],
        *,
        is_warm: bool,
        start_new_session: bool = True,
    ) -> None:
        self.args = [os.fspath(word) for word in command]
        self.returncode: int | None = None
        self.is_over = False  # nothing of the job is left
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[bytes] | None = None
        request = {
            "argv": self.args,
            "env": {os.fsencode(name): os.fsencode(value) for name, value in env.items()},
            "cwd": os.path.abspath(cwd),
            "umask": _umask(),
            "ignored": [
                int(each) for each in (signal.SIGHUP, signal.SIGINT) if signal.getsignal(each) is signal.SIG_IGN
            ],
            "blocked": [],
            "session": start_new_session,
            "group": False,
            "cpus": list(os.sched_getaffinity(0)),
            "descriptors": [0, 1, 2],
            "is_warm": is_warm,
        }
        given, passing = self._open(streams)
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.connect(_keepers())
        body = marshal.dumps(request)
        socket.send_fds(self._connection, [len(body).to_bytes(4, "big")], given)
        self._connection.sendall(body)
        for fd in passing:
            os.close(fd)
        pids, (self._pidfd,), _, _ = socket.recv_fds(self._connection, 8, 1)
        self._keeper, self.pid = int.from_bytes(pids[:4], "big"), int.from_bytes(pids[4:], "big")
        self._connection.setblocking(False)

    def _open(self, streams: tuple[Stream, Stream, Stream]) -> tuple[list[int], list[int]]:
        """The descriptors that the process gets, and those of them to close here afterwards."""
        given: list[int] = []
        passing: list[int] = []
        for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
            match stream:
                case None:
                    given.append(len(given))
                case subprocess.PIPE:
                    reader, writer = os.pipe()
                    theirs, ours = (reader, writer) if name == "stdin" else (writer, reader)
                    setattr(self, name, os.fdopen(ours, "wb" if name == "stdin" else "rb"))
                    given.append(theirs)
                    passing.append(theirs)
                case subprocess.DEVNULL:
                    given.append(os.open(os.devnull, os.O_RDWR))
                    passing.append(given[-1])
                case subprocess.STDOUT:
                    given.append(given[1])
                case int():
                    given.append(stream)
                case _:
                    given.append(stream.fileno())
        return given, passing

    # As in `subprocess.Popen`.

    def poll(self) -> int | None:
        self.read()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            rest_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            if not self.read(rest_s) and deadline is not None and time.monotonic() >= deadline:
                assert timeout is not None
                raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            try:
                signal.pidfd_send_signal(self._pidfd, signum)
            except ProcessLookupError:
                pass  # it has just ended

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    # Not in `subprocess.Popen`.

    def fileno(self) -> int:
        """A descriptor that is readable when the process has ended, and again when nothing of it is left."""
        return self._connection.fileno()

    def read(self, timeout: float | None = 0.0) -> bool:
        """Reads the keeper's messages; false if nothing has arrived."""
        if self.is_over:
            return True
        readable, _, _ = select.select([self._connection], [], [], timeout)
        if not readable:
            return False
        data = self._connection.recv(4)
        if data:
            self.returncode = os.waitstatus_to_exitcode(int.from_bytes(data, "big"))
        else:
            self.is_over = True
            assert self.returncode is not None, "the keeper died"
        return True

    def left(self) -> list[int]:
        """The living processes of the job."""
        self.read()
        return [] if self.is_over else [pid for pid in descendants(self._keeper) if proc_table.is_alive(pid)]

    def close(self) -> None:
        """Kills what is left of the job, and waits for it."""
        if self._connection.fileno() < 0:
            return
        if not self.is_over:
            self._connection.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + CLOSE_LIMIT_S
        while not self.is_over:
            self.read(1.0)
            assert time.monotonic() < deadline, f"processes that SIGKILL does not end: {self.left()}"
        self._connection.close()
        os.close(self._pidfd)
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()


def _umask() -> int:
    mask = os.umask(0o77)
    os.umask(mask)
    return mask


@cache
def _keepers() -> str:
    """Where the process that starts jobs listens; it starts on first use and ends with this process."""
    # Not a `TemporaryDirectory`: since Python 3.13 a child forked by `multiprocessing` drops the references of `atexit`,
    # which would remove the folder.
    folder = tempfile.mkdtemp(prefix="keepers")
    path = f"{folder}/socket"
    server = subprocess.Popen(
        [sys.executable, "-m", "kit.warm.keeper", path],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_TESTS, start_new_session=True,
    )  # fmt: skip
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    server.stdout.close()

    def end() -> None:
        assert server.stdin is not None
        server.stdin.close()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    return path
