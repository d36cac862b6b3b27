"""Host limits: the agent either manages without what its workers have used up, or reports the shortage."""

from __future__ import annotations

import os
import resource
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from kit.agents import listening_ports
from kit.launching import Job, Launcher
from kit.ports import quiet_port
from kit.waiting import DEADLINE_S, wait_for

from aelastic.agent.open_files import files_needed
from aelastic.cli.arguments import parse

pytestmark = pytest.mark.usefixtures("warm_stores")

# In an agent: once a file of that name exists, the host refuses to create threads, or processes.
NO_THREADS = """
import os, threading
start = threading.Thread.start

def refuse(thread):
    if os.path.exists("full"):
        raise RuntimeError("can't start new thread")
    start(thread)

threading.Thread.start = refuse
"""
# In an agent: the host refuses to start workers, but not helpers.  As in a real refusal, the call in `subprocess`
# fails: the agent treats no other EAGAIN as a host limit.
NO_WORKERS = """
import contextlib, errno, os, subprocess, unittest.mock
import aelastic.procs
aelastic.procs.START_PAUSES_S = (0.05, 0.1)
refusal = BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

class Refused(subprocess.Popen):
    def __init__(self, command, **keywords):
        is_worker = any("worker.py" in str(word) for word in command)
        refused = unittest.mock.patch("os.pipe", side_effect=refusal) if is_worker else contextlib.nullcontext()
        with refused:
            super().__init__(command, **keywords)

subprocess.Popen = Refused
"""

# Exhausts the host, and dies of it.
FILLS_UP = """
say("try", restart)
open("full", "w").close()
raise BlockingIOError("no more")
"""


def assert_no_bug(job: Job) -> None:
    assert "a bug in aelastic" not in job.stderr, job.story
    assert "aelastic/" not in job.stderr, job.story  # a traceback of ours


def test_a_worker_that_leaves_no_threads_is_started_again_and_the_job_that_fails_of_it_has_its_report(
    launch: Launcher,
) -> None:
    job = launch(FILLS_UP, "--max-restarts=1", wrapper=NO_THREADS)
    job.assert_ends(1)
    assert job.lines == ["try 0", "try 1"], "the output is complete"
    assert "rank 0 failed" in job.stderr and "cause     : BlockingIOError: no more at " in job.stderr, job.story
    assert_no_bug(job)


@pytest.mark.parametrize(
    "wrapper, what, topic",
    [
        (
            NO_THREADS.replace('os.path.exists("full")', "True"),
            "the agent cannot continue: this host cannot start more threads",
            "the-host-is-out-of-processes-or-memory",
        ),
        (
            NO_WORKERS,
            "the worker of local rank 0 cannot be started: this host cannot start more processes",
            "a-worker-cannot-be-started",
        ),
    ],
)
def test_a_host_that_is_short_of_them_is_reported_and_no_restart_is_used(
    launch: Launcher, wrapper: str, what: str, topic: str
) -> None:
    job = launch("say('started')", "--max-restarts=3", wrapper=wrapper)
    job.assert_ends(1)
    remedy = ": raise the limit (ulimit -u, pids.max)"
    assert job.stderr.splitlines()[-1] == f"aelastic: error: {what}{remedy} (help: {topic})"
    assert "restart" not in job.stderr and not job.lines, job.story


