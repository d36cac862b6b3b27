"""The watchdog: timers that workers set through a FIFO, with torch's own client and without."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from kit.effort import EFFORT
from kit.launching import LAUNCH_TIMEOUT_S, Launcher, on_each_loop, run
from kit.this_process import python, until
from kit.virtual_clock import Deadlock, on_virtual_time

from aelastic import InputError, Supervisor
from aelastic.agent.watches.file_timer import FIFO_BYTES, SCOPE_CHARS, TIMER_FILE_VARIABLE, FileTimerServer
from aelastic.agent.watches.watch import Found
from aelastic.base.host import proc_table
from aelastic.diagnose.hangs.timer_rules import LINE_BYTES_MAX

pytestmark = pytest.mark.usefixtures("warm_stores")

ON = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
HERE = os.getpid()
WITHOUT_DEADLINE = 1e6  # a timer that no test waits for


def line(pid: int, scope: str, after_s: float | None, signum: int = signal.SIGKILL) -> bytes:
    """A line as torch's client writes it; `None` clears the timer."""
    at = -1 if after_s is None else time.time() + after_s
    request = {"version": 1, "pid": pid, "scope_id": scope, "expiration_time": at, "signal": int(signum)}
    return json.dumps(request).encode() + b"\n"


class Kennel:
    """The watchdog of one worker, which is this process, and its findings."""

    def __init__(self, scratch: Path, **env: str) -> None:
        self.found: list[Found] = []
        self.server = FileTimerServer(env, scratch, self.found.append)
        self.path = Path(self.server.env[TIMER_FILE_VARIABLE])

    def write(self, *lines: bytes) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
        try:
            for each in lines:
                os.write(fd, each)
        finally:
            os.close(fd)

    def set(self, scope: str, after_s: float, *, pid: int = HERE, signum: int = signal.SIGKILL) -> None:
        self.write(line(pid, scope, after_s, signum))

    async def wait_found(self, count: int = 1) -> list[Found]:
        await until(lambda: len(self.found) >= count)
        return self.found

    async def wait_read(self) -> None:
        """Waits until it has read everything written so far."""
        count = len(self.found)
        self.set("the end", -1, signum=signal.SIGUSR2)
        await until(lambda: any(found.signum == signal.SIGUSR2 for found in self.found[count:]))
        self.found[:] = [found for found in self.found if found.signum != signal.SIGUSR2]


@asynccontextmanager
async def watching(scratch: Path, **env: str) -> AsyncIterator[Kennel]:
    kennel = Kennel(scratch, **env)
    kennel.server.open()
    task = asyncio.get_running_loop().create_task(kennel.server.run())
    try:
        kennel.server.started(1, (), {0: HERE})
        yield kennel
    finally:
        task.cancel()
        await asyncio.wait([task])
        kennel.server.close()
    assert task.cancelled(), task.exception()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A child of this process."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


# The FIFO.


@pytest.mark.parametrize("umask", [0, 0o777])
@pytest.mark.parametrize("name", ["", "a place"], ids=["usual place", "the user's place"])
def test_the_fifo_is_for_the_agents_user_alone_whatever_the_umask(tmp_path: Path, umask: int, name: str) -> None:
    kennel = Kennel(tmp_path, **({TIMER_FILE_VARIABLE: str(tmp_path / name)} if name else {}))
    before = os.umask(umask)
    try:
        kennel.server.open()
    finally:
        os.umask(before)
    mode = kennel.path.stat().st_mode
    assert (stat.S_ISFIFO(mode), stat.S_IMODE(mode), kennel.path.parent) == (True, 0o600, tmp_path)
    assert kennel.path.name == name or not name
    for _ in range(2):
        kennel.server.close()
    assert not os.listdir(tmp_path)


