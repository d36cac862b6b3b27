"""What processes use: CPU time, memory (`proc_pid_stat(5)`, `proc_pid_smaps(5)`) and files, as the kernel has it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import zip_longest
from typing import Any

from aelastic.core.record import Record
from aelastic.host import proc_table

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Counted from the state, which follows the name.
_STATE, _SESSION, _UTIME, _STIME, _RSS = 0, 3, 11, 12, 21


class Usage(Record):
    """CPU time and memory of one process, without its children."""

    cpu_s: float
    rss_bytes: int


def usage_of(pid: int | str, session: int | None = None) -> Usage | None:
    """What a process has used until now; `None` when there is none (any more).

    Args:
        pid: or `self`.
        session: the session it must be in: a number may have gone to another process.
    """
    fields = proc_table.stat_fields(pid)
    if fields is None or fields[_STATE] in {b"Z", b"X"} or (session is not None and int(fields[_SESSION]) != session):
        return None
    return Usage((int(fields[_UTIME]) + int(fields[_STIME])) / _TICKS_PER_S, int(fields[_RSS]) * _PAGE_BYTES)


def usage_of_leaders(pids: Mapping[int, Any]) -> dict[int, tuple[float, int]]:
    """CPU seconds and bytes of memory of processes that lead their sessions, as workers do; of those that live.

    Args:
        pids: by any key; what is no number is left out.
    """
    found = {key: usage_of(pid, pid) for key, pid in pids.items() if isinstance(pid, int)}
    return {key: (usage.cpu_s, usage.rss_bytes) for key, usage in found.items() if usage is not None}


class Growth:
    """By how much counts of processes have grown between one look and the next, while processes come and go."""

    def __init__(self) -> None:
        # By pid and when it began; of those that were there at the last look.
        self._before: dict[tuple[int, int], tuple[int, ...]] = {}
        self._now: dict[tuple[int, int], tuple[int, ...]] = {}

    def look(self) -> None:
        """The next look begins."""
        self._before, self._now = self._now, {}

    def of(self, process: proc_table.Process, *counts: int) -> list[int]:
        """Of what a process has counted until now.  A new process began with 0."""
        key = process.pid, process.began
        self._now[key] = counts
        return [max(0, now - before) for now, before in zip_longest(counts, self._before.get(key, ()), fillvalue=0)]


def pss_bytes(pids: Iterable[int]) -> int:
    """Memory of several processes, in which a page that many share counts in parts; of what is gone, none.

    The kernel walks through all of their pages, which takes milliseconds for each: for a thread.
    """
    found = 0
    for pid in pids:
        with suppress(OSError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            found += sum(int(kib) << 10 for kib in re.findall(rb"^Pss: +(\d+) kB$", file.read(), re.MULTILINE))
    return found


def descriptors(pid: int) -> dict[str, str]:
    """What a process has open, by number, as `/proc/PID/fd` has it; nothing of one that is gone, or another user's."""
    found = {}
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # it has closed that one
                found[fd] = os.readlink(f"/proc/{pid}/fd/{fd}")
    return found
