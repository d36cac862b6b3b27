"""The state of an agent: `/status` and `/readyz` after given events."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from kit import decided

from aelastic.cli.verbs import texts
from aelastic.errors import ProcessFailure
from aelastic.observe import run_events as ev
from aelastic.observe.run_state import PHASES_MAX, RunState
from aelastic.observe.status import TRACEBACK_CHARACTERS_MAX, describe, describe_ends, readiness
from aelastic.workers.states import Phase, Worker, WorkerState

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
BEGAN = ev.RunBegan("job-7", "node-1", "host-1", 4711, "trainer", "train.py", 2, 2, 2, 3, "c10d")
JOINING = ev.Changed(Phase.INIT, Phase.JOINING, WorkerState.INIT, "the run begins")
SPAWNING = ev.Changed(Phase.JOINING, Phase.SPAWNING, WorkerState.HEALTHY, "round 1 is complete")
RUNNING = ev.Changed(Phase.SPAWNING, Phase.RUNNING, WorkerState.HEALTHY, "all workers of this node are started")
STOPPING = ev.Changed(Phase.RUNNING, Phase.STOPPING, WorkerState.UNHEALTHY, "it fell")
BARRIER = ev.Changed(Phase.RUNNING, Phase.BARRIER, WorkerState.SUCCEEDED, "every worker of this node succeeded")


def formed(generation: int = 1) -> ev.RoundFormed:
    workers = tuple(Worker(local_rank, 2 + local_rank) for local_rank in range(2))
    return ev.RoundFormed(generation, generation, generation - 1, 1, 2, 2, 2, 4, workers)


def started(generation: int = 1) -> ev.WorkersStarted:
    return ev.WorkersStarted(generation, {0: 10 * generation, 1: 10 * generation + 1})


def failure(rank: int, traceback: str = "Traceback\nit fell", timestamp: int = 0) -> ProcessFailure:
    return ProcessFailure.from_elsewhere("host-1", rank, rank - 2, 10, 7, f"rank {rank} fell", traceback, timestamp)


def state_after(*events: Any) -> RunState:
    """The state of a run after these events, one second apart, from 0 on."""
    status = RunState()
    for now, event in enumerate(events):
        status.tell(event, float(now))
    return status


def described(status: RunState, now: float, **usage: tuple[float, int]) -> Any:
    """The status at noon, read back from JSON."""
    return json.loads(json.dumps(describe(status, now, NOON, {int(key[1:]): value for key, value in usage.items()})))


def test_workers_that_do_not_run_on_are_reported_beside_those_that_run() -> None:
    status = state_after(BEGAN, JOINING, formed(), SPAWNING, started(), RUNNING)
    shown = json.loads(json.dumps(describe(status, 9.0, NOON, {}, {1: "stopped"})))
    assert [worker["kernel"] for worker in shown["workers"]] == [None, "stopped"]
    words = "2 of 2 workers run; rank 3 is stopped by a signal (SIGCONT continues it)"
    assert (shown["ready"], shown["readiness"]) == (True, words)
    assert readiness(status) == (True, "2 of 2 workers run")
    both = readiness(status, {0: "zombie", 1: "zombie"})[1]
    assert both.endswith("; ranks 2, 3 are in zombie state: the main thread has ended")


def test_before_anything_happens_the_status_shows_that() -> None:
    shown = described(RunState(), 0.0)
    assert (shown["phase"], shown["state"], shown["ready"], shown["run"], shown["round"]) == (
        "init",
        "INIT",
        False,
        None,
        None,
    )
    assert shown["workers"] == shown["phases"] == []


def test_while_nodes_are_missing_it_shows_which_and_is_not_ready() -> None:
    status = state_after(BEGAN, JOINING, ev.Waited("1 of 2 nodes are here: host-1"))
    assert readiness(status) == (False, "waiting for a round to be complete: 1 of 2 nodes are here: host-1")
    shown = described(status, 60.0)
    assert (shown["phase"], shown["waiting"]) == ("joining", "1 of 2 nodes are here: host-1")
    assert shown["now"] == {"phase": "rendezvous", "began": "2026-11-21T11:59:01.000+00:00"}
    assert shown["run"]["run_id"] == "job-7" and shown["run"]["began"] == "2026-11-21T11:59:00.000+00:00"


def test_of_several_endpoints_it_shows_which_answer_and_since_when() -> None:
    assert described(state_after(BEGAN), 1.0)["endpoints"] is None
    changes = [("n1:1", "connection refused"), ("n0:1", ""), ("n1:1", ""), ("n0:1", "came back empty")]
    status = state_after(BEGAN, *(ev.EndpointChanged(*each) for each in changes))
    assert described(status, 60.0)["endpoints"] == [
        {"endpoint": "n0:1", "answers": False, "trouble": "came back empty", "since": "2026-11-21T11:59:04.000+00:00"},
        {"endpoint": "n1:1", "answers": True, "trouble": None, "since": "2026-11-21T11:59:03.000+00:00"},
    ]


def test_workers_that_are_being_started_are_not_ready() -> None:
    status = state_after(BEGAN, JOINING, ev.Waited("…"), formed(), ev.PhaseTook("rendezvous", 2.0), SPAWNING)
    assert readiness(status) == (False, "workers are being started")
    shown = described(status, 5.0)
    assert shown["now"]["phase"] == "spawn" and shown["waiting"] is None
    assert [(w["rank"], w["state"], w["pid"], w["started"]) for w in shown["workers"]] == [
        (2, "starting", None, None),
        (3, "starting", None, None),
    ]


def test_the_memory_of_the_fork_server_is_that_of_the_last_look() -> None:
    assert described(state_after(BEGAN), 1.0)["fork_server"] is None
    status = state_after(BEGAN, ev.ForkServerMeasured(8, 1 << 28), ev.ForkServerMeasured(0, 1 << 27))
    assert described(status, 3.0)["fork_server"] == {"parked": 0, "pss_bytes": 1 << 27}


def test_workers_that_run_are_ready_with_pid_cpu_and_memory() -> None:
    status = state_after(BEGAN, JOINING, formed(), SPAWNING, started(), RUNNING)
    assert readiness(status) == (True, "2 of 2 workers run")
    assert status.running == {0: 10, 1: 11}
    shown = described(status, 10.0, _0=(1.5, 4096))
    assert shown["workers"][0] == {
        "local_rank": 0,
        "rank": 2,
        "state": "running",
        "pid": 10,
        "id": "10",
        "kernel": None,
        "started": "2026-11-21T11:59:54.000+00:00",
        "cpu_s": 1.5,
        "rss_bytes": 4096,
    }
    assert shown["workers"][1]["cpu_s"] is None
    assert shown["round"]["world_size"] == 4 and shown["round"]["formed"] == "2026-11-21T11:59:52.000+00:00"
    assert shown["now"] == {"phase": "run", "began": "2026-11-21T11:59:55.000+00:00"}


def test_one_that_has_succeeded_leaves_the_others_ready() -> None:
    status = state_after(BEGAN, formed(), SPAWNING, started(), RUNNING, ev.WorkerEnded(1, 0, 2, "succeeded"))
    assert readiness(status) == (True, "1 of 2 workers run")
    assert status.running == {1: 11}


def test_a_worker_of_another_kind_has_a_name_and_no_pid() -> None:
    status = state_after(BEGAN, formed(), RUNNING, ev.WorkersStarted(1, {0: "remote-0", 1: None}))
    shown = described(status, 9.0)
    assert [(w["pid"], w["id"]) for w in shown["workers"]] == [(None, "remote-0"), (None, None)]


def test_in_the_exit_barrier_it_is_not_ready() -> None:
    ends = [ev.WorkerEnded(1, rank, 2 + rank, "succeeded") for rank in (0, 1)]
    status = state_after(BEGAN, formed(), SPAWNING, started(), RUNNING, *ends, ev.PhaseTook("run", 2.0), BARRIER)
    is_ready, why = readiness(status)
    assert not is_ready and "those of other nodes run" in why
    shown = described(status, 9.0)
    assert (shown["phase"], shown["state"], shown["now"]["phase"]) == ("barrier", "SUCCEEDED", "barrier")
    assert not status.running


def test_what_was_waited_for_is_over_with_its_phase() -> None:
    rejoins = ev.Changed(Phase.BARRIER, Phase.JOINING, WorkerState.STOPPED, "vm joins")
    status = state_after(
        BEGAN,
        formed(),
        SPAWNING,
        started(),
        RUNNING,
        BARRIER,
        ev.Waited("finished", "waiting for the workers of b"),
        rejoins,
    )
    assert described(status, 9.0)["waiting"] is None
    assert "workers of b" not in readiness(status)[1]


def test_what_is_announced_is_over_with_the_round() -> None:
    status = state_after(
        BEGAN, JOINING, formed(), SPAWNING, started(), RUNNING, ev.Announced("saving", "node-2 is to leave")
    )
    assert described(status, 9.0)["announced"] == "node-2 is to leave"
    status.tell(ev.Restarting("membership", decided.left("node-2", "it was asked to stop"), 0), 10.0)
    assert described(status, 11.0)["announced"] is None


def test_the_last_failure_is_the_first_of_its_generation() -> None:
    story = [BEGAN, formed(), SPAWNING, started(), RUNNING]
    first = [ev.WorkerEnded(1, 1, 3, "failed", failure(3)), ev.WorkerEnded(1, 0, 2, "failed", failure(2))]
    status = state_after(*story, *first)
    assert described(status, 9.0)["last_failure"]["rank"] == 3
    status.tell(ev.WorkerEnded(2, 0, 2, "failed", failure(2, timestamp=7)), 20.0)
    shown = described(status, 21.0)["last_failure"]
    assert (shown["generation"], shown["rank"], shown["message"], shown["exitcode"]) == (2, 2, "rank 2 fell", 7)
    assert shown["at"] == "1970-01-01T00:00:07.000+00:00"


@pytest.mark.parametrize("timestamp", [0, 10**30, -(10**30), 10**12])
def test_a_time_of_no_era_is_none(timestamp: int) -> None:
    status = state_after(BEGAN, formed(), ev.WorkerEnded(1, 0, 2, "failed", failure(2, timestamp=timestamp)))
    assert described(status, 9.0)["last_failure"]["at"] is None


def test_the_end_of_a_long_traceback_is_shown() -> None:
    long = "x" * (2 * TRACEBACK_CHARACTERS_MAX) + "the end"
    status = state_after(BEGAN, formed(), ev.WorkerEnded(1, 0, 2, "failed", failure(2, long)))
    traceback = described(status, 9.0)["last_failure"]["traceback"]
    assert len(traceback) == TRACEBACK_CHARACTERS_MAX and traceback.endswith("the end")


@pytest.mark.words
def test_restarts_are_reported_by_cause_with_the_last_ones_reason() -> None:
    status = state_after(
        BEGAN,
        formed(),
        ev.Restarting("failure", decided.restart(1, 3, decided.failed(3)), 1),
        formed(2),
        ev.Restarting("membership", decided.joined("host-2"), 1),
    )
    shown = described(status, 4.0)
    assert shown["restarts"] == {"failure": 1, "membership": 1}
    assert shown["last_restart"] == {
        "cause": "membership",
        "reason": "node host-2 joined",
        "decision": {"kind": "next_round", "cause": {"kind": "nodes_joined", "hosts": ["host-2"], "count": 1}},
        "in_place": False,
        "at": "2026-11-21T12:00:00.000+00:00",
    }
    assert shown["round"]["generation"] == 2


def lost_and_recovered(status: RunState) -> RunState:
    """A run of 5 s, in which worker 1 is lost at 6 s and worker 0 keeps its process."""
    workers = Worker(0, 2, id=10), Worker(1, 3, id=12)
    status.tell(ev.Progressed(1, 0, 2, 7), 5.5)
    status.tell(ev.WorkerEnded(1, 1, 3, "failed", failure(3)), 6.0)
    status.tell(ev.Restarting("failure", decided.restart(1, 3, decided.failed(3)), 1, in_place=True), 6.5)
    status.tell(formed().replace(round=2, restart_count=1, workers=workers, in_place=True), 7.0)
    status.tell(ev.WorkersStarted(1, {0: 10, 1: 12}), 7.0)
    status.tell(RECOVERED, 8.0)
    status.tell(ev.Progressed(1, 0, 2, 50), 9.0)
    return status


RECOVERED = ev.Recovered(2, 1, workers_kept=1, workers_replaced=1, step=7, source_rank=2, duration_s=2.0)


def test_in_place_a_worker_that_keeps_its_process_has_been_running_since_its_start() -> None:
    status = lost_and_recovered(state_after(BEGAN, JOINING, formed(), SPAWNING, started(), RUNNING))
    shown = described(status, 12.0)
    assert [(each["pid"], each["started"][17:19]) for each in shown["workers"]] == [(10, "52"), (12, "55")]


def test_a_recovery_in_place_is_reported_and_what_failed_before_it_still_is() -> None:
    status = lost_and_recovered(state_after(BEGAN, JOINING, formed(), SPAWNING, started(), RUNNING))
    shown = described(status, 12.0)
    assert shown["recoveries"] == 1 and shown["last_restart"]["in_place"] is True
    assert (shown["last_recovery"]["workers_kept"], shown["last_recovery"]["step"]) == (1, 7)
    assert shown["last_recovery"]["at"] == "2026-11-21T11:59:56.000+00:00"
    assert shown["last_failure"]["rank"] == 3
    status.tell(ev.WorkerEnded(1, 0, 2, "failed", failure(2)), 13.0)  # in the next round, in the same generation
    assert described(status, 14.0)["last_failure"]["rank"] == 2


def test_why_tells_a_round_that_continued_in_place_with_its_own_step_and_failure() -> None:
    status = lost_and_recovered(state_after(BEGAN, JOINING, formed(), SPAWNING, started(), RUNNING))
    (end,) = describe_ends(status.ends, 12.0, NOON)
    assert (end["round"], end["step"], end["failure"]["rank"], end["in_place"]) == (1, 7, 3, True)
    assert end["recovered"]["text"] == RECOVERED.text and end["again_s"] == 0.5
    assert texts.why([end]).splitlines()[0] == "round 1 ended 11:59:54 UTC after 4 s, at step 7"
    assert texts.why([end]).splitlines()[-1] == f"  done     round 2 continues in place: {RECOVERED.text}"


def test_a_recovery_that_is_given_up_is_a_restart() -> None:
    status = state_after(BEGAN, JOINING, formed(), SPAWNING, started(), RUNNING)
    status.tell(ev.Restarting("failure", decided.restart(1, 3, decided.failed(3)), 1, in_place=True), 6.5)
    status.tell(ev.NotRecovered(1, "no worker has survived"), 7.0)
    shown = described(status, 12.0)
    assert shown["last_restart"]["in_place"] is False and shown["recoveries"] == 0 and shown["last_recovery"] is None


def test_phases_come_with_begin_and_end_and_only_the_last_are_kept() -> None:
    status = state_after(BEGAN, formed(), ev.PhaseTook("detect", 0.25, 1), *[ev.PhaseTook("stop", 0.5)] * PHASES_MAX)
    phases = described(status, float(PHASES_MAX + 2))["phases"]
    assert len(phases) == PHASES_MAX and {phase["phase"] for phase in phases} == {"stop"}
    assert phases[-1] == {
        "phase": "stop",
        "generation": 1,
        "began": "2026-11-21T11:59:59.500+00:00",
        "ended": "2026-11-21T12:00:00.000+00:00",
        "duration_s": 0.5,
    }
    detect = described(state_after(BEGAN, formed(), ev.PhaseTook("detect", 0.25, 1)), 2.0)["phases"][0]
    assert (detect["phase"], detect["local_rank"]) == ("detect", 1)


def test_a_new_generation_has_new_workers() -> None:
    status = state_after(
        BEGAN,
        formed(),
        SPAWNING,
        started(),
        RUNNING,
        ev.WorkerEnded(1, 0, 2, "failed", failure(2)),
        STOPPING,
        formed(2),
    )
    assert {worker["state"] for worker in described(status, 9.0)["workers"]} == {"starting"}
    status.tell(RUNNING, 10.0)
    status.tell(started(2), 11.0)
    assert status.running == {0: 20, 1: 21} and readiness(status)[0]


def test_workers_that_start_while_they_are_stopped_are_not_ready() -> None:
    status = state_after(BEGAN, formed(), RUNNING, STOPPING, started())
    assert readiness(status) == (False, "workers are being stopped")
    assert described(status, 9.0)["now"]["phase"] == "stop"
    assert status.running == {0: 10, 1: 11}  # they are alive


def test_an_ended_run_shows_how() -> None:
    shown = described(
        state_after(
            BEGAN, formed(), SPAWNING, started(), RUNNING, ev.RunEnded(WorkerState.FAILED, "no restart is left")
        ),
        9.0,
    )
    assert (shown["phase"], shown["state"], shown["reason"]) == ("done", "FAILED", "no restart is left")
    assert shown["now"] is None and not shown["ready"]


def test_a_restart_or_a_stop_at_a_save_is_not_a_drain() -> None:
    for verb, drains in (("drain", 1), ("restart", 0), ("stop", 0)):
        saving, restarting = (
            ev.Announced("saving", "…", 8, verb=verb),
            ev.Restarting("membership", decided.joined("n2"), 0),
        )
        assert state_after(saving, restarting).drains == drains
        assert state_after(saving, ev.Announced("called off", ""), restarting).drains == 0
