"""A quorum of stores under faults: the register's history is linearizable."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from kit.effort import QUORUM_SEEDS
from kit.simulated.linearizability import Op, is_linearizable
from kit.simulated.quorum import BrokenPromiseError, simulate

from aelastic.rdzv.stores.register_attempt import Attempt, Basis

SEEDS_IN_A_TEST = 25


@pytest.mark.parametrize("first", range(0, QUORUM_SEEDS, SEEDS_IN_A_TEST))
def test_whatever_happens_to_stores_the_history_is_linearizable(first: int) -> None:
    _simulate_all(range(first, min(first + SEEDS_IN_A_TEST, QUORUM_SEEDS)))


def test_no_store_forgets_once_all_is_calm() -> None:
    simulate(44000264)


def test_no_store_forgets_that_only_a_vote_older_than_the_chosen_one_can_spare() -> None:
    """The older vote reached a new store late: if one more forgets then, a majority has lost its data."""
    simulate(50000271)


@pytest.mark.all
def test_the_worlds_are_bad_enough() -> None:
    worlds = [simulate(seed) for seed in range(20)]
    log = "\n".join(line for world in worlds for line in world.log)
    assert all(word in log for word in ("freezes", "forgets", "cut", "restarts"))
    assert sum(op.new is not None and op.answered < math.inf for world in worlds for op in world.history) > 200
    assert sum(op.answered == math.inf for world in worlds for op in world.history) > 5
    assert sum(world.is_lost for world in worlds) < 10


find_basis = Attempt.find_basis


def _of_all_that_answer(attempt: Attempt, name: str, *, is_known: bool) -> Basis | None:
    """Treats a store that has lost its data like any other."""
    votes = [cell.vote for cell in attempt.seen.values() if cell and cell.vote]
    if not votes or len(attempt.seen) < attempt.majority:
        return find_basis(attempt, name, is_known=is_known)
    return Basis(max(votes, key=lambda vote: vote.ballot), frozenset(attempt.seen), attempt.majority)


def _of_any_vote(attempt: Attempt, name: str, *, is_known: bool) -> Basis | None:
    basis = find_basis(attempt, name, is_known=is_known)
    if basis is None or basis.vote is None or basis.is_first:
        return basis
    votes = [cell.vote for cell in attempt.seen.values() if cell and cell.vote]
    return basis.replace(vote=min(votes, key=lambda vote: vote.ballot))


@pytest.mark.parametrize(
    "name, wrong, first",  # starts just before the seed that finds it, to save time
    [
        ("majority", property(lambda attempt: attempt.size // 2), 0),
        ("holds", lambda attempt, basis: True, 3),
        ("find_basis", _of_all_that_answer, 20),
        ("find_basis", _of_any_vote, 0),
    ],
    ids=["half is enough", "one look is enough", "forgetful stores count", "any vote will do"],
)
def test_a_broken_rule_breaks_a_promise(
    name: str, wrong: Callable[..., Any], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Attempt, name, wrong)
    with pytest.raises(BrokenPromiseError):
        _simulate_all(range(first, first + 200))


def _simulate_all(seeds: range) -> None:
    for seed in seeds:
        simulate(seed)


def _write(called: float, answered: float, expected: str, new: str, result: str | None) -> Op:
    return Op(called, answered, None if result is None else result.encode(), expected.encode(), new.encode())


def _read(called: float, answered: float, result: str) -> Op:
    return Op(called, answered, result.encode())


@pytest.mark.parametrize(
    "history, is_fine",
    [
        ([_write(0, 1, "", "a", "a"), _read(2, 3, "a")], True),
        ([_write(0, 1, "", "a", "a"), _read(2, 3, "")], False),
        ([_write(0, 4, "", "a", "a"), _read(1, 2, "a"), _read(3, 5, "")], False),
        ([_write(0, 2, "", "a", "a"), _write(1, 3, "", "b", "b")], False),
        ([_write(0, 2, "", "a", "a"), _write(1, 3, "", "b", "a")], True),
        ([_write(0, math.inf, "", "a", None), _read(5, 6, ""), _read(7, 8, "a")], True),
        ([_write(0, math.inf, "", "a", None), _read(5, 6, "a"), _read(7, 8, "")], False),
    ],
)
def test_the_checker_knows_what_is_linearizable(history: list[Op], is_fine: bool) -> None:
    assert is_linearizable(history) is is_fine
