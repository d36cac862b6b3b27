"""Recovery in place across several nodes, simulated: seeds keep every promise, and each promise can be broken."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from kit.effort import IN_PLACE_SEEDS
from kit.numbered import restored
from kit.simulated.checks import BrokenPromiseError
from kit.simulated.in_place import InPlaceSimulation, in_place_simulation_of, simulate_in_place
from kit.simulated.in_place_checks import InPlaceChecks

from aelastic.agent.group import events as ev
from aelastic.agent.group.in_place import InPlace, WorkerStage
from aelastic.agent.group.phases import Exits
from aelastic.agent.group.worker_group import WorkerGroup
from aelastic.base.machine import InvalidTransition
from aelastic.rdzv.decisions.decision import Decision
from aelastic.rdzv.leader.roster import Roster

SEEDS_IN_A_TEST = 20


@pytest.mark.parametrize("begin", range(0, IN_PLACE_SEEDS, SEEDS_IN_A_TEST))
def test_whatever_goes_wrong_workers_recover_in_place_or_restart_together(begin: int) -> None:
    worlds = [simulate_in_place(seed) for seed in range(begin, min(begin + SEEDS_IN_A_TEST, IN_PLACE_SEEDS))]
    if len(worlds) == SEEDS_IN_A_TEST:
        assert_reach_what_they_are_for(worlds)


def assert_reach_what_they_are_for(worlds: list[InPlaceSimulation]) -> None:
    """A simulation in which nothing happens must not pass."""
    counts = sum((world.checks.counts for world in worlds), Counter[str]())
    assert counts["kept"] > len(worlds) and counts["recovered"] > len(worlds)
    assert counts["replaced"] > len(worlds) / 2 and counts["released"] > len(worlds) / 2
    assert any(reason.startswith("not in place") for reason in counts)
    assert sum(len(world.checks.rounds) for world in worlds) > 3 * len(worlds)


def test_a_seed_tells_the_same_story_twice() -> None:
    assert restored(simulate_in_place(7).story(10_000)) == restored(simulate_in_place(7).story(10_000))


def _opt_in_always(group: WorkerGroup) -> list[ev.Action]:
    assert group.assigned is not None
    return [ev.ReportOptedIn(group.assigned.round)] if group.in_place.have_all_opted_in else []


def _wait_for_ever(group: WorkerGroup, now: float) -> list[ev.Action]:
    group.deadline = now + 1000.0
    return []


def _clear_all(exits: Exits, local_rank: int) -> None:
    exits.alive.clear()
    exits.left.clear()


def _any(in_place: InPlace, stage: WorkerStage) -> bool:
    return stage in in_place.stage.values()


BROKEN: dict[str, tuple[type, str, Any, str]] = {
    "a round ends in place though not all workers have opted in": (
        Roster, "have_all_opted_in", property(lambda _: True), "not all of its workers have opted in"),
    "one node says that its workers can leave, and restarts them": (
        WorkerGroup, "_opt_in", _opt_in_always, "starts other workers for the round .* continue in place"),
    "the leader forgets who has opted in": (
        Roster, "opt_in", lambda *_: None, "does not end in place, and all of its workers have opted in"),
    "a node is ready before all of its workers are": (
        InPlace, "are_all", _any, "is ready, and .* are not"),
    "a round that is over begins": (
        InPlace, "is_next", lambda *_: False, "knows that it is over"),
    "each end of a round is charged": (
        Decision, "is_charged", property(lambda _: True), "has restart count"),
    "the end of one worker is taken for that of all": (
        Exits, "on_cleared", _clear_all, "live|is ready, and"),
    "a worker that does not leave is waited for": (
        WorkerGroup, "_on_late", _wait_for_ever, "was told .* ago that its round is over"),
    "a node stops its workers though they could leave": (
        InPlace, "can_lose_one", property(lambda _: False), "has the state, and is stopped"),
    "workers are let go once one is done": (
        InPlace, "may_be_released", property(lambda each: not each.is_released and bool(each.those(WorkerStage.DONE))),
        "are not done"),
    "workers that are done are never let go": (
        WorkerGroup, "_release", lambda _: [], "do not come to an end"),
    "workers that are ready never join the next round": (
        WorkerGroup, "_form", lambda _: [], "are on their way"),
}  # fmt: skip


# Workers that end where a rule applies, so that many seeds find its violation.
HABITS: dict[str, dict[str, float]] = {
    "one node says that its workers can leave, and restarts them": {"dies_sharing": 0.6},
    "a round that is over begins": {"dies_ready": 0.5, "dies_forming": 0.3, "starts_s": 3.0},
    "a worker that does not leave is waited for": {"sticks": 0.3},
}
# If few seeds find it, the search begins shortly before one that does.
FIRST_SEEDS = {
    "one node says that its workers can leave, and restarts them": 80,
    "a round that is over begins": 31,
    "workers that are ready never join the next round": 25,
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_breaks_a_promise(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of, name, wrong, promise = BROKEN[rule]
    monkeypatch.setattr(of, name, wrong)
    assert is_broken(promise, FIRST_SEEDS.get(rule, 0), **HABITS.get(rule, {}))


def test_a_worker_that_begins_a_round_while_others_are_in_the_one_before_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(InPlace, "are_all", _any)
    monkeypatch.setattr(InPlaceChecks, "joins", lambda *_: None)
    assert is_broken("is still in one before it")


def is_broken(promise: str, first_seed: int = 0, **habits: float) -> bool:
    """Whether a seed finds this promise broken; others may first find a core in an impossible state."""
    for seed in range(first_seed, first_seed + 200):
        simulation = in_place_simulation_of(seed)
        simulation.workplace.habits = replace(simulation.workplace.habits, **habits)  # type: ignore[arg-type]
        try:
            simulation.run()
        except BrokenPromiseError as error:
            if re.search(promise, str(error)):
                return True
        except (AssertionError, InvalidTransition):
            pass
    return False


# Each found a bug in plans and statuses: repeated requests, rounds that end as they begin, delayed messages.
@pytest.mark.parametrize(
    "seed",
    [
        8,
        433,
        5015,
        5028,
        5160,
        9156,
        9206,
        9247,
        20861,
        21167,
        61001377,
        62001467,
        62010813,
        62010655,
        62012823,
        614102390,
        63101742,
    ],
)
def test_seeds_that_found_a_bug_find_it_no_more(seed: int) -> None:
    in_place_simulation_of(seed).run()
