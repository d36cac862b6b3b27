"""Settings that apply to all rings, and fixtures for the rings that start real processes.

A ring is a folder.  `core`, `property`, `simulation` and `shell` must not start processes; this file enforces that.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from kit import loop_guard
from kit.effort import EFFORT, examples
from kit.launching import Launcher
from kit.no_processes import no_processes
from kit.rings import DURATIONS, SHARE, WITHOUT_PROCESSES, ring_of, table, write_durations
from kit.servers.etcd_cells import Closing
from kit.servers.etcd_servers import EtcdServers
from kit.slots import slot
from kit.warm.interpreters import Warm

from aelastic.base.machine import check_invariants
from aelastic.rdzv.stores.endpoint_cell import EndpointCell
from aelastic.rdzv.stores.etcd_v3 import EtcdV3
from aelastic.workers.tcpstore import child

# A background shell ignores these signals, and every process that a test starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# CPU time limit of a test.  Tests without processes run next to others, at low priority.
CPU = "cpu_s"
CPU_BEFORE_S = pytest.StashKey[float]()

# Commands that tests run in this process must not find the user's own jobs.
_CONTROL_SOCKETS = tempfile.TemporaryDirectory(prefix="tests-")
os.environ["XDG_RUNTIME_DIR"] = _CONTROL_SOCKETS.name

# Nothing may block an event loop, in this process or in the agents that tests start.
loop_guard.install()

# All cores in this process check their invariants after each event, as do agents that tests start (`kit.launching`).
check_invariants()

# Defaults for tests that don't set `max_examples=examples(…)`.  On a busy machine, a slow
# test may fail only by its timeout.
settings.register_profile(
    "effort",
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    report_multiple_bugs=False,
    # Shrinking a failing example takes up to five minutes, so only `make test-all` does it.
    phases=tuple(phase for phase in Phase if EFFORT != "quick" or phase not in {Phase.shrink, Phase.explain}),
)
settings.load_profile("effort")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=0, help="how many seeds test_simulation.py runs")


@pytest.hookimpl(trylast=True)  # after other plugins have deselected tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Selects this run's share of the tests, or orders them for the processes that pytest-xdist starts.

    Long tests come first, in half of the processes, and short ones run next to them, so none runs alone at the end.

    pytest-xdist gives each process an equal slice of the list, in order, and rebalances from the end of a slice.
    """
    if dealt := os.environ.get(SHARE):
        number, shares = map(int, dealt.split("/"))
        items[:] = items[number - 1 :: shares]
        return
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    half, is_long = max(count // 2, 1), {item: item.get_closest_marker("long") is not None for item in items}
    long, others = ([item for item in items if is_long[item] is which] for which in (True, False))
    whole, items[:] = len(items), []
    for number in range(count):
        part = long[number::half] if number < half else []
        share = max((whole - len(items)) // (count - number) - len(part), 0)
        items += [*part, *others[:share]]
        del others[:share]
    items += others


def pytest_collection_finish() -> None:
    """Freezes everything imported and collected so far: later garbage collections skip it, and few are needed."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest-timeout starts its clock, as this may have to wait
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Tests that start processes hold one of the machine's slots; other tests must not start any."""
    with no_processes() if ring_of(item.path) in WITHOUT_PROCESSES else slot():
        return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[CPU_BEFORE_S] = time.process_time()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """The last report of a test without processes carries the CPU time that the test used."""
    if call.when == "teardown" and CPU_BEFORE_S in item.stash and ring_of(item.path) in WITHOUT_PROCESSES:
        item.user_properties.append((CPU, time.process_time() - item.stash[CPU_BEFORE_S]))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_terminal_summary(terminalreporter: Any) -> Iterator[None]:
    """Prints how long each ring took, or writes it for the program that started this run."""
    seconds = Counter[str]()
    cpu_s: dict[str, float] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid] += report.duration  # type: ignore[assignment]  # a Counter adds up the values
                for name, value in report.user_properties:
                    if name == CPU and isinstance(value, float):
                        cpu_s[report.nodeid] = value
    took = {**seconds, **cpu_s}
    path = os.environ.get(DURATIONS)
    if path:
        write_durations(path, took)
    else:
        for line in table(took, is_judged=False):
            terminalreporter.write_line(line)
    return (yield)


@pytest.fixture(autouse=True)
def _no_loop_is_blocked() -> Iterator[None]:
    loop_guard.found.clear()
    yield
    assert not loop_guard.found, "\n".join(loop_guard.found)


@pytest.fixture(autouse=True, scope="module")
def _handlers_are_given_back() -> Iterator[None]:
    """A test module must restore this process's signal handlers, because later tests fork children that inherit them.

    If SIGTERM has a Python handler, a child about to block in C code (on a semaphore, say) only records the signal.
    """
    before = {signum: signal.getsignal(signum) for signum in signal.valid_signals() - {signal.SIGALRM}}
    yield
    assert {signum: signal.getsignal(signum) for signum in before} == before


@pytest.fixture(autouse=True)
def _logging_is_given_back() -> Iterator[None]:
    """Undoes the logging setup of tests that run the command line in this process: it sends log records to stderr."""
    ours = logging.getLogger("aelastic")
    handlers, propagate, level = [*ours.handlers], ours.propagate, ours.level
    yield
    ours.handlers[:], ours.propagate = handlers, propagate
    ours.setLevel(level)


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """Forks from interpreters that have imported torch."""
    warm = Warm("torch")
    yield warm
    warm.close()


@pytest.fixture(scope="session")
def warm_store() -> Iterator[Warm]:
    """Forks from interpreters that have imported what a store server needs."""
    warm = Warm("store")
    _ = warm.python  # started before a test checks what this process holds
    yield warm
    warm.close()


@pytest.fixture
def warm_stores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, warm_store: Warm) -> None:
    """Starts agents' stores from a warm interpreter, also in this process, in tests that are not about stores."""
    if request.node.get_closest_marker("cold") is None:
        monkeypatch.setattr(child, "sys", SimpleNamespace(executable=warm_store.python))
        if "launch" in request.fixturenames:
            request.getfixturevalue("launch").store_python = warm_store.python


