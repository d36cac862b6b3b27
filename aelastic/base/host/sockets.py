"""Sockets of this machine: listening sockets, those by which users reach agents, and who is connected.

Agents, the store, and clients listen with `listen`, `listen_at` and `HeldPort`: for every host that reaches this one,
or for this host's processes only.  `Connections` finds which processes are connected to a port.

A door is how users reach an agent on this machine: a UNIX socket in a folder that belongs to this user alone.  The
folder also keeps, for an hour, the descriptions that ended agents have left.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from aelastic.base.host.files import write_beside
from aelastic.base.host.usage import descriptors

_log = logging.getLogger(__name__)

# Thousands of workers may connect at the same moment; the kernel caps this at net.core.somaxconn.
BACKLOG = 4096
# More than a job has nodes: each round looks at those of all nodes, and a cache that is too small would not help.
ADDRESSES_MAX = 1 << 14
LOOPBACKS = ("127.0.0.1", "::1")
_NO_SUCH_ADDRESS = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}

# File suffixes of doors, and of the descriptions that agents have left.
DOOR, ENDED = ".sock", ".ended"
ENDED_S, ENDED_MAX = 3600.0, 50


def listen(port: int, address: str = "") -> socket.socket:
    """Opens a listening socket.

    Args:
        port: 0 picks a free one.
        address: an address of this machine; "": all interfaces, IPv6 and IPv4.

    Raises:
        OSError: the port is in use, or not allowed.
        OverflowError: it is not a port.
    """
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    return socket.create_server(("", port), backlog=BACKLOG)


@lru_cache(maxsize=ADDRESSES_MAX)
def is_address(host: str) -> bool:
    """Whether the host is an address rather than a name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


@lru_cache(maxsize=ADDRESSES_MAX)
def is_loopback(host: str) -> bool:
    """Whether the host, an address or a name, is this one for every client.  Does not ask a name server."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def loopback_address(host: str = "localhost") -> str:
    """Returns the address of a loopback host: IPv4's for a name, unless this machine has none."""
    if host != "localhost":
        return host
    try:
        with socket.socket() as probe:
            probe.bind((LOOPBACKS[0], 0))
    except OSError:
        return LOOPBACKS[1]
    return LOOPBACKS[0]


def listen_at(port: int, addresses: Sequence[str]) -> list[socket.socket]:
    """Opens listening sockets, all on one port, at advertised addresses.

    torch's TCPStore resolves a name to IPv6 first, and then tries no other address until its timeout: each address to
    which a name may resolve must listen.

    Args:
        port: 0 picks a free one.
        addresses: if it is empty, or contains one that this machine does not have: all addresses.  A loopback address
                  that it does not have is left out.

    Raises:
        OSError: the port is in use, or not allowed.
        OverflowError: it is not a port.
    """
    listeners: list[socket.socket] = []
    try:
        for address in dict.fromkeys(addresses):
            number = listeners[0].getsockname()[1] if listeners else port
            listeners += filter(None, [_listen_if_here(number, address)])
    except OSError as error:
        for listener in listeners:
            listener.close()
        if error.errno not in _NO_SUCH_ADDRESS:
            raise
        listeners = []
    return listeners or [listen(port)]


def _listen_if_here(port: int, address: str) -> socket.socket | None:
    try:
        return listen(port, address)
    except OSError as error:
        # This machine may have no IPv6, or no IPv4.
        if error.errno not in _NO_SUCH_ADDRESS or not is_loopback(address):
            raise
        return None


def is_at_all(listener: socket.socket) -> bool:
    """Whether the socket listens at all addresses of this host."""
    return bool(ip_address(listener.getsockname()[0].partition("%")[0]).is_unspecified)


