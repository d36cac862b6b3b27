"""Any submission of a supervisor, in any phase of its member, with any failure meanwhile: the agent survives."""

from __future__ import annotations

from typing import Any

import pytest
from kit.effort import BABBLE_SEEDS
from kit.numbered import restored
from kit.simulated.babble import SENT, Babble, babble

from aelastic.rdzv.member.member import Member
from aelastic.rdzv.member.member_events import Phase

SEEDS_IN_A_TEST = 30
PHASES = {*Phase}


@pytest.mark.parametrize("begin", range(0, BABBLE_SEEDS, SEEDS_IN_A_TEST))
def test_whatever_is_submitted_the_agents_live(begin: int) -> None:
    worlds = _babble_all(range(begin, begin + SEEDS_IN_A_TEST))
    submitted = {each for world in worlds for each in world.submitted}
    assert {name for _, name in submitted} >= SENT
    assert {phase for phase, _ in submitted} >= PHASES
    assert {agent.ended for world in worlds for agent in world.agents} >= {"INIT", "crashed"}


def test_a_seed_that_found_a_bug_finds_it_no_more() -> None:
    """A request that the next leader carried out was carried out as of the time at which it was accepted."""
    babble(80187)


def test_a_core_that_comes_to_a_place_that_cannot_be_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Member._report

    def report_to_a_leader(member: Member, now: float) -> list[Any]:
        assert member.phase is not Phase.CONNECTING, "nothing is said before the first plan"
        return report(member, now)

    monkeypatch.setattr(Member, "_report", report_to_a_leader)
    with pytest.raises(AssertionError, match="nothing is said before the first plan"):
        _babble_all(range(100))


def _babble_all(seeds: range) -> list[Babble]:
    return [babble(seed) for seed in seeds]


def test_a_seed_tells_the_same_story_twice() -> None:
    assert restored(babble(3).story(10_000)) == restored(babble(3).story(10_000))