@pytest.fixture
def launch(request: pytest.FixtureRequest, tmp_path: Path, warm: Warm) -> Iterator[Launcher]:
    """Starts jobs, and makes sure that none outlives its test."""
    launcher = Launcher(tmp_path, warm)
    launcher.is_cold = request.node.get_closest_marker("cold") is not None
    yield launcher
    launcher.close()


@pytest.fixture(scope="session")
def etcds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    """Real etcd servers for tests that don't damage them.  Each starts when a test first requests it."""
    servers = EtcdServers(tmp_path_factory.mktemp("etcd"))
    yield servers
    servers.close()


@pytest.fixture
def kind_to_etcd(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forbids read-only transactions, which crash an old etcd server when its client disconnects (`etcd_v3.py`)."""
    call, asked = EtcdV3._call, list[Any]()

    async def call_and_note(self: EtcdV3, path: str, message: dict[str, Any], *args: Any, **keywords: Any) -> Any:
        if path == "kv/txn":
            asked.append([*message.get("success", []), *message.get("failure", [])])
        return await call(self, path, message, *args, **keywords)

    monkeypatch.setattr(EtcdV3, "_call", call_and_note)
    yield
    only_reading = [each for each in asked if all("request_range" in operation for operation in each)]
    assert not only_reading


@pytest.fixture
def run_id(request: pytest.FixtureRequest) -> str:
    """A run id for this test only."""
    name: str = request.node.name
    return name


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return str(path)


@pytest.fixture
async def closing() -> AsyncIterator[Closing]:
    """Closes the cells passed to it at the end of the test."""
    async with AsyncExitStack() as stack:

        def close(cell: EndpointCell) -> EndpointCell:
            stack.push_async_callback(cell.aclose)
            return cell

        yield close
