"""Out-of-memory kills.

A worker's exit code of -9 does not show whether it was killed because memory ran out, but this process's cgroup does:
`OomWatch` reads the kill counter when it is created, and explains a worker's exit from the kills since.  It reads both
versions of the interface (the kernel's `cgroup-v2.rst` and `cgroup-v1/memory.rst`); on a host without either, or one
that hides them, nothing is explained.  It never raises.
"""

from __future__ import annotations

import os
from pathlib import Path

from aelastic.base.host.files import text_of

PROC_CGROUP = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")
# In v1, "no limit" is the largest multiple of the page size; no host has 2^62 bytes.
UNLIMITED_BYTES = 1 << 62
# The exit codes of Popen and shells for SIGKILL.
KILLED = (-9, 137)
# The names of the files with counters and limits.
_V1 = {"events": "memory.oom_control", "limit": "memory.limit_in_bytes"}
_V2 = {"events": "memory.events", "limit": "memory.max"}


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
        """Returns the smallest current limit of the cgroup and those above it, or `None`."""
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
