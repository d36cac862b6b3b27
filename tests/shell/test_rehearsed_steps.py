"""At which steps a rehearsal disturbs a script, by when the undisturbed run had saved; and which files are logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from aelastic.rehearse.files import Change, Files, Stamp, by_kind, changes, overwritten
from aelastic.rehearse.judging import Undisturbed


@pytest.mark.parametrize(
    "saves, middle, second",
    [
        ({"0.pt": [9, 19, 29, 39, 49, 59, 69, 79, 89, 99]}, 40, 19),  # each tenth step
        ({"0.pt": [9, 10, 19, 20, 39, 40, 59, 60]}, 41, 19),  # seen over two steps
        ({"0.pt": [*range(100)]}, 34, 2),  # each step
        ({"0.pt": [70]}, 71, 70),
        ({"0.pt": [9, 10]}, 34, 9),
        ({"0.png": [*range(4, 99, 5)], "0.pt": [44, 89], "end.pt": [99]}, 45, 89),  # samples come more often
    ],
)
def test_a_fault_comes_just_after_a_save_and_the_second_save_is_caught(
    saves: dict[str, list[int]], middle: int, second: int
) -> None:
    usual = Undisturbed(0, 99, True, 0.1, 1.0, 1, saves, {})
    assert (usual.middle, usual.second_save) == (middle, second)


@pytest.mark.parametrize("saves", [{}, {"end.pt": [99]}])
def test_without_checkpoints_a_fault_comes_after_a_third(saves: dict[str, list[int]]) -> None:
    usual = Undisturbed(0, 99, True, 0.1, 1.0, 1, saves, {})
    assert usual.middle == 34 and usual.saved_by is None and not usual.checkpoints


LOG, STATE = Path("log"), Path("state.pt")


def test_a_file_that_only_grows_while_steps_go_on_is_a_log() -> None:
    grows = [Change(step, LOG, step > 0) for step in range(0, 100, 10)]
    assert by_kind(grows, 100, 100) == {}
    assert by_kind(grows, 1000, 100) == {"log": [*range(0, 100, 10)]}  # that may be one save, which takes its time
    files = [Change(step, Path(f"{step}.pt"), grew=False) for step in range(0, 100, 10)]
    assert by_kind(files, 100, 100) == {"0.pt": [*range(0, 100, 10)]}
    anew = [each._replace(grew=False) for each in grows]
    assert by_kind(anew, 100, 100) == {"log": [*range(0, 100, 10)]}  # written anew each time


def test_what_is_written_at_each_step_is_no_checkpoint_where_others_are_written_now_and_then() -> None:
    each = [Change(step, Path("status.json"), grew=False) for step in range(100)]
    saves = [Change(step, Path(f"{step}.pt"), grew=False) for step in (33, 66)]
    assert by_kind([*each, *saves], 100, 100) == {"0.pt": [33, 66]}
    assert by_kind(each, 100, 100) == {"status.json": [*range(100)]}


def test_a_file_grows_only_if_it_is_the_same_file() -> None:
    before: dict[Path, Stamp | None] = {STATE: Stamp(1, 10, 7, b""), LOG: Stamp(1, 10, 8, b""), Path("folder"): None}
    now: dict[Path, Stamp | None] = {
        **before,
        STATE: Stamp(2, 20, 9, b""),
        LOG: Stamp(2, 20, 8, b""),
        Path("new"): Stamp(2, 1, 1, b""),
    }
    assert changes(before, now, 5) == [
        Change(5, STATE, grew=False), Change(5, LOG, grew=True), Change(5, Path("new"), grew=False),
    ]  # fmt: skip
    assert overwritten(before, now) == ["state.pt"]


def test_a_file_grows_only_if_it_begins_as_it_was(tmp_path: Path) -> None:
    files = Files(tmp_path, tmp_path / "apart")
    for name in "log", "state":
        (tmp_path / name).write_text("losses: 1]")
    before = files.stamps()
    with (tmp_path / "log").open("a") as log:
        log.write("losses: 2]")
    (tmp_path / "state").write_text("losses: 1, 2]")
    assert {each.path.name: each.grew for each in changes(before, files.stamps())} == {"log": True, "state": False}
