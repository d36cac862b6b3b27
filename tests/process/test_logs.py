"""Worker output: every byte reaches the files, every line the console, and no worker waits for either."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import stat
import subprocess
import sys
import threading
import tty
from collections import Counter
from pathlib import Path
from typing import IO, Any

import pytest
from kit.effort import EFFORT
from kit.launching import LAUNCH_TIMEOUT_S, Launcher, cmdline, on_each_loop
from kit.launching import run as run_on
from kit.waiting import DEADLINE_S, wait_for

from aelastic import RunResult, Std, Supervisor, WorkerSpec, WorkerState

pytestmark = pytest.mark.usefixtures("warm_stores")

MIB = 1 << 20
KEPT = "--log-dir=logs"


def attempt(folder: Path, number: int = 0) -> Path:
    return folder / "logs" / "latest" / f"attempt_{number}"


def files(folder: Path) -> dict[str, bytes]:
    """Files of the only run in a log folder, by path, without its event log."""
    root = folder / "logs" / "latest"
    found = (path for path in sorted(root.rglob("*")) if path.is_file() and path.name != "events.jsonl")
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


def read_all(stream: IO[bytes], into: list[bytes]) -> threading.Thread:
    thread = threading.Thread(target=lambda: into.append(stream.read()))
    thread.start()
    return thread


# Layout and choice.


EVERYTHING = bytes(range(256)) * 4096


@on_each_loop
def test_files_lie_where_torchrun_puts_them_streams_are_chosen_by_local_rank_and_a_killed_worker_loses_no_byte(
    launch: Launcher, loop: str
) -> None:
    job = launch(
        """
        everything = bytes(range(256)) * 4096 if restart == rank == 0 else b""
        os.write(1, f"out {restart} {rank}\\n".encode() + everything)
        os.write(2, f"err {restart} {rank}\\n".encode() + everything[::-1])
        open(f"written{rank}", "w").close()
        if restart == 0:
            for other in range(4):
                wait_for(f"written{other}")
            os.kill(os.getpid(), signal.SIGKILL) if rank == 0 else time.sleep(600)
        """,
        *("--nproc-per-node=4", "--max-restarts=1", KEPT, "--redirects=0:3,1:1,2:2", "--tee=2:3,3:1", "--role=trainer"),
        loop=loop,
    )
    job.assert_ends()
    assert re.fullmatch(r"[0-9a-f-]{36}_\w+", (job.folder / "logs" / "latest").resolve().name)
    expected = {
        f"attempt_{restart}/{rank}/{name}.log": f"{name[3:]} {restart} {rank}\n".encode()
        for restart in (0, 1)
        for rank, name in ((0, "stdout"), (0, "stderr"), (1, "stdout"), (2, "stdout"), (2, "stderr"), (3, "stdout"))
    }
    expected["attempt_0/0/stdout.log"] += EVERYTHING
    expected["attempt_0/0/stderr.log"] += EVERYTHING[::-1]
    assert files(job.folder) == expected
    assert sorted(job.lines) == [f"[trainer{rank}]:out {restart} {rank}" for rank in (2, 3) for restart in (0, 1)]
    lines = sorted(line for line in job.stderr.splitlines() if re.match(r"(\[.*\]:)?err ", line))
    assert lines == [
        f"{name}err {n} {rank}"
        for name, ranks in (("[trainer2]:", (2,)), ("", (1, 3)))
        for n in (0, 1)
        for rank in ranks
    ]


def test_files_that_were_requested_stay_without_a_log_folder_too_and_their_place_is_reported(launch: Launcher) -> None:
    job = launch("say('hello')", "--redirects=1")
    assert job.wait() == 0, job.story
    (log,) = job.tmp.rglob("*.log")
    assert log.read_text() == "hello\n" and str(log.parent.parent.parent) in job.stderr
    assert not job.left()
    (folder,) = job.tmp.iterdir()
    assert log.is_relative_to(folder)
    # The temporary folder is shared with other users, who must not read this.
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


# Amount of output: a tenth is enough to fill every buffer on the way several times.
TIMES = 1 if EFFORT == "quick" else 10
PIECES = rf"""
TIMES = {TIMES}

