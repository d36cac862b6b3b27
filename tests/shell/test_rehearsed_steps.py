"""At which steps a rehearsal disturbs a script, by when the undisturbed run had saved; and which files are logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from aelastic.rehearse.files import Change, Stamp, changes, logs_of, overwritten
from aelastic.rehearse.judging import Undisturbed


@pytest.mark.parametrize(
    "saves, middle, second",
    [
        ([9, 19, 29, 39, 49, 59, 69, 79, 89, 99], 40, 19),  # each tenth step
        ([9, 10, 19, 20, 39, 40, 59, 60], 41, 19),  # seen over two steps
        ([*range(100)], 34, 2),  # each step
        ([70], 71, 70),
        ([99], 34, 99),  # at its end alone
        ([9, 10], 34, 9),
    ],
)
def test_a_fault_comes_just_after_a_save_and_the_second_save_is_caught(
    saves: list[int], middle: int, second: int
) -> None:
    usual = Undisturbed(0, 99, True, 0.1, 1.0, 1, saves, {})
    assert (usual.middle, usual.second_save) == (middle, second)


def test_without_saves_a_fault_comes_after_a_third() -> None:
    assert Undisturbed(100, 400, True, 0.1, 1.0, 1, [], {}).middle == 201


LOG, STATE = Path("log"), Path("state.pt")


def test_a_file_that_only_grows_while_steps_go_on_is_a_log() -> None:
    grows = [Change(step, LOG, step > 0) for step in range(0, 100, 10)]
    assert logs_of(grows, 100) == {LOG}
    assert logs_of(grows, 1000) == set()  # that may be one save, which takes its time
    assert logs_of([each._replace(grew=False) for each in grows], 100) == set()  # written anew each time
    assert logs_of([*grows, Change(95, LOG, grew=False)], 100) == set()


def test_a_file_grows_only_if_it_is_the_same_file() -> None:
    before: dict[Path, Stamp | None] = {STATE: Stamp(1, 10, 7), LOG: Stamp(1, 10, 8), Path("folder"): None}
    now: dict[Path, Stamp | None] = {
        **before,
        STATE: Stamp(2, 20, 9),
        LOG: Stamp(2, 20, 8),
        Path("new"): Stamp(2, 1, 1),
    }
    assert changes(before, now, 5) == [
        Change(5, STATE, grew=False), Change(5, LOG, grew=True), Change(5, Path("new"), grew=False),
    ]  # fmt: skip
    assert overwritten(before, now) == ["state.pt"]
