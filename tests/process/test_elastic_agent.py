"""torch's agent as a class: the calls that users make, on top of a supervisor, compared with torch's own classes."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ReferenceType, ref

import pytest
from kit.ports import quiet_port
from kit.stories import launches as stories
from kit.waiting import DEADLINE_S, wait_for

from aelastic import InputError, SignalException
from aelastic import elastic_agent as ours
from aelastic.compat.elastic_agent import agent as agent_module

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # torch's, and of forking with threads
    pytest.mark.usefixtures("warm_stores"),
]


def spec_of(entrypoint: Any, *args: Any, **more: Any) -> ours.WorkerSpec:
    return ours.WorkerSpec(role="trainer", local_world_size=2, entrypoint=entrypoint, args=args, **more)


def agent_of(entrypoint: Any, *args: Any, cls: Any = ours.LocalElasticAgent, **more: Any) -> Any:
    return cls(spec_of(entrypoint, *args, **more), start_method="fork")


# The agent.


def test_an_agent_gives_what_functions_return_by_global_rank_and_its_group_has_their_ranks_and_pids() -> None:
    agent = agent_of(stories.pids)
    result = agent.run()
    group = agent.get_worker_group()
    assert result.state == group.state == ours.WorkerState.SUCCEEDED and not result.is_failed()
    assert {rank: value[0] for rank, value in result.return_values.items()} == {
        w.global_rank: w.id for w in group.workers
    }
    assert [(w.local_rank, w.role_rank, w.world_size, w.role_world_size) for w in group.workers] == [
        (0, 0, 2, 2),
        (1, 1, 2, 2),
    ]
    assert (group.group_rank, group.group_world_size, group.restart_count) == (0, 1, 0)


def test_a_failure_is_a_result_after_the_restarts() -> None:
    agent = agent_of(stories.fail, max_restarts=1)
    result = agent.run()
    assert result.is_failed() and "no batch left" in next(iter(result.failures.values())).message
    assert agent._remaining_restarts == 0 and agent.get_worker_group().restart_count == 1


@pytest.mark.parametrize("entrypoint", [stories.ranks, "no-such-program"])
def test_an_agent_knows_how_many_seconds_its_run_took_whatever_it_ended_with(
    entrypoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "monotonic", iter((100.0, 107.9)).__next__)
    agent = agent_of(entrypoint)
    assert agent._total_execution_time == 0
    with suppress(InputError):
        agent.run()
    assert agent._total_execution_time == 7


def test_a_subclass_starts_workers_with_what_it_changes_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[Any] = []

    class Agent(ours.LocalElasticAgent):
        def _start_workers(self, worker_group: ours.WorkerGroup) -> dict[int, Any]:
            groups.append([worker.global_rank for worker in worker_group.workers])
            monkeypatch.setenv("STARTED", str(len(groups)))
            worker_group.spec.args = ("-c", "import os; raise SystemExit(os.environ['STARTED'] == '1')")
            ids = super()._start_workers(worker_group)
            assert sorted(ids) == [0, 1] and all(pid > 1 for pid in ids.values())
            return ids

    assert agent_of(sys.executable, "-c", "no program", cls=Agent, max_restarts=1).run().state.name == "SUCCEEDED"
    assert groups == [[0, 1], [0, 1]]


def test_a_subclass_whose_hooks_are_not_called_or_that_starts_no_worker_is_refused() -> None:
    class Loop(ours.LocalElasticAgent):
        def _invoke_run(self, role: str) -> None: ...

        def _monitor_workers(self, group: Any) -> None: ...

    with pytest.raises(
        InputError, match=r"Loop overrides _invoke_run, _monitor_workers, which aelastic's agent does not"
    ):
        agent_of("true", cls=Loop)

    class Idle(ours.LocalElasticAgent):
        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            return {}

    with pytest.raises(InputError, match=r"Idle._start_workers started no worker of this agent: call its super"):
        agent_of("true", cls=Idle).run()


def test_a_signal_stops_an_agent_and_is_raised(tmp_path: Path) -> None:
    agent = agent_of(stories.sleep_long, str(tmp_path))

    def interrupt() -> None:
        wait_for("both run", lambda: len(list(tmp_path.glob("?"))) == 2)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(SignalException) as caught:
        agent.run()
    thread.join()
    assert caught.value.sigval == signal.SIGTERM and agent.get_worker_group().state.name == "STOPPED"


def test_a_thread_may_shut_an_agent_down(tmp_path: Path) -> None:
    agent = agent_of(stories.sleep_long, str(tmp_path))
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(agent.run()))
    thread.start()
    wait_for("both run", lambda: len(list(tmp_path.glob("?"))) == 2)
    agent._shutdown(signal.SIGTERM)
    thread.join(DEADLINE_S)
    assert [result.state.name for result in results] == ["STOPPED"]


def test_what_cannot_be_started_is_refused() -> None:
    with pytest.raises(InputError, match="entrypoint is empty"):
        spec_of(None)


# Compared with torch.


@pytest.fixture
def torchs() -> Iterator[Any]:
    """torch's classes.  torch's agent leaves signal handlers behind that raise, and later forks would inherit them."""
    before = {
        signum: signal.getsignal(signum) for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
    }
    server = pytest.importorskip("torch.distributed.elastic.agent.server.api")
    local = pytest.importorskip("torch.distributed.elastic.agent.server.local_elastic_agent")
    multiprocessing = pytest.importorskip("torch.distributed.elastic.multiprocessing")
    names = ("DefaultLogsSpecs",)
    yield SimpleNamespace(
        **{name: getattr(multiprocessing, name) for name in names}, LocalElasticAgent=local.LocalElasticAgent,
        **{name: getattr(server, name) for name in ("WorkerSpec", "WorkerState", "WorkerGroup")},
    )  # fmt: skip
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.long
@pytest.mark.all
def test_agents_of_both_give_the_same_for_a_handler_of_torchs(torchs: Any, tmp_path: Path) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

    for entrypoint, restarts in ((stories.ranks, 0), (stories.fail_the_first_time, 1), (stories.fail, 1)):
        results: list[Any] = []
        for module in (torchs, ours):
            parameters = RendezvousParameters("c10d", f"localhost:{quiet_port()}", f"run {len(results)}", 1, 1)
            spec = torchs.WorkerSpec(
                role="trainer", local_world_size=2, rdzv_handler=registry.get_rendezvous_handler(parameters),
                entrypoint=entrypoint, max_restarts=restarts, monitor_interval=0.05,
            )  # fmt: skip
            agent = module.LocalElasticAgent(spec, torchs.DefaultLogsSpecs(str(tmp_path)), start_method="fork")
            result = agent.run()
            group = agent.get_worker_group()
            failures = {"some"} if result.failures else set()  # it is up to chance which of the two is first
            workers = [(w.local_rank, w.global_rank, w.role_rank, w.world_size, type(w.id)) for w in group.workers]
            results.append((result.return_values, failures, group.group_rank, workers, agent._remaining_restarts))
            assert result.is_failed() == (result.state == torchs.WorkerState.FAILED) == (entrypoint is stories.fail)
            assert group.state == result.state
        assert results[0] == results[1]


@pytest.mark.all
def test_the_address_in_the_spec_is_what_workers_of_both_get_though_the_handlers_store_is_shared(torchs: Any) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

    results: list[Any] = []
    for module in (torchs, ours):
        parameters = RendezvousParameters("c10d", f"localhost:{quiet_port()}", "job", 1, 1, local_addr="127.0.0.1")
        spec = torchs.WorkerSpec(
            role="trainer", local_world_size=2, rdzv_handler=registry.get_rendezvous_handler(parameters),
            entrypoint=stories.where_workers_meet, monitor_interval=0.05, master_addr="gateway", master_port=2345,
        )  # fmt: skip
        results.append(
            module.LocalElasticAgent(spec, torchs.DefaultLogsSpecs(), start_method="fork").run().return_values
        )
    assert results[0] == results[1] == {rank: ["gateway", "2345", "True"] for rank in range(2)}


# torch's handlers.


@pytest.fixture
def make_handler() -> Callable[[], Any]:
    """Makes torch's handler for one node, always at the same endpoint."""
    api: Any = pytest.importorskip("torch.distributed.elastic.rendezvous")
    registry: Any = pytest.importorskip("torch.distributed.elastic.rendezvous.registry")
    where = {"local_addr": "127.0.0.1", "is_host": "1"}
    parameters = api.RendezvousParameters("c10d", f"127.0.0.1:{quiet_port()}", "job", 1, 1, **where)
    return partial(registry.get_rendezvous_handler, parameters)


@pytest.mark.parametrize("entrypoint, in_thread", [
    (stories.pids, False),
    (stories.fail, True),
    pytest.param(stories.pids, True, marks=[pytest.mark.all, pytest.mark.ci]),
    pytest.param(stories.fail, False, marks=[pytest.mark.all, pytest.mark.ci]),
])  # fmt: skip
def test_a_handler_is_let_go_of_with_the_agent_so_that_its_endpoint_is_free_for_the_next(
    make_handler: Callable[[], Any], entrypoint: Any, in_thread: bool
) -> None:
    """torch's store listens for as long as anything references the handler; no garbage collection is needed."""
    handlers: list[ReferenceType[Any]] = []

    def run() -> None:
        handlers.append(ref(handler := make_handler()))
        agent_of(entrypoint, rdzv_handler=handler, max_restarts=0).run()

    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            if in_thread:
                with ThreadPoolExecutor(1) as threads:
                    threads.submit(run).result()
            else:
                run()
        assert [handler() for handler in handlers] == [None, None]
    finally:
        gc.enable()
