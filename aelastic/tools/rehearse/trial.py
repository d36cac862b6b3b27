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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, Self

from aelastic.base.host import proc_table
from aelastic.tools.rehearse.files import Change, Files, Stamp, changes
from aelastic.tools.rehearse.noted import Noted
from aelastic.training.notice.page import CALLS, STEP
from aelastic.training.rehearsed.notes import FOLDER_VARIABLE

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LOOK_S = 0.005
FILES_EACH_S = 0.05
END_S = 20.0  # for a run that was stopped
NOTICE_S = 15  # from a notice until the node goes
LAST_CALL_S = 2  # all nodes of a rehearsal begin at once
# The records of the agents' event logs that are read: starts, and the course of a recovery in place.
_EVENTS = ("workers_started", "worker_ended", "restarting", "recovered", "not_recovered")


class Script(NamedTuple):
    """What is rehearsed."""

    options: Sequence[str]  # of the agent
    command: Sequence[str]  # the script, and its arguments
    nodes: tuple[int, int]  # the fewest that it needs, and the most that it can use
    workers: int  # of a node
    step: re.Pattern[str] | None  # None: a step is one that is committed, or else a call of `notice.due()`
    environ: Mapping[str, str]

    @property
    def nodes_at_first(self) -> int:
        """How many nodes there are at first: if the job has room, one more than it needs."""
        return min(self.nodes[0] + (self.nodes[1] > 1), self.nodes[1])

    @property
    def is_several(self) -> bool:
        """Whether it may have more nodes than one."""
        return self.nodes[1] > 1

    @property
    def gpus(self) -> list[str]:
        """The names of GPUs that jobs here may use, as in `CUDA_VISIBLE_DEVICES`."""
        if (shown := self.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
            return [each for each in shown.split(",") if each and not each.startswith("-")]
        return sorted((name[6:] for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)), key=int)


class SeenStep(NamedTuple):
    at: float
    number: int
    times: int = 1  # how often one rank has printed it


class Worker(NamedTuple):
    node: int
    round: int  # of the job; a generation is one of its agent's
    rank: int
    pid: int
    folder: Path  # of its output
    page: int  # a descriptor of the page that it shares with its agent; -1 without one


