"""What processes use: CPU time and memory, as the kernel counts them (`proc_pid_stat(5)`, `proc_pid_smaps(5)`)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress

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


def pss_bytes(pids: Iterable[int]) -> int:
    """Memory of several processes, in which a page that many share counts in parts; of what is gone, none.

    The kernel walks through all of their pages, which takes milliseconds for each: for a thread.
    """
    found = 0
    for pid in pids:
        with suppress(OSError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            found += sum(int(kib) << 10 for kib in re.findall(rb"^Pss: +(\d+) kB$", file.read(), re.MULTILINE))
    return found
