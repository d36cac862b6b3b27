"""An agent that gets little of a CPU, as beside many others on a busy machine."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

# A twentieth of a CPU, in turns that are longer than most of what an agent waits for.
RUN_S, STOP_S = 0.0015, 0.03


@contextmanager
def starved(pid: int) -> Iterator[None]:
    """The process stands still most of the time; what it has started does not."""
    is_over = threading.Event()

    def take_turns() -> None:
        try:
            while not is_over.is_set():
                os.kill(pid, signal.SIGSTOP)
                time.sleep(STOP_S)
                os.kill(pid, signal.SIGCONT)
                time.sleep(RUN_S)
        except ProcessLookupError:
            pass  # it has ended, and its status was taken

    turns = threading.Thread(target=take_turns)
    turns.start()
    try:
        yield
    finally:
        is_over.set()
        turns.join()
