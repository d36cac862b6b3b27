"""One run of a script, under an agent in a process of its own, whose workers are watched and disturbed."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import NamedTuple, Self

from aelastic.host import proc_table
from aelastic.notice.page import CALLS, PAGE_VARIABLE
from aelastic.rehearse.files import Stamp, open_for_writing, stamps_of

LOOK_S = 0.005
FILES_EACH_S = 0.05
END_S = 20.0  # for a run that was stopped
NOTICE_S = 15  # from a notice until the node goes


class Script(NamedTuple):
    """What is rehearsed."""

    options: Sequence[str]  # of the agent
    command: Sequence[str]  # the script, and its arguments
    workers: int
    step: re.Pattern[str]
    metric: re.Pattern[str] | None
    root: Path  # where it leaves files
    apart: Path  # where rehearsals keep theirs


class Step(NamedTuple):
    at: float
    generation: int
    rank: int
    number: int


class Play:
    """One run.

    Args:
        script: what is run.
        folder: for its logs.
        more: options, after the script's own.
    """

    def __init__(self, script: Script, folder: Path, *more: str) -> None:
        self.script, self.folder = script, folder
        self.steps: list[Step] = []
        self.metrics: dict[int, dict[int, float]] = {}  # by generation and step: of the lowest rank that tells one
        self.saves: list[tuple[float, int]] = []  # when files had changed, and after which step
        self.stamps: dict[Path, Stamp] = {}
        self.began = time.monotonic()
        self._offsets: dict[Path, int] = {}
        self._teller: dict[int, int] = {}  # by generation: whose metrics count
        self._looked = 0.0
        folder.mkdir(parents=True)
        own = ["--log-dir", str(folder / "logs"), "--redirects", "3", "--max-restarts", "5"]
        own += ["--on-signal", f"USR1=drain:{NOTICE_S}"]
        command = [sys.executable, "-m", "aelastic", *script.options, *own, *more, *script.command]
        with (folder / "agent.log").open("wb") as log:
            self.agent = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Nothing of it is left."""
        pids = [*self.pids().values()]
        if self.agent.poll() is None:
            self.agent.kill()
        self.agent.wait()
        until = time.monotonic() + END_S
        while any(map(_lives, pids)) and time.monotonic() < until:
            time.sleep(LOOK_S)  # noqa: TID251  nothing else runs here
        self.look()

    def wait(self, condition: Callable[[], bool], limit_s: float, each_s: float = LOOK_S) -> bool:
        """Whether a condition holds before the run, or the time, is over."""
        until = time.monotonic() + limit_s
        while True:
            is_over = self.agent.poll() is not None or time.monotonic() > until
            if each_s or time.monotonic() - self._looked >= FILES_EACH_S:
                self.look()
            if (holds := condition()) or is_over:
                return holds
            time.sleep(each_s)  # noqa: TID251  as above

    def wait_end(self, limit_s: float) -> int | None:
        """The agent's exit code; `None` if it has none by then."""
        self.wait(lambda: False, limit_s)
        return self.agent.poll()

    # What is seen.

    def look(self) -> None:
        """Reads what workers have written, and now and then which files have changed."""
        for path in sorted(self.folder.glob("logs/latest/attempt_*/*/std*.log")):
            generation, rank = int(path.parts[-3].partition("_")[2]) + 1, int(path.parts[-2])
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            whole = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
            self._offsets[path] = self._offsets.get(path, 0) + whole
            for line in re.split(r"[\r\n]+", data[:whole].decode(errors="replace")):
                self._take(line, generation, rank)
        if time.monotonic() - self._looked >= FILES_EACH_S:
            before, self.stamps = self.stamps, stamps_of(self.script.root, self.script.apart)
            if before != self.stamps and self.steps:
                self.saves.append((time.monotonic(), self.last))
            self._looked = time.monotonic()

    def _take(self, line: str, generation: int, rank: int) -> None:
        if (found := self.script.step.search(line)) and found[1].isdecimal():
            self.steps.append(Step(time.monotonic(), generation, rank, int(found[1])))
        if self.script.metric and (found := self.script.metric.search(line)):
            of = (generation, rank)
            number = next((each.number for each in reversed(self.steps) if (each.generation, each.rank) == of), None)
            if number is not None and rank <= self._teller.setdefault(generation, rank):
                self._teller[generation] = rank
                with suppress(ValueError):  # no number
                    self.metrics.setdefault(generation, {})[number] = float(found[1])

    @property
    def generation(self) -> int:
        """The last whose workers made a step; 0: none did."""
        return self.steps[-1].generation if self.steps else 0

    @property
    def last(self) -> int:
        """The largest step of all; -1: there is none."""
        return max((each.number for each in self.steps), default=-1)

    @property
    def saved_after(self) -> list[int]:
        """Steps after which files had changed; of some in a row, the last."""
        steps = [step for _, step in self.saves]
        return [step for step, later in zip(steps, [*steps[1:], inf], strict=False) if later > step + 1]

    def last_of(self, rank: int) -> int:
        return max((each.number for each in self.steps if each.rank == rank), default=-1)

    def first_of(self, generation: int) -> Step | None:
        return next((each for each in self.steps if each.generation == generation), None)

    def pids(self) -> dict[int, int]:
        """The workers that were started last, by rank."""
        found: dict[int, int] = {}
        for line in self._events():
            if '"event":"workers_started"' in line:
                found = {each["rank"]: each["id"] for each in json.loads(line)["workers"]}
        return found

    def _events(self) -> list[str]:
        path = self.folder / "logs" / "latest" / "events.jsonl"
        try:
            return [line for line in path.read_text().splitlines() if line.endswith("}")]
        except OSError:
            return []  # the agent has not begun

    @property
    def said(self) -> list[str]:
        """The agent's own lines."""
        text = (self.folder / "agent.log").read_text(errors="replace")
        return [line.partition("aelastic: ")[2] for line in text.splitlines() if line.startswith("aelastic: ")]

    @property
    def cause(self) -> str:
        """Why it ended, in the agent's words."""
        failed = [line for line in self.said if re.match(r"W rank \d+ failed on |error", line)]
        return failed[-1].removeprefix("W ") if failed else (self.said or ["no word"])[-1]

    # What is done to it.

    def kill(self, rank: int) -> None:
        self.signal(rank, signal.SIGKILL)

    def signal(self, rank: int, signum: int) -> None:
        with suppress(KeyError, ProcessLookupError):  # it has ended by itself
            os.kill(self.pids()[rank], signum)

    def notice(self) -> None:
        """The node is about to go."""
        self.agent.send_signal(signal.SIGUSR1)

    @property
    def asks(self) -> bool:
        """Whether a worker has asked for notices: its page, which its environment names, counts that."""
        for pid in self.pids().values():
            with suppress(OSError, struct.error):
                environ = dict(
                    each.partition(b"=")[::2] for each in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                )
                page = os.fsdecode(environ.get(PAGE_VARIABLE.encode(), b""))
                if struct.unpack_from("q", Path(page).read_bytes(), 8 * CALLS)[0]:
                    return True
        return False

    def opened(self) -> dict[int, set[Path]]:
        """Files of the script that processes of workers have open for writing now, by process."""
        members = proc_table.session_members({*self.pids().values()})
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


def _lives(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")
