"""Shared by the tests with real processes: jobs on the command line, and checks for anything that they leave behind.

Every job has a keeper (`kit.warm.keeper`), the ancestor of all processes that the job starts.  So the tests know which of
them are left, regardless of parents, groups and sessions.
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
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop

from aelastic.base.host import proc_table
from kit import loop_guard
from kit.effort import EFFORT
from kit.waiting import DEADLINE_S, events, wait_for
from kit.warm.interpreters import Warm
from kit.warm.kept import KeptProcess, Stream

T = TypeVar("T")

# A process that imports torch needs seconds, and more on a busy machine.
LAUNCH_TIMEOUT_S = 100.0
LOOPS = ("asyncio", "uvloop")
# For tests where the loop matters: signals, children, other people's programs.
on_both_loops = pytest.mark.parametrize("loop", LOOPS)
# For tests where it does not: only the default loop in `make test`.
on_each_loop = pytest.mark.parametrize("loop", [pytest.param("asyncio", marks=pytest.mark.all), "uvloop"])

CHECK = "AELASTIC_CHECK_INVARIANTS"  # after each event of every core: the agents' part of `check_invariants`

# The beginning of each worker's script.  `say` is one write, so that lines of several workers do not mix.
PREAMBLE = """\
import os, signal, subprocess, sys, time

rank = int(os.environ.get("RANK", "-1"))
restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "-1"))


def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())


def wait_for(path):
    # Until the file is there.
    if os.path.exists(path):
        return
    import ctypes, select

    libc = ctypes.CDLL(None)
    watch = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
    libc.inotify_add_watch(watch, os.path.dirname(os.path.abspath(path)).encode(), 0x100 | 0x80)  # created, moved here
    changes = select.poll()
    changes.register(watch, select.POLLIN)
    while not os.path.exists(path):
        changes.poll(1000)  # ms; a signal whose handler runs before this would be noticed after it
        try:
            os.read(watch, 1 << 16)
        except BlockingIOError:
            pass
    os.close(watch)


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


# In an agent: its store uses another interpreter.
WARM_STORE = """
import types
from aelastic.workers.tcpstore import child
child.sys = types.SimpleNamespace(executable={python!r})
"""


def alive(pid: int) -> bool:
    return proc_table.is_alive(pid)


