"""What the console shows: progress bars, lines that stay whole, filters, and consoles of other kinds than a terminal."""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import pty
import re
import subprocess
import sys
import threading
import tty
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest
import uvloop
from kit.launching import DEADLINE_S, LAUNCH_TIMEOUT_S, Launcher, on_each_loop, wait_for

from aelastic import RunResult, Std, Supervisor, WorkerSpec, WorkerState
from aelastic.logs.follower import Follower
from aelastic.logs.lines import PrefixedLines
from aelastic.logs.pump import Pump
from aelastic.logs.sinks import Sink

pytestmark = pytest.mark.usefixtures("warm_stores")

MIB = 1 << 20


def attempt(folder: Path, number: int = 0) -> Path:
    return folder / "logs" / "latest" / f"attempt_{number}"


# Progress bars.

BAR = """
for percent in range(3):
    os.write(2, b"\\r%2d%%" % percent)
    wait_for(f"go{percent}_{rank}")
os.write(2, b"\\n")
"""


@on_each_loop
def test_progress_bars_are_live_and_no_two_ranks_share_a_line(launch: Launcher, loop: str) -> None:
    job = launch(BAR, "--nproc-per-node=2", "--tee=2", "--log-dir=logs", loop=loop)

    def stderr() -> bytes:
        return (job.folder / "stderr").read_bytes()

    for percent in range(3):
        for rank in (0, 1):
            frame = b"\r[default%d]:%2d%%" % (rank, percent)
            wait_for(f"{frame!r} in {stderr()!r}", lambda frame=frame: frame in stderr())  # type: ignore[misc]
        for rank in (0, 1):
            (job.folder / f"go{percent}_{rank}").touch()
            if percent < 2:
                frame = b"\r[default%d]:%2d%%" % (rank, percent + 1)
                wait_for(f"{frame!r} in {stderr()!r}", lambda frame=frame: frame in stderr())  # type: ignore[misc]
    assert job.wait() == 0, job.story
    for line in stderr().split(b"\n"):
        assert len(set(re.findall(rb"\[default\d\]", line))) <= 1
    for rank in (0, 1):
        assert (attempt(job.folder) / str(rank) / "stderr.log").read_bytes() == b"\r 0%\r 1%\r 2%\n"
    assert stderr().endswith(b"\n")


@on_each_loop
def test_a_bar_of_one_rank_is_drawn_in_place(launch: Launcher, loop: str) -> None:
    job = launch(
        "for percent in range(50, 53):\n    os.write(1, b'%d%%\\r' % percent)\nos.write(1, b'done\\n')",
        "--tee=1",
        "--log-dir=logs",
        loop=loop,
    )
    assert job.wait() == 0, job.story
    assert (job.folder / "stdout").read_bytes() == (
        b"[default0]:50%\r[default0]:51%\r[default0]:52%\r[default0]:done\n"
    )


# Lines stay whole.


@on_each_loop
def test_lines_of_ten_megabytes_are_shown_whole_and_so_are_their_neighbours(launch: Launcher, loop: str) -> None:
    job = launch(
        """
        if rank == 0:
            wait_for("begun")
            for _ in range(3):
                for _ in range(100):
                    os.write(1, b"x" * 100_000)
                os.write(1, b"\\n")
            open("written", "w").close()
        else:
            while not os.path.exists("written"):
                os.write(1, b"short\\n")
                open("begun", "w").close()
        """,
        "--nproc-per-node=2",
        "--tee=1",
        "--log-dir=logs",
        loop=loop,
    )
    assert job.wait(LAUNCH_TIMEOUT_S) == 0, job.stderr
    lines = (job.folder / "stdout").read_bytes().split(b"\n")
    assert lines.count(b"[default0]:" + b"x" * 10_000_000) == 3
    assert set(lines) == {b"[default0]:" + b"x" * 10_000_000, b"[default1]:short", b""}


@on_each_loop
def test_both_streams_may_go_to_one_place_and_their_lines_do_not_mix(launch: Launcher, loop: str) -> None:
    reader, writer = os.pipe()
    job = launch(
        """
        for _ in range(40):
            os.write(1, (b"o" * 99 + b"\\n") * 1000)
            os.write(2, (b"e" * 149 + b"\\n") * 1000)
        """,
        "--nproc-per-node=2",
        "--tee=1",
        "--log-dir=logs",
        loop=loop,
        stdout=writer,
        stderr=writer,
    )
    os.close(writer)
    with open(reader, "rb") as file:
        lines = file.read().split(b"\n")
    assert job.wait() == 0
    counts = Counter(lines)
    assert [counts.pop(b"[default%d]:" % rank + b"o" * 99) for rank in range(2)] == [40_000] * 2
    assert counts.pop(b"") == 1
    # What has no prefix is shown as it comes, so a line is in two parts if half of its write was seen.
    assert {bytes(set(line)) for line in counts} == {b"e"}
    assert sum(len(line) * count for line, count in counts.items()) == 80_000 * 149


