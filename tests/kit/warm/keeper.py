"""Starts the jobs of tests, and keeps track of everything that each of them starts.

    python -m kit.warm.keeper SOCKET

It has imported aelastic, but not torch.  For each connection it forks a *keeper*: the parent of one job's first process,
and, through prctl(2), of every orphan of the job.  So all processes of a job descend from its keeper, however they detach,
and can be found without scanning every process of the machine.

The keeper sends its pid and that of the job's process, with a pidfd of the latter, then the wait status when that ends.
When nothing of the job is left, the keeper ends and the connection closes.  When the other end closes, the keeper kills
everything that is left.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import pkgutil
import select
import signal
import socket
import sys
from typing import Any, NoReturn

from kit import loop_guard
from kit.warm import fork
from kit.warm.descendants import descendants

_PR_SET_CHILD_SUBREAPER = 36
NO_CHILD = 0
KILL_AGAIN_S = 0.1
# Modules that need torch or have side effects when imported.
_NOT_PRELOADED = (
    "elastic_agent",
    "forkserver",
    "launcher",
    "under",
    "torch_handler",
    "timeline",
    "rehearse",
    "workers.tcpstore.server",
    "training.",
    "__main__",
)


def preload() -> None:
    import aelastic

    for module in pkgutil.walk_packages(aelastic.__path__, "aelastic."):
        if not any(word in module.name for word in _NOT_PRELOADED):
            importlib.import_module(module.name)
    importlib.import_module("uvloop")
    importlib.import_module("aiohttp")
    assert "torch" not in sys.modules


def serve(path: str) -> tuple[dict[str, Any], socket.socket]:
    """Forks for each connection; returns in the fork, with its request."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(128)
    os.write(1, b"ready\n")
    while True:
        readable, _, _ = select.select([0, listener.fileno()], [], [])
        if 0 in readable:
            os._exit(0)  # the keepers notice that their connections close
        connection, _ = listener.accept()
        request = fork.read_request(connection)
        if request is not None:
            if os.fork() == 0:
                listener.close()
                return request, connection
            for fd in request["received"]:
                os.close(fd)
        connection.close()
        _reap()


def _reap() -> list[tuple[int, int]]:
    """Children that have ended, with their wait statuses; followed by `NO_CHILD` if none is left."""
    ended = []
    try:
        while (found := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            ended.append(found)
    except ChildProcessError:
        ended.append((NO_CHILD, 0))
    return ended


def keep(request: dict[str, Any], connection: socket.socket) -> None:
    """Returns in the job's process; ends in the keeper."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    pid = os.fork()
    if pid == 0:
        return
    for fd in request["received"]:
        os.close(fd)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    pids = os.getpid().to_bytes(4, "big") + pid.to_bytes(4, "big")
    socket.send_fds(connection, [pids], [os.pidfd_open(pid)])
    _watch(pid, connection, reader)


def _watch(pid: int, connection: socket.socket, woken: int) -> NoReturn:
    is_wanted = True
    while True:
        for ended, status in _reap():
            if ended == pid:
                _send(connection, status)
            if ended == NO_CHILD:
                os._exit(0)  # nothing of the job is left
        if is_wanted:
            readable, _, _ = select.select([woken, connection.fileno()], [], [])
            is_wanted = connection.fileno() not in readable
        else:
            for each in descendants(os.getpid()):
                _kill(each)
            readable, _, _ = select.select([woken], [], [], KILL_AGAIN_S)  # a process may have forked at that moment
        if woken in readable:
            os.read(woken, 1 << 16)


def _send(connection: socket.socket, status: int) -> None:
    try:
        connection.send(status.to_bytes(4, "big"))
    except OSError:
        pass  # nobody is waiting for it any more


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass  # gone


def run_and_exit(request: dict[str, Any]) -> NoReturn:
    """Becomes the program: an agent that is already imported, or a program to execute."""
    argv = request["argv"]
    if not request["is_warm"]:
        _execute(argv)
    if os.environ.get(loop_guard.REPORT):
        loop_guard.install()
    arguments = argv[1:]
    sys.orig_argv = list(argv)
    if arguments[:2] == ["-m", "aelastic"]:
        _begin_as_command()
        arguments = ["-P", *arguments]
    fork.run_and_exit(arguments)


def _begin_as_command() -> None:
    """Does what the package does when imported by `python -m aelastic`: it leaves the working folder out of `sys.path`."""
    import aelastic

    aelastic.working_folder = os.getcwd()
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _execute(argv: list[str]) -> NoReturn:
    # Signals that Python ignores, but programs do not (`restore_signals` of `subprocess`).
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error}\n".encode())
        os._exit(127)


def main() -> None:
    fork.die_with_parent()
    (path,) = sys.argv[1:]
    sys.path.pop(0)  # the folder where `-m` found this module
    preload()
    gc.collect()
    gc.freeze()
    request, connection = serve(path)
    keep(request, connection)
    fork.die_with_parent()
    fork.become(request)
    run_and_exit(request)


if __name__ == "__main__":
    main()
