"""Launches in users' programs: repeated, in threads and children, under loops, with signals and odd streams."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import uvloop
from kit.launching import LAUNCH_TIMEOUT_S, alive, ran
from kit.stories import launches as stories
from kit.stories.launches import one_node
from kit.waiting import DEADLINE_S, wait_for

from aelastic import ChildFailedError, InputError, SignalException, elastic_launch

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.usefixtures("warm_stores"),
]
BOTH = {0: [0, "x"], 1: [1, "x"]}


def launch(entrypoint: Any, *args: Any, **fields: Any) -> dict[int, Any]:
    return elastic_launch(one_node(**fields), entrypoint)(*args)


# Repeated launches.


def held() -> tuple[dict[str, str], set[str]]:
    gc.collect()  # objects that earlier tests dropped
    descriptors = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            descriptors[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            pass  # the descriptor that lists them
    return descriptors, {thread.name for thread in threading.enumerate()}


@pytest.mark.all
def test_dozens_of_launches_hold_no_more_descriptors_and_threads_than_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    launch("true")
    before = held()
    for number in range(24):
        assert launch(stories.rank_and, number) == {0: [0, number], 1: [1, number]}
        launch("true")
        with pytest.raises(ChildFailedError):
            launch("false")
        with pytest.raises(InputError):
            launch("true", nproc_per_node=0)
    wait_for(f"no more threads than {before[1]}", lambda: held()[1] <= before[1])
    assert held()[0] == before[0]
    assert not list(tmp_path.iterdir())


def test_a_program_with_more_than_a_thousand_open_files_may_launch() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    held_open: list[int] = []
    try:
        while not held_open or held_open[-1] < 1100:  # select(2) accepts none from 1024 up
            held_open.append(os.open(os.devnull, os.O_RDONLY))
        assert launch("true") == {0: None, 1: None}
    finally:
        for fd in held_open:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# Not with fork: with any launcher, a child of a program with busy threads inherits the locks that they hold.
@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.all), "forkserver"])
def test_threads_launch_side_by_side(method: str) -> None:
    with ThreadPoolExecutor() as threads:
        launches = [threads.submit(launch, stories.rank_and, "x", start_method=method) for _ in range(4)]
        assert [each.result(LAUNCH_TIMEOUT_S) for each in launches] == [BOTH] * 4


# As a separate program: the test process may have busy threads, whose locks a fork would inherit.
MULTIPROCESSING = """
import multiprocessing, sys
from aelastic import ChildFailedError, elastic_launch
from kit.stories import launches as stories

def launch(entrypoint):
    return elastic_launch(stories.one_node(), entrypoint)()

if __name__ == "__main__":
    launch("true")  # a loop and a guard were here before
    for method in sys.argv[1:]:
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        child = context.Process(target=stories.launch_and_put, args=(queue, method))
        child.start()
        print(method, queue.get())
        child.join()
        print("ended", child.exitcode)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        print("pool", pool.apply(launch, ("true",)))
        for entrypoint in ("false", stories.rank_and):
            try:
                pool.apply(launch, (entrypoint,))
            except (ChildFailedError, ValueError) as error:
                print(type(error).__name__, "false FAILED" in str(error), "daemonic process" in str(error))
