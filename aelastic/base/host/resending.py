"""How soon the kernel retransmits lost packets.

This module is also part of the program `workers/tcpstore/server.py`: it imports nothing of the package.
"""

from __future__ import annotations

import socket
from contextlib import suppress

# linux/tcp.h; Python does not name them.
TCP_THIN_LINEAR_TIMEOUTS, TCP_RTO_MAX_MS = 16, 44
# Linux allows no less.
RESEND_MAX_MS = 1000


def resend_soon(conn: socket.socket) -> None:
    """Makes the kernel retransmit at least once a second, on a connection with little data.

    By default the kernel doubles the wait each time: on a network that loses many packets, it soon waits many seconds.
    Connections that a listening socket accepts inherit this.
    """
    for option, value in ((TCP_THIN_LINEAR_TIMEOUTS, 1), (TCP_RTO_MAX_MS, RESEND_MAX_MS)):
        with suppress(OSError):  # the connection is gone, or Linux is older than 6.15, which has only the first option
            conn.setsockopt(socket.IPPROTO_TCP, option, value)
