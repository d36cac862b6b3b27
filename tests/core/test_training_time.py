"""Figures for training under faults, computed from what its workers wrote (`benchmarks/training_time.py`)."""

import pytest
from training_time import (
    KINDS,
    Finished,
    Happened,
    Line,
    counted_each_second,
    finished,
    parse,
    pauses,
    progress,
    schedule,
    share,
)

STEP_S = 0.04


def steps(round_: int, first: int, last: int, at: float, world_size: int = 1) -> list[Finished]:
    """A round that finishes these steps, one every `STEP_S`, the first one at `at`."""
    return [
        Finished(at + number * STEP_S, step, round_, world_size) for number, step in enumerate(range(first, last + 1))
    ]


def test_a_seed_has_one_schedule_and_another_seed_another() -> None:
    assert schedule(1, 156, 12) == schedule(1, 156, 12)
    assert schedule(1, 156, 12) != schedule(2, 156, 12)


@pytest.mark.parametrize("seed", range(20))
def test_all_kinds_come_once_before_any_comes_again(seed: int) -> None:
    kinds = [fault.kind for fault in schedule(seed, 156, 12)]
    assert len(kinds) == 12
    assert sorted(kinds[:6]) == sorted(kinds[6:]) == sorted(KINDS)


def test_faults_are_in_order_choose_a_node_and_leave_time_to_recover_from_the_last() -> None:
    faults = schedule(3, 100, 12)
    times = [fault.at for fault in faults]
    assert times == sorted(times) and times[-1] < 100 - 12 / 3
    assert all(0 <= fault.choice < 1 for fault in faults)


def test_without_an_interval_there_are_no_faults() -> None:
    assert schedule(1, 156, 0) == []


def test_a_line_that_was_cut_off_and_lines_of_other_kinds_are_not_steps() -> None:
    assert parse("started 1.0\njoined 2.0\nstep 2.5 7 99 0 3\nstep 2.54 8 99 ") == [Line(2.5, 7, 99, 0, 3)]


def test_a_step_is_finished_with_its_last_rank() -> None:
    lines = [Line(1.0, 1, 9, 0, 2), Line(1.2, 1, 9, 1, 2), Line(1.3, 2, 9, 0, 2)]
    assert finished(lines) == [Finished(1.2, 1, 9, 2)]


def test_the_same_step_of_two_rounds_is_finished_twice_and_counts_once() -> None:
    done = finished([Line(1.0, 5, 1, 0, 1), Line(2.0, 5, 2, 0, 1)])
    assert len(done) == 2
    made = progress(done, 0, 10)
    assert made.counted == (2.0,) and made.lost == 1


def test_what_comes_after_the_checkpoint_is_lost_even_if_the_run_ends_before_it_is_done_again() -> None:
    made = progress(steps(1, 1, 40, at=1.0) + steps(2, 26, 30, at=5.0), 0, 10)
    assert len(made.counted) == 30
    assert made.lost == 15


def test_a_round_that_begins_where_the_last_one_ended_loses_nothing() -> None:
    made = progress(steps(1, 1, 25, at=1.0) + steps(2, 26, 50, at=5.0), 0, 10)
    assert (len(made.counted), made.lost) == (50, 0)


def test_what_an_older_round_finishes_beside_a_newer_one_does_not_count() -> None:
    older, newer = steps(1, 1, 60, at=1.0), steps(2, 26, 45, at=2.5)
    made = progress(sorted(older + newer, key=lambda each: each.at), 0, 10)
    assert len(made.counted) == 45
    assert made.lost == 80 - 45


def test_only_what_is_finished_between_start_and_end_is_looked_at() -> None:
    done = steps(1, 1, 100, at=0.0)
    made = progress(done, done[10].at, done[20].at)
    assert (len(made.counted), made.lost) == (10, 0)


def test_a_run_without_faults_has_a_share_of_one() -> None:
    done = steps(1, 1, 251, at=1.0)
    start, end = done[0].at, done[-1].at
    assert share(len(progress(done, start, end).counted), STEP_S, start, end) == pytest.approx(1.0)


def test_a_step_of_fewer_nodes_counts_whole_as_time_and_in_part_as_work() -> None:
    done = steps(1, 1, 10, at=1.0, world_size=3) + steps(2, 11, 20, at=2.0) + steps(3, 21, 30, at=3.0, world_size=4)
    made = progress(done, 0.0, 9.0, nodes=3)
    assert len(made.counted) == 30
    assert made.work == pytest.approx(10 + 10 / 3 + 10)


def test_a_pause_has_the_last_fault_before_it_as_its_cause() -> None:
    done = steps(1, 1, 25, at=0.0) + steps(2, 26, 50, at=4.0) + steps(3, 51, 75, at=8.0)
    faults = [Happened(0.99, "worker killed"), Happened(6.0, "node added")]
    end = done[-1].at
    found = pauses(done, faults, STEP_S, 0.0, end)
    assert [(round(pause.at, 2), round(pause.seconds, 2)) for pause in found] == [(0.96, 3.0), (4.96, 3.0)]
    assert [pause.cause for pause in found] == [
        "worker killed",
        "worker killed",
    ]  # the second: its replacement joins


def test_a_fault_while_training_stands_is_not_the_cause() -> None:
    done = steps(1, 1, 25, at=0.0) + steps(2, 26, 30, at=20.0)
    faults = [Happened(0.97, "agent killed"), Happened(12.0, "node added")]
    assert [pause.cause for pause in pauses(done, faults, STEP_S, 0.0, done[-1].at)] == ["agent killed"]


def test_a_job_that_never_recovers_pauses_until_the_end() -> None:
    [pause] = pauses(steps(1, 1, 25, at=0.0), [Happened(1.0, "agent killed")], STEP_S, 0.0, 30.0)
    assert pause.seconds == pytest.approx(29.0) and pause.cause == "agent killed"


def test_a_pause_before_any_fault_has_no_cause() -> None:
    assert [pause.cause for pause in pauses(steps(1, 1, 2, at=3.0), [], STEP_S, 0.0, 3.04)] == ["none"]


def test_the_curve_shows_what_was_finished_by_each_second() -> None:
    assert counted_each_second((0.5, 0.9, 2.5), 0.0, 3.0) == [2, 2, 3]
