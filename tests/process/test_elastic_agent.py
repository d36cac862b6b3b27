"""torch's agent and its processes as classes: what their users call, over a supervisor; torch's own do the same."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit.launching import DEADLINE_S, LAUNCH_TIMEOUT_S, alive, wait_for
from kit.ports import quiet_port
from kit.stories import launches as stories

from aelastic import InputError, SignalException
from aelastic import elastic_agent as ours
from aelastic.elastic_agent import agent as agent_module
from aelastic.logs_specs import DefaultLogsSpecs, Std

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


# Processes.


def processes(tmp_path: Path, entrypoint: Any, *args: Any, module: Any = ours, **more: Any) -> Any:
    """Two, of ours or torch's; each has its number in its arguments and its environment."""
    logs = more.pop("logs_specs", DefaultLogsSpecs(str(tmp_path)))
    return module.start_processes(
        name="trainer", entrypoint=entrypoint, args={rank: (*args, rank) for rank in (0, 1)},
        envs={rank: {"RANK": str(rank), "TOLD": f"hello {rank}"} for rank in (0, 1)},
        logs_specs=logs, start_method="fork", **more,
    )  # fmt: skip


def tell(factor: int, rank: int) -> str:
    return f"{os.environ['TOLD']} {factor * rank} {'WORLD_SIZE' in os.environ}"


def fail_once_there(folder: str, rank: int) -> None:
    if rank == 1:
        raise LookupError("no batch left")
    stories.sleep_long(folder)


def test_functions_get_their_own_arguments_and_environment_and_no_more(tmp_path: Path) -> None:
    context = processes(tmp_path, tell, 7)
    pids, result = context.pids(), context.wait()
    assert result is not None and not result.is_failed()
    assert result.return_values == {0: "hello 0 0 False", 1: "hello 1 7 False"}
    assert sorted(pids) == [0, 1] and not any(alive(pid) for pid in pids.values())
    assert context.wait(0) == result, "as often as it is asked"


def test_programs_write_where_the_logs_specs_say(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logs = DefaultLogsSpecs(str(tmp_path), tee=Std.OUT)
    code = "import os, sys; print(os.environ['TOLD'], *sys.argv[1:], 'WORLD_SIZE' in os.environ)"
    prefixes = {0: "<8>", 1: "<9>"}
    context = processes(tmp_path, sys.executable, "-c", code, logs_specs=logs, log_line_prefixes=prefixes)
    result = context.wait(LAUNCH_TIMEOUT_S)
    assert result is not None and result.return_values == {0: None, 1: None}
    assert [Path(result.stdouts[rank]).read_text() for rank in (0, 1)] == ["hello 0 0 False\n", "hello 1 1 False\n"]
    assert context.stdouts == result.stdouts and sorted(context.error_files) == [0, 1]
    assert sorted(capfd.readouterr().out.splitlines()) == ["<8>hello 0 0 False", "<9>hello 1 1 False"]


def test_the_first_failure_stops_the_others(tmp_path: Path) -> None:
    context = processes(tmp_path, fail_once_there, str(tmp_path))
    pids, result = context.pids(), context.wait()
    assert result is not None and result.is_failed()
    assert "no batch left" in result.failures[1].message and result.failures[1].pid == pids[1]
    assert not any(alive(pid) for pid in pids.values())


def test_a_look_at_running_processes_gives_nothing_and_closing_ends_them(tmp_path: Path) -> None:
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGHUP)}
    context = processes(tmp_path, "sleep", "600")
    assert context.wait(0) is None and context.wait(0.01) is None
    context.close(signal.SIGTERM)
    assert not any(alive(pid) for pid in context.pids().values())
    assert {rank: failure.exitcode for rank, failure in context.wait().failures.items()} == {0: -15, 1: -15}
    assert {signum: signal.getsignal(signum) for signum in before} == before


def test_processes_that_ignore_a_signal_are_killed_in_time(tmp_path: Path) -> None:
    script = "trap '' TERM; touch $0/ignores-$1; while :; do sleep 1; done"
    context = processes(tmp_path, "sh", "-c", script, str(tmp_path))
    wait_for("both ignore it", lambda: len(list(tmp_path.glob("ignores-?"))) == 2)
    context.close(signal.SIGTERM, timeout=0.2)
    assert not any(alive(pid) for pid in context.pids().values())