class HeldPort:
    """A port of this host that nobody else can get, and that listens at advertised addresses.

    A socket at all addresses holds it without accepting connections, and lets other sockets of this process do so
    (`SO_REUSEADDR` in socket(7)).  Once it listens at an address it continues to: otherwise a process with a copy of
    the socket would block the address later.

    Args:
        number: 0 picks a free one.
        what: its purpose, for a message.
        is_bind_all: listen at all addresses, whatever is advertised.

    Raises:
        OSError: the port is in use, or not allowed.
        OverflowError: it is not a port.
    """

    def __init__(self, number: int = 0, what: str = "", *, is_bind_all: bool = False) -> None:
        self._what, self._is_bind_all = what, is_bind_all
        is_dual = socket.has_dualstack_ipv6()
        self._held = socket.socket(socket.AF_INET6 if is_dual else socket.AF_INET)
        self._kept: dict[str, socket.socket] = {}  # by address; "": all
        self.listeners: list[socket.socket] = []  # those at the advertised addresses, in their order
        try:
            self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if is_dual:
                self._held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self._held.bind(("", number))
        except BaseException:
            self._held.close()
            raise
        self.number: int = self._held.getsockname()[1]

    def listen_at(self, addresses: Sequence[str]) -> bool:
        """Listens at advertised addresses; if that is not possible, at all, or where it has listened before.

        Returns:
            Whether it listens at the advertised addresses.
        """
        addresses = () if self._is_bind_all else tuple(dict.fromkeys(addresses))
        if "" not in self._kept:
            is_first = not self._kept
            try:
                for address in addresses:
                    self._open(address)
            except OSError as error:
                if error.errno not in _NO_SUCH_ADDRESS:
                    raise
                addresses = ()
            if is_first and not addresses:
                self._close_kept()
            if not self._kept:
                self._open("")
                if not self._is_bind_all:
                    _log.info("%s listens at all addresses of this host and advertises none of them", self._what)
        self.listeners = [self._kept[each] for each in addresses if each in self._kept] or list(self._kept.values())
        return bool(addresses) and "" not in self._kept

    def _open(self, address: str) -> None:
        if address in self._kept:
            return
        try:
            listener = _listen_if_here(self.number, address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            self._held.close()  # some kernels (gVisor's) let nothing listen beside a bound socket
            listener = _listen_if_here(self.number, address)
        if listener is not None:
            self._kept[address] = listener

    def close(self) -> None:
        self._held.close()
        self._close_kept()

    def _close_kept(self) -> None:
        for listener in self._kept.values():
            listener.close()
        self.listeners, self._kept = [], {}


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


# Doors.


def doors_folder(env: Mapping[str, str]) -> Path:
    """Returns the folder of this user's doors.

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


def open_door(folder: Path, name: str) -> socket.socket:
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
            listener.bind(f"/proc/self/fd/{fd}/{name}{DOOR}")
            os.chmod(f"{name}{DOOR}", 0o600, dir_fd=fd)
            listener.listen()
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
        return listener


def close_door(folder: Path, name: str, said: Mapping[str, Any] | None) -> None:
    """Replaces an agent's socket by the description that the agent leaves, if any.  Never fails."""
    with suppress(OSError), _opened(folder) as fd:
        os.unlink(f"{name}{DOOR}", dir_fd=fd)
        if said is None:
            return
        import json

        write_beside(f"/proc/self/fd/{fd}/{name}{ENDED}", json.dumps(said).encode())


def doors_in(folder: Path) -> list[str]:
    """Returns the names of agents' sockets; some of the agents may be gone.

    Raises:
        OSError: others may have written to the folder.
    """
    with suppress(FileNotFoundError), _opened(folder) as fd:
        return [name.removesuffix(DOOR) for name in _names(fd, DOOR)]
    return []


def connect_to_door(folder: Path, name: str, timeout_s: float) -> socket.socket | None:
    """Connects to an agent; returns `None`, and removes the socket, if it no longer listens."""
    conn = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    conn.settimeout(timeout_s)
    try:
        with _opened(folder) as fd:
            try:
                conn.connect(f"/proc/self/fd/{fd}/{name}{DOOR}")
            except ConnectionRefusedError:
                os.unlink(f"{name}{DOOR}", dir_fd=fd)
                raise
    except OSError:
        conn.close()
        return None
    return conn


def user_of(conn: socket.socket) -> int:
    """Returns the user id of the client at a door, from the kernel."""
    _, user, _ = struct.unpack("3i", conn.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(user)


def left_at_doors(folder: Path) -> list[bytes]:
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
    for name in _names(fd, ENDED):
        with suppress(OSError):
            found.append((os.stat(name, dir_fd=fd).st_mtime, name))
    return [name for _, name in sorted(found, reverse=True)]


def _names(fd: int, suffix: str) -> list[str]:
    return sorted(name for name in os.listdir(fd) if name.endswith(suffix))