def pieces(rank):
    if rank == 0:  # lines of all kinds, the last one without its end
        every_byte = bytes(each for each in range(256) if each not in b"\r\n")
        return [b"one\n\ntwo\r\nbar 1%\rbar 2%\n", every_byte + b"\n", b"x" * 300_000 + b"\n", b"no newline"]
    if rank == 1:  # lines of 1 or 10 MB
        return ([b"x" * 100_000] * (10 * TIMES) + [b"\n"]) * 3
    if rank == 2:  # text and newline one by one
        return [b"from 2", b"\n"] * 500
    return [b"".join(b"%06d " % number + b"y" * 90 + b"\n" for number in range(2500))] * (10 * TIMES)  # 2.5 or 25 MB

bar = [b"50%\r", b"51%\r", b"52%\r", b"done\n", *pieces(0)]
"""


@on_each_loop
def test_lines_are_prefixed_and_whole_and_the_files_have_what_was_written(launch: Launcher, loop: str) -> None:
    job = launch(
        f"""{PIECES}
for number, piece in enumerate(pieces(rank)):
    if number == 5 and rank in (1, 2):  # each is in the middle of what the other writes
        open(f"half{{rank}}", "w").close()
        wait_for(f"half{{3 - rank}}")
    os.write(1, piece)
for piece in bar if rank == 0 else []:
    os.write(2, piece)
""",
        *("--nproc-per-node=4", "--tee=3", KEPT),
        loop=loop,
    )
    job.assert_ends(limit_s=LAUNCH_TIMEOUT_S)
    scope: dict[str, Any] = {}
    exec(PIECES, scope)

    def prefixed(rank: int, pieces: list[bytes]) -> list[bytes]:
        prefix, lines = b"[default%d]:" % rank, b"".join(pieces).removesuffix(b"\n").split(b"\n")
        return [prefix + re.sub(rb"\r(?!$)", b"\r" + prefix, line) for line in lines]

    shown = (job.folder / "stdout").read_bytes().split(b"\n")
    kept = files(job.folder)
    for rank in range(4):
        assert kept[f"attempt_0/{rank}/stdout.log"] == b"".join(scope["pieces"](rank))
        of_rank = [line for line in shown if line.startswith(b"[default%d]:" % rank)]
        assert of_rank == prefixed(rank, scope["pieces"](rank)), rank
    assert sum(line.startswith(b"[default") for line in shown) == len(shown) - 1
    assert kept["attempt_0/0/stderr.log"] == b"".join(scope["bar"])
    assert (job.folder / "stderr").read_bytes() == b"\n".join(prefixed(0, scope["bar"])) + b"\n"


def test_every_byte_is_in_the_file_when_the_agent_is_sigkilled(launch: Launcher) -> None:
    job = launch(
        "os.write(1, bytes(range(256)) * 4096)\nopen(f'written{rank}', 'w').close()\ntime.sleep(600)",
        *("--nproc-per-node=2", "--redirects=0:1", "--tee=1:1", KEPT),
    )
    wait_for("the workers' output", lambda: len([*job.folder.glob("written?")]) == 2)
    job.signal(signal.SIGKILL)
    job.wait()
    job.wait_nothing_left()
    assert files(job.folder) == {f"attempt_0/{rank}/stdout.log": EVERYTHING for rank in (0, 1)}


# Live output.


@on_each_loop
def test_what_a_worker_writes_is_seen_while_it_runs(launch: Launcher, loop: str) -> None:
    job = launch(
        """
        for number in range(3):
            say("out", number, rank)
            os.write(2, f"err {number} {rank}\\n".encode())
            wait_for(f"go{number}")
        if rank == 0:
            os.write(2, b"\\r 50%")
            wait_for("go")
            os.write(2, b"\\r100%")
        """,
        *("--nproc-per-node=2", "--tee=1:3", KEPT),
        loop=loop,
    )
    for number in range(3):
        for words in [f"{stream} {number} {rank}\n" for stream in ("out", "err") for rank in (0, 1)]:
            wait_for(lambda words=words: f"{words}\n{job.story}", lambda words=words: words in job.stdout + job.stderr)  # type: ignore[misc]
        (job.folder / f"go{number}").touch()
    wait_for("half a bar, as it is", lambda: (job.folder / "stderr").read_bytes().endswith(b"\n\r 50%"))
    job.go()
    job.assert_ends()
    assert (job.folder / "stderr").read_bytes().endswith(b"\n\r 50%\r100%")


BAR = """
for percent in range(3):
    os.write(2, b"\\r%2d%%" % percent)
    wait_for(f"go{percent}_{rank}")
