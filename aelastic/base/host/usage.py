"""CPU time, memory and descriptors of processes, from the kernel (`proc_pid_stat(5)`, `proc_pid_smaps(5)`)."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

from aelastic.base.host import proc_table
from aelastic.base.record import Record

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Counted from the state, which follows the name.
_STATE, _SESSION, _UTIME, _STIME, _RSS = 0, 3, 11, 12, 21


class Usage(Record):
    """CPU time and memory of one process, without its children."""

    cpu_s: float
    rss_bytes: int


def usage_of(pid: int | str, session: int | None = None) -> Usage | None:
    """Returns what a process has used so far; `None` if it does not exist (any more).

    Args:
        pid: its pid, or `self`.
        session: the session that it must be in: another process may have got its pid.
    """
    fields = proc_table.stat_fields(pid)
    if fields is None or fields[_STATE] in {b"Z", b"X"} or (session is not None and int(fields[_SESSION]) != session):
        return None
    return Usage((int(fields[_UTIME]) + int(fields[_STIME])) / _TICKS_PER_S, int(fields[_RSS]) * _PAGE_BYTES)


def usage_of_leaders(pids: Mapping[int, Any]) -> dict[int, tuple[float, int]]:
    """Returns CPU seconds and bytes of memory of live session leaders, such as workers.

    Args:
        pids: pids by any key; values that are not numbers are ignored.
    """
    found = {key: usage_of(pid, pid) for key, pid in pids.items() if isinstance(pid, int)}
    return {key: (usage.cpu_s, usage.rss_bytes) for key, usage in found.items() if usage is not None}


class CounterGrowth:
    """Measures how much counters of processes have grown between two looks, while processes come and go."""

    def __init__(self) -> None:
        # By pid and when it began; those that existed at the last look.
        self._before: dict[tuple[int, int], tuple[int, ...]] = {}
        self._now: dict[tuple[int, int], tuple[int, ...]] = {}

    def look(self) -> None:
        """Begins the next look."""
        self._before, self._now = self._now, {}

    def of(self, process: proc_table.Process, *counts: int) -> list[int]:
        """Returns the growth of a process's counters, given their current values.  A new process began with 0."""
        key = process.pid, process.began
        self._now[key] = counts
        return [max(0, now - before) for now, before in zip_longest(counts, self._before.get(key, ()), fillvalue=0)]


def pss_bytes(pids: Iterable[int]) -> int:
    """Returns the memory of several processes, with shared pages counted proportionally; ignores those that are gone.

    The kernel walks through all of their pages, which takes milliseconds for each: call it in a thread.
    """
    found = 0
    for pid in pids:
        with suppress(OSError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            found += sum(int(kib) << 10 for kib in re.findall(rb"^Pss: +(\d+) kB$", file.read(), re.MULTILINE))
    return found


def descriptors(pid: int) -> dict[str, str]:
    """Returns a process's open files, by number (`/proc/PID/fd`); empty if it is gone, or another user's."""
    found = {}
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # it has closed that one
                found[fd] = os.readlink(f"/proc/{pid}/fd/{fd}")
    return found


def bytes_in(files: Iterable[Path]) -> int | None:
    """Returns the bytes in regular files, which others may write for a worker; `None` without any (a pipe, say)."""
    sizes = []
    for path in files:
        with suppress(OSError):
            found = path.stat()
            if stat.S_ISREG(found.st_mode):
                sizes.append(found.st_size)
    return sum(sizes) if sizes else None
