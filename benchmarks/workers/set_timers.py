"""Sets and clears timers as torch's client does, so many in a second: `set_timers.py RATE COUNTER_FILE`.

One open, one write and one close for each line.  It imports no torch, for that takes longer than a measurement.  The
counter file holds how many timers have been set and cleared, as eight bytes.
"""

import json
import mmap
import os
import sys
import time
from pathlib import Path

TICK_S = 0.001


def send(fifo: str, scope: str, expiration_time: float, signum: int) -> None:
    request = {
        "version": 1,
        "pid": os.getpid(),
        "scope_id": scope,
        "expiration_time": expiration_time,
        "signal": signum,
    }
    line = json.dumps(request).encode() + b"\n"
    while True:
        try:
            fd = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            time.sleep(TICK_S)  # it has no reader yet
            continue
        try:
            os.write(fd, line)
            return
        except BlockingIOError:
            time.sleep(TICK_S)  # it is full, which torch's client would raise
        finally:
            os.close(fd)


def main() -> None:
    rate, path = float(sys.argv[1]), Path(sys.argv[2])
    fifo = os.environ["TORCHELASTIC_TIMER_FILE"]
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 8) as counter:
        began, count = time.monotonic(), 0
        while True:
            due = int((time.monotonic() - began) * rate)
            while count < due:
                scope = f"{__file__}#{count % 100}"  # as `timer.expires` names a scope that has no name
                send(fifo, scope, time.time() + 60, 9)
                send(fifo, scope, -1, 0)
                count += 1
            counter[:8] = count.to_bytes(8, "little")
            time.sleep(TICK_S)


if __name__ == "__main__":
    main()
