"""What the tests with real processes share: jobs on the command line, and a look at what is left of them.

Every job carries a mark of its own in its environment, which all that it starts inherits.  So what is left is
found in `/proc`, whatever became of parents, groups and sessions.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop

from aelastic.host import proc_table
from kit.warm.interpreters import Warm

T = TypeVar("T")

# Nothing takes this long; a machine may be slow, and a test that hangs is to say where.
DEADLINE_S = float(os.environ.get("TEST_DEADLINE_S", "30"))
LOOK_AGAIN_S = 0.01
# What imports torch needs seconds, and more where others compute.
LAUNCH_TIMEOUT_S = 100.0
LOOPS = ("asyncio", "uvloop")
# Where the loop is the point: signals, children, other people's programs.
on_both_loops = pytest.mark.parametrize("loop", LOOPS)
# Where it is not: the default one in `make test`.
on_each_loop = pytest.mark.parametrize("loop", [pytest.param("asyncio", marks=pytest.mark.all), "uvloop"])

MARK = "LAUNCHED_BY_TEST"
CHECK = "AELASTIC_CHECK_INVARIANTS"  # after each event of every core: the agents' part of `check_invariants`

# What workers begin with.  `say` is one write, so that lines of several workers do not mix.
PREAMBLE = """\
import os, signal, subprocess, sys, time

rank = int(os.environ.get("RANK", "-1"))
restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "-1"))


def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())


def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.01)


def rest():
    # Until a signal ends us, whose handler runs at once.  One that comes between the interpreter's last look for
    # signals and `time.sleep` would be handled when that is over.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    while True:
        os.read(reader, 100)


def daemonize():
    # In the daemon: returns.  In the worker: waits until there is one, then returns None.
    reader, writer = os.pipe()
    if child := os.fork():
        os.close(writer)
        os.waitpid(child, 0)
        os.read(reader, 1)
        return None
    os.setsid()
    if os.fork():
        os._exit(0)
    os.write(writer, b"!")
    return os.getpid()


"""


# In an agent: its store's interpreter is another.
WARM_STORE = """
import types
from aelastic.tcpstore import child
child.sys = types.SimpleNamespace(executable={python!r})
"""


def wait_for(what: str | Callable[[], str], condition: Callable[[], Any], limit_s: float = DEADLINE_S) -> Any:
    """Returns what the condition gives, once that is true."""
    deadline = time.monotonic() + limit_s
    while not (answer := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"not after {limit_s:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(LOOK_AGAIN_S)
    return answer


def alive(pid: int) -> bool:
    return proc_table.is_alive(pid)


def run(loop: str, main: Coroutine[Any, Any, T]) -> T:
    """Runs something in this process, on one of the `LOOPS`."""
    factory: Callable[[], asyncio.AbstractEventLoop] = (
        uvloop.new_event_loop if loop == "uvloop" else asyncio.SelectorEventLoop
    )
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


def ran(*command: str | Path, check: bool = False, **more: Any) -> subprocess.CompletedProcess[str]:
    """A program that has ended, and what it has said."""
    usual = {"capture_output": True, "text": True, "timeout": LAUNCH_TIMEOUT_S}
    return subprocess.run(command, check=check, **{**usual, **more})


def stand_still(pid: int) -> None:
    """SIGSTOP; returns when no thread of the process runs any more, or it has ended of what came before."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")

    def all_stopped() -> bool:
        try:
            return all(thread.read_text().rpartition(")")[2].split()[0] in "TZX" for thread in threads.glob("*/stat"))
        except OSError:
            return False  # a thread ended as we looked

    wait_for(f"{pid} stands still", all_stopped)


