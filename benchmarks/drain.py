"""Notices at random moments in a job of four agents with two gloo workers each: do all ranks save at one step?

    python benchmarks/drain.py [--notices 40] [--steps 0.005,0.02,0.1,0.5] [--control 10]

Prints JSON.  A notice is a signal to one agent (15 s); once that has left, another agent comes in its place.  A third
of the notices come in the middle of the training, a third before its first step, the others just after a worker was
killed, or with the coordinator killed up to 0.1 s later.  `control`: the same job told by a signal to each rank, with
no agreed step.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any

WORKER = Path(__file__).parent / "workers" / "steps.py"
AGENTS, NPROC, DEADLINE_S, LIMIT_S = 4, 2, 15.0, 60.0
dice = Random()  # noqa: S311  no secret
MOMENTS = ("training", "training", "first step", "first step", "worker killed", "coordinator killed")


@dataclass
class Agent:
    process: subprocess.Popen[bytes]
    stderr: Path
    logs: Path

    @property
    def epoch(self) -> int:
        """Of its last term as coordinator; 0: it had none."""
        said = re.findall(r"this agent leads the job now \(.*term (\d+)\)", self.stderr.read_text(errors="replace"))
        return int(said[-1]) if said else 0


class Job:
    """Agents that come and go, until `close`."""

    def __init__(self, step_s: float, *, by_signal: bool = False) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.port = dice.randrange(20_000, 30_000)
        self.what = "USR1=pass" if by_signal else f"USR1=drain:{DEADLINE_S:g}"
        told = {"BY_SIGNAL": "1"} if by_signal else {}
        self.env = {**os.environ, "OUT": str(self.folder), "STEP_S": str(step_s), "OMP_NUM_THREADS": "1", **told}
        self.agents: list[Agent] = []
        self.started = 0
        for _ in range(AGENTS):
            self.start()

    def start(self) -> None:
        self.started += 1
        stderr, logs = self.folder / f"stderr{self.started}", self.folder / f"logs{self.started}"
        command = [
            sys.executable, "-m", "aelastic", "--nnodes", f"1:{AGENTS}", "--nproc-per-node", str(NPROC),
            "--max-restarts", "1000", "--preload", "torch", "--log-dir", str(logs), "--on-signal", self.what,
            "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-id", "drain",
            "--rdzv-conf", "last_call_timeout=3,settle_time=0.2", "--local-addr", "127.0.0.1", str(WORKER),
        ]  # fmt: skip
        with open(stderr, "wb") as file:
            process = subprocess.Popen(command, env={**self.env, "LOGLEVEL": "INFO"}, stdout=file, stderr=file)
        self.agents.append(Agent(process, stderr, logs))

    def lines(self) -> list[list[Any]]:
        path = self.folder / "lines"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def running(self) -> str:
        """The newest round, once all ranks of all agents have begun in it."""
        starts = [line for line in self.lines() if line[4] == "start"]
        size = NPROC * len(self.agents)
        newest = max((line[1] for line in starts), default="")
        return newest if len({line[2] for line in starts if line[1] == newest and line[3] == size}) == size else ""

    @property
    def coordinator(self) -> Agent:
        return max(self.agents, key=lambda agent: agent.epoch)

    def kill(self, agent: Agent) -> None:
        agent.process.kill()
        agent.process.wait()
        self.agents.remove(agent)

    def close(self) -> None:
        for agent in list(self.agents):
            self.kill(agent)


def wait(is_so: Callable[[], Any], limit_s: float = LIMIT_S) -> bool:
    until = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def records(agent: Agent, event: str) -> list[dict[str, Any]]:
    paths = agent.logs.glob("latest/events.jsonl")
    found = [json.loads(line) for path in paths for line in path.read_text().splitlines(True) if line.endswith("\n")]
    return [each for each in found if each["event"] == event]


def a_worker_of(agent: Agent) -> int:
    return int(records(agent, "workers_started")[-1]["workers"][0]["id"])


def notify(job: Job, moment: str) -> dict[str, Any]:
    """One notice; gives what became of it."""
    round_ = job.running()
    if moment == "first step":  # a new round: another agent comes
        job.kill(dice.choice(job.agents))
        job.start()
        time.sleep(dice.uniform(0.2, 1.5))
    elif moment == "worker killed":
        os.kill(a_worker_of(dice.choice(job.agents)), signal.SIGKILL)
        time.sleep(dice.uniform(0, 0.3))
    else:
        time.sleep(dice.uniform(0.2, 1.5))
    leaving = dice.choice(job.agents)
    asked_at, before = time.time(), len(job.lines())
    leaving.process.send_signal(signal.SIGUSR1)
    if moment == "coordinator killed" and job.coordinator is not leaving:
        time.sleep(dice.uniform(0, 0.1))
        job.kill(job.coordinator)
    is_gone = wait(lambda: leaving.process.poll() is not None, DEADLINE_S + 5.0)
    left_s = time.time() - asked_at
    saves: dict[str, list[tuple[int, int]]] = {}
    for _, fence, rank, size, what, step in job.lines()[before:]:
        if what == "saved":
            saves.setdefault(fence, [(size, size)]).append((rank, step))
    is_whole = [len({step for _, step in told[1:]}) == 1 and len(told) - 1 == told[0][0] for told in saves.values()]
    said = [each for each in records(leaving, "announced") if each["what"] == "saving"]
    agreed = [datetime.fromisoformat(each["time"]).timestamp() for each in said]
    agreed = [at for at in agreed if at >= asked_at]
    killed = len(records(leaving, "killed"))
    result = {
        "moment": moment, "round": round_, "left_s": left_s, "is_gone": is_gone, "code": leaving.process.poll(),
        "saved": "none" if not is_whole else "all" if all(is_whole) else "some",
        "agreed_s": min(agreed) - asked_at if agreed else None, "killed": killed,
    }  # fmt: skip
    if leaving in job.agents:
        job.agents.remove(leaving)
    while len(job.agents) < AGENTS:
        job.start()
    step = max((line[5] for line in job.lines()[before:] if line[4] == "saved"), default=None)
    result["goes_on"] = wait(lambda: job.running() not in {"", round_})
    starts = [line[5] for line in job.lines()[before:] if line[4] == "start" and line[0] > asked_at + left_s]
    result["lost_steps"] = None if step is None or not starts else max(0, step - max(starts))
    return result


def measure(steps: Sequence[float], count: int) -> dict[str, Any]:
    results = []
    for step_s in steps:
        job = Job(step_s)
        try:
            assert wait(job.running), "\n".join(agent.stderr.read_text() for agent in job.agents)
            for number in range(count // len(steps)):
                results.append({"step_s": step_s, **notify(job, MOMENTS[number % len(MOMENTS)])})
                print(results[-1], file=sys.stderr, flush=True)
        finally:
            job.close()
    agreed = sorted(each["agreed_s"] for each in results if each["agreed_s"] is not None)
    return {
        "notices": len(results),
        "saved": Counter(f"{each['moment']}: {each['saved']}" for each in results),
        "left": sum(each["code"] == 75 for each in results),
        "left_s_max": max(each["left_s"] for each in results),
        "went_on": sum(each["goes_on"] for each in results),
        "agreed_ms": {"median": 1e3 * statistics.median(agreed), "max": 1e3 * agreed[-1]} if agreed else None,
        "killed": sum(each["killed"] for each in results),
        "lost_steps_max": max((each["lost_steps"] for each in results if each["lost_steps"] is not None), default=None),
    }


def control(count: int) -> dict[str, int]:
    """Each rank is told by a signal: how often do ranks wait for each other for ever?"""
    stuck = 0
    for _ in range(count):
        job = Job(0.004, by_signal=True)
        try:
            assert wait(job.running)
            time.sleep(dice.uniform(0.5, 1.0))
            before = len(job.lines())
            for agent in job.agents:
                agent.process.send_signal(signal.SIGUSR1)
                time.sleep(0.002)
            stuck += not wait(lambda: sum(line[4] == "saved" for line in job.lines()[before:]) == AGENTS * NPROC, 8.0)  # noqa: B023
        finally:
            job.close()
    return {"tries": count, "stuck": stuck}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--notices", type=int, default=40)
    parser.add_argument("--steps", default="0.005,0.02,0.1,0.5")
    parser.add_argument("--control", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    dice.seed(options.seed)
    figures = {"control": control(options.control)} if options.control else {}
    if options.notices:
        figures |= measure([float(each) for each in options.steps.split(",")], options.notices)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