os.write(2, b"\\n")
"""


@on_each_loop
def test_progress_bars_are_live_and_no_two_ranks_share_a_line(launch: Launcher, loop: str) -> None:
    job = launch(BAR, "--nproc-per-node=2", "--tee=2", KEPT, loop=loop)

    def stderr() -> bytes:
        return (job.folder / "stderr").read_bytes()

    def wait_frame(rank: int, percent: int) -> None:
        wait_for(f"{percent} % of rank {rank}", lambda: b"\r[default%d]:%2d%%" % (rank, percent) in stderr())

    for percent in range(3):
        for rank in (0, 1):
            wait_frame(rank, percent)
        for rank in (0, 1):
            (job.folder / f"go{percent}_{rank}").touch()
            if percent < 2:
                wait_frame(rank, percent + 1)
    assert job.wait() == 0, job.story
    for line in stderr().split(b"\n"):
        assert len(set(re.findall(rb"\[default\d\]", line))) <= 1
    for rank in (0, 1):
        assert (attempt(job.folder) / str(rank) / "stderr.log").read_bytes() == b"\r 0%\r 1%\r 2%\n"
    assert stderr().endswith(b"\n")


NO_WATCHES = "growth.GrowthWatch.watch = lambda self, path: None"
NO_INSTANCES = "growth.GrowthWatch.__init__ = lambda self: setattr(self, '_fd', None)"


@pytest.mark.parametrize("lack", [NO_WATCHES, NO_INSTANCES], ids=["no watches left", "no instances left"])
def test_output_is_shown_where_the_kernel_does_not_tell_of_it(launch: Launcher, lack: str) -> None:
    job = launch(
        "os.write(2, b'seen\\n')\nwait_for('go')\nsys.exit(restart == 0)", "--max-restarts=1",
        wrapper=f"from aelastic.base.loop import growth\n{lack}\n",
    )  # fmt: skip
    wait_for("its stderr", lambda: "seen\n" in job.stderr)
    job.go()
    job.assert_ends()
    assert job.stderr.splitlines().count("seen") == 2


def test_what_the_program_around_has_printed_before_comes_before(launch: Launcher) -> None:
    job = launch("os.write(1, b'of a worker\\n')", "--tee=1", KEPT, wrapper="print('of the program around')\n")
    job.assert_ends()
    assert job.lines == ["of the program around", "[default0]:of a worker"]


# Consoles that accept nothing, or too little.


def resident_kib(pid: int) -> int:
    match = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert match is not None
    return int(match[1])


@on_each_loop
def test_a_console_without_a_reader_blocks_no_worker_takes_no_memory_and_loses_nothing(
    launch: Launcher, loop: str
) -> None:
    job = launch(
        """
        wait_for("begin")
        for _ in range(12):
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
    out, err = list[bytes](), list[bytes]()
    readers = [read_all(job.process.stdout, out), read_all(job.process.stderr, err)]
    job.go()
    assert job.wait() == 0
    for reader in readers:
        reader.join(DEADLINE_S)
    job.process.stdout.close()
    job.process.stderr.close()
    assert out[0] == (b"[default0]:" + b"o" * 127 + b"\n") * (12 * 8192)
    shown = b"".join(line for line in err[0].splitlines(True) if not line.startswith(b"aelastic: "))
    assert shown == (b"e" * 127 + b"\n") * (12 * 8192)


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_a_reader_of_stdout_that_stops_blocks_no_worker(launch: Launcher, kind: str) -> None:
    reader, writer = os.pipe() if kind == "pipe" else pty.openpty()
    if kind == "terminal":
        tty.setraw(writer)
    job = launch("os.write(1, b'x' * (2 << 20) + b'\\n')\nopen('done', 'w').close()\n", stdout=writer)
    os.close(writer)
    wait_for("the worker to have written", (job.folder / "done").exists)
    seen = 0
    while seen < 2 * MIB + 1:
        chunk = os.read(reader, MIB)
        assert chunk.strip(b"x\n") == b""
        seen += len(chunk)
    job.assert_ends()
    os.close(reader)


def test_a_console_that_never_takes_more_is_given_up_and_the_files_are_named(launch: Launcher) -> None:
    job = launch(
        "os.write(1, b'x' * (1 << 20))",
        *("--tee=1", KEPT),
        stdout=subprocess.PIPE,
        wrapper="import aelastic.logs.pump\naelastic.logs.pump.STALL_TIMEOUT_S = 0.3\n",
    )
    assert job.wait() == 0, job.stderr
    assert not job.left()
    assert "console stopped taking output" in job.stderr and str(job.folder / "logs") in job.stderr
    assert files(job.folder)["attempt_0/0/stdout.log"] == b"x" * MIB
    assert job.process.stdout is not None
    job.process.stdout.close()


