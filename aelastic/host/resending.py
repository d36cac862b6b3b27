"""How soon the kernel sends again what a network has lost.

This module is also part of the program `tcpstore/server.py`: it imports nothing of the package.
"""

from __future__ import annotations

import socket
from contextlib import suppress

# linux/tcp.h; Python does not name them.
TCP_THIN_LINEAR_TIMEOUTS, TCP_RTO_MAX_MS = 16, 44
# Linux allows no less.
RESEND_MAX_MS = 1000


def resend_soon(conn: socket.socket) -> None:
    """Has what is lost on a connection that carries little sent again at least once a second.

    By default the kernel waits twice as long each time: on a network that loses many packets, soon for many seconds.
    Connections that a listening socket accepts inherit this.
    """
    for option, value in ((TCP_THIN_LINEAR_TIMEOUTS, 1), (TCP_RTO_MAX_MS, RESEND_MAX_MS)):
        with suppress(OSError):  # it is gone, or this is a Linux before 6.15, which has only the first
            conn.setsockopt(socket.IPPROTO_TCP, option, value)
