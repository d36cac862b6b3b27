"""Stacks of workers before they are killed: two sources, with limits, in files and in the report."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import anyio
import pytest
from kit.launching import LAUNCH_TIMEOUT_S, Job, Launcher, cmdline, ran
from kit.waiting import DEADLINE_S, wait_for

import aelastic
from aelastic import RunResult, Supervisor, WorkerBackend, WorkerExit, WorkerSpec, WorkerStart, WorkerState
from aelastic.agent.stack_dumps import _append
from aelastic.agent.watches.watch import Found
from aelastic.base.host import proc_table
from aelastic.base.host.programs import REAP_TIMEOUT_S
from aelastic.diagnose.stacks import collect as stacks
from aelastic.diagnose.stacks.collect import Stack, Tools, find_py_spy, take
from aelastic.diagnose.stacks.memory import Unreadable
from aelastic.errors import ChildFailedError
from aelastic.observe import run_events as ev
from aelastic.observe.observer import Observer

pytestmark = pytest.mark.usefixtures("warm_stores")

# Ways to be stuck, each in a function of its own.
STUCK = """
import os, signal, sys, threading, time

def spin():
    while True: pass  # one line: ranks that spin stand in the same place

def wait_for_ever():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def stand_still():
    ready()
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)

def ready():
    os.write(1, b"ready\\n")

def tell():
    # Once the main thread is where it stays; a worker that stops itself says so before.
    main = threading.main_thread().ident
    def watch():
        while not is_there(sys._current_frames()[main]):
            time.sleep(0.001)
        ready()
    threading.Thread(target=watch, daemon=True).start()

def is_there(frame):
    # In the last line of its function, not on the way to it.
    last = max(line for *_, line in frame.f_code.co_lines() if line)
    return frame.f_code.co_name in {"spin", "wait_for_ever"} and frame.f_lineno == last
"""
KINDS = ("spin", "wait_for_ever", "stand_still")
IGNORES_TERM = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"


# Sources.


@dataclass
class Stuck:
    """Stuck processes, each in its own session like a worker."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, kind: str, wrapper: Sequence[str] = ()) -> int:
        path = self.folder / f"{kind}.py"
        path.write_text(f"{STUCK}\ntell()\n{kind}()\n")
        command = [*wrapper, sys.executable, str(path)]
        popen = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        self.processes.append(popen)
        return popen.pid

    def wait_ready(self) -> None:
        for process in self.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            if str(process.args[-1]).endswith("stand_still.py"):  # type: ignore[index]
                wait_for("it is stopped", lambda: proc_table.process(process.pid).state == "T")  # type: ignore[union-attr]  # noqa: B023
                continue
            # The thread that wrote it may hold the GIL, and the main thread would then be waiting for it.
            wait_for("one thread is left", lambda: len(os.listdir(f"/proc/{process.pid}/task")) == 1)  # noqa: B023
            if str(process.args[-1]).endswith("wait_for_ever.py"):  # type: ignore[index]
                wait_for("it sleeps", lambda: proc_table.process(process.pid).state == "S")  # type: ignore[union-attr]  # noqa: B023

    def close(self) -> None:
        for process in self.processes:
            proc_table.kill_group(process.pid)
            assert process.stdout is not None
            process.stdout.close()
            process.wait(DEADLINE_S)


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[Stuck]:
    made = Stuck(tmp_path)
    yield made
    made.close()


def fake_py_spy(folder: Path, code: str) -> Path:
    path = folder / "bin" / "py-spy"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{code}\n")
    path.chmod(0o755)
    return path


def read(*path: str) -> str:
    return Path(*path).read_text()


async def look(targets: dict[int, int], py_spy: Path | str | None) -> dict[int, Stack | str]:
    found: dict[int, Stack | str] = {}
    await take(targets, Tools(None if py_spy is None else str(py_spy), dict(os.environ)), found)
    return found


def stack_of(found: Stack | str) -> Stack:
    assert isinstance(found, Stack), found
    return found


