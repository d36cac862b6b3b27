"""Event logs become a timeline: stories as text (`stories/timelines/`), differing clocks, damage, and several runs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from kit import decided
from kit.numbered import restored
from kit.stories.event_logs import NodeLog, a_crash, a_node_lost, a_start
from kit.stories.timelines import changed, logs_of, story_of

from aelastic.observe.event_log import ALIVE_INTERVAL_S
from aelastic.observe.run_events import (
    NotRecovered,
    Recovered,
    Restarting,
    RoundFormed,
    RunEnded,
    WorkerEnded,
    WorkersStarted,
)
from aelastic.rdzv.decisions import wording
from aelastic.tools.timeline.chart import restart_words
from aelastic.tools.timeline.html import page, summary
from aelastic.tools.timeline.merge import timeline_from
from aelastic.tools.timeline.model import UNKNOWN_END_S, NodeTimeline, Recovery
from aelastic.tools.timeline.reader import LINE_BYTES_MAX, UnknownVersionError, read_logs, runs_of
from aelastic.workers.states import Phase, WorkerState


def alone() -> NodeLog:
    """A node whose workers run from 1.1 s on."""
    a = NodeLog("node-a")
    a.formed(1.0, 1, 0, nodes=1)
    a.started(1.1)
    return a


def blocks_of(node: NodeTimeline) -> list[tuple[str, float, float]]:
    return [(block.name, round(block.start, 3), round(block.end, 3)) for block in node.blocks]


# One run.


def test_what_would_have_changed_an_end_is_reported_with_it() -> None:
    a = a_start()
    off = decided.refused()
    a.add(1.0, RunEnded(WorkerState.FAILED, wording.text_of(off), decision=off))

    reason = f"{wording.text_of(off)} (to restart anyway: {wording.instead_of(off)})"
    assert restored(story_of(a).reason) == restored(reason)


def continues_in_place(a: NodeLog, at: float, lost: int, number: int) -> None:
    """A worker is lost, and the others continue in place in the round with this number."""
    a.fails(at, lost, "ValueError", known_at=at)
    a.add(at + 0.05, Restarting("failure", decided.restart(number - 1, 3, decided.failed(lost)), number - 1, True))
    in_place = RoundFormed(
        round=number, generation=1, restart_count=number - 1, group_rank=0, group_world_size=1, first_rank=0,
        local_world_size=a.workers, world_size=a.workers, in_place=True,
    )  # fmt: skip
    a.add(at + 0.1, in_place)
    a.add(at + 0.1, WorkersStarted(1, {**{rank: 1000 + rank for rank in range(a.workers)}, lost: 77 + number}))
    a.add(at + 0.2, Recovered(number, 1, a.workers - 1, 1, 1234, 1 - lost, 0.2))


def test_a_worker_that_keeps_its_process_is_one_life_and_a_replacement_another() -> None:
    a = alone()
    continues_in_place(a, 5.0, lost=0, number=2)
    for rank in range(a.workers):
        a.add(9.0, WorkerEnded(1, rank, rank, "succeeded"))

    (node,) = story_of(a).nodes
    incarnations = sorted(
        (process.local_rank, round(process.start, 1), round(process.end, 1)) for process in node.incarnations
    )
    assert incarnations == [(0, 1.1, 5.0), (0, 5.1, 9.0), *((rank, 1.1, 9.0) for rank in range(1, a.workers))]
    assert [process.start for process in node.incarnations if process.is_replacement] == [pytest.approx(5.1)]


def test_a_restart_in_place_shows_how_many_workers_were_kept_and_names_the_one_that_was_lost() -> None:
    a = alone()
    continues_in_place(a, 5.0, lost=0, number=2)
    continues_in_place(a, 7.0, lost=1, number=3)  # whose process is from the first round

    story = story_of(a)
    first, second = story.restarts
    assert (first.in_place, first.round, first.next_round) == (True, 1, 2)
    assert first.recovery == Recovery(kept=1, workers=2, step=1234, source_rank=1)
    assert first.culprit.startswith("rank 0 ") and second.culprit.startswith("rank 1 ")
    assert restart_words(second).splitlines()[0] == "Restart 2 in place: 100 ms"
    assert restart_words(second).endswith("1 of 2 workers kept their processes, state of step 1234 from rank 0")
    assert "2 restarts in place" in summary(story)
    assert [mark.kind for mark in story.nodes[0].marks] == ["recovered", "recovered"]
    assert page(story).count("<p>1 of 2 workers kept their processes") == 2


def test_workers_of_a_node_that_kept_none_are_also_counted() -> None:
    a, b = alone(), NodeLog("node-b", begins=1.0)
    continues_in_place(a, 5.0, lost=0, number=2)
    b.formed(5.1, 2, 1, nodes=2)
    b.started(5.2)

    (restart,) = story_of(a, b).restarts
    assert restart.recovery is not None and (restart.recovery.kept, restart.recovery.workers) == (1, 4)


def test_a_recovery_that_is_given_up_is_drawn_as_a_restart() -> None:
    a = alone()
    a.fails(5.0, 0, "ValueError", known_at=5.0)
    a.add(5.1, Restarting("failure", decided.restart(1, 3, decided.failed(0)), 1, in_place=True))
    a.add(5.2, NotRecovered(1, "no state"))
    a.add(5.3, WorkerEnded(1, 1, 1, "stopped"))
    a.formed(6.0, 2, 1, nodes=1)
    a.started(6.1)

    story = story_of(a)
    assert [restart.in_place for restart in story.restarts] == [False]
    assert "1 restart (" in summary(story)
    assert [mark.text for mark in story.nodes[0].marks] == ["not continuing in place: no state"]


# Several nodes.


def test_nodes_are_in_the_order_of_their_group_ranks() -> None:
    a, b = a_crash()

    assert [node.name for node in story_of(b, a).nodes] == ["node-a", "node-b"]


@pytest.mark.parametrize("ahead", [3600.0, -2.5])
def test_clocks_that_differ_are_brought_together_by_the_rounds_that_nodes_share(ahead: float) -> None:
    story, straight = story_of(*a_crash(ahead=ahead)), story_of(*a_crash())

    assert blocks_of(story.nodes[1]) == blocks_of(straight.nodes[1])
    assert story.restarts[0].took_s == pytest.approx(0.3, abs=1e-4)
    # Either clock may be right, so the note only reports the difference.
    assert len(story.notes) == 1 and f"{abs(ahead):.3g} s" in story.notes[0]


def test_clocks_that_agree_are_left_alone() -> None:
    story = story_of(*a_crash(ahead=0.03))

    assert story.nodes[1].formed[1] - story.nodes[0].formed[1] == pytest.approx(0.03, abs=1e-4)
    assert not story.notes


def test_agents_of_one_host_are_distinguished() -> None:
    a = NodeLog("node-a", pid=1)
    b = NodeLog("node-a", pid=2)

    assert {node.name for node in story_of(a, b).nodes} == {"node-a · 1", "node-a · 2"}


# Damage.


def test_a_killed_agent_lived_as_long_as_it_gave_signs_of_life() -> None:
    a = a_start()
    for minute in range(1, 601):
        a.alive(0.023 + 60.0 * minute)

    story = story_of(a)

    assert (story.length_s, story.spent["trained"]) == pytest.approx((36000.023, 36000.0), abs=1e-3)
    assert blocks_of(story.nodes[0])[-1] == ("run", 0.023, 36000.023)
    assert [round(process.end, 3) for process in story.nodes[0].incarnations] == [36000.023] * 2
    assert story.is_training_known
    assert not any("lack" in note for note in story.notes)


def test_what_follows_a_start_is_unknown_where_the_log_ends_with_it() -> None:
    assert UNKNOWN_END_S == ALIVE_INTERVAL_S
    killed, restarted, late, trained = (a_start() for _ in range(4))
    restarted.fails(20.0, 0, "boom", known_at=20.01)
    for minute in range(1, 120):
        late.alive(60.0 * minute)
    late.fails(7200.0, 0, "boom", known_at=7200.01)
    for node, at in ((restarted, 20.0), (late, 7200.0)):
        node.restarting(at + 0.02, decided.restart())
        node.stopped(at + 0.1, 1)
        node.formed(at + 0.2, 2, 0, nodes=1, restarts=1)
        node.started(at + 0.3)
    trained.alive(60.03)
    of_two = story_of(a_crash()[0], a_start("node-b"))

    known = [story_of(node).is_training_known for node in (killed, restarted, late, trained)]

    assert known == [False, False, True, True]  # within two hours, a minute more or less does not matter
    assert of_two.is_training_known  # the other's log continues
    (alive,) = logs_of(killed)
    alive.alive_at = alive.first_wall + 3.0
    assert timeline_from([alive]).is_training_known


def test_an_unfinished_last_line_is_not_damage() -> None:
    a, _ = a_crash()
    (whole,) = read_logs("a", a.lines)
    (torn,) = read_logs("a", [*a.lines[:-1], a.lines[-1][:40]])

    assert whole.damaged == torn.damaged == 0
    assert len(torn.entries) == len(whole.entries) - 1


@pytest.mark.parametrize(
    "line",
    [
        b"\x00\xff garbage\n", b"[1, 2]\n", b"7\n", b"{}\n", b"[" * 100_000 + b"\n",
        b'{"schema": 1, "monotonic_ns": 1e400, "time": "2026-01-01T00:00:00Z"}\n',
        b'{"schema": 1, "monotonic_ns": "1", "time": "2026-01-01T00:00:00Z"}\n',
        b'{"schema": 1, "monotonic_ns": 1, "time": "yesterday", "node": "new"}\n',
        b'{"schema": 1, "monotonic_ns": 1, "time": 7, "node": "new"}\n', b'{"schema": 1, "monotonic_ns": 1, "node": "new"}\n',
        b'{"schema": 1, "monotonic_ns": 1, "time": "2026-01-01T00:00:00", "node": "new"}\n',
        b'{"schema": 1, "monotonic_ns": 99999999999999999999999999, "time": "2026-01-01T00:00:00Z"}\n',
        b'{"schema": 1, "filler": "' + b"x" * LINE_BYTES_MAX + b'"}\n',
    ],
    ids=lambda line: line[:24].decode(errors="replace").strip(),
)  # fmt: skip
def test_a_damaged_line_is_left_out_and_counted(line: bytes) -> None:
    a, b = a_crash()
    a.lines[5:5] = [line]

    story = story_of(a, b)

    assert [note for note in story.notes if note.startswith("1 damaged line")]
    assert story.restarts[0].took_s == pytest.approx(0.3, abs=1e-5)


def test_records_that_lack_what_they_should_have_change_nothing_but_themselves() -> None:
    a, b = a_crash()
    strange: Iterable[dict[str, Any]] = (
        {"event": "phase_took", "name": "run", "duration_s": "long"},
        {"event": "phase_took", "name": "run", "duration_s": None},
        {"event": "phase_took", "name": "run", "duration_s": 10**400},
        {"event": "phase_took", "name": "run", "duration_s": 1e308},
        {"event": "round_formed", "round": None},
        {"event": "workers_started", "workers": [7]},
        {"event": "workers_started", "workers": None},
        {"event": "worker_ended", "local_rank": [], "outcome": "failed"},
        {"event": "worker_ended", "outcome": {}, "failure": []},
        {"event": "restarting", "round": "x"},
        {"event": "noticed", "local_rank": "x"},
        {"event": "records_lost", "count": {}},
    )
    for fields in strange:
        record = {
            name: json.loads(a.lines[0])[name] for name in ("time", "monotonic_ns", "schema", "run_id", "node", "host")
        }
        a.lines.insert(5, json.dumps({**record, "round": 1, "generation": 1, **fields}).encode() + b"\n")
    a.lines.insert(5, changed(a.lines[5], event="something_new"))  # a newer aelastic may log more

    story = story_of(a, b)

    assert [note for note in story.notes if note.startswith("3 records with missing fields")]
    assert story.restarts[0].took_s == pytest.approx(0.3, abs=1e-5)


def test_a_form_that_we_do_not_know_is_refused() -> None:
    a, _ = a_crash()

    with pytest.raises(UnknownVersionError, match="there: schema version 2; this aelastic reads version 1"):
        read_logs("there", [changed(a.lines[0], schema=2)])


# Several runs.


def test_logs_that_overlap_are_one_run_and_a_run_id_that_was_used_again_is_another() -> None:
    yesterday, today = NodeLog("node-a", pid=1), NodeLog("node-a", begins=86400.0, pid=2)
    meanwhile = NodeLog("node-b", begins=40.0, run_id="other")

    runs = runs_of(logs_of(today, meanwhile, yesterday))

    assert [[log.pid for log in run] for run in runs] == [[1], [77], [2]]
    assert [len(run) for run in runs_of(logs_of(*a_node_lost()))] == [3]


def test_several_agents_in_one_file_are_distinguished() -> None:
    a, b = a_crash()

    logs = read_logs("both", [line for pair in zip(a.lines, b.lines, strict=False) for line in pair])

    assert [log.host for log in logs] == ["node-a", "node-b"]


def test_phases_between_which_records_are_missing_keep_their_own_length() -> None:
    a = alone()
    del a.lines[-2]  # `spawn` took 0.1 s
    a.took(9.0, "run")
    a.change(9.0, Phase.STOPPING)
    a.took(9.5, "stop")
    a.add(9.5, RunEnded(WorkerState.STOPPED, ""))

    story = story_of(a)

    assert blocks_of(story.nodes[0]) == [("rendezvous", 0.0, 1.0), ("run", 1.1, 9.0), ("stop", 9.0, 9.5)]
