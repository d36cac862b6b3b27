"""Checks that aelastic never blocks an event loop: blocking calls of the standard library raise in the thread of a loop.

Active in all tests with a loop in the process, and in the agents that they start from `kit.warm.keeper`.  A call is
reported if its innermost frame outside of libraries is aelastic's.  Code may suppress the exception, so `found` also
records each call; a test fails if it is not empty.

Not checked: files on a disk that hangs (nothing distinguishes disks here), locks of threads, and calls made by C code.
"""

from __future__ import annotations

import asyncio
import builtins
import concurrent.futures
import fcntl
import grp
import io
import ipaddress
import os
import pwd
import select
import socket
import stat
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import aelastic

# The file for reports of an agent that a test has started.
REPORT = "TEST_BLOCKED_LOOP"

# Files of aelastic that may block: the program itself called them in its own loop.
MAY_BLOCK = {"compat/launcher/blocking.py"}

FRAMES = 8

MayWait: TypeAlias = Callable[..., bool]
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OURS = str(Path(aelastic.__file__).parent) + os.sep
_HERE = __file__
# Starting a process takes a millisecond; closing a loop joins threads that have ended.
_QUICK = {subprocess.Popen._execute_child.__code__, asyncio.Runner.close.__code__}  # type: ignore[attr-defined]

found: list[str] = []  # since the last look
_of_thread = threading.local()


class BlockedLoopError(BaseException):
    """A call may wait in the thread of a loop.  It is a `BaseException`, so that error handlers do not catch it."""


@contextmanager
def as_in_a_thread() -> Iterator[None]:
    """Exempts a stand-in that runs code in the loop's thread which belongs in another thread."""
    before = getattr(_of_thread, "is_exempt", False)
    _of_thread.is_exempt = True
    try:
        yield
    finally:
        _of_thread.is_exempt = before


def _check(name: str, may_wait: MayWait, *args: Any, **keywords: Any) -> None:
    if asyncio._get_running_loop() is None or getattr(_of_thread, "is_exempt", False):
        return
    with as_in_a_thread():  # the check itself may call guarded functions
        frame = _caller(sys._getframe(2))
        if frame is None or not may_wait(*args, **keywords):
            return
        place = frame.f_code.co_filename.removeprefix(_OURS)
        if place in MAY_BLOCK:
            return
        text = f"{name} in the thread of a loop:\n{''.join(traceback.format_stack(frame, FRAMES))}"
        found.append(text)
        if path := os.environ.get(REPORT):
            with open(path, "a") as file:
                file.write(text + "\n")
    raise BlockedLoopError(text)


def _caller(frame: FrameType | None) -> FrameType | None:
    """The innermost frame outside of libraries, if it is aelastic's and the library's call may wait."""
    while frame is not None and (frame.f_code.co_filename == _HERE or _is_library(frame.f_code.co_filename)):
        if frame.f_code in _QUICK:
            return None
        frame = frame.f_back
    return frame if frame is not None and frame.f_code.co_filename.startswith(_OURS) else None


def _is_library(path: str) -> bool:
    return path.startswith((*_LIBRARIES, "<frozen")) and not path.startswith(_OURS)


# Calls that may wait.


def _always(*_: Any, **__: Any) -> bool:
    return True


def _of_a_child(options_at: int) -> MayWait:
    return lambda *args, **_: not (len(args) > options_at and args[options_at] & os.WNOHANG)


def _is_running(popen: subprocess.Popen[Any], *_: Any, **__: Any) -> bool:
    return popen.poll() is None


def _of_a_socket(sock: socket.socket, *_: Any, **__: Any) -> bool:
    return sock.gettimeout() != 0 and sock.type != socket.SOCK_DGRAM


def _connects(sock: socket.socket, address: Any, *_: Any) -> bool:
    return _of_a_socket(sock, address) or (sock.family != socket.AF_UNIX and _is_name(address[0]))


def _is_name(host: Any, *_: Any, **__: Any) -> bool:
    if not host or isinstance(host, tuple):
        return False
    try:
        ipaddress.ip_address((host.decode() if isinstance(host, bytes) else host).partition("%")[0])
    except ValueError:
        return True
    return False


def _selects(_read: Any, _write: Any, _except: Any, timeout: float | None = None) -> bool:
    return timeout is None or timeout > 0


