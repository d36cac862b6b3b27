"""The process table of this machine: `proc(5)`, `/proc/PID/stat`; and signals to the processes in it.

The only place that reads it.  The guard runs this text as part of its own program (`workers.guard`), so it imports only
the cheapest modules of the standard library, and none of ours.
"""

from __future__ import annotations

import os
import signal

# We need only the beginning of a line in the process table; the name in it has 64 bytes at most.
STAT_BYTES = 1024
# `/proc/PID/io` has seven lines.
IO_BYTES = 512


class Process:
    """One line of the process table: `proc(5)`, `/proc/PID/stat`."""

    __slots__ = ("_times", "parent", "pid", "session", "state")

    def __init__(self, pid: int, fields: list[bytes]) -> None:
        self.pid, self.state, self.parent, self.session = pid, fields[0].decode(), int(fields[1]), int(fields[3])
        self._times = fields[11:20]

    @property
    def ticks(self) -> int:
        """CPU time, including that of ended children that it has waited for."""
        return sum(map(int, self._times[:4]))

    @property
    def began(self) -> int:
        """When it began: another process may have its pid later."""
        return int(self._times[8])


def process(pid: int | str, root: str = "/proc") -> Process | None:
    """Returns the process, or `None` if it does not exist (any more)."""
    fields = stat_fields(pid, root)
    return None if fields is None else Process(int(pid), fields)


def stat_fields(pid: int | str, root: str = "/proc") -> list[bytes] | None:
    """Returns the fields of a process's `stat` (proc(5)), from its state (field 3) on; `None` if it does not exist."""
    try:  # `os` instead of `open` takes half the time, and this runs for each process of the machine
        fd = os.open(f"{root}/{pid}/stat", os.O_RDONLY)
    except OSError:
        return None
    try:
        stat = os.read(fd, STAT_BYTES)
    except OSError:
        return None
    finally:
        os.close(fd)
    # The name is in parentheses and may contain spaces and parentheses: count from the last one.
    return stat[stat.rindex(b")") + 2 :].split()


def io_counts(path: str, root: str = "/proc") -> dict[bytes, int]:
    """Returns the `io` counts of a process or a thread (proc(5)), by name, including children that it has waited for.

    Raises:
        OSError: it is gone, does not belong to us, or the kernel does not count.
        ValueError: there is nothing to read.
    """
    with open(f"{root}/{path}", "rb", buffering=0) as file:
        lines = (file.read(IO_BYTES) or b"").splitlines()
    if not lines:
        raise ValueError(f"{path} is empty")
    return {name: int(value) for name, _, value in (line.partition(b":") for line in lines)}


def is_alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    entry = process(pid)
    return entry is not None and entry.state not in "ZX"


def processes() -> list[Process]:
    """Returns all live processes.  Zombies are dead: they hold nothing and cannot be killed."""
    table = (process(name) for name in os.listdir("/proc") if name.isdigit())
    return [entry for entry in table if entry is not None and entry.state not in "ZX"]


def session_members(sessions: set[int]) -> list[Process]:
    """Returns the live processes in the sessions, including leaders."""
    table = (process(name) for name in os.listdir("/proc") if name.isdigit() and may_be_in(int(name), sessions))
    return [entry for entry in table if entry is not None and entry.session in sessions and entry.state not in "ZX"]


def with_descendants(table: list[Process], owners: dict[int, int]) -> dict[int, int]:
    """Returns owners by pid, extended by all descendants in the table, which have the owner of their parent."""
    found, grown = dict(owners), owners
    while grown:
        grown = {each.pid: found[each.parent] for each in table if each.parent in found and each.pid not in found}
        found |= grown
    return found


def may_be_in(pid: int, sessions: set[int]) -> bool:
    """Whether a process is in one of the sessions, as far as the kernel tells; reading `stat` takes six times as long.

    A restart looks at all processes of the machine, often thousands, once for each worker.
    """
    try:
        return os.getsid(pid) in sessions
    except ProcessLookupError:
        return False
    except OSError:
        return True  # a security module hides it


def carries(pid: int, mark: bytes) -> bool:
    """Whether the initial environment of a process contains the mark."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read()
    except OSError:
        return False  # gone, or another user's


def handles(pid: object, signum: int) -> bool:
    """Whether a process has a handler for a signal: `SigCgt` in proc(5)."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8") as file:
            caught = int(next(line for line in file if line.startswith("SigCgt:")).split()[1], 16)
    except (OSError, ValueError, StopIteration):
        return False  # it is gone
    return bool(caught >> (signum - 1) & 1)


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass  # gone, or not ours to kill


def kill_group(leader: int) -> None:
    """Kills a process group at once: a chain of processes that fork and die would escape one-by-one kills."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except OSError:
        pass  # nothing is left in it, or nothing that we may kill
