"""Connections of processes of this machine, as the kernel lists them (`proc_pid_net(5)`)."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress


class Connections:
    """Which processes have had a connection to a port, of whichever host.  Blocking.

    The kernel's table takes milliseconds to read, however short it is: it is read for sockets that are new.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._known: set[bytes] = set()  # sockets of the processes
        self._found: set[bytes] = set()  # those that are connected to the port

    def of(self, pids: Collection[int]) -> set[int]:
        """Those of the processes that have one."""
        sockets = {pid: _sockets(pid) for pid in pids}
        if new := set().union(*sockets.values()) - self._known:
            self._known |= new
            self._found |= {b"socket:[%s]" % inode for table in ("tcp", "tcp6") for inode in self._inodes(table)}
        return {pid for pid, own in sockets.items() if not own.isdisjoint(self._found)}

    def _inodes(self, table: str) -> set[bytes]:
        with suppress(OSError), open(f"/proc/net/{table}", "rb") as file:
            next(file)
            rows = (row.split(None, 10) for row in file)
            return {row[9] for row in rows if int(row[2].rpartition(b":")[2], 16) == self._port}
        return set()


def _sockets(pid: int) -> set[bytes]:
    found = set()
    with suppress(OSError):  # it is gone, or another user's
        folder = b"/proc/%d/fd/" % pid
        for fd in os.listdir(folder):
            with suppress(OSError):
                found.add(os.readlink(folder + fd))
    return {link for link in found if link.startswith(b"socket:")}
