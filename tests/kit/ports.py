"""Ports for the servers of tests."""

from __future__ import annotations

import os
import socket
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from random import SystemRandom

# Each process that runs tests on a machine has its own ports, and does not reuse one soon.
_PROCESSES_MAX = 24
_given: deque[int] = deque(maxlen=500)


def _place() -> tuple[int, socket.socket]:
    """The share of ports of this process, and the socket that holds it: the kernel grants its name only once."""
    for number in range(_PROCESSES_MAX):
        holder = socket.socket(socket.AF_UNIX)
        with suppress(OSError):  # another process has it
            holder.bind(f"\0aelastic-test-ports-{number}")
            return number, holder
        holder.close()
    raise RuntimeError(f"{_PROCESSES_MAX} processes run tests on this machine")


_OURS, _HOLDER = _place()  # before any test counts the descriptors of its process


def quiet_port() -> int:
    """A free port that the kernel assigns only on request (`ip(7)`, `ip_local_port_range`)."""
    while True:
        port = SystemRandom().randrange(12_000 + _OURS, 32_000, _PROCESSES_MAX)
        if port in _given:
            continue
        try:
            with socket.create_server(("", port)):
                _given.append(port)
                return port
        except OSError:
            pass  # taken


def listening(pids: Iterable[int]) -> dict[int, set[str]]:
    """The ports at which processes listen, each in its own network, and the addresses of each port (`proc(5)`)."""
    found: dict[int, set[str]] = {}
    for pid in pids:
        with suppress(OSError):  # it has ended
            for port, address in _listening(Path(f"/proc/{pid}")):
                found.setdefault(port, set()).add(address)
    return found


def _listening(process: Path) -> Iterator[tuple[int, str]]:
    sockets: set[str] = set()
    for fd in (process / "fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            sockets.add(os.readlink(fd))
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in (process / "net" / table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                host, _, port = fields[1].partition(":")
                yield int(port, 16), _address(host, family)


def _address(digits: str, family: int) -> str:
    """Parses an address in the kernel's form: words of four bytes, each in the machine's byte order."""
    words = (digits[start : start + 8] for start in range(0, len(digits), 8))
    return socket.inet_ntop(family, b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words))
