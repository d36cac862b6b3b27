"""Measures what the loss of a worker costs: in place, with a warm restart, and under torchrun.

    python benchmarks/in_place.py [--kills 30] [--only one,two,restart,torchrun] [--out FOLDER]

Four workers sum in a loop over gloo; one of them is killed (SIGKILL) at a random moment, again and again.  Workers put
time stamps into a FIFO (CLOCK_MONOTONIC, one clock for all): when they are past the next round's first collective, and
when they have the state, which is lost if they begin at step 0.  Each also checks the sums, and that no step is made
twice or left out.

Steps are lost if the next round begins before the newest step that a worker had committed at the kill, the one in
flight apart.  Workers of aelastic note that step in pages that they share with their agents; those of torchrun do not.

torchrun shares one store between its attempts, and forms no second one here unless that is off; it is killed for less
often, since each takes seconds.

Writes `<date>-in-place.json` (every single figure) and a readable `.md` of the same name.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from jobs import free_port
from report import Report, describe_machine

from aelastic.training.notice.page import BYTES, STEP

HERE = Path(__file__).parent
WORKERS = 4
LIMIT_S = 60.0  # for a recovery; above it the run is called off
BETWEEN_S = (0.1, 0.5)
CHANCE = random.Random(0)  # noqa: S311  which worker is killed, and when
WARM = ("--preload", "torch", "--max-restarts", "100000")
AGENT = (sys.executable, "-m", "aelastic")
UNKNOWN = -1


@dataclass(frozen=True)
class Way:
    key: str
    caption: str
    command: tuple[str, ...]
    agents: int = 1
    share: float = 1.0  # of the kills
    env: dict[str, str] = field(default_factory=dict)


WAYS = (
    Way("one", "aelastic in place, one agent, `--preload torch`", (*AGENT, *WARM)),
    Way("two", "aelastic in place, two agents with two workers each, `--preload torch`", (*AGENT, *WARM), agents=2),
    Way("restart", "aelastic, `--recovery restart`, `--preload torch`", (*AGENT, *WARM, "--recovery", "restart")),
    Way(
        "torchrun",
        "torchrun",
        (sys.executable, "-m", "torch.distributed.run", "--max-restarts", "1000"),
        share=0.15,
        env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    ),
)


@dataclass(frozen=True)
class Stamp:
    what: str
    rank: int
    restart: int
    pid: int
    at: float
    step: int


class Job:
    """Agents, and the stamps of their workers.

    Args:
        folder: of their temporary files.
    """

    def __init__(self, fifo: int, agents: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
        self._fifo, self._agents, self._folder, self._rest = fifo, agents, folder, b""
        self.stamps: list[Stamp] = []

    def kill(self, pid: int) -> tuple[float, int]:
        """Kills a worker; returns when, and the newest step that a worker had committed by then, or `UNKNOWN`."""
        with ExitStack() as opened:
            pages = [opened.enter_context(path.open("rb", buffering=0)) for path in self._folder.rglob("notice_*_*")]
            at = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            steps = [struct.unpack("8q", page.read(BYTES))[STEP] for page in pages]
        return at, max(steps, default=UNKNOWN)

    def wait_all(self, what: str, restart: int) -> list[Stamp]:
        """The stamps of all workers in the first complete attempt from this one on."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            attempts = {stamp.restart for stamp in self.stamps if stamp.what == what and stamp.restart >= restart}
            for attempt in sorted(attempts):
                found = {each.rank: each for each in self.stamps if (each.what, each.restart) == (what, attempt)}
                if len(found) == WORKERS:
                    return list(found.values())
            if any(agent.poll() is not None for agent in self._agents):
                break
            if select.select([self._fifo], [], [], 0.1)[0]:
                *lines, self._rest = (self._rest + os.read(self._fifo, 65536)).split(b"\n")
                for line in lines:
                    kind, rank, attempt_, pid, at, step = line.decode().split()
                    self.stamps.append(Stamp(kind, int(rank), int(attempt_), int(pid), float(at), int(step)))
        raise SystemExit(f"not all workers said {what!r} in attempt {restart}: {self.stamps[-8:]}")


