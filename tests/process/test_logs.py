"""What workers write: every byte in the files, every line on the console, and no worker waits for either."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import threading
from pathlib import Path
from typing import IO

import anyio
import pytest
from kit.launching import DEADLINE_S, LAUNCH_TIMEOUT_S, Launcher, cmdline, on_each_loop, wait_for

from aelastic.logs import follower as follower_module
from aelastic.logs import pump as pump_module
from aelastic.logs.follower import Follower
from aelastic.logs.lines import PrefixedLines
from aelastic.logs.pump import Pump
from aelastic.logs.sinks import DescriptorSink

pytestmark = pytest.mark.usefixtures("warm_stores")

MIB = 1 << 20


def files(folder: Path) -> dict[str, bytes]:
    """What lies in the one run of a log folder, by path, beside its event log."""
    root = folder / "latest"
    found = (path for path in sorted(root.rglob("*")) if path.is_file() and path.name != "events.jsonl")
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


# Layout and choice.


@on_each_loop
def test_files_lie_where_torchrun_puts_them_and_stay(launch: Launcher, loop: str) -> None:
    job = launch(
        """
        say("out", restart, rank)
        os.write(2, f"err {restart} {rank}\\n".encode())
        if restart == 0:
            if rank == 0:
                open("written", "w").close()
                time.sleep(600)
            wait_for("written")
            sys.exit(1)
        """,
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
        "--log-dir",
        "logs",
        "--redirects",
        "3",
        loop=loop,
    )
    assert job.wait() == 0, job.story
    root = (job.folder / "logs" / "latest").resolve()
    assert re.fullmatch(r"[0-9a-f-]{36}_\w+", root.name)
    assert files(job.folder / "logs") == {
        f"attempt_{restart}/{rank}/{name}.log": f"{word} {restart} {rank}\n".encode()
        for restart in (0, 1)
        for rank in (0, 1)
        for name, word in (("stdout", "out"), ("stderr", "err"))
    }
    assert not job.stdout and "err 0" not in job.stderr.replace("last words: err 0", "")
    job.assert_nothing_left()


@on_each_loop
def test_streams_are_chosen_by_local_rank_and_tee_wins(launch: Launcher, loop: str) -> None:
    job = launch(
        "say('out', rank)\nos.write(2, f'err {rank}\\n'.encode())",
        "--nproc-per-node=4",
        "--log-dir=logs",
        "--redirects=0:3,1:1,2:2",
        "--tee=2:3,3:1",
        "--role=trainer",
        loop=loop,
    )
    assert job.wait() == 0, job.story
    assert set(files(job.folder / "logs")) == {
        "attempt_0/0/stdout.log",
        "attempt_0/0/stderr.log",
        "attempt_0/1/stdout.log",
        "attempt_0/2/stdout.log",
        "attempt_0/2/stderr.log",
        "attempt_0/3/stdout.log",
    }
    assert sorted(job.lines) == ["[trainer2]:out 2", "[trainer3]:out 3"]
    assert sorted(job.stderr.splitlines()) == ["[trainer2]:err 2", "err 1", "err 3"]
    job.assert_nothing_left()


@on_each_loop
def test_files_that_were_asked_for_stay_without_a_log_folder_too_and_their_place_is_told(
    launch: Launcher, loop: str
) -> None:
    job = launch("say('hello')", "--redirects", "1", loop=loop)
    assert job.wait() == 0, job.story
    (log,) = job.tmp.rglob("*.log")
    assert log.read_text() == "hello\n"
    assert str(log.parent.parent.parent) in job.stderr
    assert not job.left()
    (folder,) = job.tmp.iterdir()
    assert log.is_relative_to(folder)
    assert (
        stat.S_IMODE(folder.stat().st_mode) == 0o700
    )  # other users share the temporary folder, and must not read this


@on_each_loop
def test_lines_are_prefixed_and_the_files_are_not(launch: Launcher, loop: str) -> None:
    text = b"one\n\ntwo\r\nbar 1%\rbar 2%\nno newline"
    long = b"x" * 300_000
    job = launch(
        f"os.write(1, {text!r} + b'\\n' + b'x' * 300_000)\nos.write(2, {text!r})",
        "--tee=3",
        "--log-dir=logs",
        loop=loop,
    )
    assert job.wait() == 0, job.story
    assert files(job.folder / "logs") == {
        "attempt_0/0/stdout.log": text + b"\n" + long,
        "attempt_0/0/stderr.log": text,
    }
    prefixed = b"".join(b"[default0]:" + line + b"\n" for line in text.split(b"\n")).replace(
        b"\rbar", b"\r[default0]:bar"
    )
    assert (job.folder / "stderr").read_bytes() == prefixed
    stdout = (job.folder / "stdout").read_bytes()
    assert stdout == prefixed + b"[default0]:" + long + b"\n"


@on_each_loop
def test_every_byte_is_in_the_file_when_a_worker_is_sigkilled(launch: Launcher, loop: str) -> None:
    job = launch(
        """
        everything = bytes(range(256)) * 4096
        os.write(1, everything)
        os.write(2, everything[::-1])
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        "--tee=1",
        "--redirects=3",
        "--log-dir=logs",
        loop=loop,
    )
    assert job.wait() == 137
    everything = bytes(range(256)) * 4096
    assert files(job.folder / "logs") == {
        "attempt_0/0/stdout.log": everything,
        "attempt_0/0/stderr.log": everything[::-1],
    }
    job.assert_nothing_left()