def test_a_console_that_has_gone_away_does_not_stop_the_job(launch: Launcher) -> None:
    reader, writer = os.pipe()
    job = launch(
        "wait_for('go')\nfor _ in range(5):\n    os.write(1, b'o' * (1 << 20))\n    os.write(2, b'e' * (1 << 20))",
        *("--tee=3", KEPT),
        stdout=writer,
        stderr=writer,
    )
    os.close(writer)
    os.close(reader)
    job.go()
    job.assert_ends()
    assert files(job.folder) == {f"attempt_0/0/std{end}.log": end[:1].encode() * 5 * MIB for end in ("out", "err")}


def test_a_console_that_stalls_at_the_end_can_be_given_up_and_nothing_it_has_not_shown_is_lost(
    launch: Launcher,
) -> None:
    unread, stderr = os.pipe()
    job = launch("for number in range(20_000):\n    os.write(2, b'line %d of many\\n' % number)", stderr=stderr)
    os.close(stderr)
    last = b"line 19999 of many\n"
    wait_for("the last line", lambda: [f for f in job.tmp.glob("*/stderr_*.log") if f.read_bytes().endswith(last)])
    wait_for("the worker's end", lambda: not [pid for pid in job.left() if "-u" in cmdline(pid)])

    def over() -> bool:  # at any stage: the first signal may arrive when the worker's exit is still unnoticed
        job.signal(signal.SIGINT)
        return job.process.poll() is not None

    wait_for("the end", over)
    # It succeeded or was stopped, depending on when the first signal came; its last words may not fit into the pipe.
    assert job.wait() in {0, -signal.SIGINT}
    (kept,) = job.tmp.glob("*_kept")
    assert not job.left()
    (rest,) = kept.glob("stderr_*.log")
    assert rest.read_bytes().endswith(last)
    os.close(unread)


def test_a_worker_that_floods_does_not_keep_another_from_the_console(launch: Launcher) -> None:
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
        *("--nproc-per-node=2", "--shutdown-timeout=0"),
        stderr=stderr,
    )
    os.close(stderr)
    wait_for("the word of rank 1", lambda: b"here is rank 1\n" in os.read(reader, MIB))
    job.signal(signal.SIGTERM)
    with open(reader, "rb") as rest:
        drain = read_all(rest, [])
        job.wait(LAUNCH_TIMEOUT_S)
        drain.join(DEADLINE_S)


@on_each_loop
def test_both_streams_may_go_to_one_place_and_their_lines_do_not_mix(launch: Launcher, loop: str) -> None:
    reader, writer = os.pipe()
    job = launch(
        """
        for _ in range(10):
            os.write(1, (b"o" * 99 + b"\\n") * 1000)
            os.write(2, (b"e" * 149 + b"\\n") * 1000)
        """,
        *("--nproc-per-node=2", "--tee=1", KEPT),
        loop=loop,
        stdout=writer,
        stderr=writer,
    )
    os.close(writer)
    with open(reader, "rb") as file:
        counts = Counter(file.read().split(b"\n"))
    assert job.wait() == 0
    assert [counts.pop(b"[default%d]:" % rank + b"o" * 99) for rank in range(2)] == [10_000] * 2
    assert counts.pop(b"") == 1
    # Text without a prefix is shown as it comes, so a line may be split if half of it was read.
    assert {bytes(set(line)) for line in counts} == {b"e"}
    assert sum(len(line) * count for line, count in counts.items()) == 20_000 * 149


# Disks.


def test_stderr_that_is_not_kept_takes_bounded_disk_and_a_rank_that_is_not_shown_still_tells_why_it_failed(
    launch: Launcher,
) -> None:
    job = launch(
        """
        for _ in range(8):
            os.write(2, (b"e" if rank == 0 else b"x") * (1 << 20))
        say("written", rank)
        if rank == 1:
            wait_for("go")
            raise ValueError("the cause")
        time.sleep(600)
        """,
        *("--nproc-per-node=2", "--local-ranks-filter=0"),
    )

    def logs() -> list[os.stat_result]:
        return [path.stat() for path in job.tmp.glob("*/stderr_0_?.log")]

    wait_for("all of it written", lambda: [each.st_size for each in logs()] == [8 * MIB] * 2)
    wait_for("all of it shown", lambda: (job.folder / "stderr").stat().st_size == 8 * MIB)
    wait_for("what was shown given back", lambda: all(0 < each.st_blocks * 512 < 4 * MIB for each in logs()))
    job.wait_line("written")
    job.go()
    job.assert_ends(1)
    assert job.lines == ["written 0"]
    assert "ValueError: the cause" in job.stderr and "xxxx" not in job.stderr.partition("rank 1 failed")[0]


