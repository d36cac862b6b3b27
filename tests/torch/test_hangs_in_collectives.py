"""Jobs of several agents whose ranks are stuck in gloo collectives: each agent names the rank that they wait for."""

from __future__ import annotations

import pytest
from hang_verdicts import DEADLINE_S, HOWS, Plan, plans, run

pytestmark = pytest.mark.timeout(DEADLINE_S + 20)

# The rank is on the leader's node or on another, and its workers are cold or warm.
JOBS = [
    ("Python", 2, True),
    pytest.param("C", 1, False, marks=pytest.mark.all),
    pytest.param("disk", 3, False, marks=pytest.mark.all),
    pytest.param("branch", 3, True, marks=pytest.mark.all),
    pytest.param("groups", 0, False, marks=pytest.mark.all),
]


@pytest.mark.ci
@pytest.mark.all
@pytest.mark.parametrize("how, culprit, is_warm", JOBS)
def test_every_agent_names_the_rank_that_does_not_come_and_no_other(how: str, culprit: int, is_warm: bool) -> None:
    outcome = run(Plan(0, how, 2, 2, culprit, 5, is_warm))
    assert outcome.verdict == "right", outcome.texts


@pytest.mark.all
@pytest.mark.parametrize("limit", ["DESYNCHRONISED_LIMIT_S", "DESYNCHRONISED_BARRIER_S"])
def test_who_raises_since_a_collective_timed_out_is_not_the_cause(limit: str) -> None:
    plan = Plan(0, "asleep", 2, 2, 3, 5, is_warm=False)
    outcome = run(plan, "--max-restarts=0", **{limit: "3"})
    assert outcome.verdict == "right", outcome.texts


# With a torch rendezvous handler, other nodes cannot be asked.
HANDLER = "--rdzv-backend=torch:c10d"


@pytest.mark.all
def test_through_a_handler_of_torchs_the_ranks_of_a_node_are_compared_once_a_collective_has_timed_out() -> None:
    plan = Plan(0, "asleep", 1, 3, 2, 5, is_warm=True)
    outcome = run(plan, HANDLER, "--max-restarts=0", DESYNCHRONISED_LIMIT_S="3")
    assert outcome.verdict == "right", outcome.texts


@pytest.mark.all
def test_through_a_handler_of_torchs_the_ranks_of_a_node_are_compared_once_they_are_silent() -> None:
    outcome = run(Plan(0, "lock", 1, 4, 2, 5, is_warm=False), HANDLER, "--hang-timeout=3")
    assert outcome.verdict == "right", outcome.texts


def test_a_seed_gives_the_same_jobs_with_each_way_to_hang() -> None:
    first, again = list(plans(0, 60)), list(plans(0, 60))
    assert first == again and {plan.how for plan in first} == set(HOWS)
    assert {plan.agents for plan in first} == {2, 3} and {plan.is_warm for plan in first} == {True, False}
    assert all(4 <= plan.agents * plan.workers <= 8 and plan.culprit < plan.agents * plan.workers for plan in first)
