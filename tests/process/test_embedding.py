"""The supervisor inside a user's program: it gives back everything that it takes, and touches nothing else."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import pytest
from kit.effort import FIRST_MOMENTS
from kit.launching import Launcher, alive, on_both_loops, on_each_loop, run
from kit.this_process import children, descriptors, python, threads, until
from kit.waiting import DEADLINE_S, wait_for
from kit.workers import entrypoints

from aelastic import InputError, RunResult, Std, Supervisor, WorkerSpec, WorkerState
from aelastic.logs_specs import DefaultLogsSpecs
from aelastic.rdzv import registry
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.rdzv.stores.store import Store

T = TypeVar("T")

METHODS = ("spawn", "fork", "forkserver")
with_every_method = pytest.mark.parametrize("method", METHODS)
# For tests in which the start method is irrelevant: `make test` uses the default one.
with_each_method = pytest.mark.parametrize(
    "method", ["spawn", *(pytest.param(one, marks=pytest.mark.all) for one in ("fork", "forkserver"))]
)
pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.usefixtures("warm_stores"),
]


def sleeper(path: Path, **spec: Any) -> WorkerSpec:
    """A worker that writes its pid and its child's to a file, then sleeps."""
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"path = {str(path)!r} + os.environ['LOCAL_RANK']\n"
        "open(path + '.new', 'w').write(f'{os.getpid()} {child.pid}')\n"
        "os.rename(path + '.new', path)\n"
        "time.sleep(600)\n"
    )
    return python(code, **spec)


# Leaks.


