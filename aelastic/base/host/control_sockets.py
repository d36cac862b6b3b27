"""The sockets by which users reach the agents of this machine: UNIX sockets in a folder of this user alone.

The folder also keeps, for an hour, the descriptions that ended agents have left.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aelastic.base.host.files import write_beside

# File suffixes of these sockets, and of the descriptions that agents have left.
SOCKET_SUFFIX, ENDED_SUFFIX = ".sock", ".ended"
ENDED_S, ENDED_MAX = 3600.0, 50


def folder_of(env: Mapping[str, str]) -> Path:
    """Returns the folder of this user's control sockets.

    This is not logind's own folder: that is removed with the user's last session while jobs continue, and agents that
    cron or Slurm starts do not know it.
    """
    base, user = env.get("XDG_RUNTIME_DIR", ""), os.getuid()
    is_chosen = os.path.isabs(base) and base.rstrip("/") != f"/run/user/{user}"
    return Path(base, "aelastic") if is_chosen else Path(f"/tmp/aelastic-{user}")  # noqa: S108  checked


@contextmanager
def _opened(folder: Path, *, is_made: bool = False) -> Iterator[int]:
    """Opens a descriptor of the folder, through which a path of any length can be bound.

    Raises:
        OSError: it does not exist, or others may have written to it.
    """
    if is_made:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError(f"{folder} is open to other users: remove it, or chmod 700 it")
        yield fd
    finally:
        os.close(fd)


def listen_at(folder: Path, name: str) -> socket.socket:
    """Opens a listening socket that only this user can connect to.

    Raises:
        OSError: it cannot be opened there.
    """
    with _opened(folder, is_made=True) as fd:
        for old in _ended_by_age(fd)[ENDED_MAX:]:
            with suppress(OSError):
                os.unlink(old, dir_fd=fd)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(f"/proc/self/fd/{fd}/{name}{SOCKET_SUFFIX}")
            os.chmod(f"{name}{SOCKET_SUFFIX}", 0o600, dir_fd=fd)
            listener.listen()
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
        return listener


def close(folder: Path, name: str, record: Mapping[str, Any] | None) -> None:
    """Replaces an agent's socket by the description that the agent leaves, if any.  Never fails."""
    with suppress(OSError), _opened(folder) as fd:
        os.unlink(f"{name}{SOCKET_SUFFIX}", dir_fd=fd)
        if record is None:
            return
        import json

        write_beside(f"/proc/self/fd/{fd}/{name}{ENDED_SUFFIX}", json.dumps(record).encode())


def names_in(folder: Path) -> list[str]:
    """Returns the names of agents' sockets; some of the agents may be gone.

    Raises:
        OSError: others may have written to the folder.
    """
    with suppress(FileNotFoundError), _opened(folder) as fd:
        return [name.removesuffix(SOCKET_SUFFIX) for name in _names(fd, SOCKET_SUFFIX)]
    return []


def connect(folder: Path, name: str, timeout_s: float) -> socket.socket | None:
    """Connects to an agent; returns `None`, and removes the socket, if it no longer listens."""
    conn = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    conn.settimeout(timeout_s)
    try:
        with _opened(folder) as fd:
            try:
                conn.connect(f"/proc/self/fd/{fd}/{name}{SOCKET_SUFFIX}")
            except ConnectionRefusedError:
                os.unlink(f"{name}{SOCKET_SUFFIX}", dir_fd=fd)
                raise
    except OSError:
        conn.close()
        return None
    return conn


def user_of(conn: socket.socket) -> int:
    """Returns the user id of the client at a control socket, from the kernel."""
    _, user, _ = struct.unpack("3i", conn.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(user)


def left_in(folder: Path) -> list[bytes]:
    """Returns what agents have left within the last hour, the latest first."""
    found: list[bytes] = []
    with suppress(OSError), _opened(folder) as fd:
        for name in _ended_by_age(fd)[:ENDED_MAX]:
            with suppress(OSError), open(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=fd), "rb") as file:
                if datetime.now(UTC).timestamp() - os.fstat(file.fileno()).st_mtime <= ENDED_S:
                    found.append(file.read())
    return found


def _ended_by_age(fd: int) -> list[str]:
    """Returns the names of what agents have left, the latest first."""
    found: list[tuple[float, str]] = []
    for name in _names(fd, ENDED_SUFFIX):
        with suppress(OSError):
            found.append((os.stat(name, dir_fd=fd).st_mtime, name))
    return [name for _, name in sorted(found, reverse=True)]


def _names(fd: int, suffix: str) -> list[str]:
    return sorted(name for name in os.listdir(fd) if name.endswith(suffix))