def test_a_fifo_that_a_killed_agent_has_left_is_replaced_and_what_others_have_or_put_there_is_left_to_them(
    tmp_path: Path,
) -> None:
    place = tmp_path / "timers"
    first, second = (Kennel(tmp_path, **{TIMER_FILE_VARIABLE: str(place)}) for _ in range(2))
    os.mkfifo(place)
    old = os.open(place, os.O_PATH)  # opened without reading, to keep its number from being reused
    first.server.open()
    assert not os.path.samestat(os.fstat(old), place.stat())
    os.close(old)
    with pytest.raises(InputError, match="timers' is in use by another process: use another path"):
        second.server.open()
    second.server.close()
    assert place.exists()
    if int(Path("/proc/sys/fs/pipe-max-size").read_text()) >= FIFO_BYTES:  # it holds what comes while the agent is busy
        data = line(HERE, "step", 60) * 40
        for _ in range(FIFO_BYTES // (2 * len(data))):  # data that does not fit raises an exception
            first.write(data)
    place.unlink()
    place.write_text("precious")
    first.server.close()
    assert place.read_text() == "precious"


@pytest.mark.parametrize(
    "place, complaint",
    [
        ("a file", "exists and is not a FIFO"),
        ("a folder", "exists and is not a FIFO"),
        ("a link", "exists and is not a FIFO"),
        ("a file/timers", r"cannot be made \(Not a directory\)"),
        ("nowhere/timers", r"cannot be made \(No such file or directory\)"),
        ("x" * 300, r"cannot be made \(File name too long\)"),
    ],
)
def test_where_no_fifo_can_be_it_says_so_and_leaves_what_is_there(tmp_path: Path, place: str, complaint: str) -> None:
    (tmp_path / "a file").touch()
    (tmp_path / "a folder").mkdir()
    os.mkfifo(tmp_path / "elsewhere")
    (tmp_path / "a link").symlink_to("elsewhere")
    before = os.listdir(tmp_path)
    kennel = Kennel(tmp_path / "scratch", **{TIMER_FILE_VARIABLE: str(tmp_path / place)})
    with pytest.raises(InputError, match=complaint) as caught:
        kennel.server.open()
    assert TIMER_FILE_VARIABLE in str(caught.value)
    assert "\n" not in str(caught.value)
    kennel.server.close()
    assert os.listdir(tmp_path) == before


# Timers.


@on_each_loop
def test_a_timer_that_expires_is_reported_one_that_was_cleared_is_not_and_lines_that_are_no_timers_are_logged_once(
    loop: str, tmp_path: Path, child: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with watching(tmp_path) as kennel:
            kennel.set("step", 0)
            kennel.write(*[line(HERE, f"other {n}", WITHOUT_DEADLINE) for n in range(2000)])  # more than a single read
            kennel.write(line(HERE, "step", None))
            for _ in range(3):
                kennel.write(b"nonsense\n", b"x" * (2 * LINE_BYTES_MAX) + b"\n", line(1, "step", 0), b'{"pid": "7"}\n')
                await kennel.wait_read()
            assert kennel.found == []
            before_s = time.monotonic()
            kennel.set("step", 0.05, signum=signal.SIGUSR1)
            (own,) = await kennel.wait_found()
            passed_s = time.monotonic() - before_s
            kennel.set("load", 0, pid=child.pid)
            of_child = (await kennel.wait_found(2))[-1]
            kennel.set("\n\x1b[2J\udcff" + "x" * 3000, 0)
            strange = (await kennel.wait_found(3))[-1]
        assert (own.generation, own.local_rank, own.by, own.signum) == (1, 0, "timer", signal.SIGUSR1)
        scope, late = own.reason.split(", expired ")
        words, set_for, _ = scope.rsplit(" ", 2)
        assert words == "timer 'step', set for"
        assert 0 <= float(set_for) <= 0.05  # the rest of its time when it was read
        number, unit = late.split(" ", 1)
        assert 0 <= float(number) <= passed_s and unit == "s ago"
        assert (of_child.local_rank, of_child.signum) == (0, signal.SIGKILL)
        assert f"timer 'load' (of its process {child.pid}), set for " in of_child.reason
        assert strange.reason.isprintable() and len(strange.reason) < 2 * SCOPE_CHARS

    run(loop, main())
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 3
    assert "as it is not a timer (" in said[0] and said[0].endswith("): 'nonsense'")
    assert f"as it is longer than {LINE_BYTES_MAX} bytes (" in said[1] and "): 'xxx" in said[1]
    assert "as it is from a process that no worker of this agent started (" in said[2] and said[2].endswith("): pid 1")
    assert all(len(line) < 400 for line in said)


def test_nothing_is_looked_at_while_nothing_is_written_and_no_timer_runs(tmp_path: Path) -> None:
    @on_virtual_time
    async def main() -> None:
        async with watching(tmp_path):
            await asyncio.Event().wait()

    with pytest.raises(Deadlock):  # on this clock, any timer would let time pass
        main()


async def test_a_process_that_has_ended_does_not_hang(
    tmp_path: Path, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clocks = SimpleNamespace(monotonic=time.monotonic, time=time.time)
    monkeypatch.setattr("aelastic.agent.watches.file_timer.time", clocks)
    async with watching(tmp_path) as kennel:
        kennel.set("load", 1000, pid=child.pid)
        await kennel.wait_read()
        child.kill()
        await asyncio.to_thread(partial(os.waitid, os.P_PID, child.pid, os.WEXITED | os.WNOWAIT))  # a zombie
        kennel.set("load more", 0, pid=child.pid)
        clocks.monotonic, clocks.time = (lambda: time.monotonic() + 2000), (lambda: time.time() + 2000)
        await kennel.wait_read()
        assert kennel.found == []
    assert not caplog.records


async def test_timers_are_those_of_the_generation_that_runs(
    tmp_path: Path, child: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    async with watching(tmp_path) as kennel:
        kennel.set("old", WITHOUT_DEADLINE)
        await kennel.wait_read()
        assert len(kennel.server._timers) == 1
        kennel.server.ended(1, 0)
        kennel.server.started(2, (), {0: None, 1: child.pid})  # one could not be started
        assert len(kennel.server._timers) == 0
        kennel.set("new", 0, pid=child.pid)
        kennel.server.ended(1, 1)
        (found,) = await kennel.wait_found()
        assert (found.generation, found.local_rank) == (2, 1)
        assert "'new'" in found.reason
    assert not caplog.records


async def test_a_flood_of_lines_does_not_keep_the_loop_from_others(tmp_path: Path) -> None:
    """While a client writes as fast as it can, other tasks still run and timers expire."""
    async with watching(tmp_path) as kennel:
        kennel.set("other", 1)
        code = (
            "import os, sys\nfd = os.open(sys.argv[1], os.O_WRONLY)\nline = sys.argv[2].encode() * 30\n"
            "while True:\n    os.write(fd, line)\n"
        )
        both = line(HERE, "step", WITHOUT_DEADLINE) + line(HERE, "step", None)
        writer = await asyncio.create_subprocess_exec(sys.executable, "-c", code, str(kennel.path), both.decode())
        try:
            await kennel.wait_found()
        finally:
            writer.kill()
            await writer.wait()


# With workers.

SETS_TIMER = """
import json

timer = {"version": 1, "pid": os.getpid(), "scope_id": "all_reduce", "expiration_time": time.time() + 0.1, "signal": 10}
if rank == 1:
    with open(os.environ["TORCHELASTIC_TIMER_FILE"], "w") as fifo:
        print(json.dumps(timer), file=fifo)
time.sleep(600)
"""
# Importing torch takes seconds, so `make test` does it only once: in the worker that hangs.
USES_TORCH = f"""
path = os.environ["TORCHELASTIC_TIMER_FILE"]
say("at", rank, restart, path, oct(os.stat(path).st_mode))
if (rank, restart) == (0, 0):
    open("up", "w")
    time.sleep(600)
if {EFFORT == "quick"} and restart:
    say("done", rank)
    sys.exit()

from torch.distributed.elastic import timer

timer.configure(timer.FileTimerClient(path))
wait_for("up")
with timer.expires(after=600, scope="epoch"):
    for step in range(3):
        is_last = (restart, step) == (0, 2)
        with timer.expires(after=0.3 if is_last else 300, scope=f"step {{step}}"):
            time.sleep(600 if is_last else 0)
say("done", rank)
"""


@pytest.mark.all
@pytest.mark.ci
@pytest.mark.timeout(2 * LAUNCH_TIMEOUT_S)
def test_torchs_client_has_a_hung_worker_restarted_and_the_agent_lives(launch: Launcher) -> None:
    job = launch(USES_TORCH, "--nproc-per-node=2", "--max-restarts=1", env=ON)
    assert job.wait(LAUNCH_TIMEOUT_S) == 0, job.story
    assert sorted(line for line in job.lines if line.startswith("done")) == ["done 0", "done 1"]
    said = [each.split() for each in job.lines if each.startswith("at ")]
    assert sorted(words[1:3] for words in said) == [["0", "0"], ["0", "1"], ["1", "0"], ["1", "1"]]
    assert len({words[3] for words in said}) == 1  # it survives restarts
    assert {words[4] for words in said} == {"0o10600"}
    assert "rank 1 on " in job.stderr
    assert "is stopped: timer 'step 2', set for " in job.stderr
    assert "rank 1 failed" in job.stderr and "restart 1 of 1" in job.stderr
    job.assert_nothing_left()  # including the FIFO


@on_each_loop
def test_the_report_names_rank_scope_and_signal_and_so_does_the_exit_code(launch: Launcher, loop: str) -> None:
    job = launch(SETS_TIMER, "--nproc-per-node=2", "--max-restarts=0", env=ON, loop=loop)
    assert job.wait() == 128 + signal.SIGUSR1, job.story
    report = job.stderr[job.stderr.index("Root Cause") :]
    assert "rank      : 1 (local_rank: 1)" in report
    assert f"exitcode  : -{int(signal.SIGUSR1)} (pid: " in report
    assert "(SIGUSR1)" in report
    assert re.search(r"cause     : timer 'all_reduce', set for [-.e\d]+ s, expired [-.e\d]+ s ago\n", report)
    assert "Stopped by the agent: rank 0" in report
    job.assert_nothing_left()


def test_the_fifo_of_an_agent_that_was_killed_goes_with_it(launch: Launcher) -> None:
    job = launch("say('at', os.environ['TORCHELASTIC_TIMER_FILE'])\ntime.sleep(600)\n", env=ON)
    ((_, path),) = [each.split() for each in job.wait_line("at ")]
    assert stat.S_ISFIFO(os.stat(path).st_mode)
    job.signal(signal.SIGKILL)
    job.wait()
    job.wait_nothing_left()


async def test_a_supervisor_in_a_program_goes_by_the_environment_it_is_given(tmp_path: Path) -> None:
    code = (
        "import json, os, time\n"
        "request = {'pid': os.getpid(), 'scope_id': 'step', 'expiration_time': 0, 'signal': 15}\n"
        "open(os.environ['TORCHELASTIC_TIMER_FILE'], 'w').write(json.dumps(request) + chr(10))\n"
        "time.sleep(600)\n"
    )
    env = {**os.environ, **ON, TIMER_FILE_VARIABLE: str(tmp_path / "timers")}
    result = await Supervisor(python(code, env=env)).run()
    failure = result.failures[0]
    assert (failure.exitcode, failure.signal_name()) == (-signal.SIGTERM, "SIGTERM")
    assert failure.message.startswith("timer 'step', set for 0 s, expired ")
    assert not (tmp_path / "timers").exists()
    assert not proc_table.is_alive(failure.pid)
