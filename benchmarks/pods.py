"""A job of agents that are restarted from outside, as the pods of a cluster are, and the faults that happen to it.

A pod is an agent and everything it has started.  Once the agent has ended, for whatever reason, the rest of the pod is
killed, and a new one is started after a fixed delay.  A pod that is asked to go and does not is killed after a grace.

All processes of a pod have a variable in their environment by which they are found, wherever they are in the tree of
processes.  Each agent has a session of its own; temporary files go into the job's folder.
"""

from __future__ import annotations

import heapq
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from one_node import MeasurementError, descendants
from training_time import ANNOUNCED, Fault, Finished, Happened, finished, parse

FIRST_STEP_LIMIT_S = 120.0
LOOK_AGAIN_S = 0.2  # for the first step; nothing is measured by it
GRACE_S = 30.0  # as Kubernetes gives a pod
END_S = 3.0  # at the end of the run, where nothing is measured any more
MARK = "BENCH_POD"


@dataclass(frozen=True)
class Training:
    """What is run, and what becomes of pods.

    Attributes:
        command: of an agent, up to the script.
        nodes: how many pods there are at first.
        step_s: length of a step.
        checkpoint_every: steps from one checkpoint to the next.
        restart_delay_s: from the end of a pod to the start of its replacement.
        suspended_s: how long an agent is stopped by SIGSTOP.
        notice: the signal that says that a node goes, and how many seconds before it is killed.
        script: of the workers.
    """

    command: tuple[str, ...]
    nodes: int
    step_s: float
    checkpoint_every: int
    restart_delay_s: float
    suspended_s: float
    notice: tuple[int, float] = (signal.SIGTERM, 0.0)
    script: str = "train.py"


@dataclass
class Pod:
    """An agent and what it has started."""

    mark: str
    process: subprocess.Popen[bytes]
    pidfd: int
    is_wanted: bool = True  # it is replaced when it has ended
    leaves: bool = False


@dataclass
class Outcome:
    """What a run has shown.

    Attributes:
        start_s: from the first agent's start to the first step of all nodes.
        start: when that was (CLOCK_MONOTONIC), and `end` when the run was over.
        faults: those that took place; where no worker has begun, none can be killed.
        agents: how many were started.
    """

    start_s: float
    start: float
    end: float
    done: list[Finished]
    faults: list[Happened] = field(default_factory=list)
    agents: int = 0


