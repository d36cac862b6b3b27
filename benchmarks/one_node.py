"""Measures aelastic against torchrun on one node.

    python benchmarks/one_node.py [--repeat 7] [--only start,idle] [--out FOLDER]

Both launchers take turns (torchrun, aelastic, torchrun, …) in one run, so whatever else the machine does hurts both;
what counts is the ratio of their medians.  Workers put time stamps into a FIFO that the harness reads: no log is
parsed, and nothing waits for a fixed time where an event will do.  Stamps are CLOCK_MONOTONIC, one clock for all.

Writes `<date>-one-node.json` (every single figure) and a readable `.md` of the same name.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from arguments import Arguments
from report import Figure, Report, Row, describe_machine, judge

HERE = Path(__file__).parent
LIMIT_S = 60.0  # for anything a launcher should do; above it the run is called off
STOP_LIMIT_S = 40.0  # a launcher gives its workers 30 s to stop
SETTLE_S = 6.0  # from both workers' first line until an agent is called idle: it has its helpers, and looks at no start
IDLE_S = 10.0  # wake-ups are counted that long


# --- what is measured -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measure:
    key: str
    take: Callable[[Launcher], dict[str, float]]
    figures: tuple[Figure, ...]
    max_repeats: int = 1000
    warm_up: int = 1  # turns that only fill caches, dropped


def measure_start(launcher: Launcher) -> dict[str, float]:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    python_s = time.monotonic() - began
    with launcher.start("stamp.py", "exit", workers=1) as run:
        first = run.wait_stamp("started", rank=0)
        run.wait_exit()
    start_s = first.at - run.started_at
    return {"start_s": start_s, "start_pythons": start_s / python_s}


def measure_group(launcher: Launcher) -> dict[str, float]:
    with launcher.start("init_group.py", workers=2) as run:
        last = max(run.wait_stamp("joined", rank=rank).at for rank in range(2))
        run.wait_exit()
    return {"group_s": last - run.started_at}


def measure_restart(launcher: Launcher) -> dict[str, float]:
    return {"restart_s": _restart_s(launcher, "crash")}


def measure_blocked(launcher: Launcher) -> dict[str, float]:
    return {"blocked_s": _restart_s(launcher, "crash-beside-blocked")}


def _restart_s(launcher: Launcher, story: str) -> float:
    """From the crash of rank 1 until both workers run again."""
    with launcher.start("stamp.py", story, workers=2, max_restarts=1) as run:
        crash = run.wait_stamp("crashed", rank=1)
        last = max(run.wait_stamp("started", rank=rank, restart=1).at for rank in range(2))
        run.wait_exit()
    return last - crash.at


def measure_idle(launcher: Launcher) -> dict[str, float]:
    with launcher.start("stamp.py", "sleep", workers=2) as run:
        workers = {run.wait_stamp("started", rank=rank).pid for rank in range(2)}
        run.stays_for(SETTLE_S)
        helpers = descendants(run.pid, but=workers)
        agent_before, helpers_before, began = wakeups([run.pid]), wakeups(helpers), time.monotonic()
        run.stays_for(IDLE_S)
        took = time.monotonic() - began
        return {
            "idle_mib": resident_mib([run.pid]),
            "idle_wakeups": (wakeups([run.pid]) - agent_before) / took,
            "idle_all_mib": proportional_mib([run.pid, *helpers]),
            "idle_helper_wakeups": (wakeups(helpers) - helpers_before) / took,
        }


def measure_helpers(launcher: Launcher) -> dict[str, float]:
    with launcher.start("init_group.py", "stay", workers=2) as run:
        workers = {run.wait_stamp("joined", rank=rank).pid for rank in range(2)}
        run.stays_for(SETTLE_S)
        return {"group_all_mib": proportional_mib([run.pid, *descendants(run.pid, but=workers)])}


def measure_exit(launcher: Launcher) -> dict[str, float]:
    with launcher.start("stamp.py", "exit", workers=2) as run:
        last = max(run.wait_stamp("exits", rank=rank).at for rank in range(2))
        ended_at = run.wait_exit()
    return {"exit_s": ended_at - last}


MEASURES = (
    Measure(
        "start",
        measure_start,
        (
            Figure("start_s", "command → first line of a worker that imports nothing", "s", 0.10),
            Figure("start_pythons", "the same in starts of Python (`python -c pass`)", "starts", 6.0, False),
        ),
    ),
    Measure(
        "group",
        measure_group,
        (Figure("group_s", "command → `init_process_group` done on 2 gloo workers", "s", 0.7),),
    ),
    Measure(
        "restart",
        measure_restart,
        (Figure("restart_s", "worker exit 1 → all workers of the next generation running", "s", 0.12),),
    ),
    Measure(
        "blocked",
        measure_blocked,
        (Figure("blocked_s", "the same beside a worker that SIGTERM does not end", "s", 0.15),),
        max_repeats=3,  # torchrun waits for 30 s each time
        warm_up=0,
    ),
    Measure(
        "idle",
        measure_idle,
        (
            Figure("idle_mib", "idle agent, 2 sleeping workers: memory of the agent process (RSS)", "MiB", 60.0, False),
            Figure("idle_wakeups", "idle agent: its wake-ups per second", "/s", 1.5, False),
            Figure("idle_all_mib", "the same with its helper processes (PSS)", "MiB", 80.0, False),
            Figure("idle_helper_wakeups", "helper processes: wake-ups per second", "/s"),
        ),
        max_repeats=3,
        warm_up=0,
    ),
    Measure(
        "helpers",
        measure_helpers,
        (Figure("group_all_mib", "agent with its helper processes, 2 gloo workers (PSS)", "MiB", 80.0, False),),
        max_repeats=3,
        warm_up=0,
    ),
    Measure(
        "exit",
        measure_exit,
        (Figure("exit_s", "exit of the last worker → exit of the agent", "s", 0.2),),
    ),
)


# --- running a launcher -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stamp:
    kind: str
    rank: int
    restart: int
    pid: int
    at: float


@dataclass(frozen=True)
class Launcher:
    name: str
    command: tuple[str, ...]

    @contextmanager
    def start(self, worker: str, *args: str, workers: int, max_restarts: int = 0) -> Iterator[Run]:
        """Starts workers under this launcher; on leaving, whatever is left of it is gone."""
        with tempfile.TemporaryDirectory(prefix="aelastic-bench-") as folder:
            fifo_path = os.path.join(folder, "stamps")
            os.mkfifo(fifo_path)
            fifo = os.open(fifo_path, os.O_RDWR | os.O_NONBLOCK)  # also open to write, so that it never ends
            options = ["--standalone", "--nproc-per-node", str(workers), "--max-restarts", str(max_restarts)]
            command = [*self.command, *options, str(HERE / "workers" / worker), fifo_path, *args]
            with open(os.path.join(folder, "output"), "w+b") as output:
                started_at = time.monotonic()
                agent = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
                pidfd = os.pidfd_open(agent.pid)
                run = Run(self.name, agent, pidfd, fifo, started_at)
                try:
                    yield run
                except MeasurementError as error:
                    output.seek(0)
                    error.add_note(output.read()[-4000:].decode(errors="replace"))
                    raise
                finally:
                    run.stop()
                    os.close(pidfd)
                    os.close(fifo)


class MeasurementError(Exception):
    """A launcher did not do what is measured."""


class Run:
    """One agent and the stamps of its workers."""

    def __init__(self, name: str, agent: subprocess.Popen[bytes], pidfd: int, fifo: int, started_at: float) -> None:
        self.name = name
        self.pid = agent.pid
        self.started_at = started_at
        self._agent, self._pidfd, self._fifo = agent, pidfd, fifo
        self._stamps: list[Stamp] = []
        self._unfinished = b""

    def wait_stamp(self, kind: str, rank: int, restart: int = 0) -> Stamp:
        """The stamp of that kind from that worker.

        Raises:
            MeasurementError: it does not come within `LIMIT_S`, or the agent ends without.
        """
        deadline = time.monotonic() + LIMIT_S
        while True:
            for stamp in self._stamps:
                if (stamp.kind, stamp.rank, stamp.restart) == (kind, rank, restart):
                    return stamp
            ready = self._select([self._fifo, self._pidfd], deadline - time.monotonic())
            if self._fifo in ready:
                self._read_stamps()
            elif ready:
                raise MeasurementError(f"{self.name} ended before worker {rank} of restart {restart} {kind}")
            else:
                raise MeasurementError(f"worker {rank} of restart {restart} has not {kind} after {LIMIT_S:.0f} s")

    def wait_exit(self) -> float:
        """When the agent ended.

        Raises:
            MeasurementError: it does not within `LIMIT_S`, or not well.
        """
        ready = self._select([self._pidfd], LIMIT_S)
        ended_at = time.monotonic()
        if not ready:
            raise MeasurementError(f"{self.name} has not ended after {LIMIT_S:.0f} s")
        if code := self._agent.wait():
            raise MeasurementError(f"{self.name} ended with exit code {code}")
        return ended_at

    def stays_for(self, seconds: float) -> None:
        """Lets the agent run that long.

        Raises:
            MeasurementError: it ends.
        """
        if self._select([self._pidfd], seconds):
            raise MeasurementError(f"{self.name} ended while it should have been idle")

    def stop(self) -> None:
        """Ends the agent and everything below it, and reaps it."""
        if self._agent.poll() is not None:
            return
        below = []
        for pid in descendants(self.pid):
            with suppress(ProcessLookupError):
                below.append(os.pidfd_open(pid))  # opened now: a pid may have another owner later
        self._agent.terminate()
        if not self._select([self._pidfd], STOP_LIMIT_S):
            self._agent.kill()
        self._agent.wait()
        for pidfd in below:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)

    def _read_stamps(self) -> None:
        *lines, self._unfinished = (self._unfinished + os.read(self._fifo, 65536)).split(b"\n")
        for line in lines:
            kind, rank, restart, pid, at = line.decode().split()
            self._stamps.append(Stamp(kind, int(rank), int(restart), int(pid), float(at)))

    @staticmethod
    def _select(descriptors: list[int], seconds: float) -> list[int]:
        poll = select.poll()
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        return [descriptor for descriptor, _ in poll.poll(max(0.0, seconds) * 1000)]


# --- /proc, see proc(5) -----------------------------------------------------------------------------------------------


def descendants(pid: int, but: set[int] | frozenset[int] = frozenset()) -> list[int]:
    """All processes below this one, without those in `but` and what is below them."""
    below = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, children.read_text().split()):
                if child not in but:
                    below += [child, *descendants(child, but)]
    return below


def wakeups(pids: list[int]) -> int:
    """How often threads of these processes have gone to sleep so far, and so been woken."""
    return sum(status_field(Path(f"/proc/{pid}/task"), "*/status", "voluntary_ctxt_switches") for pid in pids)


def resident_mib(pids: list[int]) -> float:
    return sum(status_field(Path(f"/proc/{pid}"), "status", "VmRSS") for pid in pids) / 1024


def proportional_mib(pids: list[int]) -> float:
    """Memory with each shared page divided by how many processes have it (`proc_pid_smaps_rollup(5)`)."""
    return sum(status_field(Path(f"/proc/{pid}"), "smaps_rollup", "Pss") for pid in pids) / 1024


def status_field(folder: Path, pattern: str, name: str) -> int:
    """The sum of this field over all status files that match; what is gone counts 0."""
    total = 0
    for path in folder.glob(pattern):
        with suppress(OSError):
            total += sum(int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(f"{name}:"))
    return total


# --- the command ------------------------------------------------------------------------------------------------------


def main() -> int:
    arguments = Arguments("Measure aelastic against torchrun on one node.", repeat=7, keys=[m.key for m in MEASURES])
    arguments.add_argument("--module", default="aelastic", help="stands for aelastic, to try out this harness")
    options = arguments.read()
    torchrun = Launcher("torchrun", (str(Path(sys.executable).with_name("torchrun")),))
    aelastic = Launcher("aelastic", (sys.executable, "-m", options.module))
    machine = describe_machine()
    if options.module != "aelastic":
        machine["in the place of aelastic"] = options.module
    samples: dict[str, dict[str, list[float]]] = {}
    rows: list[Row] = []
    for measure in MEASURES:
        if measure.key not in options.only:
            continue
        try:
            taken = take_in_turn(measure, (torchrun, aelastic), min(options.repeat, measure.max_repeats))
        except MeasurementError as error:
            print(f"bench: {measure.key}: {error}", *getattr(error, "__notes__", []), sep="\n", file=sys.stderr)
            return 1
        samples |= taken
        rows += [judge(figure, taken[figure.key]) for figure in measure.figures]
    method = f"Medians of {options.repeat} runs each (idle: at most 3), torchrun and aelastic in turn."
    report = Report("One node", method, machine)
    report.write(options.out, "one-node", report.compared(rows), repeat=options.repeat, samples=samples)
    return 0


def take_in_turn(measure: Measure, launchers: tuple[Launcher, ...], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Figures by key and launcher: those of the measure, and others that are reckoned with."""
    taken: dict[str, dict[str, list[float]]] = {
        figure.key: {launcher.name: [] for launcher in launchers} for figure in measure.figures
    }
    for turn in range(measure.warm_up + repeats):
        for launcher in launchers:
            figures = measure.take(launcher)
            told = ", ".join(f"{key} {value:.4g}" for key, value in figures.items())
            print(
                f"{measure.key} {turn} {launcher.name}: {told}{' (warm-up)' if turn < measure.warm_up else ''}",
                flush=True,
            )
            if turn >= measure.warm_up:
                for key, value in figures.items():
                    taken.setdefault(key, {}).setdefault(launcher.name, []).append(value)
    return taken


if __name__ == "__main__":
    sys.exit(main())