@on_each_loop
@pytest.mark.parametrize("option", ["--redirects=1", "--tee=1"])
def test_every_byte_is_in_the_file_when_the_agent_is_sigkilled(launch: Launcher, loop: str, option: str) -> None:
    job = launch(
        "os.write(1, bytes(range(256)) * 4096)\nopen('written', 'w').close()\ntime.sleep(600)",
        option,
        "--log-dir=logs",
        loop=loop,
    )
    wait_for("the worker's output", (job.folder / "written").exists)
    job.signal(9)
    job.wait()
    job.wait_nothing_left()
    assert files(job.folder / "logs")["attempt_0/0/stdout.log"] == bytes(range(256)) * 4096


# Live.


@on_each_loop
@pytest.mark.parametrize("options", [[], ["--tee=3", "--log-dir=logs"]], ids=["plain", "tee"])
def test_what_a_worker_writes_is_seen_while_it_runs(launch: Launcher, loop: str, options: list[str]) -> None:
    job = launch(
        """
        for number in range(3):
            say("out", number)
            os.write(2, f"err {number}\\n".encode())
            wait_for(f"go{number}")
        """,
        *options,
        loop=loop,
    )
    for number in range(3):
        for path in (job.folder / "stdout", job.folder / "stderr"):
            wait_for(f"line {number}\n{job.story}", lambda path=path, number=number: f" {number}\n" in path.read_text())  # type: ignore[misc]
        (job.folder / f"go{number}").touch()
    assert job.wait() == 0
    job.wait_nothing_left()


@on_each_loop
def test_a_progress_bar_that_ends_no_line_is_seen_as_it_is(launch: Launcher, loop: str) -> None:
    job = launch("os.write(2, b'\\r 50%')\nwait_for('go')\nos.write(2, b'\\r100%')", loop=loop)
    wait_for("half a bar", lambda: (job.folder / "stderr").read_bytes() == b"\r 50%")
    job.go()
    assert job.wait() == 0
    assert (job.folder / "stderr").read_bytes() == b"\r 50%\r100%"


# Floods, and consoles that take nothing.


@on_each_loop
def test_fifty_mebibytes_through_tee_are_complete_on_the_console(launch: Launcher, loop: str) -> None:
    job = launch(
        """
        lines = b"".join(b"%d %06d " % (rank, number) + b"y" * 90 + b"\\n" for number in range(2500))
        for _ in range(100):
            os.write(1, lines)
        """,
        "--nproc-per-node=2",
        "--tee=1",
        "--log-dir=logs",
        loop=loop,
    )
    assert job.wait(LAUNCH_TIMEOUT_S) == 0, job.stderr
    console = (job.folder / "stdout").read_bytes()
    for rank in (0, 1):
        expected = b"".join(b"%d %06d " % (rank, number) + b"y" * 90 + b"\n" for number in range(2500)) * 100
        file = files(job.folder / "logs")[f"attempt_0/{rank}/stdout.log"]
        prefix = b"[default%d]:" % rank
        shown = b"".join(line.removeprefix(prefix) for line in console.splitlines(True) if line.startswith(prefix))
        assert file == expected
        assert shown == expected
    assert len(console) == 2 * (len(expected) + 250_000 * len("[default0]:"))


