"""A rehearsal's findings about recovery in place: the script's habits, and whether training continues correctly."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from aelastic.tools.rehearse import habits
from aelastic.tools.rehearse.noted import Habit, Noted, difference
from aelastic.training.rehearsed import notes

LINES = {
    Habit(notes.READ_OUTSIDE, "train.py:9", "RANK"): (
        "rule 5 (may do harm): train.py:9 reads RANK before the function is called: read it inside, as ranks may change"
    ),
    Habit(notes.GROUP_OUTSIDE, "", ""): (
        "rule 1: a process group exists before the function is called: call init_process_group inside the function"
    ),
    Habit(notes.STILL_REFERENCED, "train.py:30", "DistributedDataParallel"): (
        "rule 1 (may do harm): DistributedDataParallel, made at train.py:30, outlives its round: "
        "keep it in a local variable of the function"
    ),
    Habit(notes.STILL_REFERENCED, "", "a process group"): (
        "rule 1 (may do harm): a process group outlives its round: "
        "keep what belongs to it in local variables of the function"
    ),
    Habit(notes.NO_GROUP, "train.py:29", ""): (
        "rule 1: train.py:29 calls share in a round without a process group: call init_process_group in each round"
    ),
    Habit(notes.WRAPPED_FIRST, "train.py:30", "DistributedDataParallel"): (
        "rule 2: train.py:30 wraps the model in DistributedDataParallel before round.share(): call share first"
    ),
    Habit(notes.COLLECTIVE_AFTER_UPDATE, "train.py:40", "all_reduce"): (
        "rule 3: train.py:40 calls all_reduce between optimizer.step() and the commit: "
        "call round.commit(step + 1) before it"
    ),
    Habit(notes.RANDOM, "", "torch"): (
        "rule 4: random numbers depend on more than step and rank (torch): seed them at the start of each step"
    ),
    Habit(notes.RANDOM, "", ""): (
        "rule 4: training continues differently after a recovery: data depend on more than step and rank, "
        "or some state is in no state_dict"
    ),
    Habit(notes.NO_COMMIT, "train.py:40", ""): (
        "rule 6: train.py:40 updates the model, but no step is committed: use round.steps() or call round.commit()"
    ),
    Habit(notes.COMMIT_WITHOUT_UPDATE, "train.py:35", ""): (
        "rule 6: train.py:35 commits steps before their gradients are applied: commit after the optimizer's update"
    ),
}


@pytest.mark.parametrize("habit", LINES)
def test_a_habit_is_named_with_its_rule_its_place_and_what_to_change(habit: Habit) -> None:
    assert habits.lines_of([habit]) == [LINES[habit]]
    assert habits.breaks(habit) == ("may do harm" not in LINES[habit])


def test_habits_that_break_recovery_come_first() -> None:
    rules = [line.split()[1].rstrip(":") for line in habits.lines_of(LINES)]
    assert rules == ["1", "1", "2", "3", "4", "4", "6", "6", "1", "1", "5"]


def test_parameters_are_noted_at_the_same_steps_in_each_run_and_at_few_of_a_long_one() -> None:
    noted = [step for step in range(1, 1_000_000) if notes.is_noted(step)]
    assert noted[:66] == [*range(1, 65), 66, 68] and len(noted) < 600
    assert all(after - before <= max(1, before / 32) for before, after in itertools.pairwise(noted))


def step_note(round_: int, step: int, *parameters: float, rank: int = 0, **random: int) -> dict[str, Any]:
    return {
        "kind": "step", "round": round_, "rank": rank, "step": step, "parameters": [*parameters] if rank == 0 else [],
        "random": random,
    }  # fmt: skip


def noted(*each: dict[str, Any]) -> Noted:
    found = Noted()
    for note in each:
        found.take(note)
    return found


USUAL = noted(*(step_note(1, step, 1.0, float(step), torch=step, random=7) for step in range(1, 9)))


def test_parameters_after_a_fault_are_compared_to_six_digits() -> None:
    same = noted(step_note(1, 1, 1.0, 1.0), step_note(2, 2, 1.0, 2.0 + 1e-7), step_note(2, 3, 1.0, 3.0))
    assert same.differs_at(USUAL, 1) is None and same.steps_after(1) == [2, 3]
    other = noted(step_note(2, 2, 1.0, 2.0), step_note(2, 3, 1.0, 3.0 + 1e-4))
    assert other.differs_at(USUAL, 1) == 3
    assert other.differs_at(USUAL, 1, last=2) is None, "only some steps are compared"
    assert not other.is_random(USUAL, until=1)


def test_parameters_that_differ_before_the_fault_are_those_of_a_script_that_is_not_deterministic() -> None:
    assert noted(step_note(1, 1, 1.0, 1.1), step_note(2, 2, 1.0, 2.1)).is_random(USUAL, until=1)


def test_random_numbers_are_blamed_if_they_were_the_same_before_the_fault_and_are_not_after_it() -> None:
    found = noted(
        step_note(1, 1, 1.0, torch=1, random=3),  # `random` differs in each run
        step_note(2, 2, 1.0, torch=99, random=3),
    )
    assert found.random_that_differ(USUAL, until=1) == ["torch"]
    assert noted(step_note(2, 2, 1.0, torch=2)).random_that_differ(USUAL, until=1) == []


@pytest.mark.parametrize(
    "values, usual, expected",
    [([3.0, 4.0], [3.0, 4.0], 0.0), ([3.0, 4.5], [3.0, 4.0], 0.1), ([1.0], [1.0, 2.0], float("inf")),
     ([float("nan")], [float("nan")], 0.0), ([1.0], [float("nan")], float("inf")), ([0.5], [0.0], 0.5)],
)  # fmt: skip
def test_a_difference_is_relative_to_the_size_of_what_it_should_be(
    values: list[float], usual: list[float], expected: float
) -> None:
    assert difference(values, usual) == pytest.approx(expected)