def cmdline(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


class Job:
    """One `aelastic` command and all that it starts.

    Its output goes to files: a leftover that holds a pipe open cannot stall the test.
    """

    def __init__(self, folder: Path, command: Sequence[str], env: dict[str, str], **popen: Any) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        # Not in the test's folder: `multiprocessing` binds sockets there, and their paths have 107 characters at most.
        self.tmp = Path(tempfile.mkdtemp(prefix="job"))
        self.mark = f"{MARK}={uuid.uuid4()}"
        base = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PET_", "AELASTIC_", "TORCHELASTIC_", MARK))
        }
        runtime = {"TMPDIR": str(self.tmp), "XDG_RUNTIME_DIR": str(folder)}
        full = {**base, CHECK: "1", **runtime, **env, MARK: self.mark.partition("=")[2]}
        with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
            given = {"cwd": folder, "env": full, "stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stderr}
            self.process = subprocess.Popen(command, **{**given, "start_new_session": True, **popen})
        self.pid = self.process.pid

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text(errors="replace")

    @property
    def lines(self) -> list[str]:
        """What workers have said, in whole lines."""
        return [line.rstrip("\n") for line in self.stdout.splitlines(keepends=True) if line.endswith("\n")]

    def wait_line(self, beginning: str, count: int = 1, limit_s: float = DEADLINE_S) -> list[str]:
        """Waits until so many lines begin so, and gives their words."""

        def found() -> list[str]:
            has_ended = self.process.poll() is not None  # then all is there that comes
            lines = [line for line in self.lines if line.startswith(beginning)]
            if len(lines) < count and has_ended:
                pytest.fail(f"the job ended (code {self.process.returncode}) without {beginning!r}:\n{self.story}")
            return lines if len(lines) >= count else []

        lines: list[str] = wait_for(lambda: f"{count} × {beginning!r} on stdout:\n{self.story}", found, limit_s)
        return lines

    @property
    def story(self) -> str:
        return f"stdout:\n{self.stdout[-4000:]}\nstderr:\n{self.stderr[-4000:]}"

    def go(self) -> None:
        """Workers may wait for this."""
        (self.folder / "go").touch()

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def wait(self, limit_s: float = DEADLINE_S) -> int:
        """The exit code, as `subprocess` has it."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the job is not over after {limit_s:g} s; left: {self.left_described()}\n{self.story}")

    def left(self) -> list[int]:
        """Which processes of this job are alive."""
        mark = self.mark.encode()
        return [entry.pid for entry in proc_table.processes() if proc_table.carries(entry.pid, mark)]

    def left_described(self) -> str:
        return "; ".join(f"{pid} {' '.join(cmdline(pid))[:120]}" for pid in self.left())

    def child(self, word: str) -> int:
        """A process of this job, by a word of its command line."""
        pids: list[int] = wait_for(
            f"a process with {word!r}", lambda: [pid for pid in self.left() if word in " ".join(cmdline(pid))]
        )
        return pids[0]

    def assert_ends(self, code: int = 0, limit_s: float = DEADLINE_S) -> None:
        """It ends, with this exit code as `subprocess` has it, and leaves nothing."""
        assert self.wait(limit_s) == code, self.story
        self.assert_nothing_left()

    def assert_nothing_left(self) -> None:
        """Of an agent that has ended: no process, no temporary file."""
        assert not self.left(), self.left_described()
        assert not os.listdir(self.tmp), os.listdir(self.tmp)

    def wait_nothing_left(self, limit_s: float = DEADLINE_S) -> None:
        """Of an agent that was killed: the same, soon."""
        wait_for("nothing left", lambda: not self.left() and not os.listdir(self.tmp), limit_s)

    def kill_all(self) -> None:
        while left := self.left():
            for pid in left:
                proc_table.kill(pid)
            time.sleep(LOOK_AGAIN_S)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE_S)
        shutil.rmtree(self.tmp, ignore_errors=True)


class Launcher:
    """Makes jobs in a test's folder, and ends them with the test.

    Args:
        warm: what starts interpreters that have torch (`kit.warm.interpreters`).
    """

    def __init__(self, folder: Path, warm: Warm) -> None:
        self.folder = folder
        self.warm = warm
        self.python = sys.executable  # what agents and workers run in
        self.store_python = sys.executable  # what the agents' stores run in
        self.jobs: list[Job] = []

    def write(self, name: str, code: str, *, preamble: str = PREAMBLE) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(preamble + textwrap.dedent(code))
        return path

    def __call__(self, worker: str, *options: str, name: str = "job", args: Sequence[str] = (), **more: Any) -> Job:
        """Starts a job.

        Args:
            worker: Python code of the workers, after the preamble.
            options: of the command line.
            args: of the workers.
            more: as `command` has it.
        """
        return self.command(*options, str(self.write(f"{name}/worker.py", worker)), *args, name=name, **more)

    def agent_program(self, name: str, wrapper: str) -> list[str]:
        """The arguments of Python that are an agent."""
        wrapper = textwrap.dedent(wrapper)
        if self.store_python != self.python:
            wrapper = f"{wrapper}\n{WARM_STORE.format(python=self.store_python)}"
        if not wrapper:
            return ["-m", "aelastic"]
        main = "\nfrom aelastic.cli.main import main_and_exit\nif __name__ == '__main__':\n    main_and_exit()\n"
        return [str(self.write(f"{name}/agent.py", wrapper + main, preamble=""))]

    def command(
        self,
        *argv: str,
        loop: str = "uvloop",
        name: str = "job",
        env: dict[str, str] | None = None,
        wrapper: str = "",
        prefix: Sequence[str] = (),
        **popen: Any,
    ) -> Job:
        """Starts a job of a command line.

        Args:
            wrapper: Python code that runs in the agent before its command line does.
            prefix: a command that starts the agent.
        """
        (self.folder / name).mkdir(exist_ok=True)
        agent = self.agent_program(name, wrapper)
        command = [*prefix, self.python, *agent, "--loop", loop, *argv]
        job = Job(self.folder / name, command, env or {}, **popen)
        self.jobs.append(job)
        return job

    def close(self) -> None:
        for job in self.jobs:
            job.kill_all()


def signal_name(signum: int) -> str:
    return signal.Signals(signum).name