"""


@pytest.mark.parametrize("methods", [("fork",), pytest.param(("spawn", "forkserver"), marks=pytest.mark.all)])
def test_children_of_multiprocessing_launch_and_those_of_a_pool_launch_programs_only(
    methods: tuple[str, ...], tmp_path: Path
) -> None:
    done = run_script(tmp_path, MULTIPROCESSING, str(tmp_path / "stranger.py"), *methods)
    assert done.stdout.splitlines() == [
        *(line for method in methods for line in (f"{method} {{0: [0, 'inside'], 1: [1, 'inside']}}", "ended 0")),
        "pool {0: None, 1: None}",
        "ChildFailedError True False",
        "InputError False True",
    ], done.stderr


# Inside a running loop.


@pytest.mark.parametrize("run", [pytest.param(asyncio.run, marks=pytest.mark.all), uvloop.run])
def test_a_program_with_a_running_loop_may_launch(run: Callable[..., Any]) -> None:
    before = threading.active_count()

    async def main() -> Any:
        task = asyncio.current_task()
        values = launch(stories.rank_and, "x")
        with pytest.raises(ChildFailedError):
            launch("false")
        assert asyncio.current_task() is task
        await asyncio.sleep(0)
        return values

    assert run(main()) == BOTH
    with ThreadPoolExecutor() as threads:  # not the thread that handles signals
        assert threads.submit(run, main()).result(LAUNCH_TIMEOUT_S) == BOTH
    wait_for("no thread of ours", lambda: threading.active_count() <= before)


class EnoughError(Exception):
    pass


def raise_enough(*_: Any) -> None:
    raise EnoughError


@pytest.mark.parametrize(
    "loop, is_under_a_loop, signum",
    [
        ("asyncio", True, signal.SIGUSR1),
        ("uvloop", False, signal.SIGINT),
        pytest.param("uvloop", False, signal.SIGUSR1, marks=pytest.mark.all),
    ],
)
def test_what_a_signal_handler_of_the_program_raises_stops_the_job_first(
    loop: str, is_under_a_loop: bool, signum: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AELASTIC_LOOP", loop)
    is_ctrl_c = signum == signal.SIGINT  # which the launch does not handle here

    def launch_long() -> None:
        launch(stories.sleep_long, str(tmp_path), signals_to_handle="SIGTERM")

    async def main() -> None:
        launch_long()

    before = signal.signal(signum, signal.default_int_handler if is_ctrl_c else raise_enough)
    try:
        with sending(tmp_path, signum), pytest.raises(KeyboardInterrupt if is_ctrl_c else EnoughError):
            asyncio.run(main()) if is_under_a_loop else launch_long()
    finally:
        signal.signal(signum, before)
    assert_all_ended(tmp_path)


# Signals.


class sending:  # noqa: N801  a context manager
    """Sends signals to this process once both workers of `sleep_long` are there and `look` has been called."""

    def __init__(self, folder: Path, *signums: int, look: Callable[[], Any] = lambda: None) -> None:
        self._thread = threading.Thread(target=self._send, args=(folder, signums, look))

    def _send(self, folder: Path, signums: tuple[int, ...], look: Callable[[], Any]) -> None:
        wait_for("two workers", lambda: (folder / "0").exists() and (folder / "1").exists())
        look()
        for number, signum in enumerate(signums):
            if number and signum == signums[0]:
                wait_for("a worker that was asked", (folder / "asked").exists)
            os.kill(os.getpid(), signum)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join(DEADLINE_S)


def assert_all_ended(folder: Path) -> None:
    assert not [rank for rank in "01" if alive(int((folder / rank).read_text()))]


@pytest.fixture
def own_handlers() -> Iterator[dict[int, Any]]:
    """Signal handlers of the surrounding program."""
    mine: dict[int, Any] = {signum: lambda *_: None for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)}
    before = {signum: signal.signal(signum, handler) for signum, handler in mine.items()}
    yield mine
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize("loop, is_under_a_loop", [("asyncio", False), ("uvloop", True)])
def test_a_signal_stops_the_job_and_its_handler_comes_back(
    loop: str, is_under_a_loop: bool, own_handlers: dict[int, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AELASTIC_LOOP", loop)

    async def under_a_loop() -> None:
        launch(stories.sleep_long, str(tmp_path))

    with sending(tmp_path, signal.SIGTERM), pytest.raises(SignalException, match="got signal: 15") as caught:
        asyncio.run(under_a_loop()) if is_under_a_loop else launch(stories.sleep_long, str(tmp_path))
    assert caught.value.sigval is signal.SIGTERM
    assert_all_ended(tmp_path)
    assert {signum: signal.getsignal(signum) for signum in own_handlers} == own_handlers
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_before_the_loop_turns_stops_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    from aelastic.base.loop.factory import loop_factory
    from aelastic.compat.launcher import elastic_launch as module

    def make_late(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
        def new_loop() -> asyncio.AbstractEventLoop:
            os.kill(os.getpid(), signal.SIGTERM)
            return loop_factory(name)()

        return new_loop

    monkeypatch.setattr(module, "loop_factory", make_late)
    with pytest.raises(SignalException):
        launch("sleep", 600)


def test_only_the_signals_named_are_handled(own_handlers: dict[int, Any], tmp_path: Path) -> None:
    during: dict[int, Any] = {}

    def look() -> None:
        during.update({signum: signal.getsignal(signum) for signum in own_handlers})

    with sending(tmp_path, signal.SIGUSR1, look=look), pytest.raises(SignalException) as caught:
        launch(stories.sleep_long, str(tmp_path), signals_to_handle="SIGUSR1")
    assert caught.value.sigval is signal.SIGUSR1
    assert [signum for signum in own_handlers if during[signum] != own_handlers[signum]] == [signal.SIGUSR1]


def test_a_signal_that_the_program_ignores_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with sending(tmp_path, signal.SIGHUP, signal.SIGQUIT), pytest.raises(SignalException) as caught:
            launch(stories.sleep_long, str(tmp_path))
        assert caught.value.sigval is signal.SIGQUIT
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_signal_kills_workers_that_take_their_time(tmp_path: Path) -> None:
    with sending(tmp_path, signal.SIGTERM, signal.SIGTERM), pytest.raises(SignalException):
        launch(stories.ignore_sigterm, str(tmp_path), shutdown_timeout=600)
    assert_all_ended(tmp_path)


def test_a_thread_handles_no_signals(tmp_path: Path) -> None:
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    launching = threading.Thread(target=launch, args=(sys.executable, "-c", wait_code(tmp_path)))
    launching.start()
    wait_for("two workers", lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
    assert {signum: signal.getsignal(signum) for signum in before} == before
    (tmp_path / "go").touch()
    launching.join(DEADLINE_S)
    assert not launching.is_alive()


def wait_code(folder: Path) -> str:
    return (
        f"import os, time\nopen(os.path.join({str(folder)!r}, os.environ['RANK']), 'w')\n"
        f"while not os.path.exists({str(folder / 'go')!r}): time.sleep(0.01)"
    )


# Scripts of others.


def run_script(folder: Path, code: str, *command: str, **popen: Any) -> subprocess.CompletedProcess[str]:
    path = folder / "stranger.py"
    path.write_text(textwrap.dedent(code))
    argv = [sys.executable, *(command or (str(path),))]
    env = {**os.environ, "PYTHONPATH": str(Path(stories.__file__).parents[2]), "TMPDIR": str(folder)}
    return ran(*argv, env=env, cwd=folder, **popen)


PLAIN = """
    from kit.stories.launches import one_node
    from aelastic.launch import elastic_launch

    def double(number):
        return 2 * number