@pytest.fixture
def few_pids() -> Iterator[Callable[[int], list[str]]]:
    """Returns a function that makes a command run in a cgroup with a limit of processes and threads."""
    root = next((path for path in map(Path, ("/sys/fs/cgroup/pids", "/sys/fs/cgroup")) if path.is_dir()), None)
    group = Path(f"{root}/test-{uuid.uuid4().hex}")
    try:
        group.mkdir()
        (group / "pids.max").read_text()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")

    def limit(count: int) -> list[str]:
        (group / "pids.max").write_text(str(count))
        return ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]

    yield limit
    wait_for("the cgroup is empty", lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


@pytest.mark.all
@pytest.mark.parametrize("turn", range(3))
def test_a_worker_that_forks_up_to_the_limit_costs_a_restart_and_no_more(
    launch: Launcher, few_pids: Callable[[int], list[str]], turn: int
) -> None:
    job = launch(
        """
        import threading
        while True:  # to the limit, in the second attempt as in the first
            if rank % 2 or os.fork() == 0:
                threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        """,
        "--nproc-per-node=2",
        "--max-restarts=1",
        prefix=few_pids(60),
    )
    job.assert_ends(1, limit_s=2 * DEADLINE_S)
    assert "1 of 1" in job.stderr and "FAILED" in job.stderr, job.story
    assert_no_bug(job)


def test_a_node_that_cannot_start_workers_gives_up_its_seat_and_the_others_continue(launch: Launcher) -> None:
    options = ("--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{quiet_port()}", "--rdzv-id=limits")
    both_at_first = ("--max-restarts=1", "--rdzv-conf=last_call_timeout=60")
    worker = "say('world', os.environ['WORLD_SIZE'], restart)\nwait_for('go' if os.environ['WORLD_SIZE'] == '1' else '/none')\n"
    good = launch(worker, *options, *both_at_first, name="good", env={"LOGLEVEL": "INFO"})
    bad = launch(worker, *options, *both_at_first, name="bad", wrapper=NO_WORKERS)
    bad.assert_ends(1)
    refusal = "the worker of local rank 0 cannot be started: this host cannot start more processes"
    assert refusal in bad.stderr.splitlines()[-1], bad.story
    good.wait_line("world 1 0")
    good.go()
    good.assert_ends()
    assert refusal in good.stderr, good.story
    assert_no_bug(bad)


# Descriptors.

WITH_ALL = ("--tee=3", "--duplicate-stdout-filters=x", "--duplicate-stderr-filters=x", "--expect-output=step:60")


@pytest.mark.parametrize(
    "options", [pytest.param((), id="plain", marks=pytest.mark.all), pytest.param(WITH_ALL, id="all that opens files")]
)
def test_as_many_files_as_are_counted_are_enough_for_a_failure_and_a_restart(
    launch: Launcher, tmp_path: Path, options: tuple[str, ...]
) -> None:
    options = ("--nproc-per-node=8", "--max-restarts=1", f"--log-dir={tmp_path / 'logs'}", *options)
    limit = files_needed(parse([*options, __file__], {}).spec)
    worker = "say('here', restart)\nwait_for(f'go{restart}')\nsys.exit(rank == 1 and restart == 0)\n"
    job = launch(worker, *options, prefix=["prlimit", f"--nofile={limit}"])
    for restart in (0, 1):
        wait_for(f"all of {restart}", lambda: sum(f"here {restart}" in line for line in job.lines) == 8)  # noqa: B023
        (job.folder / f"go{restart}").touch()
    job.assert_ends()
    assert_no_bug(job)
    refused = launch(worker, *options, prefix=["prlimit", f"--nofile={limit - 1}"], name="refused")
    refused.assert_ends(2)
    assert f"opens up to {limit} files, and may open {limit - 1}" in refused.stderr and not refused.lines


@pytest.mark.parametrize("limit", [9, pytest.param(16, marks=pytest.mark.all), 28])
def test_too_few_files_for_an_agent_are_refused_in_one_line(launch: Launcher, limit: int) -> None:
    job = launch("say('started')", prefix=["prlimit", f"--nofile={limit}"])
    job.assert_ends(2)
    assert job.stderr.count("\n") == 1 and "ulimit -n" in job.stderr, job.story
    assert not job.lines


@pytest.mark.all
@pytest.mark.parametrize("room", range(0, 12, 2))
def test_an_agent_that_runs_out_of_files_later_ends_its_workers_and_reports_why(launch: Launcher, room: int) -> None:
    """A surrounding program or an administrator may set such a limit."""
    worker = """
    import socket
    socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 10).close()
    say("ready")
    wait_for("go")
    sys.exit(1)
    """
    job = launch(worker, "--nproc-per-node=2", "--max-restarts=1")
    job.wait_line("ready", 2)
    job.child("workers/tcpstore/server.py")
    taken = [int(name) for name in os.listdir(f"/proc/{job.pid}/fd")]
    resource.prlimit(job.pid, resource.RLIMIT_NOFILE, (max(taken) + 1 + room, max(taken) + 1 + room))
    job.go()
    job.assert_ends(1)
    assert_no_bug(job)
    assert "files" in job.stderr or "FAILED" in job.stderr, job.story


def test_idle_connections_to_the_coordinator_do_not_take_what_a_restart_needs(launch: Launcher) -> None:
    endpoint = quiet_port()
    options = ("--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{endpoint}", "--rdzv-id=limits")
    job = launch(
        "say('run', restart, os.environ['MASTER_PORT'])\nwait_for(f'go{restart}')\nsys.exit(restart == 0)\n",
        *options,
        "--max-restarts=1",
        "--rdzv-conf=last_call_timeout=0.1",
        prefix=["prlimit", "--nofile=128"],
    )
    (line,) = job.wait_line("run 0")
    ports = listening_ports(job.pid) - {endpoint, int(line.split()[2])}
    assert len(ports) == 2  # for the job's agents, and for their votes
    with ExitStack() as connections:
        for port in [*ports] * 140:
            connections.enter_context(socket.create_connection(("localhost", port)))
        (job.folder / "go0").touch()
        job.wait_line("run 1")
        (job.folder / "go1").touch()
        assert job.wait() == 0, job.story
    assert job.stderr.count("dropped a connection from ") == 1, job.story
    assert_no_bug(job)
    job.assert_nothing_left()
