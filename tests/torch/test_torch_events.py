"""torchelastic's events and metrics: torch's agent and ours report the same stories; listeners can do no harm."""

from __future__ import annotations

import inspect
import json
import logging
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest
from kit import decided
from kit.launching import LAUNCH_TIMEOUT_S, Launcher
from kit.ports import quiet_port
from kit.stories import torch_events as torch_event_stories
from kit.stories.torch_events import ONE_NODE, STOPPED
from kit.waiting import DEADLINE_S, wait_for
from kit.warm.interpreters import Warm
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

from aelastic import InputError, ProcessFailure, Std, Supervisor, WorkerSpec, WorkerState
from aelastic.agent.group import events as g
from aelastic.agent.group.worker_group import WorkerGroup
from aelastic.agent.run_event_source import RunEventSource
from aelastic.observe import torch_events
from aelastic.observe.run_events import RunEnded
from aelastic.observe.torch_events import check_event_log_handler
from aelastic.observe.torch_events_core import Status, TorchRecord, TorchTranslator
from aelastic.rdzv.protocol.messages import Assigned, Ended, Interrupted, Outcome
from aelastic.rdzv.protocol.ranks import assign_ranks

STORY_TIMEOUT_S = 2 * LAUNCH_TIMEOUT_S
GROUP = "torchelastic"
# For a worker, an older torch reports neither exit code nor process id, nor the kind of failure.
HAS_EXIT_CODES = "exit_code" in inspect.signature(SimpleElasticAgent._construct_event).parameters
# Metrics that `@prof` records for methods of torch's agent, which ours lacks.
OF_METHODS = ("SimpleElasticAgent.", "LocalElasticAgent.")
# In an agent: it allows as much time for importing torch as the tests do.
PATIENT = f"""
from aelastic.observe import torch_events
torch_events.FINISH_TIMEOUT_S = {LAUNCH_TIMEOUT_S}
torch_events.TorchEvents.close_timeout_s += {LAUNCH_TIMEOUT_S}
"""