@pytest.mark.usefixtures("_patience")
async def test_memory_and_py_spy_tell_of_a_loop_a_lock_a_process_that_is_stopped_and_one_that_has_ended(
    stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = {rank: stuck.start(kind) for rank, kind in enumerate(KINDS)}
    stuck.wait_ready()

    by_memory = await look(targets, None)
    monkeypatch.setattr(stacks, "stacks_of", refuse_memory)
    by_py_spy = await look(targets, find_py_spy(None))

    for rank, (kind, state) in enumerate(zip(KINDS, ("runs", "sleeps", "is stopped"), strict=True)):
        stack, other = stack_of(by_memory[rank]), stack_of(by_py_spy[rank])
        main = stack.threads[0]
        assert (stack.source, main.frames[0].function, main.state, main.is_main) == ("memory", kind, state, True)
        lines = read(main.frames[0].file).splitlines()
        assert lines[main.frames[0].line - 1].strip() in {
            "while True: pass  # one line: ranks that spin stand in the same place",
            "lock.acquire()",
            "os.kill(os.getpid(), signal.SIGSTOP)",
        }
        assert main.frames[-1].function == "<module>"
        assert (other.source, other.threads[0].frames[0].function) == ("py-spy", kind)
        assert f'{kind}.py", line' in other.text and f", in {kind}\n" in other.text

    stuck.processes[0].kill()
    wait_for("a zombie", lambda: not proc_table.is_alive(targets[0]))
    assert await look({0: targets[0]}, find_py_spy(None)) == {0: "it has ended"}


LOOKS_AT_ITSELF = """
import os, threading
from aelastic.diagnose.stacks.interpreter import stacks_of
here = threading.Event()
lock = threading.Lock()
lock.acquire()
threading.Thread(target=lambda: (here.set(), lock.acquire()), daemon=True).start()
here.wait()
_, other = stacks_of(os.getpid())
print(*[frame.function for frame in other.frames])
"""


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_each_version_of_python_keeps_its_frames_in_a_way_that_is_found(version: str) -> None:
    """Python 3.12 enters its interpreter through frames of its own, which it does not report."""
    found = [*Path.home().glob(f".pyenv/versions/{version}.*/bin/python"), shutil.which(f"python{version}")]
    if (python := found[0]) is None:
        pytest.skip(f"there is no Python {version} on this machine")
    root = str(Path(aelastic.__file__).parent.parent)
    done = ran(python, "-c", LOOKS_AT_ITSELF, env={**os.environ, "PYTHONPATH": root})
    assert (done.stdout, done.stderr) == ("<lambda> run _bootstrap_inner _bootstrap\n", "")


@pytest.mark.usefixtures("_patience", "_without_memory")
async def test_a_py_spy_that_hangs_is_given_up_and_killed_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = fake_py_spy(tmp_path, f"echo $$ >> {tmp_path}/pids; sleep 600 & echo $! >> {tmp_path}/pids; sleep 600")
    targets = dict.fromkeys(range(3), os.getpid())
    make_scope, scopes = anyio.CancelScope, list[anyio.CancelScope]()

    def keep_scope(**options: Any) -> anyio.CancelScope:
        scopes.append(make_scope(**options))
        return scopes[-1]

    async def be_late() -> None:
        await until(
            lambda: (tmp_path / "pids").exists() and read(str(tmp_path / "pids")).count("\n") == 2 * len(targets)
        )
        for scope in scopes:
            scope.deadline = anyio.current_time()

    monkeypatch.setattr(anyio, "CancelScope", keep_scope)
    with anyio.fail_after(DEADLINE_S):  # 600 s, if it waited
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(be_late())
            found = await look(targets, fake)

    assert set(found.values()) == {f"memory: {OTHER_PYTHON}; py-spy: no answer in time"}
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2 * len(targets)
    wait_for("nothing of it is alive", lambda: not any(proc_table.is_alive(pid) for pid in pids))
    assert not [entry for entry in proc_table.processes() if entry.parent == os.getpid() and entry.pid in pids]


def test_all_sources_have_their_turn_within_the_time_of_all() -> None:
    turns = [stacks.MEMORY_UNTIL_S, stacks.PY_SPY_UNTIL_S, stacks.TIMEOUT_S - REAP_TIMEOUT_S]
    assert sorted(turns) == turns and len(set(turns)) == 3
    assert stacks.TIMEOUT_S == 2.0


@pytest.mark.usefixtures("_patience", "_without_memory")
@pytest.mark.parametrize(
    "code, reason",
    [
        (None, "not installed (pip install py-spy)"),
        (
            "echo 'Error: Permission denied (os error 13)' >&2; exit 1",
            "permission denied (it needs root, CAP_SYS_PTRACE",
        ),
        ("printf 'Error: first\\n\\nCaused by:\\n 0: x\\nStack backtrace:\\n 0: y\\n' >&2; exit 1", "first"),
        ("exit 3", "it gives no reason"),
        ("echo nonsense", "cannot read its output"),
        ("cat /dev/zero", "wrote more than 1024 KiB"),
        ("cat /dev/zero >&2", "wrote more than 1024 KiB"),
        ("echo '[{\"frames\": []}]'", "no Python frame was found"),
        (b"\x7fELF, no more", "cannot be started (Exec format error)"),
    ],
)
async def test_a_py_spy_that_gives_no_stack_is_quoted(tmp_path: Path, code: str | bytes | None, reason: str) -> None:
    fake = None if code is None else fake_py_spy(tmp_path, str(code))
    if isinstance(code, bytes) and fake is not None:
        fake.write_bytes(code)
    assert str((await look({0: os.getpid()}, fake))[0]).startswith(f"memory: {OTHER_PYTHON}; py-spy: {reason}")


@pytest.mark.usefixtures("_patience", "_without_memory")
async def test_a_complaint_that_is_seen_only_after_the_end_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_readable, asked = anyio.wait_readable, list[int]()

    async def never_readable(fd: int) -> None:
        asked.append(fd)
        if fd in asked[2:3]:  # the first reports the end, the next is stdout
            await anyio.sleep_forever()
        await wait_readable(fd)

    monkeypatch.setattr(anyio, "wait_readable", never_readable)
    program = fake_py_spy(tmp_path, "echo 'Error: first' >&2; sleep 0.1; exit 1")
    assert "py-spy: first" in str((await look({0: os.getpid()}, program))[0])


@pytest.mark.usefixtures("_patience")
async def test_of_a_shell_the_python_that_it_started_is_seen(stuck: Stuck) -> None:
    target = stuck.start("wait_for_ever", wrapper=["sh", "-c", '"$@"; true', "sh"])
    stuck.wait_ready()

    found = await look({0: target}, find_py_spy(None))

    assert stack_of(found[0]).threads[0].frames[0].function == "wait_for_ever"


def test_the_users_own_py_spy_goes_before_the_one_beside_python(tmp_path: Path) -> None:
    own = fake_py_spy(tmp_path, "")

    assert find_py_spy(f"{own.parent}:/bin") == str(own)
    assert find_py_spy("/nowhere") == find_py_spy(None) == str(Path(sys.executable).parent / "py-spy")


# In a run.

# A busy machine may need longer in tests that are not about time.
PATIENCE = """import aelastic.diagnose.stacks.collect as s
s.MEMORY_UNTIL_S, s.PY_SPY_UNTIL_S, s.TIMEOUT_S = 19.0, 20.0, 25.0
"""
OTHER_PYTHON = "it runs another Python than the agent, or none"
# As if workers ran another Python.
WITHOUT_MEMORY = f"""import aelastic.diagnose.stacks.collect as s
def refuse(pid): raise s.Unreadable({OTHER_PYTHON!r})
s.stacks_of = refuse
"""
NO_PY_SPY = "s.find_py_spy = lambda path: None\n"
BLIND = f"{PATIENCE}{WITHOUT_MEMORY}{NO_PY_SPY}"


@pytest.fixture
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    for at, name in enumerate(("MEMORY_UNTIL_S", "PY_SPY_UNTIL_S", "TIMEOUT_S")):
        monkeypatch.setattr(stacks, name, 20.0 + at)


def refuse_memory(_pid: int) -> NoReturn:
    raise Unreadable(OTHER_PYTHON)


@pytest.fixture
def _without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "stacks_of", refuse_memory)


