"""Ports for servers of tests."""

from __future__ import annotations

import socket
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
