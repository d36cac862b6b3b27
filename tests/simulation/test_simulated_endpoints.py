"""Whole agents whose board is several stores: claims and verdicts among stores that freeze, forget, are cut off and answer late or twice."""

from __future__ import annotations

import pytest
from kit.effort import ENDPOINTS_SEEDS
from kit.simulated.checks import BrokenPromiseError
from kit.simulated.simulation import simulate

from aelastic.rdzv.coordinator import leadership

SEEDS_IN_A_TEST = 10


@pytest.mark.parametrize("first", range(0, ENDPOINTS_SEEDS, SEEDS_IN_A_TEST))
def test_whatever_happens_to_endpoints_one_coordinator_decides_and_there_is_one_verdict(first: int) -> None:
    _simulate_all(range(first, first + SEEDS_IN_A_TEST))


def test_a_coordinator_that_trusts_the_board_for_too_long_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worlds are bad enough: coordinators are displaced in them."""
    monkeypatch.setattr(leadership, "TRUSTED_SHARE", 3.0)
    with pytest.raises(BrokenPromiseError, match=r"the board says that .* leads"):
        _simulate_all(range(300))


def _simulate_all(seeds: range) -> None:
    for seed in seeds:
        simulate(seed, endpoints=3)