class Listener(Observer):
    def __init__(self) -> None:
        self.received: list[ev.StacksTaken] = []

    def tell(self, event: ev.RunEvent, now: float) -> None:
        if isinstance(event, ev.StacksTaken):
            self.received.append(event)


def spec_of(folder: Path, body: str, workers: int = 1, **spec: Any) -> WorkerSpec:
    """Workers that create a file when they are ready."""
    (folder / "worker.py").write_text(
        f"{STUCK}\nrank = int(os.environ['RANK'])\nrestart = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        f"def ready():\n    open(os.path.join({str(folder)!r}, f'ready_{{rank}}_{{restart}}'), 'w').close()\n{body}"
    )
    options: dict[str, Any] = {"max_restarts": 0, "shutdown_timeout_s": 0.3, "local_world_size": workers, **spec}
    return WorkerSpec(entrypoint=sys.executable, args=(str(folder / "worker.py"),), **options)


async def until(condition: Callable[[], Any]) -> Any:
    with anyio.fail_after(DEADLINE_S):
        while not (answer := condition()):  # noqa: ASYNC110  a file of another process
            await anyio.sleep(0.01)
        return answer


async def run_and(supervisor: Supervisor, then: Callable[[], Any]) -> RunResult:
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(supervisor.run())
        await then()
    return task.result()


