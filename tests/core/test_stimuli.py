"""What set off each run event: all that follows from one end has one name, and each node comes to the same one."""

from __future__ import annotations

from kit import decided
from kit.stories.event_logs import NodeLog
from kit.stories.timelines import logs_of, story_of

from aelastic.observe import run_events as ev
from aelastic.observe.stimuli import START, Stimuli, stimulus_of
from aelastic.rdzv.decisions.cause import Cause, CauseKind
from aelastic.tools.timeline.chain import as_json, chains_of
from aelastic.workers.states import Phase, WorkerState

STOPPING = ev.Changed(Phase.RUNNING, Phase.STOPPING, WorkerState.UNHEALTHY, "")
BY_RANK_5 = ev.Restarting("failure", decided.restart(cause=Cause(CauseKind.FAILURE, ("b",), (5,))), 1)
STARTED = ev.WorkersStarted(1, {0: 1, 1: 2})


def formed(round_: int) -> ev.RoundFormed:
    return ev.RoundFormed(round_, round_, 0, 0, 2, 4, 2, 6)


def ended(rank: int, outcome: str = "failed") -> ev.WorkerEnded:
    return ev.WorkerEnded(1, rank % 2, rank, outcome)  # type: ignore[arg-type]


def stimuli_of(*events: ev.RunEvent) -> list[str]:
    stimuli = Stimuli()
    return [stimuli.of(event) for event in events]


def test_all_that_follows_from_a_failure_has_its_name_until_something_else_happens() -> None:
    failed = "1-failure-5"
    assert stimuli_of(
        formed(1), STARTED, ended(5), STOPPING, BY_RANK_5, ended(4, "stopped"), formed(2), STARTED, ended(4)
    ) == [START, START, failed, failed, failed, failed, failed, failed, "2-failure-4"]


def test_a_node_that_only_learns_of_the_failure_gives_it_the_same_name() -> None:
    assert stimuli_of(formed(1), BY_RANK_5, STOPPING)[1:] == ["1-failure-5"] * 2


def test_a_victim_has_its_own_name_and_what_follows_has_that_of_the_cause() -> None:
    assert stimuli_of(formed(1), ended(3), STOPPING, BY_RANK_5, STOPPING)[1:] == [
        "1-failure-3", "1-failure-3", "1-failure-5", "1-failure-5",
    ]  # fmt: skip


def test_a_worker_that_dies_while_it_is_stopped_sets_off_nothing() -> None:
    assert stimuli_of(formed(1), BY_RANK_5, ended(4))[2] == "1-failure-5"


def test_steps_are_set_off_by_nothing() -> None:
    assert stimuli_of(formed(1), ev.Progressed(1, 0, 0, 7)) == [START, ""]


def test_an_end_without_a_failure_is_named_by_its_cause_and_hosts() -> None:
    assert stimulus_of(4, Cause(CauseKind.NODE_LOST, ("a", "b"))) == "4-node_lost-a-b"
    assert stimuli_of(formed(1), ev.StopAsked(15), STOPPING)[1:] == ["1-signal-15"] * 2


def two_nodes() -> tuple[NodeLog, NodeLog]:
    a, b = NodeLog("node-a"), NodeLog("node-b")
    for place, log in enumerate((a, b)):
        log.formed(1.0, 1, place, nodes=2)
        log.started(1.1)
    b.fails(5.0, 1, "ValueError: x", known_at=5.02)
    for log in (a, b):
        log.restarting(5.03, decided.restart(cause=Cause(CauseKind.FAILURE, ("node-b",), (3,))), restarts=1)
    a.formed(5.5, 2, 0, nodes=2, restarts=1)
    b.formed(5.5, 2, 1, nodes=2, restarts=1)
    for log in (a, b):
        log.started(5.7)
    return a, b


def test_a_chain_leads_from_a_workers_exit_to_the_workers_of_the_next_round_on_all_nodes() -> None:
    logs = logs_of(*two_nodes())
    (stimulus,) = {entry.text("stimulus") for log in logs for entry in log.entries if entry.kind == "restarting"}
    chain = chains_of(logs, [0.0, 0.0])[stimulus]
    assert [(link.text.partition(":")[0], link.hosts) for link in chain] == [
        ("rank 3 exited", ("node-b",)),
        ("it is known why rank 3 exited", ("node-b",)),
        ("decided", ("node-a", "node-b")),
        ("round 2 is complete", ("node-a", "node-b")),
        ("workers have started", ("node-a", "node-b")),
    ]
    assert [each["after_s"] for each in as_json(chain)] == [0.0, 0.02, 0.03, 0.5, 0.7]
    (restart,) = story_of(*two_nodes()).restarts
    assert [each.text for each in restart.chain] == [each.text for each in chain]
