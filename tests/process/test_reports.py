"""Reports of jobs that die, from real jobs on the command line."""

from __future__ import annotations

import json
import os
import re
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.launching import LAUNCH_TIMEOUT_S, Launcher
from kit.ports import quiet_port
from kit.warm.interpreters import Warm

pytestmark = pytest.mark.usefixtures("warm_stores")

MEMORY = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES = 192 << 20


def test_a_plain_script_is_reported_with_its_exception_its_traceback_and_its_rank_and_the_program_above_has_the_cause(
    launch: Launcher, tmp_path: Path
) -> None:
    job = launch(
        """
        def train(batch):
            raise ValueError(f"batch {batch} is empty")

        if rank == 1:
            train(7)
        time.sleep(100)
        """,
        "--nproc-per-node=2",
        env={"TORCHELASTIC_ERROR_FILE": str(tmp_path / "above.json")},
    )

    job.assert_ends(1)
    live, report = job.stderr.split("FAILED", 1)
    assert "ValueError: batch 7 is empty" in report and "raise ValueError(" in report
    assert re.search(r"worker\.py\", line \d+, in train", report)
    assert "rank      : 1 (local_rank: 1)" in report and "exitcode  : 1 (pid: " in report
    assert "Stopped by the agent: rank 0" in report and "  log       : " not in report
    assert live.count("ValueError: batch 7 is empty\n") == 2  # the worker's own output, and the agent's line
    for ours in ("supervisor.py", "procs.py", "asyncio", "anyio", "uvloop"):
        assert ours not in job.stderr, "no frame of the agent appears"
    message = json.loads((tmp_path / "above.json").read_text())["message"]
    assert (message["message"], message["errorCode"]) == ("ValueError: batch 7 is empty", 1)
    assert "worker.py" in message["extraInfo"]["py_callstack"]


def test_ranks_that_raise_together_are_all_told_and_none_of_them_was_stopped(launch: Launcher, tmp_path: Path) -> None:
    job = launch(
        f"""
        import atexit

        def end():
            open({str(tmp_path)!r} + f"/{{rank}}", "w").close()
            if rank == 0:
                for other in range(1, 4):
                    wait_for({str(tmp_path)!r} + f"/{{other}}")
            else:
                time.sleep(600)  # as an interpreter that imported much takes its time to end

        sys.excepthook = lambda *error: (sys.__excepthook__(*error), end())
        raise ValueError("batch is empty")
        """,
        "--nproc-per-node=4",
    )

    assert job.wait() == 1
    report = job.stderr[job.stderr.index("FAILED") :]
    assert re.search(r"\nAlso raised: ranks 1-3: ValueError: batch is empty at \S+worker\.py:\d+\n", report)
    assert "Stopped by the agent" not in report
    assert report.count("batch is empty\n") == 1, "the traceback appears once"


def test_the_log_file_of_the_report_is_there_when_the_job_is_over(launch: Launcher, tmp_path: Path) -> None:
    job = launch("sys.exit('no batch left')", f"--log-dir={tmp_path / 'logs'}", "--tee=3")
    job.assert_ends(1)
    named = re.findall(r"^  log       : (.+)$", job.stderr, re.MULTILINE)
    assert [Path(path).read_text() for path in named] == ["no batch left\n"]


def test_an_exception_that_was_handled_and_printed_is_not_the_cause(launch: Launcher) -> None:
    job = launch(
        """
        import traceback

        try:
            1 / 0
        except ZeroDivisionError:
            traceback.print_exc()
        sys.exit(9)
        """
    )

    assert job.wait() == 9
    assert "  cause     : exited with code 9\n" in job.stderr


@pytest.mark.ci
@pytest.mark.all
def test_what_torchs_record_wrote_is_the_cause_and_its_file_is_named(
    launch: Launcher, tmp_path: Path, warm: Warm
) -> None:
    job = launch(
        """
        from torch.distributed.elastic.multiprocessing.errors import record

        @record
        def main():
            raise RuntimeError("recorded by torch")

        main()
        """,
        f"--log-dir={tmp_path / 'logs'}",
        env=warm.env,
    )

    assert job.wait(LAUNCH_TIMEOUT_S) == 1
    named = [Path(name).is_file() for name in re.findall(r"error_file: (/\S+/error\.json)", job.stderr)]
    assert named == [True]
    assert re.search(r"cause     : RuntimeError: recorded by torch at .*worker\.py:\d+", job.stderr)


@pytest.mark.all
def test_torchrun_above_an_agent_tells_the_workers_cause(launch: Launcher, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--no-python"]
    above = launch("raise LookupError('far below')", prefix=torchrun)

    assert above.wait(LAUNCH_TIMEOUT_S) == 1
    report = above.stderr[above.stderr.rindex("Root Cause") :]
    assert "LookupError: far below" in report


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A version 1 cgroup with little memory; its processes are the test's."""
    if os.geteuid() != 0 or not os.access(MEMORY, os.W_OK):
        pytest.skip("needs root and a writable memory cgroup of version 1")
    inside = Path("/proc/self/cgroup").read_text()
    mine = re.search(r"^\d+:memory:(.*)$", inside, re.MULTILINE)
    if mine is None:
        pytest.skip("needs a memory cgroup of version 1")
    group = MEMORY / mine[1].strip("/") / f"aelastic-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
        yield group
    finally:
        group.rmdir()


def test_an_out_of_memory_kill_is_called_one(launch: Launcher, small_memory: Path) -> None:
    enter = f"import os\nopen({str(small_memory / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
    job = launch("held = [bytearray(1 << 20) for _ in range(1024)]", wrapper=enter)

    job.assert_ends(137)
    assert "out-of-memory" in job.stderr
    assert "192.0 MiB" in job.stderr


# Every node reports the job's cause.

# Rank 0 exits with an open socket; rank 1, at the other end, fails because of it.
PEERS = """
    import socket

    path = os.environ["PEERS_AT"]
    if rank == 0:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen()
            peer, _ = server.accept()
            peer.recv(1)
            os._exit(3)
    wait_for(path)
    peer = socket.socket(socket.AF_UNIX)
    while peer.connect_ex(path):
        time.sleep(0.01)
    peer.send(b"!")
    assert not peer.recv(1)
    os._exit(4)
"""


def test_nodes_that_both_fail_tell_the_same_cause_first(launch: Launcher, tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{quiet_port()}"
    options = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=job", "--max-restarts=0")
    files = [tmp_path / f"error-{node}.json" for node in range(2)]
    jobs = [
        launch(
            PEERS,
            *options,
            name=f"node{node}",
            env={"PEERS_AT": str(tmp_path / "peers"), "TORCHELASTIC_ERROR_FILE": str(file)},
        )
        for node, file in enumerate(files)
    ]

    codes = {job.wait(LAUNCH_TIMEOUT_S) for job in jobs}
    causes = {job.stderr.partition("Root Cause")[2].partition("  cause     : ")[2].split("\n")[0] for job in jobs}
    reported = [json.loads(file.read_text())["message"] for file in files]

    assert codes in ({3}, {4}) and len(causes) == 1
    is_first = codes == {3}
    (cause,) = causes
    assert cause == f"exited with code {3 if is_first else 4}"
    assert {message["errorCode"] for message in reported} == codes
    assert {message["message"] for message in reported} == {cause}