@pytest.fixture
def all_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Checks that the test leaves no new child, descriptor, thread or temporary file."""
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp))
    gc.freeze()  # otherwise a collection covers everything that earlier tests made: half of a test's time
    # A thread of the previous test may still be reading files.
    wait_for("nothing of /proc is open", lambda: not any(path.startswith("/proc/") for path in descriptors().values()))
    before = children(), descriptors(), threads()
    yield
    gc.collect()
    gc.unfreeze()
    # An anyio thread ends shortly after its loop, and then drops its last task.
    wait_for(f"no more threads than {before[2]}", lambda: threads() <= before[2])
    assert children() <= before[0]
    wait_for(lambda: f"{descriptors()} are {before[1]}", lambda: descriptors() == before[1])
    assert not os.listdir(tmp)


def surroundings() -> dict[str, Any]:
    """State that belongs to the program around us."""
    umask = os.umask(0)
    os.umask(umask)
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # policies are, since Python 3.14
        policy = asyncio.get_event_loop_policy()
    return {
        "signals": {signum: signal.getsignal(signum) for signum in signal.valid_signals()},
        "wakeup": wakeup,
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "environment": dict(os.environ),
        "policy": policy,
        "cwd": os.getcwd(),
        "umask": umask,
        "argv": list(sys.argv),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
    }


@on_both_loops
@pytest.mark.usefixtures("all_given_back")
def test_a_run_changes_nothing_around_it_while_it_lasts_or_after(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        before = surroundings()
        supervisor = Supervisor(sleeper(tmp_path / "pids"))
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(supervisor.run())
            await until((tmp_path / "pids0").exists)
            during = surroundings()
            supervisor.stop()
        assert task.result().state is WorkerState.STOPPED
        assert during == before
        assert surroundings() == before

    run(loop, main())


@on_each_loop
@pytest.mark.usefixtures("all_given_back")
def test_a_refused_run_gives_everything_back(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Store:
        raise InputError("no such store here")

    monkeypatch.setitem(registry._FACTORIES, "refused", refuse)
    with pytest.raises(InputError, match="no such store here"):
        run(loop, Supervisor(python("", rdzv=RendezvousSettings("refused", "nowhere"))).run())


@on_each_loop
@pytest.mark.usefixtures("all_given_back")
def test_a_run_in_a_deep_temporary_folder_gives_everything_back(
    loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / "tmp" / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    code = "import os, socket; socket.socket(socket.AF_UNIX).bind(os.environ['TORCH_WORKER_SERVER_SOCKET'])"
    assert run(loop, Supervisor(python(code)).run()).state is WorkerState.SUCCEEDED
    deep.rmdir()


@on_each_loop
@pytest.mark.usefixtures("all_given_back")
def test_several_supervisors_share_a_loop_with_other_tasks_whether_they_succeed_or_fail(loop: str) -> None:
    async def main() -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.005)

        specs = [python(f"raise SystemExit({n})", local_world_size=1 + n % 2, max_restarts=n // 4) for n in range(5)]
        async with asyncio.TaskGroup() as tasks:
            ticking = tasks.create_task(tick())
            results = await asyncio.gather(*(Supervisor(spec).run() for spec in specs))
            ticking.cancel()
        assert results[0] == RunResult(WorkerState.SUCCEEDED, reason=results[0].reason)
        codes = [{failure.exitcode for failure in result.failures.values()} for result in results]
        assert codes == [set(), {1}, {2}, {3}, {4}]
        assert ticks > 2

    run(loop, main())


@pytest.mark.parametrize(
    "loop, how", [("asyncio", "cancel"), pytest.param("uvloop", "cancel", marks=pytest.mark.all), ("uvloop", "timeout")]
)
@pytest.mark.usefixtures("all_given_back")
def test_a_cancelled_run_leaves_nothing_behind(loop: str, how: str, tmp_path: Path) -> None:
    path = tmp_path / "pids"

    async def started() -> None:
        await until(lambda: Path(f"{path}0").exists() and Path(f"{path}1").exists())

    async def main() -> None:
        supervisor = Supervisor(sleeper(path, local_world_size=2))
        if how == "cancel":
            async with asyncio.TaskGroup() as tasks:
                task = tasks.create_task(supervisor.run())
                await started()
                task.cancel("enough")
            assert task.cancelled()
        else:
            with pytest.raises(TimeoutError):  # noqa: PT012
                async with asyncio.timeout(None) as limit, asyncio.TaskGroup() as tasks:

                    async def expire() -> None:
                        await started()
                        limit.reschedule(asyncio.get_running_loop().time())

                    tasks.create_task(expire())
                    await supervisor.run()

    run(loop, main())
    pids = [int(pid) for rank in (0, 1) for pid in Path(f"{path}{rank}").read_text().split()]
    assert not [pid for pid in pids if alive(pid)]


@on_both_loops
@pytest.mark.usefixtures("all_given_back")
def test_a_run_cancelled_before_its_first_step_leaves_nothing_behind(loop: str) -> None:
    async def main() -> None:
        for steps in range(12):
            async with asyncio.TaskGroup() as tasks:
                task = tasks.create_task(Supervisor(python("import time; time.sleep(600)")).run())
                for _ in range(steps):
                    await asyncio.sleep(0)
                task.cancel()
            assert task.cancelled()

    run(loop, main())


@on_each_loop
@pytest.mark.usefixtures("all_given_back")
def test_a_run_needs_no_main_thread(loop: str) -> None:
    results: list[RunResult] = []

    def body() -> None:
        results.append(run(loop, Supervisor(python("raise SystemExit(6)", max_restarts=1)).run()))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(DEADLINE_S)
    assert [result.failures[0].exitcode for result in results] == [6]


# Functions.


@pytest.fixture(scope="module", autouse=True)
def resident_helpers() -> None:
    """Starts what stays until a program exits: multiprocessing's fork server and tracker, libuv's signal pipe."""
    run("uvloop", asyncio.sleep(0))
    for method in METHODS:
        context: Any = multiprocessing.get_context(method)
        process = context.Process(target=entrypoints.fail_once)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
            process.start()
        process.join()
        process.close()


def call(function: Callable[..., Any], *args: Any, **spec: Any) -> Supervisor:
    return Supervisor(WorkerSpec(**{"entrypoint": function, "args": args, "max_restarts": 0, **spec}))


@with_every_method
@pytest.mark.usefixtures("all_given_back")
def test_a_function_is_a_worker_like_any_other(method: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    context: Any = multiprocessing.get_context(method)
    queue = context.Queue()
    supervisor = call(
        entrypoints.do_all, queue, 40, "${local_rank}",
        local_world_size=2, start_method=method, redirects=Std.ALL, log_dir=tmp_path, run_id="speech",
    )  # fmt: skip
    result = run("uvloop", supervisor.run())
    assert result.state is WorkerState.SUCCEEDED and not result.failures
    alike = {"leads its session": True, "wakes the agent": False, "sigterm": str(signal.SIG_DFL), "threads": 1}
    assert result.return_values == {n: {**alike, "rank": str(n), "local_rank": str(n)} for n in range(2)}
    assert {queue.get(timeout=DEADLINE_S), queue.get(timeout=DEADLINE_S)} == {40, 41}
    queue.close()
    queue.join_thread()
    (root,) = tmp_path.glob("speech_*")
    for rank in (0, 1):
        folder = root / "attempt_0" / str(rank)
        assert sorted((folder / "stdout.log").read_text().splitlines()) == [f"out of {rank}", f"shell of {rank}"]
        assert (folder / "stderr.log").read_text() == f"err of {rank}\n"
    assert capfd.readouterr() == ("", "")


@with_each_method
@pytest.mark.usefixtures("all_given_back")
def test_an_exception_of_a_function_comes_with_its_traceback_and_none_of_our_frames(
    method: str, capfd: pytest.CaptureFixture[str]
) -> None:
    result = run("uvloop", call(entrypoints.raise_on_rank_1, local_world_size=2, start_method=method).run())
    assert result.is_failed() and list(result.failures) == [1] and result.victims == (0,)
    failure = result.failures[1]
    assert failure.exitcode == 1 and "LookupError" in failure.message and "no batch left" in failure.message
    for text in (failure.traceback, capfd.readouterr().err):
        assert "raise_deeply" in text and "no batch left" in text
        assert f"{os.sep}aelastic{os.sep}functions.py" not in text and "errors.py" not in text


@pytest.mark.parametrize(
    "function, method, exitcode, words",
    [
        (entrypoints.leave_with, "spawn", 3, ""),
        (entrypoints.unpicklable, "fork", 1, "pickle"),
        (entrypoints.unpicklable, "spawn", 1, "return value"),
        (entrypoints.returns_what_cannot_be_read, "forkserver", None, "return value cannot be read"),
    ],
)
@pytest.mark.usefixtures("all_given_back")
def test_an_exit_code_or_a_value_that_cannot_be_returned_is_a_failure_that_reports_it(
    function: Callable[..., Any], method: str, exitcode: int | None, words: str
) -> None:
    args = [exitcode] if function is entrypoints.leave_with else []
    result = run("asyncio", call(function, *args, start_method=method).run())
    assert result.is_failed()
    failure = result.failures[0]
    assert exitcode in {None, failure.exitcode} and words in failure.message, failure


@pytest.mark.usefixtures("all_given_back")
def test_large_values_are_returned() -> None:
    result = run("uvloop", call(entrypoints.many_bytes, 16, local_world_size=2, start_method="spawn").run())
    assert result.return_values == {0: bytes(16 << 20), 1: b"\1" * (16 << 20)}
    assert len(repr(result)) < 500


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.all)])
def test_a_child_that_dies_before_the_function_begins_is_a_failure_with_its_code(method: str) -> None:
    result = run("uvloop", call(entrypoints.never_begins, entrypoints.DiesWhenRead(), start_method=method).run())
    assert result.is_failed() and result.failures[0].exitcode == 9


@with_every_method
@pytest.mark.usefixtures("all_given_back")
def test_a_function_is_stopped_as_any_worker(method: str, tmp_path: Path) -> None:
    path = tmp_path / "pid"
    supervisor = call(entrypoints.touch_and_sleep, str(path), start_method=method)

    async def main() -> RunResult:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(supervisor.run())
            await until(lambda: path.exists() and path.read_text())
            supervisor.stop()
        return task.result()

    result = run("uvloop", main())
    assert result.state is WorkerState.STOPPED and not result.failures
    assert not alive(int(path.read_text()))


# A short test name, as the path of the fork server's socket in the test's folder may have 107 bytes (`unix(7)`).
@with_each_method
def test_run_path(launch: Launcher, method: str) -> None:
    job = launch(
        """
        import json, multiprocessing
        assert multiprocessing.parent_process() is not None
        say(json.dumps([__name__, sys.argv, rank, os.path.basename(__file__)]))
        if restart:
            raise KeyError("no such thing")
        sys.exit(1)
        """,
        "--run-path", "--max-restarts=1", "--start-method", method,
        args=["--lr", "0.1", "${local_rank}"],
    )  # fmt: skip
    assert job.wait() == 1, job.story
    script = str(job.folder / "worker.py")
    assert job.lines == [f'["__main__", ["{script}", "--lr", "0.1", "0"], 0, "worker.py"]'] * 2
    assert "KeyError" in job.stderr and "worker.py" in job.stderr
    assert "functions.py" not in job.stderr and "runpy" not in job.stderr, "the script's frames only"
    job.wait_nothing_left()  # a fork server exits when its agent does


@on_each_loop
def test_a_forked_worker_that_is_asked_to_end_in_its_first_moment_does(loop: str, tmp_path: Path) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, lambda: None)  # a forked child inherits it
        for _ in range(FIRST_MOMENTS):
            # A worker that missed the signal would never be killed.
            supervisor = call(
                entrypoints.wait_for_file,
                str(tmp_path / "never"),
                start_method="fork",
                shutdown_timeout_s=10 * DEADLINE_S,
            )
            running = asyncio.ensure_future(supervisor.run())
            while not (supervisor.workers and supervisor.workers[0].id):  # noqa: ASYNC110  as early as possible
                await asyncio.sleep(0)
            supervisor.stop()
            async with asyncio.timeout(DEADLINE_S):
                await running
        loop.remove_signal_handler(signal.SIGTERM)  # uvloop's stays when its loop is closed

    run(loop, main())


def test_a_forked_worker_of_one_supervisor_does_not_hold_up_the_end_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A caller that is held up waits this long.
    monkeypatch.setattr("aelastic.workers.guard_process.GUARD_TIMEOUT_S", 10 * DEADLINE_S)
    go = tmp_path / "go"

    async def main() -> None:
        first = Supervisor(python(f"while not __import__('os').path.exists({str(go)!r}): pass"))
        ending = asyncio.ensure_future(first.run())
        await until(lambda: first.workers and first.workers[0].id)
        second = call(entrypoints.wait_for_file, str(tmp_path / "never"), start_method="fork")
        running = asyncio.ensure_future(second.run())
        await until(lambda: second.workers and second.workers[0].id)
        go.touch()
        async with asyncio.timeout(DEADLINE_S):
            await ending
        second.stop()
        await running

    run("uvloop", main())


@pytest.mark.parametrize(
    "spec, words",
    [
        ({"args": "train.py"}, "args is 'train.py': use a tuple or list of arguments"),
        ({"args": ("-c", 3)}, "must be a str without NUL"),
        ({"args": ("a\0b",)}, "must be a str without NUL"),
    ],
)
def test_arguments_that_no_command_takes_are_refused(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        WorkerSpec(entrypoint="true", **spec)


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.all)])
@pytest.mark.usefixtures("all_given_back")
def test_a_function_that_workers_cannot_find_fails_once_and_reports_it(
    method: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Like a function typed into a notebook: it exists in this `__main__`, and in no other."""

    def train() -> None: ...

    train.__module__, train.__qualname__ = "__main__", "train"
    monkeypatch.setattr(sys.modules["__main__"], "train", train, raising=False)

    result = run("asyncio", call(train, start_method=method, max_restarts=3).run())

    failure, words = result.failures[0], "Can't get attribute 'train' on <module '__m"
    if sys.version_info >= (3, 14):
        words = "module '__main__' has no attribute 'train'"
    assert failure.message.startswith(f"AttributeError: {words}") and "start_method='fork'" in failure.message
    assert failure.exitcode == 1 and "; each restart would fail in the same way; cause: " in result.reason
    assert capfd.readouterr().err.count(words) == 1


