"""The agent's own log lines: run events in, text for people out."""

from __future__ import annotations

import logging
import signal

import pytest
from kit import decided
from kit.numbered import restored

from aelastic.diagnose.failures.failure import ProcessFailure
from aelastic.observe import run_events as ev
from aelastic.observe.observer import LogLines, Observers
from aelastic.rdzv.decisions import wording
from aelastic.rdzv.protocol.messages import Outcome
from aelastic.workers.states import Phase, WorkerState

FAILURE = ProcessFailure.from_elsewhere("node7", 5, 1, 4711, 3, "it broke")
BEGAN = ev.RunBegan("job", "node1-1-ab", "node1", 1, "trainer", "train.py", 2, 2, 4, 3, "c10d")
FORMED = ev.RoundFormed(7, 3, 2, 1, 3, 4, 2, 10)
HANGS = ev.Noticed(3, 1, 5, "hang", "no output for 9 s", is_stopped=True)
COMPARED = ev.Compared(3, "hang: 3 of 4 ranks wait", (5,))
STOPPING = "SIGTERM: stopping workers (up to 30 s); send it again to kill them"


def changed(before: Phase, phase: Phase) -> ev.Changed:
    return ev.Changed(before, phase, WorkerState.HEALTHY, "")


def began(generation: int, local_rank: int, after_s: float) -> ev.WorkerReached:
    return ev.WorkerReached(generation, local_rank, local_rank, "cold", "output", after_s)


ANYWAY = "To restart anyway: a larger --max-restarts, or a rule with its own budget"
OVER = ev.RunEnded(WorkerState.FAILED, "it broke")
RUNNING: list[ev.RunEvent] = [BEGAN, FORMED, changed(Phase.JOINING, Phase.RUNNING)]


def lines_of(caplog: pytest.LogCaptureFixture, *events: ev.RunEvent) -> list[tuple[str, str]]:
    """Returns the log lines that the last event adds."""
    caplog.set_level(logging.INFO, "aelastic")
    observers = Observers([LogLines(30.0)])
    for event in events:
        caplog.clear()
        observers.tell(event, 0.0)
    return [(record.levelname[0], restored(record.getMessage())) for record in caplog.records]


@pytest.mark.parametrize(
    "events, line",
    [
        ([BEGAN, ev.Waited("1 of 2 nodes")], "W 1 of 2 nodes"),
        ([BEGAN, FORMED], "I round 7: group rank 1 of 3, world size 10"),
        ([*RUNNING, ev.WorkerEnded(3, 1, 5, "failed", FAILURE)], "W rank 5 failed on node7: it broke"),
        ([*RUNNING, ev.WorkerEnded(3, 1, 5, "succeeded")], ""),
        ([*RUNNING, HANGS], "W rank 5 on node1 is stopped: no output for 9 s"),
        ([*RUNNING, HANGS, ev.WorkerEnded(3, 1, 5, "failed", FAILURE.replace(found_by="hang"))], ""),  # already logged
        ([*RUNNING, HANGS.replace(is_stopped=False)], "W rank 5 on node1: no output for 9 s"),
        ([*RUNNING, COMPARED], "W hang: 3 of 4 ranks wait"),
        ([*RUNNING, COMPARED, COMPARED], ""),  # one node noticed after the other
        ([*RUNNING, COMPARED, FORMED, COMPARED], "W hang: 3 of 4 ranks wait"),
        ([*RUNNING, ev.Announced("saving", "n1 leaves", 8)], "W n1 leaves: all ranks save at call 8 of notice.due"),
        ([*RUNNING, ev.Announced("saving", "n1 leaves", 0)], "W n1 leaves: no call could be agreed"),
        ([*RUNNING, ev.Announced("called off", "")], "W drain cancelled: workers continue"),
        ([*RUNNING, ev.Announced("refused", "no node n9")], "W request refused: no node n9"),
        ([*RUNNING, ev.Announced("leaving", "n1 leaves")], "I leaving: n1 leaves"),
        ([*RUNNING, ev.Announced("answer", "n1 leaves")], ""),
        ([*RUNNING, ev.Restarting("failure", decided.restart(3, 3, decided.failed(5)), 3)], "W restarting worker group: rank 5 failed on host; restart 3 of 3"),
        (
            [*RUNNING, ev.Restarting("failure", decided.restart(3, 3, decided.failed(5)), 3, only_here=True)],
            "W restarting the workers of this node: rank 5 failed on host; restart 3 of 3; other nodes keep theirs",
        ),
        (
            [*RUNNING, ev.Restarting("membership", decided.left("n1", "the agent was asked to stop"), 0)],
            "W stopping workers for the next round: node n1 left: the agent was asked to stop",
        ),
        ([*RUNNING, ev.RendezvousLost("the store is gone")], "W stopping workers: the store is gone"),
        ([BEGAN, ev.RendezvousLost("the store is gone")], ""),  # the error that ends the run reports it
        ([*RUNNING, ev.PhaseTook("spawn", 0.1)], ""),
        (
            [*RUNNING, *(began(each, 0, 3.1) for each in (1, 2, 3)), began(2, 1, 4.1), OVER],
            "W 2 restarts took 7 s until workers had begun, with imports: --preload auto starts them with these done",
        ),
        ([*RUNNING, began(2, 0, 9.0), ev.ForkServerMeasured(2, 1 << 27), OVER], ""),  # with --preload, not ready in time
        ([*RUNNING, began(2, 0, 4.9), OVER], ""),
        ([*RUNNING, began(2, 0, 99.0).replace(kind="warm"), began(1, 0, 99.0), OVER], ""),
    ],
)  # fmt: skip
def test_what_happens_is_reported_in_one_line(
    caplog: pytest.LogCaptureFixture, events: list[ev.RunEvent], line: str
) -> None:
    assert [" ".join(each) for each in lines_of(caplog, *events)] == [line] * bool(line)