def resident_kib(pid: int) -> int:
    match = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert match is not None
    return int(match[1])


def read_all(stream: IO[bytes], into: list[bytes]) -> threading.Thread:
    thread = threading.Thread(target=lambda: into.append(stream.read()))
    thread.start()
    return thread


@on_each_loop
def test_a_console_without_a_reader_blocks_no_worker_takes_no_memory_and_loses_nothing(
    launch: Launcher, loop: str
) -> None:
    job = launch(
        """
        wait_for("begin")
        for _ in range(24):
            os.write(1, (b"o" * 127 + b"\\n") * 8192)
            os.write(2, (b"e" * 127 + b"\\n") * 8192)
        open("written", "w").close()
        wait_for("go")
        """,
        "--tee=1",
        loop=loop,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    wait_for("a worker", lambda: len(job.left()) >= 3)
    before = resident_kib(job.pid)
    (job.folder / "begin").touch()
    wait_for("all of it written", (job.folder / "written").exists)
    assert resident_kib(job.pid) - before < 16 * 1024
    assert job.process.stdout is not None and job.process.stderr is not None
    out: list[bytes] = []
    err: list[bytes] = []
    readers = [read_all(job.process.stdout, out), read_all(job.process.stderr, err)]
    job.go()
    assert job.wait() == 0
    for reader in readers:
        reader.join(DEADLINE_S)
    job.process.stdout.close()
    job.process.stderr.close()
    assert out[0] == (b"[default0]:" + b"o" * 127 + b"\n") * (24 * 8192)
    shown = b"".join(line for line in err[0].splitlines(True) if not line.startswith(b"aelastic: "))
    assert shown == (b"e" * 127 + b"\n") * (24 * 8192)


@on_each_loop
def test_a_console_that_never_takes_more_is_given_up_and_the_files_are_named(launch: Launcher, loop: str) -> None:
    job = launch(
        "os.write(1, b'x' * (1 << 20))",
        "--tee=1",
        "--log-dir=logs",
        loop=loop,
        stdout=subprocess.PIPE,
        wrapper="import aelastic.logs.pump\naelastic.logs.pump.STALL_TIMEOUT_S = 0.3\n",
    )
    assert job.wait() == 0, job.stderr
    assert "console stopped taking output" in job.stderr and str(job.folder / "logs") in job.stderr
    assert files(job.folder / "logs")["attempt_0/0/stdout.log"] == b"x" * MIB
    assert not job.left()
    assert job.process.stdout is not None
    job.process.stdout.close()


@on_each_loop
def test_a_console_that_has_gone_away_does_not_stop_the_job(launch: Launcher, loop: str) -> None:
    reader, writer = os.pipe()
    job = launch(
        """
        wait_for("go")
        for _ in range(5):
            os.write(1, b"o" * (1 << 20))
            os.write(2, b"e" * (1 << 20))
        open("written", "w").close()
        """,
        "--tee=3",
        "--log-dir=logs",
        loop=loop,
        stdout=writer,
        stderr=writer,
    )
    os.close(writer)
    os.close(reader)
    job.go()
    assert job.wait() == 0
    assert files(job.folder / "logs") == {
        "attempt_0/0/stdout.log": b"o" * 5 * MIB,
        "attempt_0/0/stderr.log": b"e" * 5 * MIB,
    }
    job.assert_nothing_left()


def disk_bytes(folder: Path) -> int:
    used = 0
    for path in folder.rglob("*"):
        try:
            used += path.stat().st_blocks * 512
        except FileNotFoundError:
            pass
    return used


@on_each_loop
def test_stderr_that_is_not_kept_takes_bounded_disk(launch: Launcher, loop: str) -> None:
    job = launch(
        """
        for _ in range(64):
            os.write(2, b"e" * (1 << 20))
        open("written", "w").close()
        wait_for("go")
        """,
        loop=loop,
    )
    wait_for("all of it written", (job.folder / "written").exists)
    wait_for("all of it shown", lambda: (job.folder / "stderr").stat().st_size == 64 * MIB)
    wait_for("what was shown given back", lambda: disk_bytes(job.tmp) < 4 * MIB)
    assert disk_bytes(job.tmp) > 0
    job.go()
    assert job.wait() == 0
    job.assert_nothing_left()


NO_WATCHES = """
def watch(self, path):
    return None

inotify.Growth.watch = watch
"""
NO_INSTANCES = """
def init(self):
    self._fd = None

inotify.Growth.__init__ = init
"""


@on_each_loop
@pytest.mark.parametrize("lack", [NO_WATCHES, NO_INSTANCES], ids=["no watches left", "no instances left"])
def test_output_is_shown_where_the_kernel_does_not_tell_of_it(launch: Launcher, loop: str, lack: str) -> None:
    job = launch(
        "os.write(2, b'seen\\n')\nwait_for('go')\nsys.exit(restart == 0)",
        "--max-restarts=1",
        loop=loop,
        wrapper="from aelastic.host import inotify\n" + lack,
    )
    wait_for("its stderr", lambda: "seen\n" in job.stderr)
    job.go()
    assert job.wait() == 0, job.story
    assert job.stderr.splitlines().count("seen") == 2
    job.assert_nothing_left()


@on_each_loop
def test_a_log_folder_that_cannot_be_made_is_told_before_anything_starts(launch: Launcher, loop: str) -> None:
    launch.write("job/file", "", preamble="")
    job = launch("say('started')", "--log-dir", "file/logs", loop=loop)
    assert job.wait() == 2
    assert "file/logs" in job.stderr and job.stderr.count("\n") == 1 and not job.lines
    job.assert_nothing_left()


@on_each_loop
def test_a_console_that_stalls_at_the_end_can_be_given_up_and_nothing_it_has_not_shown_is_lost(
    launch: Launcher, loop: str
) -> None:
    unread, stderr = os.pipe()
    job = launch(
        "for number in range(20_000):\n    os.write(2, b'line %d of many\\n' % number)", loop=loop, stderr=stderr
    )
    os.close(stderr)
    last = b"line 19999 of many\n"
    wait_for("the last line", lambda: [f for f in job.tmp.glob("*/stderr_*.log") if f.read_bytes().endswith(last)])
    wait_for("the worker's end", lambda: not [pid for pid in job.left() if "-u" in cmdline(pid)])

    def over() -> bool:  # however far it has come: the first may find the worker's exit yet unseen
        job.signal(signal.SIGINT)
        return job.process.poll() is not None

    wait_for("the end", over)
    # It has succeeded or was stopped, by when the first came; its last words may or may not fit into the pipe.
    assert job.wait() in {0, -signal.SIGINT}
    (kept,) = job.tmp.glob("*_kept")
    assert not job.left()
    (rest,) = kept.glob("stderr_*.log")
    assert rest.read_bytes().endswith(last)
    os.close(unread)


@on_each_loop
def test_a_worker_that_floods_does_not_keep_another_from_the_console(launch: Launcher, loop: str) -> None:
    reader, stderr = os.pipe()
    job = launch(
        """
        if rank == 1:
            wait_for("flooding")
            os.write(2, b"here is rank 1\\n")
            time.sleep(600)
        while True:
            os.write(2, b"flood\\n" * 100_000)
            open("flooding", "w")
        """,
        "--nproc-per-node=2",
        "--shutdown-timeout=0",
        loop=loop,
        stderr=stderr,
    )
    os.close(stderr)

    def seen() -> bool:
        return b"here is rank 1\n" in os.read(reader, 1 << 20)

    wait_for("the word of rank 1", seen)
    job.signal(signal.SIGTERM)
    drain = threading.Thread(target=lambda: [None for _ in iter(lambda: os.read(reader, MIB), b"")])
    drain.start()
    job.wait(LAUNCH_TIMEOUT_S)
    drain.join(DEADLINE_S)
    os.close(reader)


@on_each_loop
def test_a_log_folder_lost_while_the_job_runs_is_the_hosts_fault_and_no_usage_error(
    launch: Launcher, loop: str
) -> None:
    job = launch(
        """
        import shutil
        shutil.rmtree(sys.argv[1])
        open(sys.argv[1], "w").close()
        sys.exit(3)
        """,
        "--max-restarts=1",
        "--log-dir=logs",
        loop=loop,
        args=["logs"],
    )

    assert job.wait() == 1
    assert "rank 0 failed on" in job.stderr
    assert "cannot create the workers' log files in" in job.stderr.splitlines()[-1]
    assert "Traceback" not in job.stderr


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_an_end_that_is_asked_for_leaves_a_console_the_time_to_show_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stopped: bool
) -> None:
    monkeypatch.setattr(pump_module, "HURRY_S", 0.3 if is_stopped else DEADLINE_S)
    reader, writer = os.pipe()
    path = tmp_path / "out.log"
    path.touch()
    sink = DescriptorSink(writer, is_ours=True)
    pump = Pump()
    pump.add(Follower(path, PrefixedLines(None)), sink)
    path.write_bytes(b"x" * (1 << 20))  # more than the pipe takes

    def read_slowly() -> None:
        pump_is_asked.wait(DEADLINE_S)
        while os.read(reader, 1 << 16):
            pass

    pump_is_asked = threading.Event()
    reading = threading.Thread(target=read_slowly, daemon=True)
    if not is_stopped:
        reading.start()
    has_drained = anyio.Event()

    async def drain() -> None:
        await pump.drain()
        has_drained.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pump.run, lambda watch: None)
        pump.end_followers(pump.sizes())
        tasks.start_soon(drain)
        await anyio.wait_all_tasks_blocked()
        pump.hurry()
        pump_is_asked.set()
        with anyio.fail_after(DEADLINE_S):
            await has_drained.wait()
        tasks.cancel_scope.cancel()
    assert pump.is_stalled is is_stopped
    if not is_stopped:
        assert sink.bytes_taken == 1 << 20
    pump.close()
    if not is_stopped:
        reading.join(DEADLINE_S)  # it is at the end, once nobody writes
        assert not reading.is_alive()
    os.close(reader)