@pytest.mark.parametrize(
    "entrypoint, args, words",
    [
        ("nosuch", (), "entrypoint nosuch is not a program in PATH"),
        (
            sys.executable,
            ("-u", "nosuch.py"),
            r"script nosuch\.py not found from /\S+: check the path, or use -m for a module$",
        ),
        (lambda: 0, (), "define it at the top of a module"),
    ],
    ids=["a program that is not there", "a script that is not there", "a function that cannot be sent to a worker"],
)
def test_what_cannot_be_started_is_refused(entrypoint: Any, args: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        run("uvloop", Supervisor(WorkerSpec(entrypoint=entrypoint, args=args)).run())


def test_the_reason_of_a_run_that_failed_has_the_cause() -> None:
    spec = WorkerSpec(entrypoint=sys.executable, args=("-c", "raise ValueError('odd')"), max_restarts=0)
    result = run("uvloop", Supervisor(spec).run())
    assert re.fullmatch(r"rank 0 failed on \S+; .*; cause: ValueError: odd.*", result.reason)


@on_each_loop
def test_a_stop_while_a_users_hook_hangs_ends_the_run_and_starts_nothing(loop: str, tmp_path: Path) -> None:
    asked, answer, started = threading.Event(), threading.Event(), tmp_path / "started"

    class Hangs(DefaultLogsSpecs):
        def reify(self, envs: Any) -> Any:
            asked.set()
            answer.wait(10 * DEADLINE_S)  # a disk that does not answer
            return super().reify(envs)

    async def main() -> RunResult:
        spec = WorkerSpec(
            entrypoint=sys.executable,
            args=("-c", f"open({str(started)!r}, 'w')"),
            logs_specs=Hangs(str(tmp_path / "logs")),
        )
        supervisor = Supervisor(spec)
        with anyio.fail_after(DEADLINE_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stop_once_asked, supervisor)
                result = await supervisor.run()
        return result

    async def stop_once_asked(supervisor: Supervisor) -> None:
        await anyio.to_thread.run_sync(asked.wait, DEADLINE_S)
        supervisor.stop()

    try:
        result = run(loop, main())
    finally:
        answer.set()
    assert (result.state, result.reason) == (WorkerState.STOPPED, "the agent was asked to stop (SIGTERM)")
    assert not started.exists()
