"""Workers as real processes: how they end, what ends with them, and what remains of an agent that dies."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kit.launching import Job, Launcher, alive, cmdline, on_each_loop, ran
from kit.waiting import DEADLINE_S, wait_for

from aelastic import procs
from aelastic.base.host import proc_table
from aelastic.errors import HostError
from aelastic.workers.backend import WorkerStart

SLEEPS = """
say("ready", os.getpid())
time.sleep(600)
"""

IGNORES = """
signal.signal(signal.SIGTERM, lambda *_: say("asked"))
signal.signal(signal.SIGINT, lambda *_: say("asked"))
say("ready", os.getpid())
rest()
"""

# The store process starts when a worker connects.
NEEDS_STORE = """
import socket
socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 10).close()
"""

# A daemon with neither the environment nor the session of its worker.
HAS_STRANGE_DAEMON = """
path = f"daemon{restart}"
start = f"setsid -f sh -c 'echo $$ > {path}; exec sleep 600' > /dev/null 2>&1"
subprocess.run(["env", "-i", "sh", "-c", start], check=True)
while not os.path.exists(path) or not open(path).read().strip():
    time.sleep(0.01)
say("daemon", open(path).read().strip())
"""

# A worker with every kind of descendant that may be left: a child, a grandchild in its own group, a daemon.
HAS_FAMILY = """
subprocess.Popen(["sleep", "600"])
subprocess.Popen(["sh", "-c", "sleep 600 & wait"], process_group=0)
if daemonize():
    time.sleep(600)
say("ready", os.getpid())
"""

GUARD = "guards-the-workers-of"
STORE = "workers/tcpstore/server.py"


# Stop.


NO_PIDFDS = """
import errno, os

def pidfd_open(*_):
    raise OSError(errno.ENOSYS, "no pidfds")