def test_a_log_folder_lost_while_the_job_runs_is_the_hosts_fault_and_no_usage_error(launch: Launcher) -> None:
    lose = "import shutil\nshutil.rmtree('logs')\nopen('logs', 'w').close()\nsys.exit(3)"
    job = launch(lose, "--max-restarts=1", KEPT)
    assert job.wait() == 1
    assert "rank 0 failed on" in job.stderr and "Traceback" not in job.stderr
    assert "cannot create the workers' log files in" in job.stderr.splitlines()[-1]


def test_of_a_limited_log_the_end_is_kept_and_the_console_has_all(launch: Launcher) -> None:
    job = launch(
        "for number in range(80_000):\n    os.write(1, b'%07d' % number + b'x' * 92 + b'\\n')",
        *("--nproc-per-node=2", "--tee=0:1", "--redirects=1:1", KEPT, "--keep-log-size=2M"),
    )
    job.assert_ends()
    whole = b"".join(b"%07d" % number + b"x" * 92 + b"\n" for number in range(80_000))
    assert job.stdout.replace("[default0]:", "").encode() == whole
    for rank in (0, 1):
        log = attempt(job.folder) / str(rank) / "stdout.log"
        content = log.read_bytes()
        assert len(content) == len(whole) and content[-2 * MIB :] == whole[-2 * MIB :]
        assert content[:MIB] == bytes(MIB), "its oldest blocks are released"
        assert log.stat().st_blocks * 512 <= 4 * MIB


def test_filtered_lines_are_written_live_and_complete_behind_a_stalled_console(launch: Launcher) -> None:
    job = launch(
        """
        for number in range(20_000):
            os.write(1, b"line %d of %d%s\\n" % (number, rank, b" apple" * (number % 1000 == 0)))
        wait_for("go")
        os.write(1, b"the last apple")
        """,
        *("--nproc-per-node=2", "--tee=1", KEPT, "--duplicate-stdout-filters=apple"),
        stdout=subprocess.PIPE,
    )
    filtered = attempt(job.folder) / "filtered_stdout.log"
    expected = [f"[default{rank}]:line {n} of {rank} apple" for rank in (0, 1) for n in range(0, 20_000, 1000)]
    wait_for("the lines", lambda: filtered.exists() and sorted(filtered.read_text().splitlines()) == sorted(expected))
    assert job.process.stdout is not None
    drain = read_all(job.process.stdout, [])
    job.go()
    assert job.wait() == 0, job.stderr
    drain.join(DEADLINE_S)
    job.process.stdout.close()
    expected += [f"[default{rank}]:the last apple" for rank in (0, 1)]
    assert sorted(filtered.read_text().splitlines()) == sorted(expected)


# In a program.


def run(code: str, loop: str = "uvloop", **spec: Any) -> RunResult:
    args = ("-c", f"import os\n{code}")
    given = WorkerSpec(**{"entrypoint": sys.executable, "args": args, "max_restarts": 0, "local_world_size": 2, **spec})
    return run_on(loop, Supervisor(given).run())


@on_each_loop
def test_objects_instead_of_the_streams_get_everything_before_the_call_returns(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    sys.stdout.write("before\n")
    code = "os.write(1, 'größer\\n'.encode() * 20_000)\nos.write(2, b'bad \\xff byte\\nlast')"
    assert run(code, loop, tee=Std.ALL, log_dir=tmp_path).state is WorkerState.SUCCEEDED
    lines = out.getvalue().splitlines()
    assert lines[0] == "before"
    assert sorted(lines[1:]) == ["[default0]:größer"] * 20_000 + ["[default1]:größer"] * 20_000
    expected = [f"[default{rank}]:{word}" for rank in (0, 1) for word in ("bad \N{REPLACEMENT CHARACTER} byte", "last")]
    assert sorted(err.getvalue().splitlines()) == expected


def test_dev_null_as_a_log_folder_keeps_nothing_and_workers_write_to_the_console(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run("os.write(1, b'out\\n')\nos.write(2, b'err\\n')", redirects=Std.ALL, log_dir=Path(os.devnull))
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("out\n" * 2, "err\n" * 2)
    assert not list(tmp_path.iterdir())