"""


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.all)])
def test_a_script_without_a_guard_gets_advice(method: str, tmp_path: Path) -> None:
    code = PLAIN + f"    print(elastic_launch(one_node(start_method={method!r}), double)(4))\n"
    done = run_script(tmp_path, code)
    assert done.returncode == 1
    assert 'put the call under `if __name__ == "__main__":`' in done.stderr
    assert 'start_method "fork"' in done.stderr


def test_a_script_with_a_guard_launches_its_own_functions(tmp_path: Path) -> None:  # fork needs no guard: below
    code = PLAIN + (
        '    if __name__ == "__main__":\n'
        '        for method in ("spawn", "forkserver"):\n'
        "            print(elastic_launch(one_node(start_method=method), double)(4))\n"
    )
    done = run_script(tmp_path, code)
    assert (done.stdout, done.stderr) == ("{0: 8, 1: 8}\n" * 2, "")


@pytest.mark.parametrize("how", [pytest.param("-c", marks=pytest.mark.all), "-"])
def test_a_function_that_was_typed_in_runs_by_fork_only(how: str, tmp_path: Path) -> None:
    launches = (
        'for method in "fork", "spawn": print(elastic_launch(one_node(start_method=method), double)(4), flush=True)'
    )
    code = f"{textwrap.dedent(PLAIN)}{launches}\n"
    done = run_script(tmp_path, "", *((how, code) if how == "-c" else (how,)), input=code if how == "-" else "")
    assert done.stdout == "{0: 8, 1: 8}\n", done.stderr
    assert done.returncode == 1 and "double cannot be found by a worker" in done.stderr.splitlines()[-1]


def test_a_program_without_a_stdout_may_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed):
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", stream)
            values = launch("true")
        assert values == {0: None, 1: None}
