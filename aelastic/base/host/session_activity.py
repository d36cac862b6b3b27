"""Activity of sessions: how much their processes have written and computed, and whether they wait, from `/proc`.

Blocking; for a thread.  Written bytes are `wchar` and `write_bytes` of `proc(5)`, `/proc/PID/io`: data passed to
`write(2)` for files, pipes and sockets, and data that goes to disks, also through mapped files and direct IO.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress

from aelastic.base.host import proc_table
from aelastic.base.host.proc_table import Process
from aelastic.base.host.usage import CounterGrowth
from aelastic.base.record import Record

# System calls that wait for a file system, by number.  On network file systems and FUSE, which may write a whole
# checkpoint in `close(2)`, a process may not be in uninterruptible sleep meanwhile.
_FILE_CALLS = {
    # msync, fsync, fdatasync, rename, sync, renameat, sync_file_range, syncfs, renameat2, close
    "x86_64": frozenset({26, 74, 75, 82, 162, 264, 277, 306, 316, 3}),
    "aarch64": frozenset({227, 82, 83, 81, 38, 84, 267, 276, 57}),
}.get(os.uname().machine, frozenset())
# The same if their file is in a file system, not a socket or pipe: write, pwrite64, writev, pwritev, pwritev2.
_WRITE_CALLS = {
    "x86_64": frozenset({1, 18, 20, 296, 328}),
    "aarch64": frozenset({64, 68, 66, 70, 287}),
}.get(os.uname().machine, frozenset())

# Waking up a thread takes 8 bytes (`eventfd(2)`), or fewer; text and data come in larger pieces.
WAKE_UP_BYTES = 8
# More bytes than this in such small writes are treated as data even though each looks like a wake-up.
WAKE_UPS_BYTES_MAX = 4096


FILE = "file"


class Activity(Record):
    """The activity of one session since the first look; counters only grow."""

    written: int | None  # bytes; `None`: it contains a process of another user, or the kernel does not count
    cpu_s: float
    waits_for_disk: bool  # a thread is in uninterruptible sleep, or in `fsync(2)`; checked if nothing was written
    waits_for_cpu: bool  # a thread is ready to run, or runs; checked in the same case


class SessionActivity:
    """Looks at sessions repeatedly, and adds up the activity of their processes."""

    def __init__(self) -> None:
        self._tick_s = 1 / os.sysconf("SC_CLK_TCK")
        self._growth = CounterGrowth()
        self._sums: dict[int, tuple[int, int]] = {}  # bytes and ticks, by session

    def look(self, sessions: Collection[int]) -> dict[int, Activity]:
        """Returns the activity of each session with a live process."""
        members: dict[int, list[Process]] = {}
        for entry in proc_table.session_members(set(sessions)):
            members.setdefault(entry.session, []).append(entry)
        self._growth.look()
        return {session: self._activity(session, entries) for session, entries in sorted(members.items())}

    def _activity(self, session: int, members: list[Process]) -> Activity:
        written, ticks = self._sums.get(session, (0, 0))
        had_written = written
        is_seen = True
        for entry in members:
            try:
                counts = _io_of(entry.pid)
            except PermissionError:
                is_seen = False
                continue
            if counts is not None:
                chars, writes, disk_bytes, more_ticks = self._growth.of(entry, *counts, entry.ticks)
                is_wake_up = chars <= WAKE_UP_BYTES * writes and chars < WAKE_UPS_BYTES_MAX
                written += disk_bytes + (0 if is_wake_up else chars)
                ticks += more_ticks
        self._sums[session] = written, ticks
        states = _states([entry.pid for entry in members]) if written == had_written else set()
        return Activity(written if is_seen else None, ticks * self._tick_s, bool(states & {"D", FILE}), "R" in states)


def _io_of(pid: int) -> tuple[int, int, int] | None:
    """Returns bytes passed to write(2), calls of it, and bytes to disks; `None` if the process is gone.

    Raises:
        PermissionError: it does not belong to us, or the kernel does not count.
    """
    try:
        io = proc_table.io_counts(f"{pid}/io")
        return io[b"wchar"], io[b"syscw"], io[b"write_bytes"]
    except PermissionError:
        raise
    except FileNotFoundError:
        if os.path.exists(f"/proc/{pid}"):
            raise PermissionError from None
        return None
    except (OSError, ValueError, KeyError):
        return None


def _states(pids: Collection[int]) -> set[str]:
    """Returns the states of all threads, from `stat` (proc(5)); `FILE` if one sleeps and waits for a file system."""
    states = set()
    for pid in pids:
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                fields = proc_table.stat_fields(f"{pid}/task/{thread}")
                state = fields[0].decode() if fields else ""
                states.add(FILE if state == "S" and _waits_for_file(pid, thread) else state)
    return states


def _waits_for_file(pid: int, thread: str) -> bool:
    """Whether a sleeping thread is in a system call that waits for a file system; false if that cannot be read."""
    with suppress(OSError, ValueError):
        with open(f"/proc/{pid}/task/{thread}/syscall", "rb", buffering=0) as file:
            call, *args = (file.read() or b"").split()
        if int(call) in _WRITE_CALLS:
            name = os.readlink(f"/proc/{pid}/fd/{int(args[0], 16)}")
            return name.startswith("/") and not name.startswith("/dev/")
        return int(call) in _FILE_CALLS
    return False
