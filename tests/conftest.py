"""What holds for all rings, and the fixtures of those with real processes.

A ring is a folder.  `core`, `property`, `simulation` and `shell` start no process; that is enforced here.
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

# Started in the background, a shell has these ignored, and what is ignored is handed on to all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The processor time of a test: those without processes run beside others, at low priority.
CPU = "cpu_s"
CPU_BEFORE_S = pytest.StashKey[float]()

# Commands that tests run in this process find no jobs of the user who runs the tests.
_CONTROL_SOCKETS = tempfile.TemporaryDirectory(prefix="tests-")
os.environ["XDG_RUNTIME_DIR"] = _CONTROL_SOCKETS.name

# No loop of this process, nor of the agents that tests start, may be blocked.
loop_guard.install()

# Every core of this process states its invariants after each event; agents that tests start do, too (`kit.launching`).
check_invariants()

# Of tests that do not say how many; the others say `max_examples=examples(…)`.  A loaded machine is slow: no test fails of
# that, save by its timeout.
settings.register_profile(
    "effort",
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    report_multiple_bugs=False,
    # Making a failing example small takes up to five minutes: `make test-all` does it.
    phases=tuple(phase for phase in Phase if EFFORT != "quick" or phase not in {Phase.shrink, Phase.explain}),
)
settings.load_profile("effort")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=0, help="how many seeds test_simulation.py runs")


@pytest.hookimpl(trylast=True)  # some are left out before
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Takes this run's share, or puts the tests in order for the processes that pytest-xdist starts.

    Long tests come first, in half of the processes, and others run beside them: none runs alone at the end.

    pytest-xdist gives each process an equal part of the list, in its order, and moves what is at the end of a part.
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
    """What has been imported and collected stays: no collection of garbage looks at it again, and few are needed."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest-timeout begins to count: it may have to wait
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Tests with processes hold one of the machine's slots; the others start none."""
    with no_processes() if ring_of(item.path) in WITHOUT_PROCESSES else slot():
        return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[CPU_BEFORE_S] = time.process_time()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """The last report of a test without processes has the processor time that it took."""
    if call.when == "teardown" and CPU_BEFORE_S in item.stash and ring_of(item.path) in WITHOUT_PROCESSES:
        item.user_properties.append((CPU, time.process_time() - item.stash[CPU_BEFORE_S]))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_terminal_summary(terminalreporter: Any) -> Iterator[None]:
    """Says what each ring took, or writes it for the program that started this run."""
    seconds = Counter[str]()
    cpu_s: dict[str, float] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid] += report.duration  # type: ignore[assignment]  # a Counter adds up what it is given
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
    """What is forked in later tests has this process's signal handlers.

    Where SIGTERM has one in Python, a child that is about to wait in C (for a semaphore, say) only notes the signal.
    """
    before = {signum: signal.getsignal(signum) for signum in signal.valid_signals() - {signal.SIGALRM}}
    yield
    assert {signum: signal.getsignal(signum) for signum in before} == before


@pytest.fixture(autouse=True)
def _logging_is_given_back() -> Iterator[None]:
    """A test that runs the command line in this process sends log records to stderr; later tests read what they write."""
    ours = logging.getLogger("aelastic")
    handlers, propagate, level = [*ours.handlers], ours.propagate, ours.level
    yield
    ours.handlers[:], ours.propagate = handlers, propagate
    ours.setLevel(level)


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """Interpreters that have imported torch."""
    warm = Warm("torch")
    yield warm
    warm.close()


@pytest.fixture(scope="session")
def warm_store() -> Iterator[Warm]:
    """Interpreters that have imported what serves a store."""
    warm = Warm("store")
    _ = warm.python  # it runs before a test looks at what this process has
    yield warm
    warm.close()


@pytest.fixture
def warm_stores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, warm_store: Warm) -> None:
    """The stores of agents, also of those in this process, start warm in tests whose subject they are not."""
    if request.node.get_closest_marker("cold") is None:
        monkeypatch.setattr(child, "sys", SimpleNamespace(executable=warm_store.python))
        if "launch" in request.fixturenames:
            request.getfixturevalue("launch").store_python = warm_store.python


@pytest.fixture
def launch(request: pytest.FixtureRequest, tmp_path: Path, warm: Warm) -> Iterator[Launcher]:
    """Starts jobs; none of them outlives its test."""
    launcher = Launcher(tmp_path, warm)
    launcher.is_cold = request.node.get_closest_marker("cold") is not None
    yield launcher
    launcher.close()


@pytest.fixture(scope="session")
def etcds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    """Real etcd servers for tests that do not harm them; each runs from when it is first asked for."""
    servers = EtcdServers(tmp_path_factory.mktemp("etcd"))
    yield servers
    servers.close()


@pytest.fixture
def kind_to_etcd(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is asked that ends an old etcd server if its client goes away (`etcd_v3.py`)."""
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
    """One of this test's own."""
    name: str = request.node.name
    return name


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return str(path)


@pytest.fixture
async def closing() -> AsyncIterator[Closing]:
    """Cells given to it are closed in the end."""
    async with AsyncExitStack() as stack:

        def close(cell: EndpointCell) -> EndpointCell:
            stack.push_async_callback(cell.aclose)
            return cell

        yield close