@contextmanager
def job_of(way: Way) -> Iterator[Job]:
    with tempfile.TemporaryDirectory(prefix="aelastic-bench-") as folder:
        path = os.path.join(folder, "stamps")
        os.mkfifo(path)
        fifo = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        options = ["--nproc-per-node", str(WORKERS // way.agents)]
        if way.agents == 1:
            options += ["--standalone"]
        else:
            port = free_port()
            options += ["--nnodes", str(way.agents), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
            options += ["--rdzv-id", "cordons"]
        command = [*way.command, *options, str(HERE / "workers" / "in_place.py"), path]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL", "TMPDIR": folder, **way.env}
        with open(os.path.join(folder, "output"), "w+b") as output:
            agents = [
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env)
                for _ in range(way.agents)
            ]
            try:
                yield Job(fifo, agents, Path(folder))
            except SystemExit:
                output.seek(0)
                sys.stderr.write(output.read()[-4000:].decode(errors="replace"))
                raise
            finally:
                for agent in agents:
                    agent.terminate()
                for agent in agents:
                    try:
                        agent.wait(40)
                    except subprocess.TimeoutExpired:
                        agent.kill()
                        agent.wait()
                os.close(fifo)


def measure(way: Way, kills: int) -> dict[str, list[float]]:
    """Of each kill: times from it, how many processes were kept, the newest step, and where the next round began."""
    taken: dict[str, list[float]] = {"past_ms": [], "state_ms": [], "kept": [], "committed": [], "began": []}
    with job_of(way) as job:
        before = job.wait_all("state", 0)
        for _ in range(kills):
            time.sleep(CHANCE.uniform(*BETWEEN_S))
            victim = CHANCE.choice(before)
            at, committed = job.kill(victim.pid)
            after = job.wait_all("state", before[0].restart + 1)
            past = [each for each in job.stamps if (each.what, each.restart) == ("past", after[0].restart)]
            taken["past_ms"].append((max(each.at for each in past) - at) * 1e3)
            taken["state_ms"].append((max(each.at for each in after) - at) * 1e3)
            taken["kept"].append(len({each.pid for each in before} & {each.pid for each in after}))
            taken["committed"].append(committed)
            taken["began"].append(after[0].step)
            before = after
        if wrong := [each for each in job.stamps if each.what == "wrong"]:
            raise SystemExit(f"wrong sums or steps: {wrong}")
    return taken


def row(way: Way, taken: dict[str, list[float]], theirs_ms: float | None) -> str:
    """Of the table.

    Args:
        theirs_ms: until torchrun's workers train again, if that was measured.
    """
    count = len(taken["began"])
    losses = taken["began"].count(0)  # a worker has made steps before it is killed
    state_ms = statistics.median(taken["state_ms"])
    state, steps = f"{state_ms:.0f} ms", most_lost(taken)
    if losses == count:
        state, steps = "lost", "all"
    elif losses:
        state = f"{state}; lost {losses} times"
    share = "" if theirs_ms is None or way.key == "torchrun" else f"{state_ms / theirs_ms:.3f}"
    kept = f"{sum(taken['kept']) / count:.2f} of {WORKERS - 1}"
    past_ms = statistics.median(taken["past_ms"])
    return f"| {way.caption} | {count} | {past_ms:.0f} ms | {state} | {steps} | {share} | {kept} |"


def most_lost(taken: dict[str, list[float]]) -> str:
    """Steps that a kill has cost, beside the one in flight."""
    if UNKNOWN in taken["committed"]:
        return "unknown"
    return f"{max(0, *(old - new for old, new in zip(taken['committed'], taken['began'], strict=True))):.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--only", default=",".join(way.key for way in WAYS))
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    machine = describe_machine()
    found: dict[str, dict[str, list[float]]] = {}
    for way in WAYS:
        if way.key in options.only.split(","):
            found[way.key] = measure(way, max(2, round(options.kills * way.share)))
            print(way.key, {name: statistics.median(values) for name, values in found[way.key].items()}, flush=True)
    theirs_ms = statistics.median(found["torchrun"]["state_ms"]) if "torchrun" in found else None
    lines = [
        "| what | kills | all past a collective | all have the state | most steps lost | share of torchrun's | kept |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [row(way, found[way.key], theirs_ms) for way in WAYS if way.key in found]
    method = (
        "SIGKILL to one of four gloo workers; medians. Steps lost: beside the one in flight. "
        "Share: of the time until all workers train again, from the state that they have or from step 0."
    )
    Report("Recovery in place", method, machine).write(options.out, "in-place", lines, taken=found)


if __name__ == "__main__":
    main()
