"""Child processes: starts helpers, waits for the end of any process, and reaps dead children.

No signal to the agent's group or process tree ends a helper.  Nothing here waits for "any child": that would take a
status from the code that waits for that child.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import anyio

from aelastic.base.host import proc_table

# How often to look at a process if the kernel has no pidfds.
LOOK_AGAIN_S = 0.05
# A killed process ends in milliseconds, unless it is in a frozen cgroup, or waits for a disk (state D).
KILL_TIMEOUT_S = 1.0

# Children that some code of this process waits for.  `reap_orphans` leaves them alone.
waited_for: set[int] = set()
# The processes that were started as helpers, each in its own session.
helpers: set[int] = set()

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_before: set[int] | None = None  # children of this process when it began to adopt


def start_helper(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Starts a program that calls `signals.ignore_signals` first; it is in `waited_for` until the caller removes it.

    Args:
        options: of `subprocess.Popen`.

    Raises:
        OSError: it cannot be started.
    """
    # The child inherits our mask: a signal that comes before it ignores signals is pending until then, and is dropped.
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        popen = subprocess.Popen(command, start_new_session=True, **options)  # it must not get a Ctrl-C at the terminal
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, usual)
    waited_for.add(popen.pid)
    helpers.add(popen.pid)
    return popen


def start_program(files: Sequence[str], words: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Starts a helper whose program is the concatenated text of some files, as its standard input.

    It starts without the package, whatever is in its folder, and `pkill -f aelastic` does not find it.

    Args:
        files: the files of modules that import only the standard library, or names in the files before them.
        words: its arguments.
        options: of `subprocess.Popen`.

    Raises:
        OSError: it cannot be started.
    """
    with open(os.memfd_create("program"), "w+b", buffering=0) as program:
        for path in files:
            with open(path, "rb") as file:
                program.write(file.read() + b"\n\n")
        program.seek(0)
        command = [sys.executable, "-I", "-S", "-", *words]
        return start_helper(command, stdin=program, cwd="/", **options)  # keeps no folder busy


class ForkedHelper:
    """A helper that another process has forked as a child of this one (`subprocess.Popen` if it is exec'd)."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        waited_for.add(pid)
        helpers.add(pid)

    def kill(self) -> None:
        proc_table.kill(self.pid)

    def poll(self) -> int | None:
        return taken_status(self.pid)


def pidfd_of(pid: int) -> int | None:
    """Returns a descriptor that becomes readable when the process ends (`pidfd_open(2)`), or `None`."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None  # not Linux, older than 5.3, forbidden; or the process is gone


async def wait_ended(pid: int) -> None:
    """Returns when the process, which need not be our child, has ended (it may still be a zombie)."""
    if (pidfd := pidfd_of(pid)) is not None:
        try:
            await anyio.wait_readable(pidfd)
        finally:
            os.close(pidfd)
        return
    while proc_table.is_alive(pid):  # noqa: ASYNC110  no kernel to tell us
        await anyio.sleep(LOOK_AGAIN_S)


async def wait_killed(pid: int) -> None:
    """Returns when a killed process has ended, or after `KILL_TIMEOUT_S`.  Cancellation has to wait."""
    with anyio.move_on_after(KILL_TIMEOUT_S, shield=True):
        await wait_ended(pid)


def taken_status(pid: int) -> int | None:
    """Returns the exit code of a child that has ended; `None` while it runs."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None  # another part of this process took its status
    return os.waitstatus_to_exitcode(status) if ended else None


def adopt_orphans() -> None:
    """Makes this process the parent of every orphan among its descendants (`PR_SET_CHILD_SUBREAPER` in prctl(2)).

    For a process that is an agent and nothing else.  It must reap them, and `orphans` finds them: daemons with their
    own environment and session, which do not carry the agent's mark.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if os.getpid() == 1 or not hasattr(libc, "prctl") or libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        return  # pid 1 has all orphans of its container, whose parents need not be ours
    global _before  # noqa: PLW0603  the whole process adopts
    _before = set(_children())


def is_adopting() -> bool:
    """Whether orphans become children of this process."""
    return _before is not None or os.getpid() == 1


def orphans() -> list[proc_table.Process]:
    """Returns adopted processes: those that workers left behind, in whatever session."""
    before = _before
    if before is None:
        return []
    found = (proc_table.process(pid) for pid in _children() if pid not in waited_for and pid not in before)
    return [entry for entry in found if entry is not None and entry.parent == os.getpid() and not _is_ours(entry)]


def _is_ours(entry: proc_table.Process) -> bool:
    """Whether other code of this process handles a child: it is in our session, or in that of a helper.

    A process forked by a fork server is our child before we know of it, and may outlive the fork server.
    """
    return entry.session == os.getsid(0) or entry.session in helpers


def _children() -> list[int]:
    """Returns children of this process, including zombies (`proc_pid_task_children(5)`, otherwise the whole table).

    Returns none if no more files may be opened: the next call finds them.
    """
    found: list[int] = []
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children") as file:
                found += map(int, file.read().split())
    except OSError as error:  # a thread ended meanwhile, or this kernel has no such file
        if error.errno in {errno.EMFILE, errno.ENFILE}:
            return []
        table = (proc_table.process(name) for name in os.listdir("/proc") if name.isdigit())
        found = [entry.pid for entry in table if entry is not None and entry.parent == os.getpid()]
    return found


def reap_orphans() -> None:
    """Reaps dead children that nothing waits for.

    A process with pid 1 inherits every orphan of its container, one that adopts orphans those of its descendants; as
    zombies they would fill the process table.  Orphans come from workers, so from other sessions than ours: children
    in our session were started by this process, say by `multiprocessing`, which waits for them.
    """
    for pid in _children():
        entry = proc_table.process(pid)
        if entry is None or entry.state != "Z" or entry.pid in waited_for:
            continue
        if not _is_ours(entry):
            try:
                os.waitpid(entry.pid, os.WNOHANG)
            except ChildProcessError:
                pass  # other code of this process took it
