"""Measures what watching and telling cost an idle agent: 8 sleeping workers, everything switched on, and nothing.

    python benchmarks/watching.py [--repeat 3] [--seconds 20] [--out FOLDER]

torchrun (which has the FIFO timer of all this), aelastic bare, and aelastic with everything take turns in one run.
Everything is: the FIFO timer, hang detection by all three signs and by a pattern, HTTP with a client that asks for
`/livez` and `/metrics` every 10 s, the event log, systemd's notifications with a watchdog, and the live line on a
terminal.  Processor time is what the kernel counted for all threads of the agent (`/proc/PID/task/TID/schedstat`).

Two more figures, each a ratio within one process or one run: what a record of the event log costs the thread that emits
it, beside a line that `logging` writes to a file; and how long `/livez` takes to answer beside a crowd of clients that
say nothing, compared with how long it takes without them.

Writes `<date>-watching.json` (every single figure) and a readable `.md` of the same name.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pty
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from arguments import Arguments
from jobs import free_port
from one_node import HERE, SETTLE_S, MeasurementError, Run, resident_mib, wakeups
from report import Report, describe_machine

from aelastic.observe.event_log import EventLog
from aelastic.observe.run_events import RoundFormed

WORKERS = 8
TARGET_SHARE = 0.01  # of a core, more than the bare agent takes
TARGET_RECORD = 1.0  # lines of `logging`
TARGET_ANSWER = 3.0  # answers to a client that is alone
RECORDS, ANSWERS, CROWD = 1000, 50, 100  # the server takes 128 connections
ASK_EVERY_S = 10.0  # as Kubernetes' probes do, if nothing else is said; and about as often as Prometheus scrapes
HANG_OPTIONS = ("--hang-timeout", "600", "--expect-output", "nothing of the kind:600")


@dataclass(frozen=True)
class Contestant:
    name: str
    command: tuple[str, ...]
    is_watched: bool


@dataclass(frozen=True)
class Cost:
    cpu_share: float  # of a core
    wakeups: float  # per second
    resident_mib: float

    def shown(self) -> tuple[str, str, str]:
        return f"{self.cpu_share:.2%}", f"{self.wakeups:.2f} /s", f"{self.resident_mib:.0f} MiB"


def measure(contestant: Contestant, seconds: float) -> Cost:
    with started(contestant) as run:
        for rank in range(WORKERS):
            run.wait_stamp("started", rank)
        run.stays_for(SETTLE_S)
        before_s, woken, began = cpu_s(run.pid), wakeups([run.pid]), time.monotonic()
        run.stays_for(seconds)
        took = time.monotonic() - began
        woken = wakeups([run.pid]) - woken
        return Cost((cpu_s(run.pid) - before_s) / took, woken / took, resident_mib([run.pid]))


def cpu_s(pid: int) -> float:
    """Processor time of all threads that live, to the nanosecond."""
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):
            total += int(path.read_text().split()[0])
    return total / 1e9


def measure_record() -> float:
    """Processor time of the thread that emits an event, as a multiple of what a line of `logging` takes."""
    event = RoundFormed(7, 3, 2, 1, 2, 4, 2, 6)
    with tempfile.TemporaryDirectory(prefix="aelastic-bench-") as folder:
        log = EventLog(Path(folder) / "events.jsonl")
        record_s = each_s(lambda: log.tell(event, 0.0))
        asyncio.run(log.aclose())
        handler = logging.FileHandler(Path(folder) / "log")
        logger = logging.Logger("cordons")  # noqa: LOG001  of its own: nothing else may handle its lines
        logger.addHandler(handler)
        line_s = each_s(lambda: logger.info("round %d of %d nodes was formed", 7, 2))
        handler.close()
    return record_s / line_s


def each_s(call: Callable[[], None]) -> float:
    """Processor time of this thread for one call."""
    began_s = time.thread_time()
    for _ in range(RECORDS):
        call()
    return (time.thread_time() - began_s) / RECORDS


def measure_answer() -> float:
    """The median time of an answer beside a crowd of silent clients, as a multiple of that without one."""
    port = free_port()
    agent = Contestant("crowd", (sys.executable, "-m", "aelastic"), is_watched=False)
    with started(agent, TORCHELASTIC_HEALTH_CHECK_PORT=str(port)) as run:
        for rank in range(WORKERS):
            run.wait_stamp("started", rank)
        answer_s(port)  # the first one imports aiohttp
        alone_s = statistics.median(answer_s(port) for _ in range(ANSWERS))
        with ExitStack() as crowd:
            for _ in range(CROWD):
                crowd.enter_context(socket.create_connection(("127.0.0.1", port)))
            crowded_s = statistics.median(answer_s(port) for _ in range(ANSWERS))
    return crowded_s / alone_s


def answer_s(port: int) -> float:
    began_s = time.monotonic()
    urllib.request.urlopen(f"http://127.0.0.1:{port}/livez", timeout=60).read()
    return time.monotonic() - began_s


@contextmanager
def started(contestant: Contestant, **variables: str) -> Iterator[Run]:
    """Workers that sleep under this launcher; on leaving, whatever is left of them is gone.

    Args:
        variables: of the environment, besides those of this process.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="aelastic-bench-"))
        fifo_path = os.path.join(folder, "stamps")
        os.mkfifo(fifo_path)
        fifo = os.open(fifo_path, os.O_RDWR | os.O_NONBLOCK)  # also open to write, so that it never ends
        stack.callback(os.close, fifo)
        options = ["--standalone", "--nproc-per-node", str(WORKERS), "--max-restarts", "0"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        env = {name: value for name, value in env.items() if name not in {"CI", "NO_COLOR"}}
        terminal: int = subprocess.DEVNULL
        if contestant.is_watched or contestant.name == "torchrun":
            env["TORCHELASTIC_ENABLE_FILE_TIMER"] = "1"
        if contestant.is_watched:
            options += [*HANG_OPTIONS, "--log-dir", os.path.join(folder, "logs")]
            terminal = stack.enter_context(terminal_that_is_read())
            port = free_port()
            env |= {"TORCHELASTIC_HEALTH_CHECK_PORT": str(port), "TERM": "xterm"}
            env |= {"NOTIFY_SOCKET": stack.enter_context(systemd(folder)), "WATCHDOG_USEC": "30000000"}
            stack.enter_context(http_client(port))
        command = [*contestant.command, *options, str(HERE / "workers" / "stamp.py"), fifo_path, "sleep"]
        agent = subprocess.Popen(
            command, stdout=terminal, stderr=terminal, stdin=subprocess.DEVNULL, env=env, start_new_session=True
        )
        pidfd = os.pidfd_open(agent.pid)
        stack.callback(os.close, pidfd)
        run = Run(contestant.name, agent, pidfd, fifo, time.monotonic())
        stack.callback(run.stop)
        yield run


@contextmanager
def terminal_that_is_read() -> Iterator[int]:
    """A terminal whose output is read."""
    ours, theirs = pty.openpty()
    reader = threading.Thread(target=read_to_the_end, args=(ours,), daemon=True)
    reader.start()
    yield theirs
    os.close(theirs)
    reader.join()
    os.close(ours)


def read_to_the_end(fd: int) -> None:
    with suppress(OSError):  # EIO: no process has the other end open
        while os.read(fd, 1 << 16):
            pass


@contextmanager
def systemd(folder: str) -> Iterator[str]:
    """A socket for notifications; a datagram that does not fit is dropped by the sender."""
    path = os.path.join(folder, "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(path)
        yield path


@contextmanager
def http_client(port: int) -> Iterator[None]:
    is_over = threading.Event()

    def ask() -> None:
        wait_s = 0.1  # until there is an answer: the first one imports aiohttp, which is no part of idling
        while not is_over.wait(wait_s):
            for path in ("livez", "metrics"):
                with suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=5).read()
                    wait_s = ASK_EVERY_S

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    try:
        yield
    finally:
        is_over.set()
        asking.join()


# --- the report -------------------------------------------------------------------------------------------------------


def table(costs: dict[str, Cost], record_ratio: float, answer_ratio: float) -> list[str]:
    added = costs["everything"].cpu_share - costs["bare"].cpu_share
    verdict = "ok" if added < TARGET_SHARE else "MISSED"
    lines = ["| what | torchrun | aelastic, bare | aelastic, everything on |", "|---|---|---|---|"]
    shown = [costs[name].shown() for name in ("torchrun", "bare", "everything")]
    captions = ("processor time, share of a core", "wake-ups", "memory (RSS)")
    lines += [f"| {caption} | {' | '.join(values)} |" for caption, *values in zip(captions, *shown, strict=True)]
    lines += ["", f"Added by everything: {added:.2%} of a core (target < {TARGET_SHARE:.0%}): {verdict}."]
    record, answer = (
        f"{ratio:.2f} times as long {than} (target < {target:g}): {'ok' if ratio < target else 'MISSED'}."
        for ratio, target, than in (
            (record_ratio, TARGET_RECORD, "as a line of `logging` to a file"),
            (answer_ratio, TARGET_ANSWER, "as without them"),
        )
    )
    lines += ["", f"Emitting an event that the event log records takes {record}"]
    return [*lines, "", f"An answer of `/livez` beside {CROWD} silent clients takes {answer}"]


def main() -> int:
    options = Arguments("Measure what watching and telling cost an idle agent.", repeat=3, seconds=20.0).read()
    own = (sys.executable, "-m", "aelastic")
    contestants = (
        Contestant("torchrun", (str(Path(sys.executable).with_name("torchrun")),), is_watched=False),
        Contestant("bare", own, is_watched=False),
        Contestant("everything", own, is_watched=True),
    )
    machine = describe_machine()
    samples: dict[str, list[Cost]] = {contestant.name: [] for contestant in contestants}
    ratios: dict[str, list[float]] = {"record": [], "answer": []}
    for turn in range(options.repeat):
        try:
            for contestant in contestants:
                print(f"\rwatching: {contestant.name}, turn {turn + 1} of {options.repeat}   ", end="", flush=True)
                samples[contestant.name].append(measure(contestant, options.seconds))
            ratios["record"].append(measure_record())
            ratios["answer"].append(measure_answer())
        except MeasurementError as error:
            print(f"\nbench: {error}", file=sys.stderr)
            return 1
    costs = {
        name: Cost(
            *(statistics.median(values) for values in zip(*(vars(cost).values() for cost in taken), strict=True))
        )
        for name, taken in samples.items()
    }
    method = f"An idle agent with {WORKERS} sleeping workers; medians of {options.repeat} runs, in turn."
    every: dict[str, Any] = {name: [asdict(cost) for cost in taken] for name, taken in samples.items()}
    Report("Watching", method, machine).write(
        options.out,
        "watching",
        table(costs, *(statistics.median(taken) for taken in ratios.values())),
        repeat=options.repeat,
        seconds=options.seconds,
        samples=every | ratios,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