async def run_and_stop(supervisor: Supervisor, folder: Path, before: Callable[[], Any] = lambda: None) -> RunResult:
    """Stops a run's only worker once it is ready, after calling `before`."""

    async def stop() -> None:
        await until(ready(folder, 0))
        before()
        supervisor.stop()

    result = await run_and(supervisor, stop)
    assert result.state is WorkerState.STOPPED
    return result


def ready(folder: Path, *ranks: int) -> Callable[[], bool]:
    return lambda: all((folder / f"ready_{rank}_0").exists() for rank in ranks)


async def find(supervisor: Supervisor, rank: int, *what: Any) -> None:
    """Makes a watch find a worker unhealthy, once both are ready."""
    assert supervisor._run is not None
    await supervisor._run._current.stuck.unhealthy.on_found(Found(1, rank, *what))


SPINS = "tell()\nspin()\n"
RESISTS = f"{IGNORES_TERM}\n{SPINS}"


@pytest.mark.usefixtures("_patience")
async def test_callers_at_the_same_time_get_the_same_dump_and_an_unhealthy_worker_s_stack_is_in_its_failure(
    tmp_path: Path,
) -> None:
    listener = Listener()
    # Enough time to exit, as the stack of a killed worker is taken once more.
    body = "tell()\nwait_for_ever() if rank == 1 else spin()\n"
    spec = spec_of(tmp_path, body, 2, log_dir=tmp_path / "logs", shutdown_timeout_s=DEADLINE_S)
    supervisor = Supervisor(spec, observers=[listener])
    before = await supervisor.collect_stacks()
    answers: list[ev.StacksTaken] = []

    async def ask() -> None:
        await until(ready(tmp_path, 0, 1))
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(supervisor.collect_stacks("the first"))
            others = [tasks.create_task(supervisor.collect_stacks("asked")) for _ in range(3)]
            await asyncio.sleep(0)
            first.cancel()
        answers.extend(task.result() for task in others)
        await find(supervisor, 1, "timer", "timer 'step' expired", signal.SIGKILL)

    result = await run_and(supervisor, ask)
    after = await supervisor.collect_stacks()

    assert before.source == after.source == {} and before.path == after.path == ""
    dump, found = listener.received
    assert answers[0] == dump and answers[1] is answers[0] is answers[2]
    assert dump.why == "the first" and dump.source[1] == "memory"
    assert dump.source[0] in {"memory", "py-spy"}, "memory that changes too fast to be read is left to py-spy"
    assert Path(dump.path).name == "attempt_0"
    assert found.why == "rank 1: timer 'step' expired"
    for rank, kind in enumerate(("spin", "wait_for_ever")):
        assert f", in {kind}\n" in read(dump.path, str(rank), "stack.txt")
    assert list(result.failures) == [1] and result.stacks == {}
    failure = result.failures[1]
    assert re.search(r'by memory, most recent call first:\n  File ".*", line \d+, in wait_for_ever\n', failure.stack)
    assert f"all threads: {found.path}/1/stack.txt" in failure.stack
    report = str(ChildFailedError("job", result.failures, result.victims, result.stacks))
    assert report.index("  stack     : by memory, most recent call first") < report.index(", in wait_for_ever")
    assert failure.for_others().stack == failure.stack


