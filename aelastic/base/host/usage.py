"""Resources that processes use, shortages when the kernel refuses more, and out-of-memory kills.

CPU time, memory and descriptors come from the kernel (`proc_pid_stat(5)`, `proc_pid_smaps(5)`).  `shortage_of` finds
which shortage caused an error, and what to do.

A worker's exit code of -9 does not show whether it was killed because memory ran out, but this process's cgroup does:
`OomWatch` reads the kill counter when it is created, and explains a worker's exit from the kills since.  It reads both
versions of the interface (the kernel's `cgroup-v2.rst` and `cgroup-v1/memory.rst`); on a host without either, or one
that hides them, nothing is explained.  It never raises.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from traceback import walk_tb
from typing import Any

from aelastic.base.host import proc_table
from aelastic.base.host.files import text_of
from aelastic.base.record import Record

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Counted from the state, which follows the name.
_STATE, _SESSION, _UTIME, _STIME, _RSS = 0, 3, 11, 12, 21

# The shortage behind a refusal of the kernel, and what to do.
_SHORT = {
    errno.EMFILE: "this process cannot open more files: raise the limit (ulimit -n)",
    errno.ENFILE: "this host cannot open more files: raise fs.file-max",
    errno.ENOMEM: "this host has no memory left",
    errno.EAGAIN: "this host cannot start more processes: raise the limit (ulimit -u, pids.max)",
}
# The modules of the standard library that fork.
_FORKING = ("subprocess.py", "popen_fork.py", "popen_spawn_posix.py", "popen_forkserver.py", "util.py", "forkserver.py")

PROC_CGROUP = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")
# In v1, "no limit" is the largest multiple of the page size; no host has 2^62 bytes.
UNLIMITED_BYTES = 1 << 62
# The exit codes of Popen and shells for SIGKILL.
KILLED = (-9, 137)
# The names of the files with counters and limits.
_V1 = {"events": "memory.oom_control", "limit": "memory.limit_in_bytes"}
_V2 = {"events": "memory.events", "limit": "memory.max"}


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


class Growth:
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


def shortage_of(error: BaseException) -> str:
    """Returns what the host is short of and what to do, if an error shows that; otherwise ""."""
    if is_refused_thread(error):
        return "this host cannot start more threads: raise the limit (ulimit -u, pids.max)"
    if isinstance(error, MemoryError):
        return _SHORT[errno.ENOMEM]
    places = (frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__))
    # Elsewhere EAGAIN is not a limit but a call that would have to wait.
    if isinstance(error, OSError) and (error.errno != errno.EAGAIN or any(each.endswith(_FORKING) for each in places)):
        return _SHORT.get(error.errno or 0, "")
    return ""


def is_refused_thread(error: BaseException) -> bool:
    """Whether the host has refused a thread: CPython has no exception class for that (`_threadmodule.c`)."""
    return type(error) is RuntimeError and str(error) == "can't start new thread"


class OomWatch:
    """Counts out-of-memory kills in this process's cgroup since its creation.

    In v2 the counter includes the cgroups below, in v1 only the cgroup itself.  If this cgroup has no counter (v2
    without the memory controller), the nearest one above that has one is used.

    Args:
        proc_cgroup: the list of this process's cgroups (`cgroups(7)`).
        root: where the hierarchies are mounted.
    """

    def __init__(self, proc_cgroup: Path = PROC_CGROUP, root: Path = CGROUP_ROOT) -> None:
        self._interface, self._folders = _find_folders(proc_cgroup, root)
        self._events = next((path for path in self._paths("events") if _read_kills(path) is not None), None)
        self._at_start = self._count()
        self._explained = 0

    def kills_since_start(self) -> int:
        """Returns how many processes of the cgroup the kernel has killed since; 0 if unknown."""
        # A new cgroup that replaces one of the same name starts at 0 again.
        return max(0, self._count() - self._at_start)

    def limit_bytes(self) -> int | None:
        """Returns the smallest current limit of the cgroup and those above it; `None` if there is none."""
        limits = [_number(text_of(path)) for path in self._paths("limit")]  # v2 writes "max" for none
        return min((limit for limit in limits if limit is not None and limit < UNLIMITED_BYTES), default=None)

    @property
    def limit_text(self) -> str:
        """The limit as text, such as `512.0 MiB`, or ""."""
        limit = self.limit_bytes()
        return "" if limit is None else _size_text(limit)

    def explain(self, exitcode: int) -> str:
        """Returns a sentence about a worker's exit, if the kernel has killed a process since; otherwise "".

        One kill explains one SIGKILL.  It does not explain another exit, but may have caused it: a killed data loader
        makes its parent fail.  The kernel counts before it kills, so an exit that we see has been counted.
        """
        kills = self.kills_since_start() - self._explained
        if kills <= 0:
            return ""
        limit = f" (memory limit {self.limit_text})" if self.limit_text else ""
        if exitcode in KILLED:
            self._explained += 1
            return f"the kernel's out-of-memory killer ended it{limit}"
        return f"the kernel's out-of-memory killer ended {kills} process(es) of its cgroup{limit}"

    def _count(self) -> int:
        return (_read_kills(self._events) or 0) if self._events else 0

    def _paths(self, what: str) -> list[Path]:
        return [folder / self._interface[what] for folder in self._folders]


def _find_folders(proc_cgroup: Path, root: Path) -> tuple[dict[str, str], list[Path]]:
    """Returns the cgroup's folder and those above it, innermost first, up to the mount."""
    cgroups: dict[str, str] = {}
    for line in text_of(proc_cgroup).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        cgroups |= dict.fromkeys(controllers.split(","), path)
    # Only one of v1 and v2 has the memory controller.
    interface = _V1 if "memory" in cgroups else _V2
    mount = root / "memory" if interface is _V1 else root
    inside = Path((cgroups.get("memory") or cgroups.get("", "/")).strip("/"))
    # A container may see the host's path, of which its mount has only the end, or a path above its namespace.
    folders = [mount / above for above in (inside, *inside.parents)] if ".." not in inside.parts else [mount]
    return interface, [folder for folder in folders if os.path.isdir(folder)]


def _read_kills(path: Path) -> int | None:
    for line in text_of(path).splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill":
            return _number(value)
    return None


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def _size_text(size: int) -> str:
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):  # noqa: B007
        if value < 1024:
            break
        value /= 1024
    return f"{value:.1f} {unit}" if unit != "B" else f"{size} B"
