"""A worker that writes: `flood` as fast as it can, `prints` as fast, line by line, `lines` with the time on each.

Half of it goes to stdout, half to stderr.  Lines have 100 bytes.
"""

import os
import sys
import time

LINE = b"epoch 3 step 000000 loss 0.123456 " + b"." * 65 + b"\n"
FLOOD_MIB = 64  # of each worker
LINES = 400  # of each worker, too
INTERVAL_S = 0.005
LIVES_S = 120  # nothing is left for longer, whatever becomes of the harness


def stamp(kind: str) -> None:
    """One line into the harness's FIFO, atomic because it is short (pipe(7), PIPE_BUF)."""
    rank, restart = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    fifo = os.open(sys.argv[1], os.O_WRONLY)
    os.write(fifo, f"{kind} {rank} {restart} {os.getpid()} {time.monotonic()!r}\n".encode())
    os.close(fifo)


def flood() -> None:
    lines = LINE * (65_536 // len(LINE))
    for number in range(FLOOD_MIB * 2**20 // len(lines)):
        os.write(1 + number % 2, lines)


def print_lines() -> None:
    for number in range(FLOOD_MIB * 2**20 // len(LINE)):
        os.write(1 + number % 2, LINE)


def write_lines() -> None:
    for number in range(LINES):
        time.sleep(INTERVAL_S)
        os.write(1 + number % 2, f"{time.monotonic()!r} {'.' * 100}".encode()[:99] + b"\n")


time.sleep(1.0)  # launchers start helpers in their first moments
stamp("begins")
{"flood": flood, "prints": print_lines, "lines": write_lines}[sys.argv[2]]()
stamp("has_written")
time.sleep(LIVES_S)