@pytest.mark.usefixtures("_patience")
async def test_without_logs_stacks_that_are_requested_lie_in_a_folder_that_goes_with_the_run(tmp_path: Path) -> None:
    supervisor = Supervisor(spec_of(tmp_path, SPINS))
    seen: list[str] = []

    async def ask() -> None:
        await until(ready(tmp_path, 0))
        for why in ("once", "again"):
            taken = await supervisor.collect_stacks(why)
        seen.extend([taken.path, read(taken.path, "0", "stack.txt")])
        supervisor.stop()

    await run_and(supervisor, ask)

    path, text = seen
    heads = [line.partition("), ")[2] for line in text.splitlines() if line.startswith("===")]
    assert [head.partition("; by ")[0] for head in heads] == ["once", "again"]
    assert all(head.endswith(("; by memory", "; by py-spy")) for head in heads), "py-spy if memory changes meanwhile"
    assert re.match(r"=== \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00, rank 0 \(local rank 0, pid \d+\), once", text)
    assert not os.path.exists(path)  # noqa: ASYNC240  the run is over


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
async def test_a_worker_whose_stack_cannot_be_dumped_is_stopped_anyway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: int
) -> None:
    monkeypatch.setitem(
        sys.modules, "aelastic.diagnose.stacks.collect", None
    )  # a venv that was removed during the job, say
    supervisor = Supervisor(spec_of(tmp_path, RESISTS, shutdown_timeout_s=0.5))

    async def find_unhealthy() -> None:
        await until(ready(tmp_path, 0))
        await find(supervisor, 0, "hang", "no output for 9 s", signum)

    result = await run_and(supervisor, find_unhealthy)

    assert (result.failures[0].message, result.failures[0].stack) == ("no output for 9 s", "")
    # A worker that exits by the signal that stopped it has not resisted.
    assert [*result.stacks] == ([] if signum == signal.SIGKILL else [0])
    if result.stacks:
        assert re.fullmatch(r"did not end within \d+\.\d s and had to be killed", result.stacks[0])


@pytest.mark.usefixtures("_patience")
async def test_a_worker_killed_before_a_restart_is_in_the_folder_of_its_attempt(tmp_path: Path) -> None:
    body = """
if restart == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell()
    if rank == 0:
        spin()
    while not os.path.exists(os.path.join(os.path.dirname(__file__), "ready_0_0")):
        time.sleep(0.01)
    raise ValueError("once")
"""
    spec = spec_of(tmp_path, body, 2, log_dir=tmp_path / "logs", max_restarts=1)
    supervisor = Supervisor(spec)

    with anyio.fail_after(DEADLINE_S):
        result = await supervisor.run()

    assert result.state is WorkerState.SUCCEEDED and result.stacks == {}
    written = {
        str(path.relative_to(tmp_path / "logs" / "latest")) for path in (tmp_path / "logs" / "latest").rglob("stack*")
    }
    assert written == {"attempt_0/0/stack.txt"}