def test_a_name_server_that_is_silent_holds_no_job_up(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(torch_events, "NAME_LIMIT_S", 0.05)
    monkeypatch.setattr("socket.getfqdn", lambda name: answers.wait(DEADLINE_S) and name)
    torch_events._host_name.cache_clear()
    try:
        assert torch_events._host_name() == socket.gethostname()
        assert not answers.is_set()
    finally:
        answers.set()
        torch_events._host_name.cache_clear()


def free_endpoint() -> str:
    return f"127.0.0.1:{quiet_port()}"


@dataclass
class Agent:
    """A process in which torch's agent or ours runs a story."""

    result: Path
    process: subprocess.Popen[bytes]

    def recorded(self) -> Any:
        """Its listeners' records, and when it began and ended."""
        assert self.process.wait(STORY_TIMEOUT_S) == 0, self.result.with_suffix(".log").read_text()
        return json.loads(self.result.read_text())


@pytest.fixture
def start_agent(tmp_path: Path, warm: Warm) -> Iterator[Callable[..., Agent]]:
    agents = list[Agent]()

    def start(launcher: str, story: str, **config: Any) -> Agent:
        result, shared = tmp_path / f"{len(agents)}.json", tmp_path / f"shared by {launcher}"
        shared.mkdir(exist_ok=True)
        arguments = [launcher, story, json.dumps({"run_id": "job", **config}), str(result)]
        env = {**os.environ, "TMPDIR": str(tmp_path), "SHARED": str(shared)}
        with result.with_suffix(".log").open("wb") as log:
            process = subprocess.Popen(
                [warm.python, torch_event_stories.__file__, *arguments],
                env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        agents.append(Agent(result, process))
        return agents[-1]

    yield start
    for agent in agents:
        agent.process.kill()
        agent.process.wait()


def comparable(recorded: list[dict[str, Any]]) -> list[Any]:
    """The parts of the records that don't differ between runs, without looks that found the workers healthy."""
    found: list[Any] = []
    for each in recorded:
        if each["kind"] == "event":
            found.append((each["name"], each["source"], comparable_metadata(each["metadata"])))
        elif not each["name"].startswith(OF_METHODS):
            found.append((each["group_name"], each["name"], each["value"]))
            if found[-1] == (GROUP, "workers.trainer.healthy", 1):
                assert found[-2][1] == "workers.trainer.remaining_restarts"
                del found[-2:]
    return found


def comparable_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    more = json.loads(metadata["metadata"])
    if not HAS_EXIT_CODES:
        more.pop("exit_code", None)
        more.pop("worker_pid", None)
    if (pid := more.get("worker_pid", [None])) != [None]:
        assert str(pid[0]) == metadata["worker_id"]
        more["worker_pid"] = "any"
    raw_error = metadata["raw_error"]
    if raw_error is not None:
        raw_error = shape_of(raw_error)
    return metadata | {
        "metadata": more,
        "worker_id": metadata["worker_id"] and metadata["worker_id"].isdecimal(),
        "raw_error": raw_error,
        "total_run_time": type(metadata["total_run_time"]),
        "duration_ms": type(metadata["duration_ms"]),
    }


def shape_of(raw_error: str) -> Any:
    """The shape of an error without what differs: the agent's frames, the time."""
    try:
        record = json.loads(raw_error)
    except ValueError:
        return "the agent's own words"
    if not HAS_EXIT_CODES:
        record.pop("errorTraits", None)
    if isinstance(record["message"], dict):
        extra = record["message"]["extraInfo"]
        assert extra["timestamp"].isdecimal()
        extra["timestamp"], extra["py_callstack"] = "any", extra["py_callstack"].splitlines()[-2:]
    return record


# The same stories.


# The others are parts of these, or end in another way.
QUICK = {"programs succeed", "a function fails", "a program fails, then succeeds", STOPPED}


@pytest.mark.timeout(STORY_TIMEOUT_S + 20)
@pytest.mark.parametrize(
    "story", [pytest.param(story, marks=() if story in QUICK else pytest.mark.all) for story in ONE_NODE]
)
def test_listeners_get_what_torchs_agent_sends_them_with_the_time_when_it_happened(
    start_agent: Callable[..., Agent], story: str
) -> None:
    agents = [start_agent(launcher, story) for launcher in ("torch", "ours")]
    theirs, ours = (agent.recorded() for agent in agents)
    assert len(comparable(theirs["recorded"])) > 3
    assert comparable(ours["recorded"]) == comparable(theirs["recorded"])

    times = [each["timestamp"] / (1000 if each["kind"] == "event" else 1) for each in ours["recorded"]]
    assert times == sorted(times)
    assert ours["began"] - 0.001 <= times[0] <= times[-1] <= ours["ended"]

    # Programs that are stopped were seen to be healthy before.
    names = [each["name"] for each in ours["recorded"]]
    healthy = [place for place, name in enumerate(names) if name == "workers.trainer.healthy"]
    assert healthy or story != STOPPED
    assert all(place > names.index("torchelastic.worker.status.START") for place in healthy)


def recorded_on_two_nodes(start_agent: Callable[..., Agent], story: str) -> dict[str, list[list[Any]]]:
    """The records of both nodes' agents, under torchrun and under aelastic."""
    agents = dict[str, list[Agent]]()
    for launcher in ("torch", "ours"):
        config = {"min_nodes": 2, "max_nodes": 2, "rdzv_endpoint": free_endpoint()}
        agents[launcher] = [start_agent(launcher, story, **config) for _ in range(2)]
    return {launcher: [comparable(agent.recorded()["recorded"]) for agent in both] for launcher, both in agents.items()}


@pytest.mark.timeout(STORY_TIMEOUT_S + 20)
@pytest.mark.all
def test_of_two_nodes_each_tells_its_part(start_agent: Callable[..., Agent]) -> None:
    def first_rank(node: list[Any]) -> int:
        rank: int = next(word[2]["global_rank"] for word in node if word[1] == "WORKER")
        return rank

    recorded = recorded_on_two_nodes(start_agent, "two nodes succeed")
    assert sorted(recorded["ours"], key=first_rank) == sorted(recorded["torch"], key=first_rank)


@pytest.mark.all
@pytest.mark.timeout(STORY_TIMEOUT_S + 20)
def test_a_node_tells_of_the_restart_that_another_ones_failure_made(start_agent: Callable[..., Agent]) -> None:
    tables = []
    for recorded in recorded_on_two_nodes(start_agent, "one of two nodes fails").values():
        nodes = [[word[:2] for word in node] for node in recorded]
        assert sum((GROUP, "workers.trainer.failed") in node for node in nodes) == 1
        tables.append(sorted(nodes, key=len))
    assert tables[1] == tables[0]


# Points of a story that need no processes.


FAILURE = ProcessFailure.from_elsewhere("node7", 1, 1, 4711, 3, "it broke", "", 0)


class Story:
    """A worker group into which a test feeds events, and the resulting records."""

    def __init__(self) -> None:
        self.group = WorkerGroup(WorkerSpec(entrypoint="train.py", local_world_size=2))
        self.source = RunEventSource(self.group)
        self.translator = TorchTranslator("default", self.group.spec.max_restarts, 0.0)
        self.now = 0.0

    def handle(self, step: g.Event | RunEnded | None) -> list[TorchRecord]:
        """The records of an event, of the end of the run, or of a look at the workers."""
        if step is None:
            return self.translator.look()
        if isinstance(step, RunEnded):
            return self.translator.handle(step, self.now)
        self.now += 1
        self.group.handle(step, self.now)
        events = self.source.handle(step, self.now)
        return [record for event in events for record in self.translator.handle(event, self.now)]


def ended(state: WorkerState, failure: ProcessFailure | None = None) -> RunEnded:
    return RunEnded(state, "it is over", None, {} if failure is None else {1: failure})


LOOK = None
BEGUN: list[Any] = [
    g.Start(),
    Assigned(1, 0, assign_ranks([("default", 2)])[0], "localhost", 29500),
    g.Spawned(1, {0: 100, 1: 101}),
]
GONE: list[Any] = [g.Exited(1, 0, None), g.Exited(1, 1, None), g.Cleared(1, 0), g.Cleared(1, 1)]
INTERRUPTED = Interrupted(1, decided.lost("n1", "silent for 5 s"))
OTHERS_SUCCEEDED = Ended(Outcome.SUCCEEDED, decided.SUCCEEDED)
HUNG = ProcessFailure(1, 4711, -9, "nowhere", unhealthy="timer 'step' expired")
LOOKED_BAD = ["workers.default.remaining_restarts", "workers.default.failed"]
COUNTED = [
    f"workers.default.{name}"
    for name in (
        "flakiness", "run_total", "run_success_with_retries", "run_success_no_retries", "run_failed_with_retries",
        "run_failed_no_retries",
    )
]  # fmt: skip
# Events and the names of their records; records of the usual beginning are left out if more follows.
POINTS: dict[str, tuple[list[Any], list[str]]] = {
    "workers begin": (BEGUN, ["RENDEZVOUS", "ASSIGN_WORKER_RANKS", "START", "START"]),
    "where no round comes the agent has failed": (
        [g.Start(), Ended(Outcome.TIMED_OUT, decided.TOO_FEW), ended(WorkerState.UNKNOWN)], ["RENDEZVOUS", "FAILED"],
    ),
    "no further round comes, and there was a rendezvous all the same": (
        [*BEGUN, INTERRUPTED, *GONE, g.StopRequested()], ["RENDEZVOUS"],
    ),
    "a spare that was never needed has succeeded without workers": (
        [g.Start(), OTHERS_SUCCEEDED, ended(WorkerState.SUCCEEDED)], ["RENDEZVOUS", "SUCCEEDED"],
    ),
    "workers of an earlier round have not succeeded with a job that went on without them": (
        [*BEGUN, INTERRUPTED, *GONE, OTHERS_SUCCEEDED, ended(WorkerState.SUCCEEDED)], ["RENDEZVOUS", "SUCCEEDED"],
    ),
    "of a job that another node failed our workers are victims": (
        [*BEGUN, Ended(Outcome.FAILED, decided.refused(3), FAILURE), *GONE, ended(WorkerState.FAILED)],
        [*COUNTED, "TERMINATED", "TERMINATED", "SUCCEEDED"],
    ),
    "a failure that ends the job after all workers are gone is told": (
        [*BEGUN, g.Exited(1, 1, FAILURE), g.Exited(1, 0, None), *GONE[2:], Ended(Outcome.FAILED, decided.refused(3), FAILURE),
         ended(WorkerState.FAILED, ProcessFailure(1, 4711, 3, "nowhere"))],
        [*LOOKED_BAD, *COUNTED, "TERMINATED", "FAILED", "SUCCEEDED"],
    ),
    "a worker that is stopped for a hang has failed as if a look at it had found that": (
        [*BEGUN, g.FoundUnhealthy(1, 1, FAILURE, signal.SIGKILL), LOOK, *GONE, Ended(Outcome.FAILED, decided.refused(3), FAILURE),
         ended(WorkerState.FAILED, HUNG)],
        [*LOOKED_BAD, *COUNTED, "TERMINATED", "FAILED", "SUCCEEDED"],
    ),
    "no state is healthy before there are workers": ([g.Start(), LOOK], []),
    "they are healthy until they are interrupted": (
        [*BEGUN, LOOK, INTERRUPTED, LOOK], ["workers.default.remaining_restarts", "workers.default.healthy"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("point", POINTS)
def test_which_events_and_metrics_are_recorded(point: str) -> None:
    story, records = Story(), list[TorchRecord]()
    steps, words = POINTS[point]
    for number, step in enumerate(steps):
        records += story.handle(step)
        if steps[: number + 1] == BEGUN != steps:  # the start of the workers is reported once
            records.clear()
    assert [each.state if isinstance(each, Status) else each.name for each in records] == words


def test_a_restart_that_another_nodes_failure_costs_is_counted_before_its_round() -> None:
    story = Story()
    for step in (*BEGUN, Interrupted(1, decided.restart(), 1), *GONE):
        story.handle(step)
    records = story.handle(ended(WorkerState.STOPPED))
    assert [each.restart_count for each in records if isinstance(each, Status)] == [1]


# Handlers.


class Handler(logging.Handler):
    """Keeps its records; raises or waits as a test decides."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.error: Exception | None = None
        self.may_go = threading.Event()
        self.may_go.set()
        self.is_called = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.is_called.set()
        assert self.may_go.wait(LAUNCH_TIMEOUT_S)
        self.names.append(json.loads(record.getMessage())["metadata"]["state"])
        if self.error is not None:
            raise self.error


@pytest.fixture
def handler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Handler]:
    """A handler that the surrounding program has added, under the name `ours`."""
    events = pytest.importorskip("torch.distributed.elastic.events")
    handler = Handler()
    monkeypatch.setitem(events.handlers._log_handlers, "ours", handler)
    monkeypatch.delitem(events._events_loggers, "ours", raising=False)
    yield handler
    handler.may_go.set()
    wait_for("all is told", lambda: not is_recording())
    logging.getLogger("torchelastic-events-ours").handlers.clear()


def is_recording() -> bool:
    return any(thread.name == "torch events" for thread in threading.enumerate())


STATES = ["RENDEZVOUS", "ASSIGN_WORKER_RANKS", "START", "SUCCEEDED", "SUCCEEDED"]


def supervisor(**spec: Any) -> Supervisor:
    return Supervisor(WorkerSpec(**{"entrypoint": "true", "event_log_handler": "ours", **spec}))


async def test_a_handler_that_the_program_added_is_called_and_if_it_raises_that_is_reported_once_and_harms_nothing(
    handler: Handler, caplog: pytest.LogCaptureFixture
) -> None:
    handler.error = ValueError("the disk of the handler is full")
    assert (await supervisor().run()).state is WorkerState.SUCCEEDED
    assert handler.names == STATES
    warnings = [record.getMessage() for record in caplog.records if "handler" in record.getMessage()]
    assert len(warnings) == 1
    assert "ValueError: the disk of the handler is full" in warnings[0]


async def test_a_handler_that_blocks_is_waited_for_at_the_end_and_not_forever(
    handler: Handler, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_events, "FINISH_TIMEOUT_S", 0.2)
    handler.may_go.clear()
    assert (await supervisor().run()).state is WorkerState.SUCCEEDED
    assert handler.names == []
    assert "were dropped: their handlers were too slow" in caplog.text


async def test_a_second_request_does_not_wait_for_a_handler_that_blocks(handler: Handler) -> None:
    handler.may_go.clear()
    supervised = supervisor()
    with anyio.fail_after(DEADLINE_S):  # the handler is given more time than that
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(supervised.run)
            while not supervised._group.is_done:  # noqa: ASYNC110  there is no event
                await anyio.sleep(0.01)
            supervised.stop()
    assert handler.names == []


async def test_what_a_handler_does_not_take_is_kept_up_to_a_limit(
    handler: Handler, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_events, "BACKLOG_MAX", 3)
    monkeypatch.setattr(torch_events, "FINISH_TIMEOUT_S", 0.2)
    handler.may_go.clear()
    await supervisor().run()
    handler.may_go.set()
    wait_for("all is told", lambda: not is_recording())
    assert handler.names[0] == "RENDEZVOUS"
    assert len(handler.names) < len(STATES)
    assert "events and metrics were dropped" in caplog.text


# Names of handlers.


async def test_an_unknown_handler_is_refused_before_anything_is_started(tmp_path: Path, handler: Handler) -> None:
    program = supervisor(
        event_log_handler="nobody", log_dir=tmp_path, entrypoint="touch", args=(f"{tmp_path}/started",)
    )
    known = "console, dynamic_rendezvous, null, ours"
    with pytest.raises(InputError, match=f"'nobody' is not known to torch: use one of {known}, or add it to"):
        await program.run()
    assert not os.listdir(tmp_path)
    check_event_log_handler("ours")


async def test_an_agent_that_cannot_make_its_folders_has_failed(tmp_path: Path, handler: Handler) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError):
        await supervisor(log_dir=tmp_path / "file" / "logs", redirects=Std.ALL).run()
    assert handler.names == ["FAILED"]


@pytest.mark.all
@pytest.mark.ci
def test_on_the_command_line_a_job_that_fails_at_once_is_recorded_to_its_end(launch: Launcher) -> None:
    job = launch("sys.exit(3)", "--event-log-handler", "console", "--nproc-per-node", "2", wrapper=PATIENT)
    job.assert_ends(3, limit_s=LAUNCH_TIMEOUT_S)
    events = [json.loads(line) for line in job.stderr.splitlines() if line.startswith("{")]
    states = [event["metadata"]["state"] for event in events]
    assert states[:4] == ["RENDEZVOUS", "ASSIGN_WORKER_RANKS", "START", "START"]
    assert "FAILED" in states[4:6]
    assert (states[6:], events[-1]["source"]) == (["SUCCEEDED"], "AGENT")
    # They are emitted once torch is imported, which takes longer than the whole job.
    assert events[-1]["timestamp"] / 1000 <= (job.folder / "stderr").stat().st_mtime


@pytest.mark.all
def test_a_failure_of_the_agent_is_recorded_with_its_traceback(launch: Launcher) -> None:
    options = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={free_endpoint()}", "--rdzv-id=job"]
    job = launch("pass", *options, "--rdzv-conf=join_timeout=1", "--event-log-handler=console", wrapper=PATIENT)
    job.wait(LAUNCH_TIMEOUT_S)
    events = [json.loads(line)["metadata"] for line in job.stderr.splitlines() if line.startswith("{")]
    assert [event["state"] for event in events] == ["RENDEZVOUS", "FAILED"]
    assert events[1]["raw_error"].startswith("Traceback")
    assert "\naelastic.errors.Rendezvous" in events[1]["raw_error"]
    job.assert_nothing_left()