class Pods:
    """A job's pods.

    Args:
        training: what they run.
        folder: for the checkpoint, the workers' files and everything temporary; its name is the job's.
        lives_s: workers end by themselves after so many seconds, should they be left.
    """

    def __init__(self, training: Training, folder: Path, lives_s: float) -> None:
        self._training = training
        self._folder = folder
        script = Path(__file__).parent / "workers" / training.script
        arguments = (str(folder), str(training.step_s), str(training.checkpoint_every))
        self._command = [*training.command, str(script), *arguments, str(time.monotonic() + lives_s)]
        self._numbers = count()
        self._pods: list[Pod] = []
        self._more = 0  # wanted beyond the nodes at first
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._outcome = Outcome(0.0, 0.0, 0.0, [])

    def run(self, faults: Iterable[Fault], duration: float) -> Outcome:
        """Runs the job for so many seconds from its first step of all nodes, and lets the faults happen.

        Raises:
            MeasurementError: there is no such step within `FIRST_STEP_LIMIT_S`.
        """
        outcome = self._outcome
        began = time.monotonic()
        for _ in range(self._training.nodes):
            self._start()
        outcome.start = self._wait_first_step(began + FIRST_STEP_LIMIT_S)
        outcome.start_s, outcome.end = outcome.start - began, outcome.start + duration
        for fault in faults:
            self._at(outcome.start + fault.at, lambda fault=fault: self._happen(fault))  # type: ignore[misc]
        while time.monotonic() < outcome.end:
            self._turn(outcome.end)
        outcome.done = self._read()
        return outcome

    def stop(self) -> None:
        """Ends all pods; nothing of them is left."""
        self._timers.clear()
        for pod in self._pods:
            pod.process.terminate()
            pod.process.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + END_S
        for pod in self._pods:
            with suppress(subprocess.TimeoutExpired):
                pod.process.wait(max(0.0, deadline - time.monotonic()))
            self._kill(pod)
            os.close(pod.pidfd)
        self._pods.clear()
        kill(marked(f"{self._folder.name}."))

    # --- time ---------------------------------------------------------------------------------------------------------

    def _at(self, when: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (when, next(self._order), do))

    def _turn(self, end: float) -> None:
        """Waits for the next timer or the end of an agent, and does what is due."""
        until = min(end, self._timers[0][0]) if self._timers else end
        poll = select.poll()
        for pod in self._pods:
            poll.register(pod.pidfd, select.POLLIN)
        poll.poll(max(0.0, until - time.monotonic()) * 1000)
        for pod in [pod for pod in self._pods if pod.process.poll() is not None]:
            self._on_ended(pod)
        while self._timers and self._timers[0][0] <= time.monotonic():
            heapq.heappop(self._timers)[2]()

    def _wait_first_step(self, deadline: float) -> float:
        while time.monotonic() < deadline:
            self._turn(time.monotonic() + LOOK_AGAIN_S)
            for each in self._read():
                if each.world_size >= self._training.nodes:
                    return each.at
        raise MeasurementError(f"no step of {self._training.nodes} nodes within {FIRST_STEP_LIMIT_S:.0f} s")

    def _read(self) -> list[Finished]:
        lines = []
        for path in self._folder.glob("steps-*"):
            lines += parse(path.read_text())
        return finished(lines)

    # --- pods ---------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        number = next(self._numbers)
        mark = f"{self._folder.name}.{number}"
        env = {**os.environ, MARK: mark, "TMPDIR": str(self._folder), "OMP_NUM_THREADS": "1"}
        with (self._folder / f"agent-{number}.log").open("wb") as file:
            process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env, start_new_session=True
            )
        self._pods.append(Pod(mark, process, os.pidfd_open(process.pid)))
        self._outcome.agents += 1

    def _on_ended(self, pod: Pod) -> None:
        self._kill(pod)
        os.close(pod.pidfd)
        self._pods.remove(pod)
        if pod.is_wanted:
            self._at(time.monotonic() + self._training.restart_delay_s, self._start)

    def _kill(self, pod: Pod) -> None:
        """Kills the agent, and then what it leaves."""
        below = descendants(pod.process.pid) if pod.process.poll() is None else []
        pod.process.kill()
        pod.process.wait()
        kill(below)
        kill(marked(f"{pod.mark}\0"))

    def _worker(self, pod: Pod) -> int | None:
        """The process that runs the script in this pod, from its first line on."""
        living = set(marked(f"{pod.mark}\0"))
        paths = sorted(self._folder.glob(f"steps-{pod.mark}-*"), key=lambda path: path.stat().st_mtime, reverse=True)
        pids = [int(path.name.rpartition("-")[2]) for path in paths]
        return next((pid for pid in pids if pid in living), None)

    # --- faults -------------------------------------------------------------------------------------------------------

    def _happen(self, fault: Fault) -> None:
        if fault.kind == "node added":
            self._told(fault.kind)
            self._more += 1
            self._start()
            return
        staying = [pod for pod in self._pods if not pod.leaves]
        if fault.kind.startswith("worker"):
            workers = [pid for pod in staying if (pid := self._worker(pod))]
            if workers:
                self._told(fault.kind)
                self._strike_worker(fault.kind, workers[int(fault.choice * len(workers))])
        elif staying:
            self._told(fault.kind)
            self._strike_agent(fault.kind, staying[int(fault.choice * len(staying))])

    def _told(self, kind: str) -> None:
        self._outcome.faults.append(Happened(time.monotonic(), kind))

    def _strike_worker(self, kind: str, pid: int) -> None:
        if kind == "worker killed":
            kill([pid])
        else:
            (self._folder / f"raise-{pid}").touch()

    def _strike_agent(self, kind: str, pod: Pod) -> None:
        agent = pod.process
        if kind == "agent suspended":
            agent.send_signal(signal.SIGSTOP)
            self._at(time.monotonic() + self._training.suspended_s, lambda: agent.send_signal(signal.SIGCONT))
            return
        self._lose(pod)
        if kind == ANNOUNCED:
            signum, before_s = self._training.notice
            agent.send_signal(signum)
            self._at(time.monotonic() + before_s, agent.kill)
        elif kind == "agent killed":
            agent.kill()  # the rest of the pod follows when its end has been seen, at once
        else:
            agent.terminate()
            self._at(time.monotonic() + GRACE_S, agent.kill)

    def _lose(self, pod: Pod) -> None:
        """It is not replaced if a node has been added before."""
        pod.leaves = True
        pod.is_wanted = not self._more
        self._more -= not pod.is_wanted


# --- processes --------------------------------------------------------------------------------------------------------


def marked(mark: str) -> list[int]:
    """The processes whose variable begins so."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if wanted in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def agent_command(
    name: str, nodes: tuple[int, int], port: int, run_id: str, announced_s: float = 0.0
) -> tuple[str, ...]:
    """Of an agent: the same for all launchers, and no setting but those of the job and its notices."""
    is_ours = announced_s and name != "torchrun"
    return (
        *launchers()[name],
        *(("--on-signal", f"USR1=drain:{announced_s:g}", "--admit", "saved:5") if is_ours else ()),
        *("--nnodes", f"{nodes[0]}:{nodes[1]}", "--nproc-per-node", "1", "--max-restarts", "1000"),
        *("--rdzv-backend", "etcd-v3" if name == ON_ETCD else "c10d"),
        *("--rdzv-endpoint", _endpoint(name, port), "--rdzv-id", run_id),
        *("--rdzv-conf", "last_call_timeout=1", "--local-addr", "127.0.0.1"),
    )


def _endpoint(name: str, port: int) -> str:
    """Where the agents meet: each pod may be a victim, with an endpoint that it serves."""
    if name == ON_ETCD:
        return ETCD
    return ",".join(f"127.0.0.{host}:{port}" for host in range(1, 4 if name == ON_THREE else 2))


# The same options as with `--preload`, and a script that recovers in place.
IN_PLACE = "aelastic in place"
# On request only: three endpoints, and an etcd that runs.
ON_THREE, ON_ETCD, ETCD = "aelastic on three", "aelastic on etcd", "127.0.0.1:2379"


def launchers() -> dict[str, tuple[str, ...]]:
    aelastic = (sys.executable, "-m", "aelastic")
    return {
        "torchrun": (str(Path(sys.executable).with_name("torchrun")),),
        "aelastic": aelastic,
        "aelastic --preload": (*aelastic, "--preload", "torch,torch.distributed"),
        IN_PLACE: (*aelastic, "--preload", "torch,torch.distributed"),
        ON_THREE: aelastic,
        ON_ETCD: aelastic,
    }
