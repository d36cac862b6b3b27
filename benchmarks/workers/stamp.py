"""A worker that imports nothing.  Says when it is there, then does as told: `exit`, `sleep`, or `crash` once.

With `crash-beside-blocked` the other worker ignores SIGTERM, as one does that waits in a collective.

The first statement reads the clock (CLOCK_MONOTONIC, one for all processes of a machine); everything else comes later.
Note that `os`, `sys` and `time` are in memory before a script's first line.
"""

import time

STARTED = time.monotonic()

import os  # noqa: E402
import sys  # noqa: E402

# A launcher starts helpers in its first moments; what a running job does is measured after them.
LIVES_S = 2.0


def stamp(kind: str, at: float) -> None:
    """One line into the harness's FIFO, atomic because it is short (pipe(7), PIPE_BUF)."""
    rank, restart = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    fifo = os.open(sys.argv[1], os.O_WRONLY)
    os.write(fifo, f"{kind} {rank} {restart} {os.getpid()} {at!r}\n".encode())
    os.close(fifo)


stamp("started", STARTED)
what, _, beside = sys.argv[2].partition("-beside-")
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if beside == "blocked" and first and os.environ["RANK"] == "0":
    import signal

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if what == "exit" or (what == "crash" and first and os.environ["RANK"] == "1"):
    time.sleep(LIVES_S)
if what == "crash" and first and os.environ["RANK"] == "1":
    stamp("crashed", time.monotonic())
    os._exit(1)
if what == "sleep" or (what == "crash" and first):
    time.sleep(120)  # nothing is left for longer, whatever becomes of the harness
if what == "exit":
    stamp("exits", time.monotonic())
    os._exit(0)
