"""A slow and leaky link for `netns.py`: `python weather.py END INTERFACE DELAY_S LOSS SEED` carries packets between two.

Both ends are TUN devices, made where the program runs; one may be moved to another namespace.  The kernel has `netem`
for this, but many kernels are built without.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import sys
import time

# linux/if_tun.h
TUNSETIFF = 0x400454CA
IFF_TUN = 0x0001
IFF_NO_PI = 0x1000
PACKET_BYTES_MAX = 1 << 16


def tun(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return device


def carry(ends: tuple[int, int], delay_s: float, loss: float, luck: random.Random) -> None:
    numbers = itertools.count()
    on_their_way: list[tuple[float, int, int, bytes]] = []
    while True:
        timeout = max(on_their_way[0][0] - time.monotonic(), 0.0) if on_their_way else None
        for source in select.select(ends, [], [], timeout)[0]:
            packet = os.read(source, PACKET_BYTES_MAX)
            if luck.random() >= loss:
                target = ends[1] if source == ends[0] else ends[0]
                heapq.heappush(on_their_way, (time.monotonic() + delay_s, next(numbers), target, packet))
        while on_their_way and on_their_way[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(on_their_way)
            try:
                os.write(target, packet)
            except OSError:
                pass  # that end is down


def main(end: str, interface: str, delay_s: float, loss: float, seed: int) -> None:
    try:
        ends = tun(end), tun(interface)
    except OSError as error:
        sys.exit(str(error))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    carry(ends, delay_s, loss, random.Random(seed))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
