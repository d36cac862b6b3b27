"""Positions of a node's workers relative to a round: cases that the worker group's stories don't show."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from aelastic.agent.group.in_place import LIMIT_S, InPlace
from aelastic.rdzv.protocol.messages import Assigned


@pytest.fixture
def workers() -> InPlace:
    """Two workers in a round."""
    made = InPlace()
    made.start([0, 1], is_ahead=False)
    made.begin_round()
    return made


def test_rounds_are_unshared_until_the_last_worker_has_the_state(workers: InPlace) -> None:
    counts = []
    for shared in ([], [0], [0, 1]):
        for rank in shared:
            workers.on_shared(rank)
        workers.leave(0.0)
        counts.append(workers.unshared_rounds)
        workers.begin_round()
    assert counts == [1, 2, 0]


def test_each_recovery_has_the_whole_limit(workers: InPlace) -> None:
    workers.leave(1000.0)
    workers.begin_round()
    workers.leave(5000.0)
    assert workers.ready_by == 5000.0 + LIMIT_S


def test_a_round_that_has_begun_is_not_the_next_one(workers: InPlace) -> None:
    """Otherwise its end would look like the end of a round that workers have not entered."""
    workers.leave(0.0)
    workers.keep_next(cast("Assigned", SimpleNamespace(round=4)))
    assert workers.is_next(4)
    workers.begin_round()
    assert not workers.is_next(4)
