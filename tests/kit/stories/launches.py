"""Functions to launch; as a script, it runs one launch after the other with torch's launcher or with ours.

    python launches.py torch|aelastic

It prints the outcome of each launch as a JSON line, for the test to compare.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any

KNOWN_RANKS = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME",
)  # fmt: skip


def rank_and(*args: Any) -> list[Any]:
    return [int(os.environ["RANK"]), *args]


def ranks() -> list[str]:
    return [os.environ[name] for name in KNOWN_RANKS]


def where_workers_meet() -> list[str]:
    return [os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")]


def pids() -> list[int]:
    return [os.getpid(), os.getppid()]


def fail() -> None:
    raise LookupError("no batch left")


def fail_the_first_time() -> str:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        fail()
    return "restarts " + os.environ["TORCHELASTIC_RESTART_COUNT"]


def sleep_long(folder: str) -> None:
    """Writes its pid to a file in the folder first."""
    path = os.path.join(folder, os.environ["RANK"])
    with open(path + ".new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(path + ".new", path)
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        time.sleep(0.1)  # a signal that comes just before the sleep is handled only after it


def ignore_sigterm(folder: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: open(os.path.join(folder, "asked"), "w").close())
    sleep_long(folder)


def meet(queue: Any, event: Any, lock: Any, barrier: Any) -> bool:
    """Works only if the workers and their parent share each argument."""
    with lock:
        queue.put(int(os.environ["RANK"]))
    barrier.wait(60)
    return bool(event.wait(60))


def many_bytes(mebibytes: int) -> bytes:
    return b"\7" * (mebibytes << 20)


def large_dict(entries: int) -> dict[int, str]:
    return {number: str(number) for number in range(entries)}


def tensors() -> Any:
    import torch

    shared = torch.arange(1000.0)
    shared.share_memory_()
    return {"shared": shared, "leaf": torch.ones(3, requires_grad=True), "strided": torch.eye(4)[::2]}


def unpicklable() -> Any:
    return threading.Lock()


class UnpicklableError(Exception):
    def __init__(self, lock: Any, _: Any) -> None:
        super().__init__("a lock inside", lock)


def fail_with_a_lock() -> None:
    raise UnpicklableError(threading.Lock(), None)


def launch_inside(start_method: str) -> dict[int, Any]:
    from aelastic.launch import elastic_launch

    return elastic_launch(one_node(start_method=start_method), rank_and)("inside")


def launch_and_put(queue: Any, start_method: str) -> None:
    queue.put(launch_inside(start_method))


def speak(lines: int) -> None:
    for number in range(lines):
        print(f"line {number}")  # noqa: T201


def one_node(config: Any = None, **more: Any) -> Any:
    """A config for two workers of one node."""
    if config is None:
        from aelastic.launch import LaunchConfig as config  # noqa: N813
    fields = {
        "min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2, "run_id": "story", "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0", "max_restarts": 0, "monitor_interval": 0.02, "start_method": "fork",
    }  # fmt: skip
    return config(**{**fields, **more})


class Health:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")

    @property
    def alive_callback(self) -> Any:
        return lambda: 0


def _record(name: str, story: Any) -> None:
    try:
        outcome = story()
    except Exception as error:  # noqa: BLE001  that is the outcome
        bases = [base.__name__ for base in type(error).__mro__]
        kind = next(
            base for base in ("ChildFailedError", "SignalException", "ValueError", "Exception") if base in bases
        )
        outcome = {"raised": kind}
        if kind == "ChildFailedError":
            rank, failure = error.get_first_failure()  # type: ignore[attr-defined]
            outcome |= {"name": error.name, "rank": rank, "exitcode": failure.exitcode}  # type: ignore[attr-defined]
        if kind == "SignalException":
            outcome["signal"] = int(error.sigval)  # type: ignore[attr-defined]
    print(json.dumps([name, outcome]), flush=True)  # noqa: T201


def _stories(whose: str) -> None:
    if whose == "torch":
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch, launch_agent
    else:
        from aelastic.launch import LaunchConfig, elastic_launch, launch_agent  # type: ignore[assignment]

    def call(entrypoint: Any, *args: Any, **fields: Any) -> Any:
        return elastic_launch(one_node(LaunchConfig, **fields), entrypoint)(*args)

    def checked_health() -> list[str]:
        server = Health()
        elastic_launch(one_node(LaunchConfig), rank_and, server)()  # type: ignore[arg-type]
        return server.calls

    _record("function", lambda: call(rank_and, "${local_rank}", 3))
    _record("agent", lambda: launch_agent(one_node(LaunchConfig), rank_and, ["x"]))
    _record("local function", lambda: call(lambda: 5))
    _record("program", lambda: call("true"))
    _record("program with other arguments than text", lambda: call("test", 3, "-gt", "${local_rank}"))
    _record("own Python", lambda: call(sys.executable, "-c", "import sys; sys.exit(3)", nproc_per_node=1))
    _record("failing program", lambda: call("false", nproc_per_node=1))
    _record("failing function", lambda: call(fail, nproc_per_node=1))
    _record("restarted function", lambda: call(fail_the_first_time, max_restarts=1))
    _record("ranks", lambda: call(ranks, role="trainer"))
    _record("default role", lambda: call(os.getenv, "ROLE_NAME"))
    _record("signals", lambda: call(os.getenv, "TORCHELASTIC_SIGNALS_TO_HANDLE", signals_to_handle="SIGUSR1"))
    _record(
        "static", lambda: call(rank_and, rdzv_backend="static", rdzv_endpoint=sys.argv[2], rdzv_configs={"rank": 0})
    )
    _record("health", checked_health)
    for signum in (signal.SIGTERM, signal.SIGINT):
        folder = sys.argv[3] + signum.name
        os.mkdir(folder)
        threading.Thread(target=_kill_self_when_both_sleep, args=(signum, folder), daemon=True).start()
        _record(signum.name, lambda: call(sleep_long, folder))  # noqa: B023  called at once
    for name, fields in MISUSES.items():
        _record(name, lambda: call(rank_and, **fields))  # noqa: B023  called at once


# Misuses for which torch also raises ValueError.
MISUSES: dict[str, dict[str, Any]] = {
    "min above max": {"min_nodes": 2},
    "no nodes": {"min_nodes": 0, "max_nodes": 0},
    "start method": {"start_method": "thread"},
    "back end": {"rdzv_backend": "carrier-pigeon"},
    "static without rank": {"rdzv_backend": "static", "rdzv_endpoint": "localhost:1"},
    "static without port": {"rdzv_backend": "static", "rdzv_endpoint": "localhost", "rdzv_configs": {"rank": 0}},
    "shutdown timeout": {"shutdown_timeout": -1},
}


def _kill_self_when_both_sleep(signum: int, folder: str) -> None:
    while not all(os.path.exists(os.path.join(folder, rank)) for rank in "01") or _is_forking():
        time.sleep(0.01)
    os.kill(os.getpid(), signum)


def _is_forking() -> bool:
    """True while the main thread starts a process: an exception in a fork hook is dropped, such as torch's on a signal."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and not frame.f_code.co_filename.endswith("multiprocessing/process.py"):
        frame = frame.f_back
    return frame is not None


if __name__ == "__main__":
    _stories(sys.argv[1])