def run(loop: str, main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine in this process, on one of the `LOOPS`."""
    factory: Callable[[], asyncio.AbstractEventLoop] = (
        uvloop.new_event_loop if loop == "uvloop" else asyncio.SelectorEventLoop
    )
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


def ran(*command: str | Path, check: bool = False, **more: Any) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end; returns its result with its output."""
    usual = {"capture_output": True, "text": True, "timeout": LAUNCH_TIMEOUT_S}
    return subprocess.run(command, check=check, **{**usual, **more})


def stand_still(pid: int) -> None:
    """Sends SIGSTOP; returns when no thread of the process runs any more, or when it has ended for an earlier cause."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")

    def all_stopped() -> bool:
        try:
            return all(thread.read_text().rpartition(")")[2].split()[0] in "TZX" for thread in threads.glob("*/stat"))
        except OSError:
            return False  # a thread ended during the check

    wait_for(f"{pid} stands still", all_stopped)


def cmdline(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


# A fork cannot honor these: Python or the C library reads them only at start.
READ_AT_START = ("PYTHON", "LD_", "MALLOC_", "TZ", "LC_", "LANG")


class Job:
    """One `aelastic` command and all processes that it starts.

    Its output goes to files, so a leftover process that holds a pipe open cannot stall the test.

    Args:
        folder: its working folder, which also gets its output.
        command: the program and its arguments.
        env: variables in addition to those of this process.
        is_cold: execute the program instead of forking an agent from a process that has imported aelastic.
        stdin, stdout, stderr, cwd, start_new_session: as in `subprocess.Popen`.
    """

    def __init__(
        self,
        folder: Path,
        command: Sequence[str | os.PathLike[str]],
        env: dict[str, str],
        *,
        is_cold: bool = True,
        stdin: Stream = subprocess.DEVNULL,
        stdout: Stream = None,
        stderr: Stream = None,
        cwd: Path | None = None,
        start_new_session: bool = True,
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        # Not in the test's folder: `multiprocessing` binds sockets there, whose paths are limited to 107 characters.
        self.tmp = Path(tempfile.mkdtemp(prefix="job"))
        base = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PET_", "AELASTIC_", "TORCHELASTIC_"))
        }
        full = {**base, CHECK: "1", "TMPDIR": str(self.tmp), "XDG_RUNTIME_DIR": str(folder), **env}
        self.blocked = folder / "blocked-loop"
        full[loop_guard.REPORT] = str(self.blocked)
        is_read_at_start = any(name.startswith(READ_AT_START) and name != "PYTHON_EXEC" for name in env)
        is_warm = not is_cold and EFFORT == "quick" and not is_read_at_start
        self._texts: dict[str, tuple[tuple[int, int], str]] = {}
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
            streams = (stdin, out if stdout is None else stdout, err if stderr is None else stderr)
            self.process = KeptProcess(
                command, full, cwd or folder, streams, is_warm=is_warm, start_new_session=start_new_session
            )
        self.pid = self.process.pid
        events.add(self.process)
        events.watch(folder)

    @property
    def stdout(self) -> str:
        return self._text("stdout")

    @property
    def stderr(self) -> str:
        return self._text("stderr")

    def _text(self, name: str) -> str:
        """The content of a file, read again only when it has changed."""
        path = self.folder / name
        now = os.stat(path)
        version = (now.st_size, now.st_mtime_ns)
        if name not in self._texts or self._texts[name][0] != version:
            self._texts[name] = (version, path.read_text(errors="replace"))
        return self._texts[name][1]

    @property
    def lines(self) -> list[str]:
        """The workers' output, in whole lines."""
        return [line.rstrip("\n") for line in self.stdout.splitlines(keepends=True) if line.endswith("\n")]

    def wait_line(self, beginning: str, count: int = 1, limit_s: float = DEADLINE_S) -> list[str]:
        """Waits for `count` lines with this beginning, and returns their words."""

        def found() -> list[str]:
            has_ended = self.process.poll() is not None  # then its output is complete
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
        """Creates the file `go`, which workers may wait for."""
        (self.folder / "go").touch()

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def wait(self, limit_s: float = DEADLINE_S) -> int:
        """Waits for the exit code, as in `subprocess`."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the job is not over after {limit_s:g} s; left: {self.left_described()}\n{self.story}")

    def left(self) -> list[int]:
        """The processes of this job that are alive."""
        return self.process.left()

    def left_described(self) -> str:
        return "; ".join(f"{pid} {' '.join(cmdline(pid))[:120]}" for pid in self.left())

    def child(self, word: str) -> int:
        """Waits for a process of this job with a word in its command line."""
        pids: list[int] = wait_for(
            f"a process with {word!r}", lambda: [pid for pid in self.left() if word in " ".join(cmdline(pid))]
        )
        return pids[0]

    def assert_ends(self, code: int = 0, limit_s: float = DEADLINE_S) -> None:
        """Expects it to end with this exit code, as in `subprocess`, and to leave nothing behind."""
        assert self.wait(limit_s) == code, self.story
        self.assert_nothing_left()

    def assert_nothing_left(self) -> None:
        """Fails if an agent that ended has left a process or a temporary file."""
        assert not self.left(), self.left_described()
        assert not os.listdir(self.tmp), os.listdir(self.tmp)

    def wait_nothing_left(self, limit_s: float = DEADLINE_S) -> None:
        """Waits until an agent that was killed has left no process and no temporary file."""
        wait_for("nothing left", lambda: not self.left() and not os.listdir(self.tmp), limit_s)

    def kill_all(self) -> None:
        events.unwatch(self.folder)
        events.discard(self.process)
        self.process.close()
        shutil.rmtree(self.tmp, ignore_errors=True)


class Launcher:
    """Starts jobs in a test's folder, and ends them with the test.

    Args:
        warm: starts interpreters that have imported torch (`kit.warm.interpreters`).
    """

    def __init__(self, folder: Path, warm: Warm) -> None:
        self.folder = folder
        self.warm = warm
        self.python = sys.executable  # runs agents and workers
        self.store_python = sys.executable  # runs the agents' stores
        self.is_cold = False  # whether agents start as they do for a user
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
            options: options of the command line.
            args: arguments of the workers.
            more: further arguments of `command`.
        """
        return self.command(*options, str(self.write(f"{name}/worker.py", worker)), *args, name=name, **more)

    def agent_program(self, name: str, wrapper: str) -> list[str]:
        """The arguments that make Python run an agent."""
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
        """Starts a job with a command line.

        Args:
            wrapper: Python code that runs in the agent before its command line.
            prefix: a command that starts the agent.
        """
        (self.folder / name).mkdir(exist_ok=True)
        agent = self.agent_program(name, wrapper)
        command = [*prefix, self.python, *agent, "--loop", loop, *argv]
        job = Job(self.folder / name, command, env or {}, is_cold=self.starts_cold(prefix), **popen)
        self.jobs.append(job)
        return job

    def starts_cold(self, prefix: Sequence[str]) -> bool:
        """Whether an agent with this prefix is executed rather than forked."""
        return self.is_cold or bool(prefix) or self.python != sys.executable

    def close(self) -> None:
        for job in self.jobs:
            job.kill_all()
        blocked = [job.blocked.read_text() for job in self.jobs if job.blocked.exists()]
        assert not blocked, "\n".join(blocked)


def signal_name(signum: int) -> str:
    return signal.Signals(signum).name
