"""One run of a script: its nodes are agents in processes of their own, its workers are watched and disturbed."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, Self

from aelastic.host import proc_table
from aelastic.notice.page import CALLS
from aelastic.rehearse.files import Stamp, open_for_writing, stamps_of

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LOOK_S = 0.005
FILES_EACH_S = 0.05
END_S = 20.0  # for a run that was stopped
NOTICE_S = 15  # from a notice until the node goes
LAST_CALL_S = 2  # all nodes of a rehearsal begin at once


class Script(NamedTuple):
    """What is rehearsed."""

    options: Sequence[str]  # of the agent
    command: Sequence[str]  # the script, and its arguments
    nodes: tuple[int, int]  # that it can do with, and that it has room for
    workers: int  # of a node
    step: re.Pattern[str] | None  # none: a step is a call of `notice.due()`
    metric: re.Pattern[str] | None
    root: Path  # where it leaves files
    apart: Path  # where rehearsals keep theirs

    @property
    def played(self) -> int:
        """How many nodes there are at first: where the job has room, one more than it needs."""
        return min(self.nodes[0] + (self.nodes[1] > 1), self.nodes[1])


class Step(NamedTuple):
    at: float
    number: int


class Worker(NamedTuple):
    node: int
    generation: int
    rank: int
    pid: int
    folder: Path  # of its output
    page: int  # a descriptor of what it shares with its agent; -1: there is none


class Play:
    """One run.

    Args:
        script: what is run.
        folder: for its logs.
        nodes: how many; `None`: as many as the script is played on.
        more: options, after the script's own.
    """

    def __init__(self, script: Script, folder: Path, nodes: int | None, *more: str) -> None:
        self.script, self.folder, self._more = script, folder, more
        self.agents: list[subprocess.Popen[bytes]] = []
        self.workers: list[Worker] = []  # all that were started
        self.first: dict[int, Step] = {}  # by generation
        self.newest: dict[tuple[int, int], Step] = {}  # by generation and rank
        self.metrics: dict[int, dict[int, float]] = {}  # by generation and step: of the lowest rank that tells one
        self.saves: list[int] = []  # steps after which files had changed
        self.stamps: dict[Path, Stamp] = {}
        self.began = time.monotonic()
        self._offsets: dict[Path, int] = {}
        self._starts: dict[int, int] = {}  # of workers, by node
        self._teller: dict[int, int] = {}  # by generation: whose metrics count
        self._looked = 0.0
        folder.mkdir(parents=True)
        self._job = ["--rdzv-id", f"{script.apart.name}-{folder.name}"]
        if script.nodes[1] > 1:
            with socket.create_server(("127.0.0.1", 0)) as free:
                endpoint = f"127.0.0.1:{free.getsockname()[1]}"
            self._job += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--local-addr", "127.0.0.1"]
            self._job += ["--rdzv-conf", f"last_call_timeout={LAST_CALL_S}"]
        for _ in range(script.played if nodes is None else nodes):
            self.add_node()

    def add_node(self) -> None:
        place = len(self.agents) or ""
        own = ["--log-dir", str(self._logs(len(self.agents))), "--redirects", "3", "--max-restarts", "3"]
        own += ["--on-signal", f"USR1=drain:{NOTICE_S}", *self._job, *self._more]
        command = [sys.executable, "-m", "aelastic", *self.script.options, *own, *self.script.command]
        with (self.folder / f"agent{place}.log").open("wb") as log:
            self.agents.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    preexec_fn=_end_with_us,  # noqa: PLW1509  there are no threads here
                )
            )  # fmt: skip

    def _logs(self, node: int) -> Path:
        return self.folder / f"logs{node or ''}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Nothing of it is left."""
        self.look()
        for agent in self.agents:
            agent.kill()
            agent.wait()
        until = time.monotonic() + END_S
        while any(proc_table.is_alive(each.pid) for each in self.workers) and time.monotonic() < until:
            time.sleep(LOOK_S)  # noqa: TID251  nothing else runs here
        self.look()
        for page in {each.page for each in self.workers} - {-1}:
            os.close(page)
        self.workers = [each._replace(page=-1) for each in self.workers]

    def wait(self, condition: Callable[[], bool], limit_s: float, each_s: float = LOOK_S) -> bool:
        """Whether a condition holds before the run, or the time, is over."""
        until = time.monotonic() + limit_s
        while True:
            is_over = not self.is_on or time.monotonic() > until
            if each_s or time.monotonic() - self._looked >= FILES_EACH_S:
                self.look()
            if (holds := condition()) or is_over:
                return holds
            time.sleep(each_s)  # noqa: TID251  as above

    def wait_end(self, limit_s: float) -> int | None:
        """The first agent's exit code; `None` if it has none by then."""
        self.wait(lambda: False, limit_s)
        return self.agents[0].poll()

    @property
    def is_on(self) -> bool:
        return any([agent.poll() is None for agent in self.agents])  # noqa: C419  each is asked

    # What is seen.

    def look(self) -> None:
        """Reads what agents and workers have written, and now and then which files have changed."""
        for node in range(len(self.agents)):
            for line in self._lines(self._logs(node) / "latest" / "events.jsonl"):
                if '"event":"workers_started"' in line:
                    self._take_start(node, json.loads(line))
        for worker in self.workers:
            for line in (line for name in ("stdout.log", "stderr.log") for line in self._lines(worker.folder / name)):
                self._take(line, worker)
            if self.script.step is None and (calls := self._calls(worker)):
                self.first.setdefault(worker.generation, Step(time.monotonic(), 0))
                self._newest(worker, calls - 1)
        if time.monotonic() - self._looked >= FILES_EACH_S:
            before, self.stamps = self.stamps, stamps_of(self.script.root, self.script.apart)
            if before != self.stamps and self.first:
                self.saves.append(self.last())
            self._looked = time.monotonic()

    def _lines(self, path: Path) -> Iterator[str]:
        """What a file has more than at the look before, as far as lines are whole."""
        with suppress(OSError), path.open("rb") as file:  # it is not there yet
            offset = self._offsets.get(path, 0)
            file.seek(offset)
            data = file.read()
            whole = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
            self._offsets[path] = offset + whole
            yield from re.split(r"[\r\n]+", data[:whole].decode(errors="replace"))

    def _take_start(self, node: int, record: dict[str, Any]) -> None:
        attempt = self._logs(node) / "latest" / f"attempt_{self._starts.get(node, 0)}"
        self._starts[node] = self._starts.get(node, 0) + 1
        generation = record["generation"]
        for each in record["workers"]:
            folder = attempt / str(each["local_rank"])
            page = _page_of(self.agents[node].pid, f"/notice_{generation}_{each['local_rank']}")
            self.workers.append(Worker(node, generation, each["rank"], each["id"], folder, page))
        self.workers.sort(key=lambda worker: (worker.generation, worker.rank))

    def _take(self, line: str, worker: Worker) -> None:
        of, step, metric = (worker.generation, worker.rank), self.script.step, self.script.metric
        if step and (found := step.search(line)) and found[1].isdecimal():
            self.first.setdefault(worker.generation, Step(time.monotonic(), int(found[1])))
            self._newest(worker, int(found[1]))
        if metric and (found := metric.search(line)) and worker.rank <= self._teller.get(of[0], worker.rank):
            if self._teller.get(of[0]) != worker.rank:
                self._teller[of[0]], self.metrics[of[0]] = worker.rank, {}
            told = self.metrics[of[0]]
            with suppress(ValueError, KeyError):  # no number, or before the first step
                told[self.newest[of].number if step else len(told)] = float(found[1])

    def _newest(self, worker: Worker, number: int) -> None:
        of = worker.generation, worker.rank
        if of not in self.newest or self.newest[of].number < number:
            self.newest[of] = Step(time.monotonic(), number)

    @staticmethod
    def _calls(worker: Worker) -> int:
        with suppress(OSError, struct.error):  # there is no page
            calls: int = struct.unpack("q", os.pread(worker.page, 8, 8 * CALLS))[0]
            return calls
        return 0

    def align(self, generation: int, last: int, told: int) -> None:
        """Calls of `notice.due()` are counted from 0 by each process; one that came to the end has made the last ones.

        Args:
            generation: that came to its end.
            last: the last step of a job that nothing disturbs.
            told: how many metrics that tells.
        """
        if self.script.step is None and generation in self.first:
            off, numbers = last - self.last(generation), self.metrics.get(generation, {})
            self.first[generation] = Step(self.first[generation].at, off)
            for of, step in self.newest.items():
                if of[0] == generation:
                    self.newest[of] = Step(step.at, step.number + off)
            self.metrics[generation] = {at + told - len(numbers): value for at, value in numbers.items()}

    @property
    def generation(self) -> int:
        """The last whose workers made a step; 0: none did."""
        return max(self.first, default=0)

    def last(self, least: int = 0, most: float = inf) -> int:
        """The largest step of some generations; -1: there is none."""
        return max((step.number for (at, _), step in self.newest.items() if least <= at <= most), default=-1)

    def least(self) -> int:
        """The smallest of the steps at which ranks are that tell theirs, in the newest generation."""
        return min((step.number for (at, _), step in self.newest.items() if at == self.generation), default=-1)

    @property
    def saved_after(self) -> list[int]:
        """Steps after which files had changed; of some in a row, the last."""
        return [step for step, later in zip(self.saves, [*self.saves[1:], inf], strict=False) if later > step + 1]

    @property
    def team(self) -> list[Worker]:
        """The workers that were started last."""
        newest = self.workers[-1].generation if self.workers else 0
        return [each for each in self.workers if each.generation == newest]

    @property
    def said(self) -> list[str]:
        """The first agent's own lines."""
        text = (self.folder / "agent.log").read_text(errors="replace")
        return [line.partition("aelastic: ")[2] for line in text.splitlines() if line.startswith("aelastic: ")]

    @property
    def cause(self) -> str:
        """Why it ended, in the agent's words."""
        failed = [line for line in self.said if re.match(r"W rank \d+ failed on |error", line)]
        return failed[-1].removeprefix("W ") if failed else (self.said or ["no word"])[-1]

    @property
    def asks(self) -> bool:
        """Whether a worker has asked for notices."""
        return any(map(self._calls, self.workers))

    def keep_stacks(self) -> None:
        """Of a run that does not go on: where its workers are."""
        with (self.folder / "stacks.txt").open("wb") as file, suppress(subprocess.TimeoutExpired):
            command = [sys.executable, "-m", "aelastic", "stacks", "--job", self._job[1]]
            subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=False, timeout=END_S)

    # What is done to it.

    def signal(self, signum: int, workers: Sequence[Worker]) -> None:
        for worker in workers:
            with suppress(ProcessLookupError):  # it has ended by itself
                os.kill(worker.pid, signum)

    def kill(self, rank: int) -> None:
        self.signal(signal.SIGKILL, [each for each in self.team if each.rank == rank])

    def opened(self) -> dict[int, set[Path]]:
        """Files of the script that processes of workers have open for writing now, by process."""
        members = proc_table.session_members({each.pid for each in self.team})
        return {each.pid: open_for_writing(each.pid, self.script.root, self.script.apart) for each in members}

    def catch_writer(self, usual: set[Path], limit_s: float) -> set[Path]:
        """Kills the first process of a worker that opens a file for writing; gives these files, or none in time.

        Args:
            usual: files that are always open, as a log.
            limit_s: for that.
        """
        pids, caught = [*self.opened()], set[Path]()

        def is_caught() -> bool:
            for pid in pids:
                if paths := open_for_writing(pid, self.script.root, self.script.apart) - usual:
                    proc_table.kill(pid)
                    caught.update(paths)
                    return True
            return False

        self.wait(is_caught, limit_s, each_s=0.0)
        return caught


_libc = ctypes.CDLL(None)


def _end_with_us() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _page_of(agent: int, name: str) -> int:
    """What an agent shares with a worker, through the agent's own descriptor: it outlives both."""
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{agent}/fd"):
            with suppress(OSError):
                if os.readlink(path := f"/proc/{agent}/fd/{fd}").endswith(name):
                    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return -1