def _locks(_: Any, operation: int, *__: Any) -> bool:
    return not operation & (fcntl.LOCK_NB | fcntl.LOCK_UN)


def _opens(path: Any, *_: Any, **__: Any) -> bool:
    try:
        return not isinstance(path, int) and stat.S_ISFIFO(os.stat(path).st_mode)
    except (OSError, TypeError, ValueError):
        return False


def _opens_low(path: Any, flags: int, *_: Any, dir_fd: int | None = None, **__: Any) -> bool:
    return dir_fd is None and not flags & (os.O_NONBLOCK | os.O_PATH) and _opens(path)


def _waits_for(event: int) -> MayWait:
    """Matches a pipe, socket or terminal that is not ready to read or write now."""

    def may_wait(fd: int, *_: Any) -> bool:
        try:
            mode, blocks = os.fstat(fd).st_mode, os.get_blocking(fd)
        except OSError:
            return False
        if not blocks or not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd)):
            return False
        poll = _POLL()
        poll.register(fd, event)
        return not poll.poll(0)

    return may_wait


def _is_alive(thread: threading.Thread, *_: Any, **__: Any) -> bool:
    return thread.is_alive()


def _is_unset(event: threading.Event, *_: Any, **__: Any) -> bool:
    is_start = sys._getframe(3).f_code is threading.Thread.start.__code__
    return not event.is_set() and not is_start


def _is_undone(future: concurrent.futures.Future[Any], *_: Any, **__: Any) -> bool:
    return not future.done()


_POLL = select.poll


class _Poll:
    """The result of `select.poll`."""

    def __init__(self) -> None:
        self._poll = _POLL()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._poll, name)

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        _check("poll", lambda: timeout is None or timeout != 0)
        return self._poll.poll(timeout)


_SOCKETS_WAIT = ("recv", "recv_into", "recvfrom", "recvfrom_into", "recvmsg", "send", "sendall", "sendmsg", "accept")
_WATCHED: list[tuple[Any, str, MayWait]] = [
    (time, "sleep", _always),
    *((os, name, _always) for name in ("wait", "wait3", "wait4", "fsync", "fdatasync", "sync", "system", "popen")),
    (os, "waitpid", _of_a_child(1)),
    (os, "waitid", _of_a_child(2)),
    *((subprocess, name, _always) for name in ("run", "call", "check_call", "check_output", "getoutput")),
    *((subprocess.Popen, name, _is_running) for name in ("wait", "communicate")),
    *((socket.socket, name, _of_a_socket) for name in _SOCKETS_WAIT),
    (socket.socket, "connect", _connects),
    (socket, "create_connection", _always),
    *((socket, name, _is_name) for name in ("getaddrinfo", "gethostbyname", "gethostbyname_ex")),
    *((socket, name, _always) for name in ("gethostbyaddr", "getnameinfo", "getfqdn")),
    *((pwd, name, _always) for name in ("getpwuid", "getpwnam", "getpwall")),
    *((grp, name, _always) for name in ("getgrgid", "getgrnam", "getgrall")),
    (select, "select", _selects),
    (fcntl, "flock", _locks),
    (fcntl, "lockf", _locks),
    *((module, "open", _opens) for module in (builtins, io)),
    (os, "open", _opens_low),
    *((os, name, _waits_for(select.POLLIN)) for name in ("read", "readv")),
    *((os, name, _waits_for(select.POLLOUT)) for name in ("write", "writev")),
    (threading.Thread, "join", _is_alive),
    (threading.Event, "wait", _is_unset),
    (concurrent.futures.Future, "result", _is_undone),
]


def _watched(name: str, really: Callable[..., Any], may_wait: MayWait) -> Callable[..., Any]:
    @wraps(really)
    def call(*args: Any, **keywords: Any) -> Any:
        _check(name, may_wait, *args, **keywords)
        return really(*args, **keywords)

    return call


def install() -> None:
    """Watches from now on, in this process and its forks."""
    if getattr(select, "poll") is _Poll:  # noqa: B009
        return
    for owner, name, may_wait in _WATCHED:
        full_name = f"{getattr(owner, '__name__', owner)}.{name}"
        setattr(owner, name, _watched(full_name, getattr(owner, name), may_wait))
    setattr(select, "poll", _Poll)  # noqa: B010  a type for the type checker