@on_each_loop
def test_bytes_of_any_kind_are_shown_unchanged(launch: Launcher, loop: str) -> None:
    everything = bytes(byte for byte in range(256) if byte not in b"\r\n")
    job = launch(
        "for _ in range(2000):\n    os.write(1, bytes(b for b in range(256) if b not in b'\\r\\n') + b'\\n')",
        "--tee=1",
        "--log-dir=logs",
        loop=loop,
    )
    assert job.wait() == 0, job.stderr
    assert (attempt(job.folder) / "0" / "stdout.log").read_bytes() == (everything + b"\n") * 2000
    assert (job.folder / "stdout").read_bytes() == (b"[default0]:" + everything + b"\n") * 2000


@on_each_loop
def test_text_and_newline_written_one_by_one_make_one_line(launch: Launcher, loop: str) -> None:
    job = launch(
        """
        for number in range(500):
            os.write(1, b"from %d" % rank)
            os.write(1, b"\\n")
        """,
        "--nproc-per-node=4",
        "--tee=1",
        "--log-dir=logs",
        loop=loop,
    )
    assert job.wait() == 0, job.stderr
    assert sorted(job.lines) == sorted(f"[default{rank}]:from {rank}" for rank in range(4) for _ in range(500))


# Which ranks are shown, and what is filtered.


@on_each_loop
def test_a_rank_that_is_not_shown_still_tells_why_it_failed_and_takes_bounded_disk(launch: Launcher, loop: str) -> None:
    job = launch(
        """
        if rank == 1:
            for _ in range(16):
                os.write(2, b"e" * (1 << 20))
            wait_for("go")
            raise ValueError("the cause")
        say("seen")
        time.sleep(600)
        """,
        "--nproc-per-node=2",
        "--local-ranks-filter=0",
        loop=loop,
    )

    def kept() -> int:
        return sum(path.stat().st_blocks * 512 for path in job.tmp.glob("*/stderr_0_1.log"))

    wait_for(
        "its output", lambda: [path for path in job.tmp.glob("*/stderr_0_1.log") if path.stat().st_size == 16 * MIB]
    )
    wait_for("what is not shown given back", lambda: 0 < kept() < 4 * MIB)
    job.wait_line("seen")
    job.go()
    assert job.wait() == 1
    assert job.lines == ["seen"]
    assert "ValueError: the cause" in job.stderr and "eeee" not in job.stderr.partition("rank 1 failed")[0]
    job.assert_nothing_left()


@on_each_loop
def test_filtered_lines_are_written_live_and_complete_behind_a_stalled_console(launch: Launcher, loop: str) -> None:
    job = launch(
        """
        for number in range(20_000):
            os.write(1, b"line %d of %d%s\\n" % (number, rank, b" apple" * (number % 1000 == 0)))
        wait_for("go")
        os.write(1, b"the last apple")
        """,
        "--nproc-per-node=2",
        "--tee=1",
        "--log-dir=logs",
        "--duplicate-stdout-filters=apple",
        loop=loop,
        stdout=subprocess.PIPE,
    )
    filtered = attempt(job.folder) / "filtered_stdout.log"
    expected = [f"[default{rank}]:line {n} of {rank} apple" for rank in (0, 1) for n in range(0, 20_000, 1000)]
    wait_for("the lines", lambda: filtered.exists() and sorted(filtered.read_text().splitlines()) == sorted(expected))
    assert job.process.stdout is not None
    drain = threading.Thread(target=job.process.stdout.read)
    drain.start()
    job.go()
    assert job.wait() == 0, job.stderr
    drain.join(DEADLINE_S)
    job.process.stdout.close()
    expected += [f"[default{rank}]:the last apple" for rank in (0, 1)]
    assert sorted(filtered.read_text().splitlines()) == sorted(expected)


# The link to the newest run.