os.pidfd_open = pidfd_open
"""


# core/stories/group/stops.txt covers the time of the kill, on virtual time.
@pytest.mark.parametrize(
    "loop, wrapper",
    [("uvloop", ""), *(pytest.param(*one, marks=pytest.mark.all) for one in (("asyncio", ""), ("uvloop", NO_PIDFDS)))],
)
def test_a_worker_that_ignores_sigterm_is_killed_in_the_end(launch: Launcher, loop: str, wrapper: str) -> None:
    job = launch(IGNORES, "--shutdown-timeout=0.2", loop=loop, wrapper=wrapper)
    job.wait_line("ready")
    job.signal(signal.SIGTERM)
    job.assert_ends(-signal.SIGTERM)


def test_sigterm_goes_to_workers_alone_which_may_use_their_children_once_more_and_those_that_fail_then_are_named(
    launch: Launcher,
) -> None:
    job = launch(
        """
        LOADER = "import sys, time\\nfor line in sys.stdin: print('batch', flush=True)\\ntime.sleep(600)"
        loader = subprocess.Popen([sys.executable, "-c", LOADER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

        def use_loader():
            loader.stdin.write(b"more\\n")
            loader.stdin.flush()
            return loader.stdout.readline().decode().strip()

        def save(*_):
            say("saved", use_loader())  # a loader that got the signal as well would be gone
            if rank == 0:
                os._exit(1)  # a code, and no exception
            raise ConnectionError("the store is gone")

        use_loader()
        signal.signal(signal.SIGTERM, save)
        say("ready")
        rest()
        """,
        "--nproc-per-node=3",
    )
    job.wait_line("ready", 3)
    job.signal(signal.SIGTERM)
    job.assert_ends(-signal.SIGTERM)
    assert job.lines[3:] == ["saved batch"] * 3, job.story
    first, second = job.stderr.splitlines()[-2:]
    assert first == "aelastic: stopped by SIGTERM; 2 of 3 workers failed while they were stopping"
    assert second.startswith("aelastic: ranks 1, 2 ended by ConnectionError: the store is gone at "), second


@pytest.mark.parametrize(
    "loop, signum", [("uvloop", signal.SIGTERM), pytest.param("asyncio", signal.SIGINT, marks=pytest.mark.all)]
)
def test_a_second_signal_kills_now(launch: Launcher, loop: str, signum: int) -> None:
    job = launch(IGNORES, "--shutdown-timeout=600", "--nproc-per-node=2", loop=loop)
    job.wait_line("ready", 2)
    job.signal(signum)
    job.wait_line("asked", 2)
    job.signal(signum)
    job.assert_ends(-signum)


@pytest.mark.parametrize(
    "loop, signum",
    [
        ("uvloop", signal.SIGHUP),
        ("asyncio", signal.SIGINT),
        pytest.param("uvloop", signal.SIGTERM, marks=pytest.mark.all),
        pytest.param("asyncio", signal.SIGQUIT, marks=pytest.mark.all),
    ],
)
def test_signals_are_passed_on_as_they_come_and_the_agent_dies_of_them(
    launch: Launcher, loop: str, signum: int
) -> None:
    job = launch(
        """
        def leave(signum, _):
            say("got", signum)
            os._exit(0)

        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(signum, leave)
        say("ready")
        rest()
        """,
        loop=loop,
    )
    job.wait_line("ready")
    job.signal(signum)
    job.assert_ends(-signum)
    assert job.lines == ["ready", f"got {signum}"]


def test_a_fork_server_outlives_signals_which_are_as_ever_in_its_workers(launch: Launcher) -> None:
    job = launch(
        """
        say("ready", os.getppid(), *(signal.getsignal(each).name for each in (signal.SIGTERM, signal.SIGHUP)))
        wait_for("go")
        """,
        "--run-path",
        "--start-method=forkserver",
    )
    (line,) = job.wait_line("ready")
    _, fork_server, *handlers = line.split()
    assert handlers == ["SIG_DFL", "SIG_DFL"]
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT):
        os.kill(int(fork_server), signum)
    job.go()
    job.assert_ends()


def test_signals_to_handle_are_the_ones_named_and_no_others(launch: Launcher) -> None:
    worker = """
    signal.signal(signal.SIGUSR1, lambda *_: (say("got", "USR1"), os._exit(0)))
    say("ready")
    rest()
    """
    named = launch(worker, "--signals-to-handle", "SIGUSR1", name="named")
    other = launch(worker, "--signals-to-handle", "SIGUSR1", name="other")
    named.wait_line("ready")
    other.wait_line("ready")
    named.signal(signal.SIGUSR1)
    other.signal(signal.SIGTERM)  # dies at once, like any other program
    named.assert_ends(-signal.SIGUSR1)
    assert other.wait() == -signal.SIGTERM
    assert named.lines == ["ready", "got USR1"] and other.lines == ["ready"]
    other.wait_nothing_left()


def test_nohup_holds_for_the_agent_and_its_workers_and_a_guard_that_was_killed_is_not_missed(launch: Launcher) -> None:
    job = launch("say('ready', signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)\nwait_for('go')", prefix=["nohup"])
    assert job.wait_line("ready") == ["ready True"]
    # `pkill -f` matches command lines; the path of the Python installation is not ours to choose.
    assert "aelastic" not in " ".join(cmdline(job.child(GUARD))[1:])
    os.kill(job.child(GUARD), signal.SIGKILL)
    job.signal(signal.SIGHUP)
    job.go()
    job.assert_ends()


# Exit codes; test_verdicts.py covers aelastic's own for each death.


@pytest.mark.parametrize(
    "end",
    [
        "os._exit(7)",
        *(pytest.param(one, marks=pytest.mark.all) for one in ("os.kill(os.getpid(), signal.SIGSEGV)", "rest()")),
    ],
)
def test_whatever_ends_a_job_is_1_as_with_torchrun_where_that_is_requested(launch: Launcher, end: str) -> None:
    job = launch(f"say('ready')\n{end}", "--exit-codes=torchrun")
    if end == "rest()":
        job.wait_line("ready")
        job.signal(signal.SIGTERM)
    job.assert_ends(1)


def test_the_first_failure_decides_the_code_and_victims_do_not(launch: Launcher) -> None:
    job = launch(
        """
        if rank == 1:
            wait_for("go")
            os._exit(9)
        signal.signal(signal.SIGTERM, lambda *_: os._exit(5))
        say("ready")
        rest()
        """,
        "--nproc-per-node",
        "3",
    )
    job.wait_line("ready", 2)
    job.go()
    assert job.wait() == 9, job.story


# Leftovers.


def test_what_a_worker_leaves_is_gone_before_the_next_generation_and_outlives_no_agent(launch: Launcher) -> None:
    """Children, also in their own groups, and daemons, with and without its environment and session."""
    job = launch(
        f"""
if restart:
    for name in ("daemon0", "child"):
        say(name, os.path.exists(f"/proc/{{open(name).read().strip()}}/exe"))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
open("child", "w").write(str(child.pid))
{HAS_STRANGE_DAEMON}
{HAS_FAMILY}
os._exit(restart == 0)
""",
        "--max-restarts=1",
    )
    job.assert_ends()
    lines = [line for line in job.lines if not line.startswith("ready")]
    daemons = [int(line.split()[1]) for line in lines if line.startswith("daemon ")]
    assert lines[1:3] == ["daemon0 False", "child False"], job.story
    assert len(daemons) == 2 and not any(map(alive, daemons))


@pytest.fixture
def bystander() -> Iterator[int]:
    """An unrelated process: same user, same program, a session of its own."""
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(command, start_new_session=True) as process:
        yield process.pid
        assert process.poll() is None, "an unrelated process was killed"
        process.kill()


@on_each_loop
def test_nothing_of_a_sigkilled_agent_lives_on_and_nothing_else_is_touched(
    launch: Launcher, loop: str, bystander: int
) -> None:
    other = launch(NEEDS_STORE + SLEEPS, name="other", loop=loop)
    job = launch(NEEDS_STORE + HAS_FAMILY + "time.sleep(600)", "--nproc-per-node", "2", loop=loop)
    other.wait_line("ready")
    job.wait_line("ready", 2)
    # Wait for every process of both jobs: the store starts a little after the connections.
    job.child(GUARD), job.child(STORE), other.child(GUARD), other.child(STORE)
    others = set(other.left())
    # Per worker: itself, a child, a shell (slow to start) with its child, a daemon.  Plus agent, guard and store.
    wait_for(job.left_described, lambda: len(job.left()) >= 2 * 5 + 3)

    job.signal(signal.SIGKILL)

    assert job.wait() == -signal.SIGKILL
    job.wait_nothing_left()
    assert alive(bystander)
    assert set(other.left()) == others and os.listdir(other.tmp)
    other.signal(signal.SIGTERM)
    other.assert_ends(-signal.SIGTERM)


def test_a_guard_that_is_killed_is_replaced_and_the_agent_can_still_be_killed(launch: Launcher) -> None:
    job = launch(
        "if restart == 0:\n    say('first')\n    wait_for('go')\n    os._exit(1)\n" + HAS_FAMILY + "time.sleep(600)",
        "--max-restarts",
        "1",
    )
    job.wait_line("first")
    first = job.child(GUARD)
    os.kill(first, signal.SIGKILL)
    wait_for("the guard dead", lambda: not alive(first))
    job.go()
    job.wait_line("ready")
    second = job.child(GUARD)
    os.kill(second, signal.SIGKILL)
    wait_for("another guard", lambda: {pid for pid in job.left() if GUARD in cmdline(pid)} - {first, second})

    job.signal(signal.SIGKILL)

    job.wait()
    job.wait_nothing_left()


AN_AGENT_KILLED_AS_IT_STARTS_A_GUARD = """
import os, signal, subprocess
from aelastic.workers import guard_process
from aelastic.workers.guard_process import GuardProcess

def start_and_die(*args, start=guard_process.start_program, **options):
    start(*args, **options)
    os.kill(os.getpid(), signal.SIGKILL)

worker = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(worker.pid, flush=True)
guard = GuardProcess("no mark", None)
guard.send("+", worker.pid)
guard_process.start_program = start_and_die
guard.ensure()
"""


def test_a_guard_has_all_that_it_needs_before_it_runs() -> None:
    """The agent may be killed right after it has replaced its guard."""
    command = [sys.executable, "-c", AN_AGENT_KILLED_AS_IT_STARTS_A_GUARD]
    agent = ran(*command)
    assert agent.returncode == -signal.SIGKILL, agent.stderr
    wait_for("the worker gone", lambda: not alive(int(agent.stdout)))


def test_nothing_is_left_of_an_agent_in_an_agent_when_the_outer_one_is_killed(launch: Launcher) -> None:
    inner = launch.write("job/inner.py", HAS_FAMILY + "time.sleep(600)")
    job = launch(
        f"os.execv(sys.executable, [sys.executable, '-m', 'aelastic', '--nproc-per-node', '2', {str(inner)!r}])",
    )
    job.wait_line("ready", 2)
    guards = [pid for pid in job.left() if GUARD in cmdline(pid)]
    assert len(guards) == 2

    job.signal(signal.SIGKILL)

    job.wait()
    job.wait_nothing_left()


def test_a_chain_of_forks_that_outruns_a_look_is_gone_too(launch: Launcher) -> None:
    job = launch(
        """
        say("ready")
        while True:  # a chain: each link starts the next and dies
            if os.fork():
                time.sleep(0.02)
                os._exit(0)
        """
    )
    job.wait_line("ready")
    job.assert_ends()


# As the first process in a container.


@pytest.fixture
def unshare() -> list[str]:
    command = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no PID namespace can be made here (needs root)")
    return command


def init_of(job: Job) -> int:
    """The pid, in our namespace, of the job's process that has pid 1 in its own."""

    def found() -> list[int]:
        children = [entry.pid for entry in proc_table.processes() if entry.parent == job.pid]
        return [pid for pid in children if "aelastic" in cmdline(pid)]

    return int(wait_for("an agent with pid 1", found)[0])


@on_each_loop
def test_as_pid_1_it_reaps_orphans_while_workers_run_and_exits_with_143_at_sigterm(
    launch: Launcher, loop: str, unshare: list[str]
) -> None:
    job = launch(
        """
        def zombies():
            found = []
            for name in filter(str.isdigit, os.listdir("/proc")):
                try:
                    state = open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[0]
                except OSError:
                    continue
                if state == "Z":
                    found.append(name)
            return found

        for _ in range(20):
            if not os.fork():  # an orphan's parent
                if not os.fork():
                    if not os.fork():  # outlives its parent by a moment
                        time.sleep(0.05)
                    os._exit(0)
                os._exit(0)
        for _ in range(20):
            os.wait()
        deadline = time.monotonic() + 20
        while (left := zombies()) and time.monotonic() < deadline:
            time.sleep(0.02)
        say("agent", os.getppid())
        say("zombies", len(left))
        """
        + textwrap.indent(HAS_FAMILY + "time.sleep(600)", " " * 8),
        loop=loop,
        prefix=unshare,
    )
    job.wait_line("ready")
    assert job.lines[:2] == ["agent 1", "zombies 0"]
    os.kill(init_of(job), signal.SIGTERM)
    assert job.wait() == 128 + signal.SIGTERM, job.story
    wait_for("nothing left", lambda: not job.left())
    job.assert_nothing_left()


# Processes that don't end.


FREEZER = Path("/sys/fs/cgroup/freezer")


@pytest.fixture
def freezer() -> Iterator[Path]:
    """A cgroup whose members can be frozen: SIGKILL has no effect on them until they thaw."""
    folder = FREEZER / f"aelastic-test-{os.getpid()}"
    try:
        folder.mkdir()
        assert (folder / "freezer.state").exists()
    except (OSError, AssertionError):
        pytest.skip("no cgroup v1 freezer can be used here")
    try:
        yield folder
    finally:
        (folder / "freezer.state").write_text("THAWED")
        for pid in (folder / "cgroup.procs").read_text().split():
            proc_table.kill(int(pid))
        wait_for("the cgroup empty", lambda: not (folder / "cgroup.procs").read_text().strip())
        folder.rmdir()


# In the agent: a shorter wait for processes that cannot end.
IMPATIENT = """
from aelastic import procs
from aelastic.agent.group import worker_group
from aelastic.workers import guard, guard_process

guard.LOOKS_MAX = 3
worker_group.KILL_WAIT_S = guard_process.GUARD_TIMEOUT_S = procs.ORPHANS_TIMEOUT_S = 0.3
"""


def test_the_agent_leaves_when_a_worker_survives_sigkill_and_names_it(launch: Launcher, freezer: Path) -> None:
    job = launch(SLEEPS, "--shutdown-timeout", "0.2", "--nproc-per-node", "2", wrapper=IMPATIENT)
    stuck, other = (int(line.split()[1]) for line in job.wait_line("ready", 2))
    (freezer / "cgroup.procs").write_text(str(stuck))
    (freezer / "freezer.state").write_text("FROZEN")
    wait_for("the worker frozen", lambda: (freezer / "freezer.state").read_text().strip() == "FROZEN")
    job.signal(signal.SIGTERM)
    assert job.wait() == 70, job.story
    assert "survived SIGKILL" in job.stderr and f"pid {stuck} " in job.stderr
    assert not alive(other)
    assert alive(stuck), "this kernel kills frozen processes: the test shows nothing"


# Processes that don't start.


# A valid ELF file whose only segment lies outside of the address space: by then the old program is gone, and the
# kernel has to kill the process (`load_elf_binary`).
DIES_IN_EXEC = (
    struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\2\1\1", 2, 62, 1, 0, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    + struct.pack("<IIQQQQQQ", 1, 5, 0, 0x7FFF_FFFF_FFFF_F000, 0, 4096, 4096, 4096)
    + bytes(4096)
)


@pytest.mark.parametrize(
    "content, code, words",
    [
        (b"\x7fELF but not really", 126, "could not be started"),
        (b"#!/nowhere/python\n", 127, "could not be started"),
        (DIES_IN_EXEC, 128 + signal.SIGSEGV, "SIGSEGV"),
    ],
    ids=["garbage", "no interpreter", "dies in exec"],
)
def test_a_program_that_cannot_be_executed_fails_as_in_a_shell(
    launch: Launcher, content: bytes, code: int, words: str
) -> None:
    program = launch.write("job/program", "", preamble="")
    program.write_bytes(content)
    program.chmod(0o755)
    job = launch.command("--no-python", "--max-restarts=1", str(program))
    job.assert_ends(code)
    assert words in job.stderr


# Kernels without pidfds, and agents without streams.


@on_each_loop
def test_without_pidfds_exits_are_still_seen_and_all_is_cleared(launch: Launcher, loop: str) -> None:
    job = launch(
        HAS_FAMILY + "os._exit(0 if restart == 1 else 3)",
        "--max-restarts",
        "1",
        "--monitor-interval",
        "0.02",
        "--nproc-per-node",
        "2",
        loop=loop,
        wrapper=NO_PIDFDS,
    )
    job.assert_ends()
    assert len(job.lines) >= 3


@pytest.mark.parametrize(
    "closed", ["<&- >&- 2>&-", *(pytest.param(one, marks=pytest.mark.all) for one in ("<&-", ">&-", "2>&-"))]
)
def test_closed_standard_streams_change_nothing_but_what_is_seen(launch: Launcher, closed: str) -> None:
    job = launch("sys.exit(3)", prefix=["sh", "-c", f'exec "$@" {closed}', "sh"])

    job.assert_ends(3)


def test_a_function_worker_that_is_still_importing_does_not_outlive_a_sigkilled_agent(launch: Launcher) -> None:
    main = """
        import asyncio, os, time
        from aelastic import Supervisor, WorkerSpec

        def function():
            pass

        if __name__ == "__mp_main__":
            os.write(1, b"importing\\n")
            time.sleep(600)
        if __name__ == "__main__":
            asyncio.run(Supervisor(WorkerSpec(entrypoint=function)).run())
            raise SystemExit
    """
    job = launch.command(wrapper=main)
    job.wait_line("importing")

    job.signal(signal.SIGKILL)

    job.wait_nothing_left()


async def test_a_function_that_multiprocessing_does_not_start_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its fork server may be frozen; a child that it forks later belongs to nobody, and is killed."""
    may_start, started = threading.Event(), list[subprocess.Popen[bytes]]()

    class Slow:
        def __init__(self, *_: object) -> None:
            may_start.wait(DEADLINE_S)
            started.append(subprocess.Popen(["sleep", "600"]))
            self.pid = started[0].pid

    async def in_late_thread(function: Callable[[], None], *, within_s: float) -> None:
        assert within_s == procs.FUNCTION_START_S
        threading.Thread(target=function, daemon=True).start()
        raise TimeoutError

    monkeypatch.setattr(procs, "Function", Slow)
    monkeypatch.setattr(procs, "in_thread", in_late_thread)
    workers = procs.LocalWorkers(start_method="forkserver", monitor_interval=0.1, mark="SLOW=1")
    with pytest.raises(HostError, match=r"local rank 0 cannot be started: no answer from multiprocessing"):
        await workers.start([WorkerStart(0, print, (), {}, None, None, tmp_path / "error")])
    await workers.aclose()
    may_start.set()
    wait_for("a child", lambda: started)
    assert started[0].wait() == -signal.SIGKILL