@pytest.mark.usefixtures("_patience")
async def test_stacks_that_can_not_be_written_are_in_the_report_and_the_job_continues(tmp_path: Path) -> None:
    def make_unwritable() -> None:
        [folder] = (tmp_path / "logs" / "latest").glob("attempt_0/0")
        (folder / "stack.txt").mkdir()

    result = await run_and_stop(
        Supervisor(spec_of(tmp_path, RESISTS, log_dir=tmp_path / "logs")), tmp_path, make_unwritable
    )
    assert ", in spin" in result.stacks[0] and "all threads" not in result.stacks[0]


class Elsewhere(WorkerBackend):
    """Its workers are not processes of this machine, although their names look like it."""

    def __init__(self) -> None:
        self.exits: dict[int, asyncio.Future[WorkerExit]] = {}

    async def start(self, starts: Sequence[WorkerStart]) -> dict[int, int]:
        self.exits = {start.local_rank: asyncio.get_running_loop().create_future() for start in starts}
        return dict.fromkeys(self.exits, os.getpid())

    async def wait(self, local_rank: int) -> WorkerExit:
        return await asyncio.shield(self.exits[local_rank])

    def stop(self, local_rank: int, signum: int) -> bool:
        if signum == signal.SIGKILL and not self.exits[local_rank].done():
            self.exits[local_rank].set_result(WorkerExit(-signum))
        return True


async def test_workers_of_another_machine_are_killed_without_a_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: Any) -> None:
        pytest.fail("a worker was looked at")

    monkeypatch.setattr(stacks, "take", never)
    listener = Listener()
    supervisor = Supervisor(spec_of(tmp_path, "", 2), backend=Elsewhere(), observers=[listener])
    taken: list[ev.StacksTaken] = []

    async def ask() -> None:
        await until(lambda: supervisor.workers and supervisor.workers[0].id)
        taken.append(await supervisor.collect_stacks())
        supervisor.stop()

    result = await run_and(supervisor, ask)

    assert result.state is WorkerState.STOPPED and result.stacks == {}
    assert dict(taken[0].source) == dict.fromkeys((0, 1), "not a process of this machine")
    assert listener.received == taken


@pytest.mark.usefixtures("_patience")
async def test_a_worker_that_ends_while_stacks_are_collected_is_a_victim_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, ended = tmp_path / "go", list[bool]()
    body = f"{IGNORES_TERM}\nready()\nwhile not os.path.exists({str(go)!r}):\n    time.sleep(0.01)\n"
    supervisor = Supervisor(spec_of(tmp_path, body))

    async def slow_take(targets: dict[int, int], tools: Tools, found: dict[int, Stack | str]) -> None:
        go.touch()
        await until(lambda: not proc_table.is_alive(targets[0]))
        await until(lambda: not supervisor._group.exits.alive)
        ended.append(True)

    monkeypatch.setattr(stacks, "take", slow_take)
    result = await run_and_stop(supervisor, tmp_path)
    assert result.victims == (0,) and result.stacks == {}  # it was not killed
    assert len(ended) <= 1  # the run need not wait for the rest


async def test_what_looking_raises_does_not_save_a_worker_or_end_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(stacks, "take", broken)
    result = await run_and_stop(Supervisor(spec_of(tmp_path, RESISTS)), tmp_path)
    assert result.stacks[0].endswith("stack not known (no answer in time)")
    assert "cannot take the workers' stacks" in caplog.text


def test_a_file_that_has_grown_too_large_begins_again(tmp_path: Path) -> None:
    path, written = tmp_path / "new" / "stack.txt", dict[int, Path]()
    _append({0: (path, "first\n")}, written)
    _append({0: (path, "second\n")}, written)
    assert path.read_text() == "first\nsecond\n"
    os.truncate(path, (16 << 20) + 1)

    _append({0: (path, "third\n")}, written)

    assert path.read_text() == "third\n" and written == {0: path}


