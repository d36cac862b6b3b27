"""The cost of an event depends on what it changes, not on the size of the job, unless the event concerns every node.

`kit/costs.py` defines the lives of jobs.  Work by one agent or worker costs the same whatever the size of the job;
work for all of them costs the same for each.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from kit.costs import LIVES, Life, names
from kit.effort import AGENTS
from kit.visits import Act, Name, Visits, median, visits

import aelastic
from aelastic.agent.group import events as group_events
from aelastic.agent.group import restart_grace
from aelastic.agent.group.restart_grace import RestartGrace
from aelastic.agent.group.worker_group import WorkerGroup
from aelastic.base.machine import Machine, check_invariants
from aelastic.diagnose.hangs import hang_rules, timer_rules
from aelastic.rdzv.leader import coordinator_events, leader_events
from aelastic.rdzv.leader.coordinator import Coordinator
from aelastic.rdzv.leader.leader import Leader
from aelastic.rdzv.member import member_events
from aelastic.rdzv.member.member import Member
from aelastic.rdzv.stores.register import Register
from aelastic.workers.forkserver.preload import Preload

SMALL, LARGE = AGENTS
# Hash tables grow by powers of two, and larger numbers take more steps to parse.
STEPS, HELD_BYTES = 15, 1200

EVENTS: dict[type, Any] = {
    Leader: leader_events.Event,
    Coordinator: coordinator_events.Event,
    Member: member_events.Event,
    WorkerGroup: group_events.Event,
    RestartGrace: restart_grace.Event,
    hang_rules.HangDetector: hang_rules.Event,
    timer_rules.Timers: timer_rules.Event,
}
# Cores that don't grow, either with the job or with the node.
BOUNDED = {
    Register: "of a few endpoints, as the user gave them",
    Preload: "of a few modules, as the user gave them",
}


def cores() -> set[str]:
    """Names of all cores that have phases, from their sources."""
    sources = [path.read_text() for path in Path(aelastic.__file__).parent.rglob("*.py")]
    return {name for source in sources for name in re.findall(r"^class (\w+)\(Machine\[", source, re.MULTILINE)}


@pytest.fixture(autouse=True)
def _no_invariants() -> Iterator[None]:
    """Disables invariants: they visit everything after each event."""
    check_invariants(False)
    yield
    check_invariants()


def costs(life: Life, count: int) -> dict[tuple[str, bool], Visits]:
    """Cost of each event by name, in a job with `count` nodes or workers."""
    measured = defaultdict[tuple[str, bool], list[Visits]](list)
    for name, concerns_all, act in life(count):
        measured[name, concerns_all].append(visits(act))
    return {key: median(found) for key, found in measured.items()}


@pytest.mark.ci
@pytest.mark.all
@pytest.mark.timeout(600)  # thousands of agents
@pytest.mark.parametrize("life", LIVES)
def test_what_an_event_costs_for_each_agent_does_not_grow_with_their_number(life: Life) -> None:
    few, many = costs(life, SMALL), costs(life, LARGE)
    assert few.keys() == many.keys()
    dear = {}
    for (name, concerns_all), cost in few.items():
        limit = Visits(int(1.1 * cost.steps) + STEPS, cost.held_bytes + HELD_BYTES)
        if concerns_all:
            growth = LARGE / SMALL
            limit = Visits(int(1.1 * growth * cost.steps) + STEPS, int(2 * growth * cost.held_bytes))
        found = many[name, concerns_all]
        if found.steps > limit.steps or found.held_bytes > limit.held_bytes:
            dear[name] = (cost, found)
    assert dear == {}


def test_a_loop_a_copy_and_a_search_are_seen() -> None:
    class Core:
        def __init__(self, count: int, do: Callable[[Any], Any]) -> None:
            self.of, self.do = dict.fromkeys(names(count), 0), do

        def handle(self, event: Any, now: float) -> None:
            self.do(self.of)

    def growth(do: Callable[[Any], Any]) -> Visits:
        few, many = (visits(Act(Core(count, do), None, 0.0)) for count in (SMALL, LARGE))
        return Visits(many.steps - few.steps, many.held_bytes - few.held_bytes)

    assert growth(lambda of: any(of[name] for name in of)).steps > 10 * STEPS
    assert growth(lambda of: Name("none") in of.values()).steps > 10 * STEPS
    assert growth(set).held_bytes > HELD_BYTES
    assert growth(lambda of: [*of]).held_bytes > HELD_BYTES
    found = growth(lambda of: of.get(Name("n0")))
    assert abs(found.steps) <= STEPS and abs(found.held_bytes) <= HELD_BYTES


def test_each_core_is_measured_by_each_of_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lives also work in small jobs, with the cores' invariants enabled."""
    assert cores() == {each.__name__ for each in {*EVENTS, *BOUNDED} if issubclass(each, Machine)}
    check_invariants()
    handled: set[tuple[type, type]] = set()
    handle = Machine.handle

    def noting(core: Any, event: Any, now: float) -> Any:
        handled.add((type(core), type(event)))
        return handle(core, event, now)

    monkeypatch.setattr(Machine, "handle", noting)
    for life in LIVES:
        for _, _, act in life(30):
            handled.add((type(act.core), type(act.event)))
            act.core.handle(act.event, act.now)
    missing = {
        (core.__name__, event.__name__)
        for core, events in EVENTS.items()
        for event in get_args(events)
        if (core, event) not in handled
    }
    assert missing == set()
