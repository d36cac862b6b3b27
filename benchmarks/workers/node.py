"""A worker that imports nothing: says when it is there and which rank it has, then sleeps.

The first statement reads the clock (CLOCK_MONOTONIC, one for all processes of a machine); everything else comes later.
"""

import time

STARTED = time.monotonic()

import os  # noqa: E402
import sys  # noqa: E402

rank, world_size = os.environ["RANK"], os.environ["WORLD_SIZE"]
fifo = os.open(sys.argv[1], os.O_WRONLY)
# One write, atomic because it is short (pipe(7), PIPE_BUF).
os.write(fifo, f"{rank} {world_size} {os.getpid()} {STARTED!r}\n".encode())
os.close(fifo)
time.sleep(120)  # nothing is left for longer, whatever becomes of the harness