# On the command line.


THREE = f"""
{IGNORES_TERM}
{STUCK}
if rank == 3:
    ready()
    wait_for("go")
    raise ValueError("the culprit")
tell()
[spin, wait_for_ever, stand_still][rank]()
"""


def wait_stuck(job: Job) -> None:
    job.wait_line("ready", 4)
    wait_for(
        "one is stopped", lambda: any((entry := proc_table.process(pid)) and entry.state == "T" for pid in job.left())
    )
    job.go()


def test_of_ranks_that_had_to_be_killed_stacks_are_in_the_attempt_s_folder_and_in_the_report(launch: Launcher) -> None:
    job = launch(THREE, "--nproc-per-node=4", "--shutdown-timeout=0.3", "--log-dir=logs", wrapper=PATIENCE)
    wait_stuck(job)

    job.assert_ends(1)
    report = job.stderr[job.stderr.index("FAILED") :]
    assert "cause     : ValueError: the culprit" in report
    assert "Stopped by the agent" not in report and "\nKilled by the agent:\n" in report
    for rank, kind in enumerate(KINDS):
        words = rf"rank {rank} did not end within \d+\.\d s and had to be killed; stack by memory, most recent call first:\n"
        assert re.search(rf'{words}    File ".*worker\.py", line \d+, in {kind}\n', report)
        path = next((job.folder / "logs" / "latest" / "attempt_0").glob(f"{rank}/stack.txt"))
        assert re.search(
            rf", about to be killed; by memory\nMainThread \(.*\), most recent call first:\n  File .*, in {kind}\n",
            path.read_text(),
        )
        assert re.search(rf"all threads: \S+/attempt_0/{rank}/stack\.txt\n", report)
        assert f"rank {rank} was in File" in job.stderr[: job.stderr.index("FAILED")]


def test_where_nothing_can_be_asked_the_report_shows_why(launch: Launcher) -> None:
    job = launch(THREE, "--nproc-per-node=4", "--shutdown-timeout=0.3", wrapper=BLIND + AT_ONCE)
    wait_stuck(job)

    assert job.wait() == 1
    assert not (job.folder / "looks").exists() and NOT_EXPLAINED not in job.stderr, "it did not look for hangs"
    report = job.stderr[job.stderr.index("FAILED") :]
    reasons = f"memory: {OTHER_PYTHON}; py-spy: not installed (pip install py-spy))"
    assert re.search(rf"  ranks 0-2 did not end within .*; stack not known \({re.escape(reasons)}", report)
    assert job.stderr.count("py-spy: not installed") == 1


def interrupted(launch: Launcher, *options: str, body: str = "spin()", **more: Any) -> Job:
    """A job after a second Ctrl-C, with workers that resist."""
    worker = f"{IGNORES_TERM}\n{STUCK}\ntell()\n{body}\n"
    job = launch(worker, "--shutdown-timeout=300", *options, **more)
    job.wait_line("ready", 2 if options else 1)
    workers = [pid for pid in job.left() if "-u" in cmdline(pid)]
    # The thread that reports it must end, or it would be part of the stack.
    wait_for("one thread each", lambda: all(len(os.listdir(f"/proc/{pid}/task")) == 1 for pid in workers))
    job.signal(signal.SIGINT)
    wait_for("the first is heard", lambda: "send it again to kill them" in job.stderr)
    job.signal(signal.SIGINT)
    return job


@pytest.mark.all
def test_a_user_who_asks_twice_is_not_told_how_stacks_could_have_been_had(launch: Launcher) -> None:
    job = interrupted(launch, wrapper=BLIND)
    job.assert_ends(-signal.SIGINT)
    assert re.search(r"rank 0 did not end within \d+\.\d s and had to be killed\n", job.stderr)
    assert "py-spy" not in job.stderr


