"""Which processes are connected to a port."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from aelastic.base.host.usage import descriptors


class Connections:
    """Finds which processes have had a connection to a port, on any host.  Blocking.

    Reading the kernel's table takes milliseconds, however short it is: it is read only when there are new sockets.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._known: set[str] = set()  # sockets of the processes
        self._found: set[str] = set()  # those connected to the port

    def of(self, pids: Collection[int]) -> set[int]:
        """Returns the processes that have one."""
        sockets = {pid: {each for each in descriptors(pid).values() if each.startswith("socket:")} for pid in pids}
        if new := set().union(*sockets.values()) - self._known:
            self._known |= new
            self._found |= {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in self._inodes(table)}
        return {pid for pid, own in sockets.items() if not own.isdisjoint(self._found)}

    def _inodes(self, table: str) -> set[str]:
        with suppress(OSError), open(f"/proc/net/{table}") as file:
            next(file)
            rows = (row.split(None, 10) for row in file)
            return {row[9] for row in rows if int(row[2].rpartition(":")[2], 16) == self._port}
        return set()
