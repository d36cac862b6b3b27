"""An agent that gets little CPU time, as on a busy machine."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# A twentieth of a CPU, with pauses longer than most of the agent's waits.
RUN_S, STOP_S = 0.0015, 0.03


def _ran_s(pid: int) -> float:
    """How long the threads of a process have run (first field of `/proc/PID/task/TID/schedstat`)."""
    ran_ns = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):  # a thread that has ended
            ran_ns += int(path.read_text().split()[0])
    return ran_ns / 1e9


def _wants_to_run(pid: int) -> bool:
    """Whether a thread of a process runs or waits for a CPU."""
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):
            if path.read_text().rpartition(")")[2].split()[0] == "R":
                return True
    return False


@contextmanager
def starved(pid: int) -> Iterator[None]:
    """Keeps a process stopped most of the time, but not the processes that it started.

    Its turn lasts until it has run or has nothing to do: on a busy machine a turn of fixed length might give it nothing.
    """
    is_over = threading.Event()

    def run_for_a_turn() -> None:
        enough_s = _ran_s(pid) + RUN_S
        os.kill(pid, signal.SIGCONT)
        time.sleep(RUN_S)
        while _wants_to_run(pid) and _ran_s(pid) < enough_s and not is_over.is_set():
            time.sleep(RUN_S)

    def take_turns() -> None:
        try:
            while not is_over.is_set():
                os.kill(pid, signal.SIGSTOP)
                time.sleep(STOP_S)
                run_for_a_turn()
        except ProcessLookupError:
            pass  # it has ended, and its status has been collected

    turns = threading.Thread(target=take_turns)
    turns.start()
    try:
        yield
    finally:
        is_over.set()
        turns.join()
