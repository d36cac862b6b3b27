"""What a process uses: CPU time and memory, as the kernel counts them (`proc_pid_stat(5)`)."""

from __future__ import annotations

import os

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
