"""Functions that tests pass to a supervisor; a spawned child can import them cheaply."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from typing import Any, NoReturn


def rank_squared() -> int:
    return int(os.environ["RANK"]) ** 2


def raise_deeply() -> NoReturn:
    _raise("no batch left")


def _raise(why: str) -> NoReturn:
    raise LookupError(why)


def raise_on_rank_1() -> int:
    if os.environ["RANK"] == "1":
        raise_deeply()
    time.sleep(600)
    return 0


def leave_with(code: int) -> NoReturn:
    sys.exit(code)


def many_bytes(mebibytes: int) -> bytes:
    return bytes([int(os.environ["RANK"])]) * (mebibytes << 20)


def unpicklable() -> Any:
    return lambda: None


class DiesWhenRead:
    """Unpickling it ends the process, so a child of `spawn` that reads its arguments never begins."""

    def __reduce__(self) -> Any:
        return os._exit, (9,)


def never_begins(_: Any) -> str:
    return "began"


class ReadOnlyInAWorker:
    def __reduce__(self) -> Any:
        return _read, (os.getpid(),)


def _read(writer: int) -> str:
    if os.getpid() != writer and "RANK" not in os.environ:
        raise RuntimeError("read by the agent")
    return "read"


def returns_what_cannot_be_read() -> Any:
    return ReadOnlyInAWorker()


def do_all(queue: multiprocessing.Queue[int], bonus: int, local_rank: str) -> dict[str, Any]:
    """Prints, puts a value into a queue, and returns a description of its process."""
    described = describe_self()
    print(f"out of {local_rank}")  # noqa: T201
    print(f"err of {local_rank}", file=sys.stderr)  # noqa: T201
    os.system(f"echo shell of {local_rank}")
    queue.put(int(os.environ["RANK"]) + bonus)
    return described


def describe_self() -> dict[str, Any]:
    import signal
    import threading

    return {
        "leads its session": os.getsid(0) == os.getpid(),
        "wakes the agent": signal.set_wakeup_fd(-1) != -1,
        "sigterm": str(signal.getsignal(signal.SIGTERM)),
        "threads": threading.active_count(),
        "rank": os.environ["RANK"],
        "local_rank": os.environ["LOCAL_RANK"],
    }


def allowed_cpus() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def touch_and_sleep(path: str) -> NoReturn:
    with open(path, "w") as file:
        file.write(str(os.getpid()))
    while True:
        time.sleep(600)


def fail_once() -> int:
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if restart == 0:
        sys.exit(1)
    return restart


def wait_for_file(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.01)


def describe_the_second_time(module: str, more: bytes) -> tuple[int, bool, int]:
    """Fails once; then returns its rank, whether a module was already imported, and how much data it received."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("first")
    return int(os.environ["RANK"]), module in sys.modules, len(more)
