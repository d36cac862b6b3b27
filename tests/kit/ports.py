"""Ports for servers of tests."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from random import SystemRandom


def quiet_port() -> int:
    """A free port that the kernel gives to nothing that does not ask for it (`ip(7)`, `ip_local_port_range`)."""
    while True:
        port = SystemRandom().randrange(12_000, 32_000)
        try:
            with socket.create_server(("", port)):
                return port
        except OSError:
            pass  # taken


def listening(pids: Iterable[int]) -> dict[int, set[str]]:
    """The ports at which processes of this machine listen, and the addresses of each (`proc(5)`, `/proc/net/tcp`)."""
    inodes: set[str] = set()
    for pid in pids:
        with suppress(OSError):  # it has ended
            for name in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    inodes.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    found: dict[int, set[str]] = {}
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                host, _, port = words[1].partition(":")
                found.setdefault(int(port, 16), set()).add(_address(host, family))
    return found


def _address(digits: str, family: int) -> str:
    """An address as the kernel writes it there: words of four bytes, each in the order of the machine."""
    words = (digits[start : start + 8] for start in range(0, len(digits), 8))
    return socket.inet_ntop(family, b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words))
