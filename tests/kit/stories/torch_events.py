"""Runs a story under torch's agent or ours, in a process of its own, and records the events that listeners received.

python torch_events.py torch|ours STORY '{"run_id": "job", "min_nodes": 2}' RESULT_FILE
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from aelastic import Supervisor, WorkerSpec
from aelastic.rdzv.settings import RendezvousSettings

# Entrypoint, arguments, workers, restarts.
Story: TypeAlias = tuple[str | Callable[..., Any], tuple[Any, ...], int, int]

recorded: list[dict[str, Any]] = []


class EventHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        recorded.append({"kind": "event", **json.loads(record.getMessage())})


class MetricHandler:
    def emit(self, metric_data: Any) -> None:
        recorded.append({"kind": "metric", **metric_data._asdict()})


def double(number: int) -> int:
    return 2 * number


def rank_1_raises() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("broken")
    time.sleep(600)


def python(code: str) -> tuple[str, tuple[str, ...]]:
    return sys.executable, ("-c", f"import os, sys, time\n{code}")


# A program that fails is alone: under torch, a program that is stopped because of it has also failed.
FAILS_AT_FIRST = "sys.exit(3 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)"
WAITS = "open(os.environ['STARTED'] + os.environ['RANK'], 'w'); time.sleep(600)"
# One of two nodes fails once; the other one is healthy when it does.
ONE_OF_TWO_FAILS = """
folder, rank = os.environ['SHARED'], os.environ['RANK']
if os.path.exists(f'{folder}/failed'):
    sys.exit()
open(f'{folder}/{rank}', 'w')
if rank == '0':
    while len(os.listdir(folder)) < 2:
        time.sleep(0.01)
    open(f'{folder}/failed', 'w')
    sys.exit(3)
time.sleep(600)
"""
STOPPED = "programs are stopped"
ONE_NODE: dict[str, Story] = {
    "a signal ends a program": (*python("os.kill(os.getpid(), 9)"), 1, 0),
    "functions succeed": (double, (21,), 2, 2),
    "programs succeed": (*python("pass"), 2, 3),
    "a function fails": (rank_1_raises, (), 2, 0),
    "a program fails": (*python("sys.exit(3)"), 1, 0),
    "a program fails, then succeeds": (*python(FAILS_AT_FIRST), 1, 1),
    "a program fails twice": (*python("sys.exit(3)"), 1, 1),
    STOPPED: (*python(WAITS), 2, 1),
}
TWO_NODES: dict[str, Story] = {
    "two nodes succeed": (*python("pass"), 2, 1),
    "one of two nodes fails": (*python(ONE_OF_TWO_FAILS), 1, 1),
}
STORIES = ONE_NODE | TWO_NODES


def run_torch(story: str, config: dict[str, Any]) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    entrypoint, args, workers, max_restarts = STORIES[story]
    if story == STOPPED:
        when_started(lambda: os.kill(os.getpid(), signal.SIGTERM))
    launch_config = LaunchConfig(
        nproc_per_node=workers,
        role="trainer",
        max_restarts=max_restarts,
        monitor_interval=0.05,
        start_method="fork",  # a function that is spawned imports torch first
        event_log_handler="recorder",
        logs_specs=DefaultLogsSpecs(log_dir=tempfile.mkdtemp()),
        **{"min_nodes": 1, "max_nodes": 1, "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", **config},
    )
    launch_agent(launch_config, entrypoint, list(args))


def run_ours(story: str, config: dict[str, Any]) -> None:
    entrypoint, args, workers, max_restarts = STORIES[story]
    loop = asyncio.new_event_loop()
    if story == STOPPED:
        when_started(lambda: loop.call_soon_threadsafe(supervisor.stop))
    rdzv = None
    if "min_nodes" in config:
        rdzv = RendezvousSettings("c10d", config["rdzv_endpoint"], config["min_nodes"], config["max_nodes"])
    supervisor = Supervisor(
        WorkerSpec(
            entrypoint=entrypoint,
            args=args,
            local_world_size=workers,
            role="trainer",
            max_restarts=max_restarts,
            monitor_interval=0.05,
            event_log_handler="recorder",
            run_id=config["run_id"],
            rdzv=rdzv,
        )
    )

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(supervisor.run())


def when_started(stop: Callable[[], Any]) -> None:
    folder = tempfile.mkdtemp()
    os.environ["STARTED"] = f"{folder}/rank"

    def watch() -> None:
        while len(os.listdir(folder)) < STORIES[STOPPED][2]:
            time.sleep(0.01)
        while not any(each.get("name") == "workers.trainer.healthy" for each in recorded):
            time.sleep(0.01)
        stop()

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    from torch.distributed.elastic.events.handlers import _log_handlers
    from torch.distributed.elastic.metrics.api import configure

    launcher, story, config, result = sys.argv[1:]
    _log_handlers["recorder"] = EventHandler()
    recorder: Any = MetricHandler()
    configure(recorder)
    began = time.time()
    try:
        (run_torch if launcher == "torch" else run_ours)(story, json.loads(config))
    except Exception as failure:  # noqa: BLE001  listeners receive how it ended
        logging.getLogger(__name__).info("%r", failure)
    Path(result).write_text(json.dumps({"recorded": recorded, "began": began, "ended": time.time()}))


if __name__ == "__main__":
    main()