def test_latest_leads_to_the_newest_run(launch: Launcher) -> None:
    for number in (1, 2):
        job = launch(f"say({number})", "--redirects=1", "--log-dir=logs", name="job")
        assert job.wait() == 0, job.stderr
        assert (attempt(job.folder) / "0" / "stdout.log").read_text() == f"{number}\n"
    assert len(list((job.folder / "logs").iterdir())) == 3
    assert not os.path.isabs(os.readlink(job.folder / "logs" / "latest"))


def test_two_runs_at_once_share_a_log_folder(launch: Launcher) -> None:
    logs = launch.folder / "logs"
    jobs = [launch("say(1)", "--redirects=1", f"--log-dir={logs}", name=f"job{number}") for number in range(4)]
    for job in jobs:
        assert job.wait() == 0, job.stderr
    runs = [path for path in logs.iterdir() if not path.is_symlink()]
    assert len(runs) == 4 and (logs / "latest").resolve() in runs
    assert len(list(logs.iterdir())) == 5


def test_a_folder_named_latest_is_left_alone(launch: Launcher) -> None:
    (launch.folder / "job" / "logs" / "latest" / "mine").mkdir(parents=True)
    job = launch("say(1)", "--redirects=1", "--log-dir=logs")
    assert job.wait() == 0, job.stderr
    assert (job.folder / "logs" / "latest" / "mine").is_dir()
    assert len(list((job.folder / "logs").iterdir())) == 2


# Consoles.


@on_each_loop
def test_a_console_made_non_blocking_gets_everything(launch: Launcher, loop: str) -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETFL, fcntl.fcntl(writer, fcntl.F_GETFL) | os.O_NONBLOCK)
    job = launch("os.write(1, (b'x' * 99 + b'\\n') * 50_000)", "--tee=1", "--log-dir=logs", loop=loop, stdout=writer)
    os.close(writer)
    with open(reader, "rb") as file:
        assert file.read() == (b"[default0]:" + b"x" * 99 + b"\n") * 50_000
    assert job.wait() == 0, job.stderr


@on_each_loop
def test_a_terminal_shows_what_a_pipe_does(launch: Launcher, loop: str) -> None:
    ours, terminal = pty.openpty()
    tty.setraw(terminal)
    job = launch(
        "os.write(1, b'\\r 5%')\nwait_for('go')\nos.write(1, b'\\r 6%\\n')",
        "--tee=1",
        "--log-dir=logs",
        loop=loop,
        stdout=terminal,
    )
    assert os.read(ours, 1000) == b"\r[default0]: 5%"
    job.go()
    assert job.wait() == 0, job.stderr
    assert os.read(ours, 1000) == b"\r[default0]: 6%\n"
    os.close(terminal)
    os.close(ours)


def run(spec: WorkerSpec, loop: str = "uvloop") -> RunResult:
    factory: Any = uvloop.new_event_loop if loop == "uvloop" else asyncio.SelectorEventLoop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(Supervisor(spec).run())


def writer(code: str, **spec: Any) -> WorkerSpec:
    args = ("-c", f"import os\n{code}")
    return WorkerSpec(entrypoint=sys.executable, args=args, max_restarts=0, tee=Std.ALL, local_world_size=2, **spec)


