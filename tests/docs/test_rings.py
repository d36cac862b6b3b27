"""The page about the tests describes the rings correctly."""

from __future__ import annotations

from kit.rings import RINGS, TESTS
from sources import ROOT

PAGE = ROOT / "docs/development/tests.md"


def test_the_page_has_each_ring_with_its_budget() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.endswith(" s |") and line.count("|") == 5]
    assert rows == [
        f"| {ring.name} | {ring.holds} | {'yes' if ring.has_processes else 'no'} | {ring.budget_s} s |"
        for ring in RINGS
    ]


def test_each_folder_with_tests_is_a_ring() -> None:
    folders = {path.parent.name for path in TESTS.glob("*/test_*.py")}
    assert folders == {ring.name for ring in RINGS}
