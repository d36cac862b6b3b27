"""The list of mutants: reading and applying their diffs, finding what a change affects, recording results."""

from __future__ import annotations

from pathlib import Path

import mutants
import pytest
from mutants import LIVED, STALE, Mutant, Reach, Result

MODULE = """\
import math

LIMIT = 3


def is_over(count: int) -> bool:
    if count < 0:
        return False
    return count >= LIMIT


@cache
def square(number: int) -> int:
    return number * number


class Counter:
    def add(self, number: int) -> int:
        def twice() -> int:
            return 2 * number

        return twice()
"""
DIFF = """\
A limit that is reached does not count as over.

--- a/aelastic/over.py
+++ b/aelastic/over.py
@@ -6,4 +6,4 @@
 def is_over(count: int) -> bool:
     if count < 0:
         return False
-    return count >= LIMIT
+    return count > LIMIT
"""


def changed(old: str, new: str) -> str:
    assert MODULE.count(old) == 1
    return MODULE.replace(old, new)


def test_a_mutant_is_applied() -> None:
    assert mutants.applied(MODULE, DIFF) == changed(">= LIMIT", "> LIMIT")


def test_a_mutant_is_applied_where_its_lines_have_moved_to() -> None:
    moved = "# one more line\n" * 20 + MODULE
    assert mutants.applied(moved, DIFF) == moved.replace(">= LIMIT", "> LIMIT")


def test_of_two_places_the_nearest_is_changed() -> None:
    text = MODULE + MODULE
    assert mutants.applied(text, DIFF) == changed(">= LIMIT", "> LIMIT") + MODULE


def test_a_mutant_whose_lines_have_changed_is_stale() -> None:
    assert mutants.applied(changed("count < 0", "count <= 0"), DIFF) is None


def test_a_change_reaches_the_function_around_it() -> None:
    assert mutants.reach_of_change(MODULE, changed(">= LIMIT", "> LIMIT")) == {7, 8, 9}


def test_a_line_that_is_left_out_reaches_the_function_around_it() -> None:
    assert mutants.reach_of_change(MODULE, changed("        return False\n", "        pass\n")) == {7, 8, 9}


def test_a_change_reaches_the_innermost_function() -> None:
    assert mutants.reach_of_change(MODULE, changed("2 * number", "3 * number")) == {20}


@pytest.mark.parametrize("old, new", [("LIMIT = 3", "LIMIT = 4"), ("number * number", "number + number")])
def test_a_constant_and_a_function_with_a_cache_reach_the_whole_module(old: str, new: str) -> None:
    assert mutants.reach_of_change(MODULE, changed(old, new)) >= set(range(1, 23))


def test_tests_run_by_ring_and_the_quickest_first() -> None:
    slow, quick, simulated = (
        "tests/core/test_a.py::slow",
        "tests/core/test_b.py::quick",
        "tests/simulation/test_c.py::all",
    )
    reach = Reach({simulated: 0.1, slow: 9.0, quick: 0.5}, {"aelastic/over.py": {7: [0, 1], 9: [2]}})
    assert reach.of("aelastic/over.py", {7, 8, 9}) == [quick, slow, simulated]
    assert reach.of("aelastic/over.py", {9}) == [quick]
    assert reach.of("aelastic/other.py", {9}) == []


def test_what_the_tests_reach_is_kept(tmp_path: Path) -> None:
    reach = Reach({"tests/core/test_a.py::one": 0.5}, {"aelastic/over.py": {7: [0]}})
    reach.save(tmp_path / "reach.json")
    assert Reach.load(tmp_path / "reach.json") == reach


def test_a_mutant_that_was_found_and_lives_now_is_a_loss() -> None:
    before = {"a": "core", "b": LIVED, "c": "simulation"}
    assert mutants.lost(before, {"a": LIVED, "b": LIVED, "c": "core", "d": LIVED}) == ["a"]


def test_what_is_recorded_keeps_mutants_that_have_not_run_and_forgets_those_that_are_gone() -> None:
    before = {"a": "core", "b": LIVED, "gone": "core"}
    assert mutants.merged(before, {"b": "shell", "c": STALE}, ["a", "b", "c"]) == {"a": "core", "b": "shell"}


def test_a_run_ends_with_its_numbers() -> None:
    results = [Result("a", "core"), Result("b", "core"), Result("c", "shell"), Result("d", LIVED)]
    assert mutants.table(results) == "4 mutants: 3 found (2 by core, 1 by shell), 1 lived"


def test_each_mutant_of_the_list_has_a_sentence_and_changes_one_module_of_the_product() -> None:
    for mutant in mutants.read_mutants():
        assert mutant.sentence.endswith("."), mutant.name
        assert mutant.path.startswith("aelastic/"), mutant.name


def test_a_diff_that_changes_two_files_is_not_a_mutant(tmp_path: Path) -> None:
    (tmp_path / "two.diff").write_text(DIFF + DIFF)
    with pytest.raises(ValueError, match="changes 2 files"):
        Mutant.read(tmp_path / "two.diff")