@on_each_loop
def test_objects_in_the_place_of_the_streams_get_everything_before_the_call_returns(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    sys.stdout.write("before\n")
    code = "os.write(1, 'größer\\n'.encode() * 20_000)\nos.write(2, b'bad \\xff byte\\nlast')"
    assert run(writer(code, log_dir=tmp_path), loop).state is WorkerState.SUCCEEDED
    lines = out.getvalue().splitlines()
    assert lines[0] == "before"
    assert sorted(lines[1:]) == ["[default0]:größer"] * 20_000 + ["[default1]:größer"] * 20_000
    told = [f"[default{rank}]:{word}" for rank in (0, 1) for word in ("bad \N{REPLACEMENT CHARACTER} byte", "last")]
    assert sorted(err.getvalue().splitlines()) == told


def test_one_object_in_the_place_of_both_streams_has_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = io.StringIO()
    monkeypatch.setattr("sys.stdout", both)
    monkeypatch.setattr("sys.stderr", both)
    code = "for _ in range(500):\n    os.write(1, b'out')\n    os.write(2, b'err\\n')\n    os.write(1, b'\\n')"
    assert run(writer(code, log_dir=tmp_path)).state is WorkerState.SUCCEEDED
    lines = both.getvalue().splitlines()
    expected = [f"[default{rank}]:{word}" for rank in (0, 1) for word in ("err", "out")]
    assert {line: lines.count(line) for line in lines} == dict.fromkeys(expected, 500)


def test_dev_null_as_a_log_folder_keeps_nothing_and_workers_write_to_the_console(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run(writer("os.write(1, b'out\\n')\nos.write(2, b'err\\n')", redirects=Std.ALL, log_dir=Path(os.devnull)))
    told = capfd.readouterr()
    assert (told.out, told.err) == ("out\n" * 2, "err\n" * 2)
    assert not list(tmp_path.iterdir())


def test_pytests_capture_gets_what_is_teed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(writer("os.write(1, b'out\\n')\nos.write(2, b'err\\n')", log_dir=tmp_path))
    told = capsys.readouterr()
    assert sorted(told.out.splitlines()) == ["[default0]:out", "[default1]:out"]
    assert sorted(told.err.splitlines()) == ["[default0]:err", "[default1]:err"]


class Notebook:
    """As Jupyter's stream: it has a descriptor, but what is written to that is not seen in the notebook."""

    def __init__(self, fd: int) -> None:
        self.text = ""
        self.fd = fd

    def fileno(self) -> int:
        return self.fd

    def write(self, text: str) -> int:
        self.text += text
        return len(text)


def test_a_stream_that_does_more_than_write_to_its_descriptor_is_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "terminal").open("wb") as file:
        notebook = Notebook(file.fileno())
        monkeypatch.setattr("sys.stdout", notebook)
        run(writer("os.write(1, b'out\\n')", log_dir=tmp_path / "logs"))
    assert sorted(notebook.text.splitlines()) == ["[default0]:out", "[default1]:out"]
    assert not (tmp_path / "terminal").read_bytes()


class Broken:
    def write(self, text: str) -> int:
        raise RuntimeError(text)


@pytest.mark.parametrize("stream", [Broken(), None], ids=["broken", "none"])
def test_a_stream_that_takes_nothing_blocks_no_worker(
    stream: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", stream)
    assert run(writer("os.write(1, b'out\\n')", log_dir=tmp_path)).state is WorkerState.SUCCEEDED
    assert (tmp_path / "latest" / "attempt_0" / "0" / "stdout.log").read_bytes() == b"out\n"


def test_what_the_program_has_printed_before_comes_before(launch: Launcher) -> None:
    job = launch(
        "os.write(1, b'of a worker\\n')", "--tee=1", "--log-dir=logs", wrapper="print('of the program around')\n"
    )
    assert job.wait() == 0, job.stderr
    assert job.lines == ["of the program around", "[default0]:of a worker"]


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_a_reader_of_stdout_that_stops_blocks_no_worker(kind: str, tmp_path: Path) -> None:
    reader, writer = os.pipe() if kind == "pipe" else pty.openpty()
    if kind == "terminal":
        tty.setraw(writer)
    script = tmp_path / "flood.py"
    script.write_text("import os\nos.write(1, b'x' * (8 << 20) + b'\\n')\nopen('done', 'w').close()\n")
    with subprocess.Popen([sys.executable, "-m", "aelastic", str(script)], cwd=tmp_path, stdout=writer) as agent:
        os.close(writer)
        wait_for("the worker to have written", (tmp_path / "done").exists)
        seen = 0
        while seen < 8 * MIB + 1:
            chunk = os.read(reader, MIB)
            assert chunk.strip(b"x\n") == b""
            seen += len(chunk)
        assert agent.wait(DEADLINE_S) == 0
    os.close(reader)


class StalledSink(Sink):
    """A sink that takes nothing until the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_entered = threading.Event()
        self.may_go_on = threading.Event()
        self.is_closed = threading.Event()

    def _write(self, piece: bytes) -> bool:
        self.is_entered.set()
        return self.may_go_on.wait(DEADLINE_S)

    def close(self) -> None:
        self.is_closed.set()


async def test_a_file_stays_open_while_an_abandoned_thread_may_use_it(tmp_path: Path) -> None:
    path, sink, pump = tmp_path / "stdout.log", StalledSink(), Pump()
    path.touch()
    follower = Follower(path, PrefixedLines(None))
    pump.add(follower, sink)
    path.write_text("a line\n")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pump.run, lambda _: None)
        pump.wake(set())
        await anyio.to_thread.run_sync(sink.is_entered.wait, DEADLINE_S)
        tasks.cancel_scope.cancel()
    pump.close()
    os.fstat(follower.fileno())  # its number is not another file's yet
    assert not sink.is_closed.is_set()
    sink.may_go_on.set()
    assert await anyio.to_thread.run_sync(sink.is_closed.wait, DEADLINE_S)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(follower.fileno())