def test_a_second_ctrl_c_looks_first_and_a_third_does_not_wait_for_that(launch: Launcher, tmp_path: Path) -> None:
    fake = fake_py_spy(tmp_path, "touch asked; sleep 600")
    patient = f"{PATIENCE}{WITHOUT_MEMORY}s.TIMEOUT_S = s.PY_SPY_UNTIL_S = 300.0\n"
    job = interrupted(launch, wrapper=patient, env={"PATH": f"{fake.parent}:{os.environ['PATH']}"})
    wait_for("py-spy is asked", (job.folder / "asked").exists)
    assert job.process.poll() is None
    job.signal(signal.SIGINT)

    job.assert_ends(-signal.SIGINT)
    assert "aelastic: stopped by SIGINT; all workers have ended\n" in job.stderr
    assert "had to be killed; stack not known (killed immediately)" in job.stderr


def test_a_second_ctrl_c_tells_where_workers_stood_at_length_where_no_file_does(launch: Launcher) -> None:
    deep = "def outer(depth):\n    outer(depth - 1) if depth else spin()\nouter(20)"
    job = interrupted(launch, "--nproc-per-node=2", body=deep, wrapper=PATIENCE)
    job.assert_ends(-signal.SIGINT)
    report = job.stderr[job.stderr.index("aelastic: stopped by SIGINT") :]
    assert re.match(
        r"aelastic: stopped by SIGINT; all workers have ended\n"
        r"aelastic: ranks 0, 1 did not end within .* s and had to be killed; stack by memory, most recent call first:\n"
        r'aelastic:   File ".*worker.py", line \d+, in spin\n',
        report,
    )
    assert report.count(", in outer\n") == 21 and "all threads" not in report and "stack.txt" not in report


# Before any hang.

# In the agent: it looks until the worker's Python has begun, and once more; files show that it looks, and has looked.
AT_ONCE = """
import os
from aelastic.agent import stack_dumps

def looks():
    while not os.path.exists("up"):
        yield 0.1
    yield 0.1

warn_unless_seen = stack_dumps.StackDumps.warn_unless_seen

async def look_and_tell(self):
    open("looks", "w").close()
    await warn_unless_seen(self)
    open("looked", "w").close()

stack_dumps.FIRST_LOOKS_S = looks()
stack_dumps.StackDumps.warn_unless_seen = look_and_tell
"""
NOT_EXPLAINED = (
    "aelastic: W hangs cannot be explained: the stack of rank 0 cannot be read: memory: it runs another Python"
)
UNTIL_LOOKED = "open('up', 'w').close()\nwait_for('looked')"


@pytest.mark.parametrize("option", ["--hang-timeout=600", pytest.param("--expect-output=x:600", marks=pytest.mark.all)])
def test_who_looks_for_hangs_learns_at_the_start_that_they_will_not_be_explained(launch: Launcher, option: str) -> None:
    job = launch(UNTIL_LOOKED, option, wrapper=BLIND + AT_ONCE)
    job.assert_ends()
    assert NOT_EXPLAINED in job.stderr


def test_who_looks_for_hangs_that_can_be_explained_learns_nothing_of_it(launch: Launcher) -> None:
    job = launch(UNTIL_LOOKED, "--hang-timeout=600", wrapper=f"{PATIENCE}{NO_PY_SPY}{AT_ONCE}")
    job.assert_ends()
    assert NOT_EXPLAINED not in job.stderr


@pytest.mark.cold
def test_workers_that_end_when_asked_cost_nothing_of_this(launch: Launcher) -> None:
    wrapper = """
import atexit, sys
atexit.register(lambda: print("imported", {"aelastic.diagnose.stacks.collect", "aelastic.diagnose.stacks.format"} & set(sys.modules)))
"""
    job = launch(
        "if rank == 1: raise ValueError('x')\ntime.sleep(600)\n",
        "--nproc-per-node=2",
        "--max-restarts=1",
        wrapper=wrapper,
    )

    job.assert_ends(1, LAUNCH_TIMEOUT_S)
    assert job.lines[-1] == "imported set()"
    assert "stack" not in job.stderr