@pytest.mark.parametrize(
    "before, signum, line",
    [
        ([], signal.SIGTERM, STOPPING),
        ([], signal.SIGRTMIN + 2, f"signal {signal.SIGRTMIN + 2}: " + STOPPING.partition(": ")[2]),
        ([ev.StopAsked(signal.SIGTERM)], signal.SIGINT, "second SIGINT: killing workers"),
        ([ev.Killed(3, (0,), "not ended after 30 s")], signal.SIGTERM, "SIGTERM: workers are being killed already"),
        (
            [changed(Phase.RUNNING, Phase.CANCELLING), ev.StopAsked(signal.SIGTERM)],
            signal.SIGTERM,
            "second SIGTERM: leaving; the start of workers does not end",
        ),
        ([changed(Phase.RUNNING, Phase.AWAITING)], signal.SIGTERM, ""),  # nothing left to stop
    ],
)
def test_a_stop_shows_what_becomes_of_the_workers(
    caplog: pytest.LogCaptureFixture, before: list[ev.RunEvent], signum: int, line: str
) -> None:
    lines = lines_of(caplog, *RUNNING, *before, ev.StopAsked(signum))
    assert lines == ([("W", line)] if line else [])


@pytest.mark.parametrize(
    "before, outcome, level, line",
    [
        (
            [],
            Outcome.FAILED,
            "W",
            "the job has failed: rank 5 failed on host; all 3 restarts are used up",
        ),  # failed on another node, so our workers are stopped
        (
            [ev.WorkerEnded(3, 1, 5, "failed", FAILURE)],
            Outcome.FAILED,
            "W",
            f"not restarting: rank 5 failed on host; all 3 restarts are used up. {ANYWAY}",
        ),
        (
            [changed(Phase.RUNNING, Phase.AWAITING)],
            Outcome.FAILED,
            "W",
            f"not restarting: rank 5 failed on host; all 3 restarts are used up. {ANYWAY}",
        ),
        ([], Outcome.SUCCEEDED, "I", "the job has succeeded: rank 5 failed on host; all 3 restarts are used up"),
    ],
)
def test_the_verdict_is_a_warning_where_workers_are_stopped_for_it(
    caplog: pytest.LogCaptureFixture, before: list[ev.RunEvent], outcome: Outcome, level: str, line: str
) -> None:
    lines = lines_of(caplog, *RUNNING, *before, ev.JobEnded(outcome, decided.refused(3, decided.failed(5)), FAILURE))
    assert lines == [(level, line)]
    off = decided.refused(0, decided.failed(5))  # torchrun's default: no restarts requested
    assert not before or ("I", f"the job has failed: {restored(wording.text_of(off))}") in lines_of(
        caplog, *RUNNING, *before, ev.JobEnded(Outcome.FAILED, off, FAILURE)
    )
