"""The TCP sockets of a round's process groups: noted as groups are made, watched, and cut when the round is over.

A collective of gloo raises as soon as one of its sockets is shut, so cutting them frees a rank from any of them.  While
groups are being made, sockets of three kinds are open.  They are cut in two ways:

- connected and connecting ones: shut.  The store's connection is one, so a wait in the store also raises.
- listening ones: a rank that waits for a lost peer to connect has no socket to the peer.  gloo finds out whom a
  connection belongs to by a number that comes first on it, so this process connects to itself with each number, and
  hangs up: the wait raises.  Such a socket is never shut: gloo's thread would end the process.

Sockets that exist before groups are made are left alone; they belong to other libraries.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import socket
import stat
import struct
import threading
from collections.abc import Iterator

# gloo's default needs a connection to each peer before a group is made; with this variable, they are made when needed.
_LAZY_VARIABLE = "TORCH_GLOO_LAZY_INIT"
_ANSWER_S = 1.0  # for a connection of this process to itself
_libc = ctypes.CDLL(None, use_errno=True)


class GroupSockets:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, int] = {}  # inodes by descriptor
        self._openings: list[set[tuple[int, int]]] = []  # what was open as each of them began
        self._answered: set[tuple[int, int]] = set()
        self._peers = select.epoll()
        self._watched: list[int] = []  # copies: gloo closes a socket that its peer has closed
        self._handed_over = 0  # of them
        self._was_cut = False

    def begin(self) -> None:
        """A round begins: all ranks have left the last one."""
        with self._lock:
            self._clear()
            self._stop_watching()
            self._was_cut = False
            if os.environ.get(_LAZY_VARIABLE, "0") not in {"", "0"}:
                self._openings.append(_open_sockets())

    def end(self) -> None:
        """The round is left, and its sockets are closed by those who opened them.

        The copies stay, so that the connections end only when all ranks have left: gloo forgets a message that it is
        about to send to a peer that has closed the connection, and its sender waits for good (torch 2.13).
        """
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        self._known.clear()
        self._openings.clear()
        self._answered.clear()

    def _stop_watching(self) -> None:
        self._peers.close()
        self._peers = select.epoll()
        for copy in self._watched:
            os.close(copy)
        self._watched.clear()
        self._handed_over = 0

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Notes the sockets of a group that is made within the `with` block; they may be cut while they are opened."""
        before = _open_sockets()
        with self._lock:
            self._openings.append(before)
        try:
            yield
        finally:
            with self._lock:
                for descriptor, inode in _open_sockets() - before:
                    self._note(descriptor, inode)
                    with contextlib.suppress(OSError):  # closed meanwhile
                        self._watch(descriptor)
                self._openings = [each for each in self._openings if each is not before]

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Notes the connection to a store once it is made: torch would keep replacing one that is cut earlier.

        It is not watched, since the agent may end the store before the round.
        """
        before = _open_sockets()
        yield
        with self._lock:
            for descriptor, inode in _open_sockets() - before:
                self._note(descriptor, inode)

    def _note(self, descriptor: int, inode: int) -> None:
        if _is_tcp(descriptor):
            self._known[descriptor] = inode

    def _watch(self, descriptor: int) -> None:
        if not _is_tcp(descriptor) or _listens(descriptor):
            return
        copy = os.dup(descriptor)
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if most != resource.RLIM_INFINITY and copy >= most // 2:
            os.close(copy)  # the script needs the others; the agent's message comes milliseconds later
            return
        self._watched.append(copy)
        self._peers.register(copy, select.EPOLLRDHUP)

    @property
    def is_to_be_cut(self) -> bool:
        """Whether another cut may find something: sockets are being opened, or were since the last one."""
        with self._lock:
            return bool(self._openings or self._known)

    def new_connections(self) -> list[int]:
        """Returns copies of the connections of groups that were made since the last call."""
        with self._lock:
            new = self._watched[self._handed_over :]
            self._handed_over = len(self._watched)
            return new

    def is_cut_by_peer(self) -> bool:
        """Whether a peer has closed one of its sockets; costs less than a microsecond."""
        return bool(self._peers.poll(0))

    def was_cut_by_peer(self) -> bool:
        """Whether a peer has closed one of its sockets since the round began."""
        return self._was_cut or self.is_cut_by_peer()

    def watch_no_more(self) -> None:
        """Stops watching: a peer has closed a socket, and the round is not over.

        Either this script destroys groups within a round, or the agent's message is still to come.
        """
        with self._lock:
            self._was_cut = True
            self._stop_watching()

    def cut(self, world_size: int) -> None:
        """Shuts the round's sockets; those being opened need further calls, until they are open or given up.

        Args:
            world_size: the number of ranks that may be waited for.
        """
        with self._lock:
            sockets = set(self._known.items())
            self._known.clear()
            for before in self._openings:
                sockets |= {each for each in _open_sockets() - before if _is_tcp(each[0])}
            is_opening = bool(self._openings)
        for descriptor, inode in sockets:
            with contextlib.suppress(OSError), _copy(descriptor) as copy:
                if _inode(copy) != inode:
                    continue  # the number belongs to another file by now
                if not _listens(copy):
                    # Not for writing: gloo forgets a message that it fails to send (torch 2.13).
                    _libc.shutdown(copy, socket.SHUT_RD)
                elif is_opening and (descriptor, inode) not in self._answered:
                    _answer(copy, world_size)
                    self._answered.add((descriptor, inode))


def _open_sockets() -> set[tuple[int, int]]:
    """Returns the descriptors of this process that are sockets, each with its inode."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, such as that of the listing
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found


def _inode(descriptor: int) -> int:
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return -1


@contextlib.contextmanager
def _copy(descriptor: int) -> Iterator[int]:
    """Duplicates a descriptor: while the copy is open, it is the same socket, whatever the number then refers to."""
    copy = os.dup(descriptor)
    try:
        yield copy
    finally:
        os.close(copy)


# Python's own socket objects are not used for sockets of others: with `socket.setdefaulttimeout` they change whether a
# socket blocks, for all who use it.


def _option(descriptor: int, option: int) -> int:
    value, size = ctypes.c_int(-1), ctypes.c_uint(ctypes.sizeof(ctypes.c_int))
    _libc.getsockopt(descriptor, socket.SOL_SOCKET, option, ctypes.byref(value), ctypes.byref(size))
    return value.value


def _is_tcp(descriptor: int) -> bool:
    is_internet = _option(descriptor, socket.SO_DOMAIN) in {socket.AF_INET, socket.AF_INET6}
    return is_internet and _option(descriptor, socket.SO_TYPE) == socket.SOCK_STREAM


def _listens(descriptor: int) -> bool:
    return _option(descriptor, socket.SO_ACCEPTCONN) == 1


def _answer(descriptor: int, world_size: int) -> None:
    """Connects to a listening socket of this process as each peer would, and hangs up."""
    listener = socket.socket(fileno=os.dup(descriptor))  # gloo's listening sockets never block
    with listener:
        address = listener.getsockname()
    for number in range(world_size):
        with socket.socket(listener.family, socket.SOCK_STREAM) as caller:
            caller.settimeout(_ANSWER_S)
            caller.connect(address)
            caller.sendall(struct.pack("=q", number))