class Trial:
    """One run.

    Args:
        script: what is run.
        files: those that it leaves.
        metric: a pattern of the number to compare, if any.
        folder: for its logs.
        nodes: how many; `None`: `script.nodes_at_first`.
        more: options, after the script's own.
    """

    def __init__(
        self, script: Script, files: Files, metric: re.Pattern[str] | None, folder: Path, nodes: int | None, *more: str
    ) -> None:
        self.script, self.files, self.folder = script, files, folder
        self._metric, self._more = metric, more
        self.agents: list[subprocess.Popen[bytes]] = []
        self.workers: list[Worker] = []  # all that were started
        self.first: dict[int, SeenStep] = {}  # by round
        self.newest: dict[tuple[int, int], SeenStep] = {}  # by round and rank
        self.stride = 1  # of the steps that a rank prints
        self.no_number = ""  # that `metric` found
        self.goes_back: tuple[int, int] | None = None  # the steps of a rank, and to which
        self.changes: list[Change] = []
        self.looks: set[int] = set()  # steps after which files were looked at
        self.stamps: dict[Path, Stamp | None] = files.stamps()
        self.began = time.monotonic()
        self._metrics: dict[tuple[int, int], dict[int, float]] = {}  # by step, or by position
        self._offsets: dict[Path, int] = {}
        self.noted = Noted()
        self.recoveries: list[dict[str, Any]] = []  # records of the event logs, about recovery in place
        self._look_at_files = 0.0
        self.watch: Callable[[Trial], None] = lambda _: None  # called after each look
        folder.mkdir()
        self._notes = folder / "notes"
        self._notes.mkdir()
        self._job = ["--rdzv-id", f"{files.apart.name}-{folder.name}"]
        with socket.create_server(("127.0.0.1", 0)) as free:
            endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        self._job += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--local-addr", "127.0.0.1"]
        self._job += ["--rdzv-conf", f"last_call_timeout={LAST_CALL_S}"]
        for _ in range(script.nodes_at_first if nodes is None else nodes):
            self.add_node()

    def add_node(self) -> None:
        place = len(self.agents)
        own = ["--log-dir", str(self._logs(place)), "--redirects", "3", "--max-restarts", "3", "--exit-codes", "cause"]
        own += ["--on-signal", f"USR1=drain:{NOTICE_S}", *self._job, *self._more]
        command = [sys.executable, "-m", "aelastic", *self.script.options, *own, *self.script.command]
        environ, many = {**self.script.environ, FOLDER_VARIABLE: str(self._notes)}, self.script.workers
        share = self.script.gpus[place * many : (place + 1) * many]
        if self.script.is_several and len(share) == many:
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(share)
        with (self.folder / f"agent{place or ''}.log").open("wb") as log:
            self.agents.append(
                subprocess.Popen(
                    command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    preexec_fn=lambda: _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509  there are no threads here
                )
            )  # fmt: skip

    def _logs(self, node: int) -> Path:
        return self.folder / f"logs{node or ''}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Ends the run; nothing of it is left."""
        for agent in self.agents:
            agent.kill()
            agent.wait()
        until = time.monotonic() + END_S
        while any(proc_table.is_alive(each.pid) for each in self.workers) and time.monotonic() < until:
            time.sleep(LOOK_S)  # noqa: TID251  nothing else runs here
        self._look_at_files = 0.0
        self.look()
        for page in {each.page for each in self.workers} - {-1}:
            os.close(page)
        self.workers = [each._replace(page=-1) for each in self.workers]

    def wait(self, condition: Callable[[], bool], limit_s: float, each_s: float = LOOK_S) -> bool:
        """Whether a condition holds before the run, or the time, is over."""
        until = time.monotonic() + limit_s
        while True:
            is_over = not self.is_on or time.monotonic() > until
            if each_s or time.monotonic() >= self._look_at_files:
                self.look()
            if (holds := condition()) or is_over:
                return holds
            time.sleep(each_s)  # noqa: TID251  as above

    def wait_end(self, limit_s: float) -> int | None:
        """Waits for the first agent's exit code; `None` if it has none by then."""
        self.wait(lambda: False, limit_s)
        return self.agents[0].poll()

    @property
    def is_on(self) -> bool:
        return any([agent.poll() is None for agent in self.agents])  # noqa: C419  each is asked

    # What is seen.

    def look(self) -> None:
        """Reads what agents and workers have written, and checks now and then which files have changed."""
        self._look_at_events()
        for worker in self.workers:
            # If steps and numbers are printed apart, stderr has the steps, as a progress bar.  A number that
            # is read has its step by then.
            numbers = [*self._lines(worker.folder / "stdout.log")]
            for line in (*self._lines(worker.folder / "stderr.log"), *numbers):
                self._take(line, worker)
            if self.script.step is None:
                self._take_page(worker)
        if (began := time.monotonic()) >= self._look_at_files:
            before, self.stamps = self.stamps, self.files.stamps()
            if self.first:
                self.changes += changes(before, self.stamps, self.last())
                self.looks.add(self.last())
            now = time.monotonic()
            self._look_at_files = now + max(FILES_EACH_S, 10 * (now - began))  # many files may take longer
        self.watch(self)

    def _look_at_events(self) -> None:
        """Reads the agents' event logs, and the workers' notes."""
        for node in range(len(self.agents)):
            for line in self._lines(self._logs(node) / "latest" / "events.jsonl"):
                if any(f'"event":"{name}"' in line for name in _EVENTS):
                    self._take_event(node, json.loads(line))
        for path in self._notes.iterdir():
            for line in filter(None, self._lines(path)):
                self.noted.take(json.loads(line))

    def _lines(self, path: Path) -> Iterator[str]:
        """Yields the whole lines that a file has gained since it was last read."""
        with suppress(OSError), path.open("rb") as file:  # it is not there yet
            offset = self._offsets.get(path, 0)
            file.seek(offset)
            data = file.read()
            whole = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
            self._offsets[path] = offset + whole
            yield from re.split(r"[\r\n]+", data[:whole].decode(errors="replace"))

    def _take_event(self, node: int, record: dict[str, Any]) -> None:
        if record["event"] == "workers_started":
            self._take_start(node, record)
        else:
            self.recoveries.append(record)

    def _take_start(self, node: int, record: dict[str, Any]) -> None:
        attempt = self._logs(node) / "latest" / f"attempt_{record['generation'] - 1}"
        for each in record["workers"]:
            folder = attempt / str(each["local_rank"])
            page = _page_of(self.agents[node].pid, f"/notice_{record['generation']}_{each['local_rank']}")
            self.workers.append(Worker(node, record["round"], each["rank"], each["id"], folder, page))

    def _take_page(self, worker: Worker) -> None:
        """Takes the steps of a script that prints none: those that it commits, or else its calls of `notice.due()`."""
        if committed := self._word(worker, STEP):
            shared = [each for ranks in self.noted.shared.values() for each in ranks.values() if each.pid == worker.pid]
            if shared:  # it is noted before the first commit
                self.first.setdefault(worker.round, SeenStep(shared[-1].at, shared[-1].step))
                self._newest(worker, committed - 1)
        elif not self.commits and (calls := self._word(worker, CALLS)):
            self.first.setdefault(worker.round, SeenStep(time.monotonic(), 0))
            self._newest(worker, calls - 1)

    def _take(self, line: str, worker: Worker) -> None:
        of, step = (worker.round, worker.rank), self.script.step
        if step and (found := step.search(line)) and (found[1] or "").isdecimal():
            number = int(found[1])
            if of in self.newest and self.newest[of].times == 1 and number < self.newest[of].number:
                del self.newest[of]  # a line about where it was saved, not a step
                self.first[worker.round] = SeenStep(time.monotonic(), number)
            first = self.first.setdefault(worker.round, SeenStep(time.monotonic(), number)).number
            if of in self.newest:
                newest = self.newest[of].number
                self.stride = max(self.stride, number - newest)
                if number <= first and newest > first + 2:
                    self.goes_back = newest, number
            self._newest(worker, number)
        if self._metric and (found := self._metric.search(line)) and found[1] and (of in self.newest or not step):
            numbers = self._metrics.setdefault(of, {})
            try:
                numbers[self.newest[of].number if step else len(numbers)] = float(found[1])
            except ValueError:
                self.no_number = found[1]

    def _newest(self, worker: Worker, number: int) -> None:
        of = worker.round, worker.rank
        before = self.newest.get(of, SeenStep(0.0, -1, 0))
        if before.number < number:
            self.newest[of] = SeenStep(time.monotonic(), number, before.times + 1)

    def metrics(self, round_: int) -> dict[int, float]:
        """Returns the numbers by step, of the lowest rank that prints one."""
        return self._metrics.get(min((of for of in self._metrics if of[0] == round_), default=(0, 0)), {})

    @staticmethod
    def _word(worker: Worker, word: int) -> int:
        """Returns a word of the page that a worker shares with its agent."""
        with suppress(OSError, struct.error):  # there is no page
            value: int = struct.unpack("q", os.pread(worker.page, 8, 8 * word))[0]
            return value
        return 0

    @property
    def commits(self) -> bool:
        """Whether steps are those that the script commits (`Round.steps`)."""
        return self.script.step is None and bool(self.noted.shared)

    def committed(self) -> int:
        """The newest step that a worker has committed; 0: none has."""
        return max((self._word(worker, STEP) for worker in self.team), default=0)

    def align(self, last: int, count: int) -> None:
        """Counts calls of `notice.due()` from the end: each process counts from 0, and one that finished made the last.

        If no steps are printed, metrics are also counted.

        Args:
            last: the last step of the undisturbed job.
            count: how many metrics that job prints.
        """
        off, more = last - self.last(self.round), count - len(self.metrics(self.round))
        first = self.first[self.round]
        self.first[self.round] = first._replace(number=first.number + off)
        for of in [of for of in self.newest if of[0] == self.round]:
            self.newest[of] = self.newest[of]._replace(number=self.newest[of].number + off)
            self._metrics[of] = {at + more: value for at, value in self._metrics.get(of, {}).items()}

    @property
    def round(self) -> int:
        """The last whose workers made a step; 0: none did."""
        return max(self.first, default=0)

    def last(self, least: int = 0, most: float = inf) -> int:
        """Returns the largest step of some rounds; -1 without one."""
        return max((step.number for (at, _), step in self.newest.items() if least <= at <= most), default=-1)

    def least(self) -> int:
        """Returns the step that all ranks have reached in some round, except those that seldom print theirs."""
        return max(map(self._least, self.first), default=-1)

    def _least(self, round_: int) -> int:
        steps = [step for (at, _), step in self.newest.items() if at == round_]
        most = max((step.times for step in steps), default=0)
        return min((step.number for step in steps if 4 * step.times >= most), default=-1)

    @property
    def team(self) -> list[Worker]:
        """The workers that were started last."""
        newest = max((each.round for each in self.workers), default=0)
        return [each for each in self.workers if each.round == newest]

    @property
    def cause(self) -> str:
        """Why it ended: the last failure in the first agent's event log, or its last words."""
        with suppress(OSError):  # there is no event log
            text = (self._logs(0) / "latest" / "events.jsonl").read_text()
            whole = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
            for record in map(json.loads, reversed(whole)):
                if failure := record.get("failure"):
                    what = failure["message"].strip().partition("\n")[0]
                    return f"rank {failure['rank']} failed on {failure['host']}: {what}"
        text = (self.folder / "agent.log").read_text(errors="replace")
        lines: list[str] = re.findall(r"^aelastic: (.*)$", text, re.MULTILINE)
        return (lines or ["it printed nothing"])[-1]

    @property
    def asks(self) -> bool:
        """Whether a worker has called `notice.due`."""
        return any(self._word(worker, CALLS) for worker in self.workers)

    def why_it_stands(self) -> str:
        """Says why a run that does not continue ended or, if it has not, which file shows what its workers do."""
        if not self.is_on:
            return self.cause
        with (self.folder / "stacks.txt").open("wb") as file, suppress(subprocess.TimeoutExpired):
            command = [sys.executable, "-m", "aelastic", "stacks", "--job", self._job[1]]
            subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=False, timeout=END_S)
        return "its workers are stuck, see stacks.txt"

    # How it is disturbed.

    def signal(self, signum: int, workers: Sequence[Worker]) -> None:
        for worker in workers:
            with suppress(ProcessLookupError):  # it has ended by itself
                os.kill(worker.pid, signum)

    def kill(self, rank: int) -> None:
        self.signal(signal.SIGKILL, [each for each in self.team if each.rank == rank])

    def opened(self) -> dict[int, set[Path]]:
        """Returns files of the script that workers' processes have open for writing now, by process."""
        members = proc_table.session_members({each.pid for each in self.team})
        return {each.pid: self.files.opened(each.pid) for each in members}

    def catch_writer(self, usual: set[Path], limit_s: float) -> set[Path]:
        """Kills the first process of a worker that opens a file for writing; returns these files, or none in time.

        Args:
            usual: files that are always open, such as a log.
            limit_s: how long to wait.
        """
        pids, caught = [*self.opened()], set[Path]()

        def is_caught() -> bool:
            for pid in pids:
                if paths := self.files.opened(pid) - usual:
                    proc_table.kill(pid)
                    caught.update(paths)
                    return True
            return False

        self.wait(is_caught, limit_s, each_s=0.0)
        return caught


_libc = ctypes.CDLL(None)


def _page_of(agent: int, name: str) -> int:
    """Opens the page that an agent shares with a worker, through the agent's descriptor: ours outlives both."""
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{agent}/fd"):
            with suppress(OSError):
                if os.readlink(path := f"/proc/{agent}/fd/{fd}").endswith(name):
                    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return -1