# Limits.


LOUD = """
line = b"%07d" + b"x" * 92 + b"\\n"
for number in range(80_000):
    os.write(1, line % number)
"""


@on_each_loop
@pytest.mark.parametrize("kept", ["--tee", "--redirects"])
def test_of_a_limited_log_the_end_is_kept_and_the_console_has_all(launch: Launcher, loop: str, kept: str) -> None:
    job = launch(LOUD, kept, "1", "--log-dir", "logs", "--keep-log-size", "2M", loop=loop)
    assert job.wait() == 0
    whole = b"".join(b"%07d" % number + b"x" * 92 + b"\n" for number in range(80_000))
    if kept == "--tee":
        assert job.stdout.replace("[default0]:", "").encode() == whole
    (log,) = (job.folder / "logs/latest").rglob("stdout.log")
    content = log.read_bytes()
    assert len(content) == len(whole) and content[-2 * MIB :] == whole[-2 * MIB :]
    assert content[:MIB] == bytes(MIB), "its oldest blocks are given back"
    assert log.stat().st_blocks * 512 <= 4 * MIB


def test_a_limited_log_keeps_what_another_follower_of_it_has_not_read(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.touch()
    console = Follower(path, PrefixedLines(None))
    limited = Follower(path, PrefixedLines(None), keeps=MIB, sharers=[console])
    written = b"".join(b"%09d\n" % number for number in range(600_000))
    path.write_bytes(written)
    while limited.next_piece(is_ended=False):
        pass
    assert path.read_bytes() == written, "a console that stalls loses nothing"
    shown = bytearray()
    while piece := console.next_piece(is_ended=False):
        shown += piece
    assert shown == written
    with path.open("ab") as file:
        file.write(written[: 1 << 20])
    while limited.next_piece(is_ended=False):
        pass
    assert path.read_bytes()[:MIB] == bytes(MIB) and path.read_bytes()[-MIB:] == written[:MIB]
    console.close()
    limited.close()


def test_where_a_file_system_frees_no_parts_of_files_a_follower_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_module, "_fallocate", None)
    path = tmp_path / "stdout.log"
    path.touch()
    follower = Follower(path, PrefixedLines(None), keeps=MIB)
    assert not follower.can_free
    follower.close()
