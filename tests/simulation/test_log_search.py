"""Searches for violations in the replicated log under faults: none are found unless a rule is broken."""

from __future__ import annotations

import pytest
from kit.effort import LOG_BREAK_WALKS, LOG_STATES, LOG_WALKS
from kit.log_search.breaks import BREAKS, Break
from kit.log_search.search import FoundError, breadth_first, walk
from kit.log_search.setups import LOST, STATES, WALKS
from kit.log_search.world import Move, Setup

WALKS_IN_A_TEST = 500


@pytest.mark.parametrize("first", range(0, LOG_WALKS, WALKS_IN_A_TEST))
@pytest.mark.parametrize("setup", WALKS.values(), ids=WALKS)
def test_no_walk_breaks_a_promise_or_stops_a_job_whose_quorum_lives(setup: Setup, first: int) -> None:
    for seed in range(first, min(first + WALKS_IN_A_TEST, LOG_WALKS)):
        walk(setup, seed)


@pytest.mark.parametrize("first", range(0, LOG_WALKS, WALKS_IN_A_TEST))
@pytest.mark.parametrize("setup, beginning", LOST.values(), ids=LOST)
def test_no_walk_after_an_entry_was_lost_breaks_a_promise(
    setup: Setup, beginning: tuple[Move, ...], first: int
) -> None:
    for seed in range(first, min(first + WALKS_IN_A_TEST, LOG_WALKS)):
        walk(setup, seed, beginning=beginning)


@pytest.mark.parametrize("setup", STATES.values(), ids=STATES)
def test_no_state_that_is_near_breaks_a_promise(setup: Setup) -> None:
    assert breadth_first(setup, LOG_STATES) > 1000


@pytest.mark.parametrize("broken", BREAKS, ids=lambda broken: broken.name)
def test_a_broken_rule_is_noticed(broken: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    for change in broken.changes:
        monkeypatch.setattr(*change)
    with pytest.raises(FoundError):
        broken.walk(broken.seed, is_shrunk=False)


@pytest.mark.parametrize("broken", BREAKS, ids=lambda broken: broken.name)
def test_what_notices_a_broken_rule_is_the_rule(broken: Break) -> None:
    """The same walks find nothing if no rule is broken."""
    broken.walk(broken.seed)


@pytest.mark.all
@pytest.mark.parametrize("broken", BREAKS, ids=lambda broken: broken.name)
def test_a_broken_rule_is_noticed_by_other_walks(broken: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    for change in broken.changes:
        monkeypatch.setattr(*change)
    seeds = range(broken.seed + 1, broken.seed + 1 + LOG_BREAK_WALKS)
    with pytest.raises(FoundError):
        _walk_all(broken, seeds)


def _walk_all(broken: Break, seeds: range) -> None:
    for seed in seeds:
        broken.walk(seed, is_shrunk=False)
