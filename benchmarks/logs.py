"""Measures how the output of workers reaches the console, against torchrun: `--tee 3` with 2 workers.

    python benchmarks/logs.py [--repeat 5] [--only flood,prints,lines] [--out FOLDER]

Both launchers take turns in one run (torchrun, aelastic, torchrun, …).  The console is a pair of pipes that the harness
reads; every byte is counted, and a run in which one is missing is no result.  Times are CLOCK_MONOTONIC, one for all.

Writes `<date>-logs.json` (every single figure) and a readable `.md` of the same name.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from arguments import Arguments
from one_node import HERE, LIMIT_S, Launcher, Measure, MeasurementError, Run, take_in_turn
from report import Figure, Report, Row, describe_machine, judge

WORKERS = 2
LINE_BYTES = 100
FLOOD_MIB = 64  # as `workers/writer.py` has it
LINES = 400
PREFIX_BYTES = len("[default0]:")
READ_BYTES = 1 << 20


# --- what is measured -------------------------------------------------------------------------------------------------


def measure_flood(launcher: Launcher) -> dict[str, float]:
    return measure_bytes(launcher, "flood", 65_536 // LINE_BYTES * LINE_BYTES)


def measure_prints(launcher: Launcher) -> dict[str, float]:
    return measure_bytes(launcher, "prints", LINE_BYTES)


def measure_bytes(launcher: Launcher, what: str, at_once: int) -> dict[str, float]:
    with open_console(launcher, what) as (run, console):
        begun_at = min(run.wait_stamp("begins", rank=rank).at for rank in range(WORKERS))
        before_s = cpu_s(run.pid)
        written = WORKERS * (FLOOD_MIB * 2**20 // at_once) * at_once
        console.read_bytes(written + written // LINE_BYTES * PREFIX_BYTES)
        ended_at = time.monotonic()
        mib = written / 2**20
        return {
            f"{what}_mib_s": mib / (ended_at - begun_at),
            f"{what}_cpu_ms_mib": (cpu_s(run.pid) - before_s) * 1000 / mib,
        }


def measure_lines(launcher: Launcher) -> dict[str, float]:
    with open_console(launcher, "lines") as (run, console):
        run.wait_stamp("begins", rank=0)
        delays = sorted(console.read_delays(WORKERS * LINES))
        return {
            "line_p50_ms": delays[len(delays) // 2] * 1000,
            "line_p99_ms": delays[len(delays) * 99 // 100] * 1000,
        }


MEASURES = (
    Measure(
        "flood",
        measure_flood,
        (
            Figure(
                "flood_mib_s",
                f"{WORKERS} workers × {FLOOD_MIB} MiB of 100-byte lines",
                "MiB/s",
                200,
                False,
                is_least=True,
            ),
            Figure("flood_cpu_ms_mib", "CPU time of the agent for a MiB of them", "ms", 0.25),
        ),
    ),
    Measure(
        "prints",
        measure_prints,
        (
            Figure("prints_mib_s", "the same, each line a write of its own", "MiB/s"),
            Figure("prints_cpu_ms_mib", "CPU time of the agent for a MiB of them", "ms"),
        ),
    ),
    Measure(
        "lines",
        measure_lines,
        (
            Figure("line_p50_ms", "a line written → on the console, median", "ms"),
            Figure("line_p99_ms", "the same, the slowest of a hundred", "ms", 10.0, False),
        ),
    ),
)


# --- the console ------------------------------------------------------------------------------------------------------


class Console:
    """The reader's ends of the agent's stdout and stderr."""

    def __init__(self, fds: tuple[int, int]) -> None:
        self._fds = fds

    def read_bytes(self, count: int) -> None:
        """Returns when so many have come, on both together.

        Raises:
            MeasurementError: they don't come within `LIMIT_S`, or there are more.
        """
        rest = count
        for chunk, _ in self._read():
            rest -= len(chunk)
            if rest <= 0:
                break
        if rest:
            raise MeasurementError(f"{count - rest} bytes on the console, not {count}")

    def read_delays(self, count: int) -> list[float]:
        """For so many lines, the seconds from the time that stands in the line till we have it.

        Raises:
            MeasurementError: they don't come within `LIMIT_S`.
        """
        delays: list[float] = []
        partial: dict[int, bytes] = {}
        for chunk, fd in self._read():
            now = time.monotonic()
            *lines, partial[fd] = (partial.get(fd, b"") + chunk).split(b"\n")
            delays += [now - float(line[PREFIX_BYTES:].split()[0]) for line in lines if line.startswith(b"[default")]
            if len(delays) == count:
                break
        if len(delays) != count:
            raise MeasurementError(f"{len(delays)} lines on the console, not {count}")
        return delays

    def _read(self) -> Iterator[tuple[bytes, int]]:
        poll, deadline = select.poll(), time.monotonic() + LIMIT_S
        for fd in self._fds:
            poll.register(fd, select.POLLIN)
        while ready := poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            for fd, _ in ready:
                if not (chunk := os.read(fd, READ_BYTES)):
                    return
                yield chunk, fd


@contextmanager
def open_console(launcher: Launcher, what: str) -> Iterator[tuple[Run, Console]]:
    """Starts workers that write; on leaving, whatever is left of them is gone."""
    with tempfile.TemporaryDirectory(prefix="aelastic-bench-") as folder:
        fifo_path = os.path.join(folder, "stamps")
        os.mkfifo(fifo_path)
        fifo = os.open(fifo_path, os.O_RDWR | os.O_NONBLOCK)  # also open to write, so that it never ends
        options = ["--standalone", "--nproc-per-node", str(WORKERS), "--max-restarts", "0", "--tee", "3"]
        options += ["--log-dir", os.path.join(folder, "logs"), str(HERE / "workers" / "writer.py")]
        started_at = time.monotonic()
        agent = subprocess.Popen(
            [*launcher.command, *options, fifo_path, what],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # torchrun says something about it otherwise
        )
        assert agent.stdout is not None and agent.stderr is not None
        pidfd = os.pidfd_open(agent.pid)
        run = Run(launcher.name, agent, pidfd, fifo, started_at)
        try:
            yield run, Console((agent.stdout.fileno(), agent.stderr.fileno()))
        finally:
            agent.stdout.close()
            agent.stderr.close()
            run.stop()
            os.close(pidfd)
            os.close(fifo)


def cpu_s(pid: int) -> float:
    """Processor time that all threads of a process have taken: proc(5), `/proc/PID/stat`."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- the command ------------------------------------------------------------------------------------------------------


def main() -> int:
    options = Arguments(
        "Measure the way of the workers' output to the console.", repeat=5, keys=[each.key for each in MEASURES]
    ).read()
    torchrun = Launcher("torchrun", (str(Path(sys.executable).with_name("torchrun")),))
    aelastic = Launcher("aelastic", (sys.executable, "-m", "aelastic"))
    machine = describe_machine()
    samples: dict[str, dict[str, list[float]]] = {}
    rows: list[Row] = []
    for measure in (measure for measure in MEASURES if measure.key in options.only):
        try:
            taken = take_in_turn(measure, (torchrun, aelastic), options.repeat)
        except MeasurementError as error:
            print(f"bench: {measure.key}: {error}", file=sys.stderr)
            return 1
        samples |= taken
        rows += [judge(figure, taken[figure.key]) for figure in measure.figures]
    method = f"`--tee 3`, console read through pipes. Medians of {options.repeat} runs, torchrun and aelastic in turn."
    report = Report("Logs", method, machine)
    report.write(options.out, "logs", report.compared(rows), repeat=options.repeat, samples=samples)
    return 0


if __name__ == "__main__":
    sys.exit(main())
