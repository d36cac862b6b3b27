"""Connections of processes of this machine, as the kernel lists them (`proc_pid_net(5)`)."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress

_ESTABLISHED = b"01"


def connected_to(port: int, pids: Collection[int]) -> set[int]:
    """Those of the processes that have a connection to this port, of whichever host.  Blocking."""
    sockets = {b"socket:[%s]" % inode for table in ("tcp", "tcp6") for inode in _inodes(f"/proc/net/{table}", port)}
    return {pid for pid in pids if sockets and not sockets.isdisjoint(_open_files(pid))}


def _inodes(table: str, port: int) -> set[bytes]:
    """Of the sockets that are connected to the port."""
    with suppress(OSError), open(table, "rb") as file:
        next(file)
        rows = (row.split(None, 10) for row in file)
        return {row[9] for row in rows if row[3] == _ESTABLISHED and int(row[2].rpartition(b":")[2], 16) == port}
    return set()


def _open_files(pid: int) -> set[bytes]:
    found = set()
    with suppress(OSError):  # it is gone, or another user's
        folder = b"/proc/%d/fd/" % pid
        for fd in os.listdir(folder):
            with suppress(OSError):
                found.add(os.readlink(folder + fd))
    return found
