"""Where agents of this user can be spoken to on this machine: UNIX sockets in a folder that is this user's alone.

Beside the socket of an agent that runs lies, for an hour, what the last agents that have ended left to be read.
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

from aelastic.host.files import write_beside

ENDED_S, ENDED_MAX = 3600.0, 20
SOCKET, ENDED = ".sock", ".ended"


def folder_of(env: Mapping[str, str]) -> Path:
    """Where they lie.

    Not in logind's own folder: that goes with the user's last session while jobs go on, and agents that cron or Slurm
    starts are not told of it.
    """
    base, user = env.get("XDG_RUNTIME_DIR", ""), os.getuid()
    is_chosen = os.path.isabs(base) and base.rstrip("/") != f"/run/user/{user}"
    return Path(base, "aelastic") if is_chosen else Path(f"/tmp/aelastic-{user}")  # noqa: S108  checked


@contextmanager
def opened(folder: Path, *, is_made: bool = False) -> Iterator[int]:
    """A descriptor of the folder: by it, a path of any length can be bound.

    Raises:
        OSError: it is not there, or others may have put into it what they want.
    """
    if is_made:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError(f"{folder} is not this user's alone: remove it, or chmod 700 it")
        yield fd
    finally:
        os.close(fd)


def listen(folder: Path, name: str) -> socket.socket:
    """A socket that this user alone can connect to.

    Raises:
        OSError: there is no place for it.
    """
    with opened(folder, is_made=True) as fd:
        for old in _by_age(fd)[ENDED_MAX:]:
            with suppress(OSError):
                os.unlink(old, dir_fd=fd)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(f"/proc/self/fd/{fd}/{name}{SOCKET}")
            os.chmod(f"{name}{SOCKET}", 0o600, dir_fd=fd)
            listener.listen()
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
        return listener


def leave(folder: Path, name: str, said: Mapping[str, Any] | None) -> None:
    """In the place of its socket, what an agent that ends leaves to be read, if anything; nothing fails for that."""
    with suppress(OSError), opened(folder) as fd:
        os.unlink(f"{name}{SOCKET}", dir_fd=fd)
        if said is None:
            return
        import json

        write_beside(f"/proc/self/fd/{fd}/{name}{ENDED}", json.dumps(said).encode())


def user_of(conn: socket.socket) -> int:
    """Who has connected, as the kernel says."""
    _, user, _ = struct.unpack("3i", conn.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(user)


def doors_in(folder: Path) -> list[str]:
    """The names of sockets of agents, some of which may be gone.

    Raises:
        OSError: others may have put there what they want.
    """
    with suppress(FileNotFoundError), opened(folder) as fd:
        return [name.removesuffix(SOCKET) for name in _names(fd, SOCKET)]
    return []


def connect(folder: Path, name: str, timeout_s: float) -> socket.socket | None:
    """A connection to an agent; `None` where none listens any more, and its socket is removed."""
    conn = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    conn.settimeout(timeout_s)
    try:
        with opened(folder) as fd:
            try:
                conn.connect(f"/proc/self/fd/{fd}/{name}{SOCKET}")
            except ConnectionRefusedError:
                os.unlink(f"{name}{SOCKET}", dir_fd=fd)
                raise
    except OSError:
        conn.close()
        return None
    return conn


def ended(folder: Path) -> list[bytes]:
    """What agents have left within the last hour, the latest first."""
    found: list[bytes] = []
    with suppress(OSError), opened(folder) as fd:
        for name in _by_age(fd)[:ENDED_MAX]:
            with suppress(OSError), open(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=fd), "rb") as file:
                if datetime.now(UTC).timestamp() - os.fstat(file.fileno()).st_mtime <= ENDED_S:
                    found.append(file.read())
    return found


def _by_age(fd: int) -> list[str]:
    """What agents have left, the latest first."""
    found: list[tuple[float, str]] = []
    for name in _names(fd, ENDED):
        with suppress(OSError):
            found.append((os.stat(name, dir_fd=fd).st_mtime, name))
    return [name for _, name in sorted(found, reverse=True)]


def _names(fd: int, suffix: str) -> list[str]:
    return sorted(name for name in os.listdir(fd) if name.endswith(suffix))
