"""An agent that implements only recovery in place: it starts ranks, replaces those that die, and records the story.

It replaces the real agent in tests of the worker's side.  Ranks end by themselves, following their script.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aelastic.training import messages

DEADLINE_S = 60.0
PATIENCE_S = 10
# Ends with its stdin.
STORE = """
import sys
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@dataclass
class Story:
    """The events so far."""

    round: int = 0
    deaths: list[int] = field(default_factory=list)  # ranks
    received: list[dict[str, Any]] = field(default_factory=list)  # messages of workers, with their ranks
    output: str = ""
    pids: dict[int, set[int]] = field(default_factory=dict)  # of each rank

    def received_from(self, rank: int, kind: str) -> list[dict[str, Any]]:
        return [each for each in self.received if each["rank"] == rank and each["kind"] == kind]

    def lines(self, beginning: str) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith(beginning)]


class _Worker:
    def __init__(self, rank: int, command: list[str], env: Mapping[str, str], folder: Path, output: int) -> None:
        self.rank = rank
        self.is_ready = self.is_done = False
        self.is_open = True
        self.path = folder / f"{rank}-{time.monotonic_ns()}"
        self.connection: socket.socket | None = None
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(self.path))
        self.listener.listen()
        own = {messages.SOCKET_VARIABLE: messages.variable(str(self.path)), "RANK": str(rank)}
        self.process = subprocess.Popen(
            command, env={**env, **own}, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        self.end = os.pidfd_open(self.process.pid)

    @property
    def socket(self) -> socket.socket:
        return self.connection or self.listener

    def accept(self) -> None:
        self.connection, _ = self.listener.accept()
        self.listener.close()
        self.path.unlink()

    def send(self, kind: str, **fields: Any) -> None:
        if self.connection is not None:
            try:
                self.connection.send(messages.encode(kind, **fields))
            except OSError:
                pass  # it has ended

    def close(self) -> None:
        self.socket.close()
        self.process.kill()
        self.process.wait()
        os.close(self.end)


class InPlaceAgent:
    """Runs one job.

    Args:
        folder: for sockets and output; also the workers' working folder.
        python: the command that starts an interpreter.
        script: the workers' script.
        world_size: the number of ranks.
        env: variables for the workers.
    """

    def __init__(
        self,
        folder: Path,
        python: str,
        script: Path,
        *args: str,
        world_size: int = 3,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = folder
        self._python = python
        self._command = [python, str(script), *args]
        self._world_size = world_size
        base = {name: value for name, value in os.environ.items() if not name.startswith("AELASTIC_")}
        self._env = {**base, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL", **(env or {})}
        self._ending = ExitStack()
        self._workers: list[_Worker] = []
        self._stores: list[subprocess.Popen[bytes]] = []
        self.story = Story()

    def __enter__(self) -> Self:
        self._output = self._ending.enter_context((self._folder / "output").open("wb"))
        self._workers = [self._start(rank) for rank in range(self._world_size)]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.close()
        for store in self._stores:
            store.kill()
            store.communicate()
        self._ending.close()

    def _start(self, rank: int) -> _Worker:
        return _Worker(rank, self._command, self._env, self._folder, self._output.fileno())

    def run(self) -> Story:
        """Runs until all ranks are done or the state is lost."""
        until = time.monotonic() + DEADLINE_S
        is_running = False
        while self._workers and not any(each["kind"] == messages.LOST for each in self.story.received):
            assert time.monotonic() < until, f"hung: {self.story}\n{(self._folder / 'output').read_text()}"
            files: list[Any] = [worker.socket for worker in self._workers if worker.is_open]
            files += [worker.end for worker in self._workers]
            readable, _, _ = select.select(files, [], [], 0.5)
            for worker in list(self._workers):
                if worker.socket in readable:
                    self._receive(worker)
                if worker.end in readable:
                    is_running = self._lose(worker, is_running=is_running)
            if not is_running and self._workers and all(worker.is_ready for worker in self._workers):
                self._begin()
                is_running = True
            if is_running and all(worker.is_done for worker in self._workers):
                for worker in self._workers:
                    worker.send(messages.END)
        self.story.output = (self._folder / "output").read_text()
        return self.story

    def disappear(self) -> list[int]:
        """Closes its sockets once all workers are in a round; returns how they ended."""
        while not all(worker.is_ready for worker in self._workers):
            readable, _, _ = select.select([worker.socket for worker in self._workers], [], [], DEADLINE_S)
            for worker in self._workers:
                if worker.socket in readable:
                    self._receive(worker)
        self._begin()
        for worker in self._workers:
            worker.socket.close()
        codes = [worker.process.wait(DEADLINE_S) for worker in self._workers]
        self.story.output = (self._folder / "output").read_text()
        return codes

    def _receive(self, worker: _Worker) -> None:
        if worker.connection is None:
            worker.accept()
            return
        try:
            packet = worker.connection.recv(messages.MAX_PACKET)
        except ConnectionResetError:  # it has ended with a message unread
            packet = b""
        if not packet:
            worker.is_open = False
            return
        message = messages.decode(packet)
        if message["kind"] == messages.KEEP:
            return
        self.story.received.append({**message, "rank": worker.rank})
        worker.is_ready |= message["kind"] == messages.READY
        worker.is_done |= message["kind"] == messages.DONE and message["round"] == self.story.round

    def _lose(self, worker: _Worker, *, is_running: bool) -> bool:
        """Handles the end of a worker: if it was not done, another takes its rank in the next round."""
        self._workers.remove(worker)
        is_end = worker.is_done and worker.process.poll() == 0
        worker.close()
        if is_end:
            return is_running
        self.story.deaths.append(worker.rank)
        if is_running:
            for other in self._workers:
                other.is_ready = other.is_done = False
                other.send(messages.OVER, round=self.story.round, why=f"rank {worker.rank} was lost")
        self._workers.append(self._start(worker.rank))
        return False

    def _begin(self) -> None:
        self.story.round += 1
        command = [self._python, "-c", STORE]
        store = subprocess.Popen(command, env=self._env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._stores.append(store)
        assert store.stdout is not None
        port = store.stdout.readline().decode().strip()
        for worker in self._workers:
            env = {
                "RANK": worker.rank, "LOCAL_RANK": worker.rank, "WORLD_SIZE": self._world_size, "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True, "AELASTIC_ROUND": self.story.round,
            }  # fmt: skip
            own_env = {name: str(value) for name, value in env.items()}
            worker.send(messages.BEGIN, round=self.story.round, env=own_env, patience=PATIENCE_S)
            self.story.pids.setdefault(worker.rank, set()).add(worker.process.pid)


# Ends a worker whose test is over, even if it hangs.
ALARM = f"import signal; signal.alarm({int(2 * DEADLINE_S)})\n"
assert signal.SIGALRM