def test_a_signal_is_raised_where_processes_are_waited_for(tmp_path: Path) -> None:
    context = processes(tmp_path, "sleep", "600")
    kill = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGTERM))
    try:
        with pytest.raises(SignalException) as caught:  # noqa: PT012  the signal must not come before
            kill.start()
            context.wait()
    finally:
        kill.join()
        context.close(signal.SIGTERM)
    assert caught.value.sigval == signal.SIGTERM and not any(alive(pid) for pid in context.pids().values())


def test_what_cannot_be_started_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no-such-program not found"):
        processes(tmp_path, "no-such-program")
    logs = DefaultLogsSpecs(str(tmp_path))
    with pytest.raises(RuntimeError, match="envs has entries for"):
        ours.start_processes("t", "true", {0: (), 1: ()}, {0: {}}, logs)
    with pytest.raises(InputError, match="entrypoint is empty"):
        spec_of(None)


# As torch.


@pytest.fixture
def torchs() -> Iterator[Any]:
    """torch's classes.  Its agent leaves its signal handlers behind, which raise: what is forked later would have them."""
    before = {
        signum: signal.getsignal(signum) for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
    }
    server = pytest.importorskip("torch.distributed.elastic.agent.server.api")
    local = pytest.importorskip("torch.distributed.elastic.agent.server.local_elastic_agent")
    multiprocessing = pytest.importorskip("torch.distributed.elastic.multiprocessing")
    names = ("start_processes", "PContext", "DefaultLogsSpecs", "Std")
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
        told: list[Any] = []
        for module in (torchs, ours):
            parameters = RendezvousParameters("c10d", f"localhost:{quiet_port()}", f"run {len(told)}", 1, 1)
            spec = torchs.WorkerSpec(
                role="trainer", local_world_size=2, rdzv_handler=registry.get_rendezvous_handler(parameters),
                entrypoint=entrypoint, max_restarts=restarts, monitor_interval=0.05,
            )  # fmt: skip
            agent = module.LocalElasticAgent(spec, torchs.DefaultLogsSpecs(str(tmp_path)), start_method="fork")
            result = agent.run()
            group = agent.get_worker_group()
            failures = {"some"} if result.failures else set()  # which of the two is the first is chance
            workers = [(w.local_rank, w.global_rank, w.role_rank, w.world_size, type(w.id)) for w in group.workers]
            told.append((result.return_values, failures, group.group_rank, workers, agent._remaining_restarts))
            assert result.is_failed() == (result.state == torchs.WorkerState.FAILED) == (entrypoint is stories.fail)
            assert group.state == result.state
        assert told[0] == told[1]


@pytest.mark.all
def test_the_address_in_the_spec_is_what_workers_of_both_get_though_the_handlers_store_is_shared(torchs: Any) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

    told: list[Any] = []
    for module in (torchs, ours):
        parameters = RendezvousParameters("c10d", f"localhost:{quiet_port()}", "job", 1, 1, local_addr="127.0.0.1")
        spec = torchs.WorkerSpec(
            role="trainer", local_world_size=2, rdzv_handler=registry.get_rendezvous_handler(parameters),
            entrypoint=stories.where_workers_meet, monitor_interval=0.05, master_addr="gateway", master_port=2345,
        )  # fmt: skip
        told.append(module.LocalElasticAgent(spec, torchs.DefaultLogsSpecs(), start_method="fork").run().return_values)
    assert told[0] == told[1] == {rank: ["gateway", "2345", "True"] for rank in range(2)}


@pytest.mark.all
def test_processes_of_both_give_the_same(torchs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for entrypoint, args in ((tell, (7,)), (fail_once_there, (str(tmp_path),)), ("true", ()), ("false", ())):
        told: list[Any] = []
        for module in (torchs, ours):
            logs = torchs.DefaultLogsSpecs(str(tmp_path), redirects=torchs.Std.ALL)
            context = processes(tmp_path, entrypoint, *args, module=module, logs_specs=logs)
            files = [str(path).rsplit("_", 1)[1][8:] for path in context.stdouts.values()]  # below a random folder
            pids, result = context.pids(), context.wait(-1, 0.05)
            context.close()
            codes = {failure.exitcode for failure in result.failures.values()} - {-15}
            told.append((result.is_failed(), result.return_values, codes, files, sorted(pids)))
        assert told[0] == told[1]
