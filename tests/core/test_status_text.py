"""The text of the status line."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kit import decided
from kit.numbered import restored

from aelastic.errors import ProcessFailure
from aelastic.observe import run_events as ev
from aelastic.observe.run_state import PHASES_MAX, RunState
from aelastic.observe.status_text import StatusText, cut, duration
from aelastic.workers.states import Phase, WorkerState

BEGAN = ev.RunBegan(
    run_id="job", node_id="node", host="a", pid=1, role="default", entrypoint="train.py", local_world_size=2,
    min_nodes=2, max_nodes=4, max_restarts=3, rdzv_backend="c10d",
)  # fmt: skip
FAILURE = ProcessFailure.from_elsewhere(
    host="b", rank=3, local_rank=1, pid=9, exitcode=1, message="ValueError: boom", traceback="", timestamp=0
)


def formed(number: int = 1, *, restart_count: int = 0, nodes: int = 2) -> ev.RoundFormed:
    return ev.RoundFormed(
        round=number, generation=number, restart_count=restart_count, group_rank=nodes - 1, group_world_size=nodes,
        first_rank=2 * nodes - 2, local_world_size=2, world_size=2 * nodes,
    )  # fmt: skip


def changed(phase: Phase) -> ev.Changed:
    return ev.Changed(Phase.INIT, phase, WorkerState.HEALTHY, "")


class Recorder(StatusText):
    """The text of a run, and what feeds it."""

    def __init__(self) -> None:
        self.run = RunState()
        super().__init__(self.run)


def text_after(*events: object, began: ev.RunBegan = BEGAN) -> Recorder:
    text = Recorder()
    for event in (began, *events):
        text.run.tell(event, 100.0)  # type: ignore[arg-type]
    return text


RUNNING = (changed(Phase.JOINING), formed(), changed(Phase.RUNNING), ev.WorkersStarted(1, {0: 41, 1: 42}))


def line(text: StatusText, width: int = 200) -> str:
    return restored(text.line(107.0, width))


def test_before_anything_is_known_it_says_little() -> None:
    assert Recorder().line(5.0, 80) == "aelastic | starting"


def test_missing_nodes_come_first() -> None:
    text = text_after(changed(Phase.JOINING))
    assert line(text) == "aelastic 7 s | waiting for 2 to 4 nodes | 2 ranks here | restarts 0 of 3"
    text.run.tell(ev.Waited("rendezvous: 1 of 2 nodes joined after 10 s (a)", "waiting for node rank 1"), 101.0)
    assert line(text) == (
        "aelastic 7 s | waiting for 2 to 4 nodes | waiting for node rank 1 | rendezvous: 1 of 2 nodes joined after 10 s (a) | "
        "2 ranks here | restarts 0 of 3"
    )
    assert "waiting for node rank 1" in line(text, 80)


def test_what_was_waited_for_is_forgotten_when_it_came() -> None:
    text = text_after(changed(Phase.JOINING), ev.Waited("waiting for 1 more"), formed())
    assert line(text).startswith("aelastic 7 s | starting workers | round 1 | ")
    text.run.tell(changed(Phase.RUNNING), 101.0)
    assert line(text) == "aelastic 7 s | starting workers | round 1 | 4 ranks on 2 nodes | restarts 0 of 3"


def test_running_workers_and_those_that_are_done_are_counted() -> None:
    text = text_after(*RUNNING)
    assert line(text) == "aelastic 7 s | running | round 1 | 4 ranks on 2 nodes | restarts 0 of 3"
    text.run.tell(ev.WorkerEnded(1, 0, 2, "succeeded"), 101.0)
    assert line(text).startswith("aelastic 7 s | running, 1 of 2 done | ")
    text.run.tell(ev.WorkerEnded(1, 1, 3, "succeeded"), 101.0)
    text.run.tell(changed(Phase.BARRIER), 101.0)
    assert line(text).startswith("aelastic 7 s | done here | waiting for other nodes | ")
    text.run.tell(ev.Waited("finished", "waiting for the workers of b"), 101.0)
    assert line(text).startswith("aelastic 7 s | done here | waiting for the workers of b | ")


def test_a_failure_of_ours_is_named_while_the_others_are_stopped() -> None:
    text = text_after(*RUNNING, ev.WorkerEnded(1, 1, 3, "failed", FAILURE), changed(Phase.STOPPING))
    assert line(text).startswith("aelastic 7 s | stopping 1 worker: rank 3 failed | ")
    text.run.tell(ev.WorkerEnded(1, 0, 2, "stopped"), 101.0)
    assert line(text).startswith("aelastic 7 s | stopping what workers left behind: rank 3 failed | ")
    text.run.tell(changed(Phase.AWAITING), 101.0)
    assert line(text).startswith("aelastic 7 s | rank 3 failed | waiting for the leader's decision | ")


def test_a_restart_shows_why_and_counts() -> None:
    text = text_after(
        *RUNNING, ev.Restarting("failure", decided.restart(1, 3, decided.failed(0, "b")), 1), changed(Phase.STOPPING)
    )
    assert line(text) == (
        "aelastic 7 s | stopping 2 workers: rank 0 failed on b; restart 1 of 3 | round 1 | 4 ranks on 2 nodes | "
        "restarts 1 of 3"
    )
    text.run.tell(changed(Phase.JOINING), 101.0)
    assert "after round 1" in line(text)
    text.run.tell(formed(2, restart_count=1), 101.0)
    text.run.tell(changed(Phase.RUNNING), 101.0)
    assert line(text) == "aelastic 7 s | starting workers | round 2 | 4 ranks on 2 nodes | restarts 1 of 3"


def test_the_origin_of_a_stop_request_is_named() -> None:
    text = text_after(*RUNNING, ev.StopAsked(2), changed(Phase.STOPPING))
    assert line(text).startswith("aelastic 7 s | stopping 2 workers: asked to by SIGINT | ")


def test_a_node_on_its_own_waits_for_no_other_and_has_no_nodes_to_count() -> None:
    fields = {**vars(BEGAN), "min_nodes": 1, "max_nodes": 1, "max_restarts": 0}
    text = text_after(changed(Phase.JOINING), began=ev.RunBegan(**fields))
    assert line(text) == "aelastic 7 s | starting | 2 ranks here | no restarts"
    text.run.tell(formed(nodes=1), 101.0)
    text.run.tell(changed(Phase.RUNNING), 101.0)
    assert line(text) == "aelastic 7 s | starting workers | round 1 | 2 ranks | no restarts"


def test_a_picture_has_the_ranks_their_notes_and_the_last_failure() -> None:
    text = text_after(*RUNNING, ev.Noticed(1, 0, 2, "hang", "no sign of life for 60 s", is_stopped=False))
    for name, duration_s in (("rendezvous", 1.25), ("run", 60.0), ("detect", 0.04), ("stop", 2.0)):
        text.run.tell(ev.PhaseTook(name, duration_s), 101.0)  # type: ignore[arg-type]
    text.run.tell(ev.ForkServerMeasured(2, 3 << 20), 101.0)
    text.run.tell(ev.RunEnded(WorkerState.FAILED, "", FAILURE), 102.0)
    picture = text.picture(107.0)
    assert [(each.rank, each.local_rank, each.pid, each.state, each.note) for each in picture.ranks] == [
        (2, 0, 41, "running", "no sign of life for 60 s"),
        (3, 1, 42, "running", ""),
    ]
    assert picture.node == "run job on a | group rank 1 of 2 | template 3 MiB, 2 parked"
    assert picture.failure == "last failure, 5 s ago: rank 3 on b: ValueError: boom"
    assert picture.took == "phases took: detect 0.0 s, stop 2.0 s, rendezvous 1.2 s"


@pytest.mark.parametrize(
    "passed_s, words",
    [
        (0, "0 s"),
        (9.9, "9 s"),
        (14.9, "10 s"),
        (59, "55 s"),
        (60, "1 min 0 s"),
        (205, "3 min 20 s"),
        (3599, "59 min 50 s"),
        (3600, "1 h 0 min"),
        (7530, "2 h 5 min"),
        (90_000, "25 h 0 min"),
        (-1, "0 s"),
    ],
)
def test_durations_are_coarser_the_longer_they_are(passed_s: float, words: str) -> None:
    assert duration(passed_s) == words


@given(began=st.floats(0, 1e6), passed=st.floats(0, 1e5))
@example(began=0.7, passed=8.0)
def test_the_line_changes_when_it_is_due_and_not_before(began: float, passed: float) -> None:
    text = Recorder()
    text.run.tell(BEGAN, began)
    now = began + passed
    then = text.changes_at(now)
    assert now < then <= now + 60.001
    assert (
        text.line(then - 0.001, 99) == text.line(max(now, then - 0.001), 99) == text.line(now, 99) or then - now < 0.01
    )
    assert text.line(then + 0.001, 99) != text.line(now, 99)


@given(st.text(), st.integers(0, 40))
def test_what_is_cut_is_ascii_on_one_row(text: str, width: int) -> None:
    shown = cut(text, width)
    assert len(shown) <= width and shown.isascii() and (shown.isprintable() or not shown)


def test_a_narrow_line_lacks_the_round_and_then_the_size_before_it_is_cut() -> None:
    text = text_after(*RUNNING)
    whole = line(text)
    lean = whole.replace(" | round 1", "")
    leanest = lean.replace(" | 4 ranks on 2 nodes", "")
    assert len(whole) > len(lean) > len(leanest)
    for shown in (whole, lean, leanest):
        assert text.line(107.0, len(shown)) == shown
    assert text.line(107.0, len(lean) - 1) == leanest and text.line(107.0, len(leanest) - 1).endswith("...")


def test_what_is_too_long_ends_in_dots() -> None:
    assert cut("abcdefgh", 8) == "abcdefgh"
    assert cut("abcdefghi", 8) == "abcde..."
    assert cut("größe\x1b[J\n", 80) == "gr??e?[J"


def test_the_view_names_each_of_several_endpoints() -> None:
    assert text_after().picture(107.0).endpoints == ""
    text = text_after(ev.EndpointChanged("n1:1", "connection refused"), ev.EndpointChanged("n0:1", ""))
    assert text.picture(107.0).endpoints == "endpoints: n0:1 answers for 7 s, n1:1 missing (connection refused) for 7 s"


def test_the_view_knows_how_long_a_phase_took_that_many_workers_have_ended_since() -> None:
    took = [ev.PhaseTook("detect", 0.5, local_rank) for local_rank in range(2 * PHASES_MAX)]
    text = text_after(*RUNNING, ev.PhaseTook("rendezvous", 3.0), *took)
    assert text.picture(107.0).took == "phases took: detect 0.5 s, rendezvous 3.0 s"
