"""No event costs more than what it changes: it visits as much in a small job as in a large one, unless it is for all.

`kit/costs` tells the stories: what one node does, or one worker (`nodes`), costs the same however many there are; what
happens to all of them (`rounds`) may cost as much for each of many as for each of a few.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from kit.costs import nodes, rounds
from kit.costs.terms import Story, names
from kit.visits import Act, Name, Visits, median, visits

import aelastic
from aelastic.core.machine import Machine, check_invariants
from aelastic.forkserver.preload import Preload
from aelastic.group import events as group_events
from aelastic.group import restart_grace
from aelastic.group.restart_grace import RestartGrace
from aelastic.group.worker_group import WorkerGroup
from aelastic.hangs import hang_rules, timer_rules
from aelastic.rdzv.coordinator import coordinator_events, session_events
from aelastic.rdzv.coordinator.coordinator import Coordinator
from aelastic.rdzv.coordinator.leader import Leader
from aelastic.rdzv.member import member_events
from aelastic.rdzv.member.member import Member
from aelastic.rdzv.quorum.register import Register
from aelastic.rdzv.survivors.election import Election

FEW, MANY = 50, 500  # of which one does something
SMALL, LARGE = 15, 120  # where all is visited, which takes as long
# A median of a few events: tables are of powers of two, and a number of three digits is read in more steps.
STEPS, HELD_BYTES = 40, 2000

EVENTS: dict[type, Any] = {
    Leader: session_events.Event,
    Coordinator: coordinator_events.Event,
    Member: member_events.Event,
    WorkerGroup: group_events.Event,
    RestartGrace: restart_grace.Event,
    hang_rules.HangRules: hang_rules.Event,
    timer_rules.Timers: timer_rules.Event,
}
# Cores of which no part grows with the job, nor with the node.
BOUNDED = {
    Election: "a round of more than `SEATS_MAX` nodes elects none",
    Register: "of a few endpoints, as the user gave them",
    Preload: "of a few modules, as the user gave them",
}


def stories(*modules: object) -> dict[str, Story]:
    return {
        name: story for module in modules for name, story in inspect.getmembers(module, inspect.isgeneratorfunction)
    }


def for_each_story(*modules: object) -> pytest.MarkDecorator:
    told = stories(*modules)
    return pytest.mark.parametrize("story", told.values(), ids=told)


def cores() -> set[str]:
    """Names of all cores with phases, by their sources."""
    sources = [path.read_text() for path in Path(aelastic.__file__).parent.rglob("*.py")]
    return {name for source in sources for name in re.findall(r"^class (\w+)\(Machine\[", source, re.MULTILINE)}


def cost(story: Story, count: int) -> Visits:
    return median([visits(act) for act in story(count)])


@pytest.fixture(autouse=True)
def _no_invariants() -> Iterator[None]:
    """They look at everything, after each event."""
    check_invariants(False)
    yield
    check_invariants()


@for_each_story(nodes)
def test_an_event_of_one_costs_the_same_however_many_there_are(story: Story) -> None:
    few, many = cost(story, FEW), cost(story, MANY)
    assert many.steps <= 1.1 * few.steps + STEPS
    assert many.held_bytes <= few.held_bytes + HELD_BYTES


@for_each_story(rounds)
def test_an_event_for_all_costs_as_much_for_each_of_many_as_of_a_few(story: Story) -> None:
    few, many = cost(story, SMALL), cost(story, LARGE)
    assert many.steps <= 1.1 * LARGE / SMALL * few.steps
    assert many.held_bytes <= 2 * LARGE / SMALL * few.held_bytes


@for_each_story(nodes, rounds)
def test_the_invariants_hold_in_each_story(story: Story) -> None:
    check_invariants()
    for act in story(12):
        act.core.handle(act.event, act.now)


def test_a_loop_a_copy_and_a_search_are_seen() -> None:
    class Core:
        def __init__(self, count: int, do: Callable[[Any], Any]) -> None:
            self.of, self.do = dict.fromkeys(names(count), 0), do

        def handle(self, event: Any, now: float) -> None:
            self.do(self.of)

    def growth(do: Callable[[Any], Any]) -> Visits:
        few, many = (visits(Act(Core(count, do), None, 0.0)) for count in (FEW, MANY))
        return Visits(many.steps - few.steps, many.held_bytes - few.held_bytes)

    assert growth(lambda of: any(of[name] for name in of)).steps > 10 * STEPS
    assert growth(lambda of: Name("none") in of.values()).steps > 10 * STEPS
    assert growth(set).held_bytes > HELD_BYTES
    assert growth(lambda of: [*of]).held_bytes > HELD_BYTES
    found = growth(lambda of: of.get(Name("n0")))
    assert abs(found.steps) <= STEPS and abs(found.held_bytes) <= HELD_BYTES


def test_each_core_is_measured_by_each_of_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cores() == {each.__name__ for each in {*EVENTS, *BOUNDED} if issubclass(each, Machine)}
    handled: set[tuple[type, type]] = set()
    handle = Machine.handle

    def noting(core: Any, event: Any, now: float) -> Any:
        handled.add((type(core), type(event)))
        return handle(core, event, now)

    monkeypatch.setattr(Machine, "handle", noting)
    for story in stories(nodes, rounds).values():
        for act in story(12):
            handled.add((type(act.core), type(act.event)))
            act.core.handle(act.event, act.now)
    missing = {
        (core.__name__, event.__name__)
        for core, events in EVENTS.items()
        for event in get_args(events)
        if (core, event) not in handled
    }
    assert missing == set()
