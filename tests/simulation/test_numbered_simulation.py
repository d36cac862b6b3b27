"""A seed's decisions, events, counters and verdicts stay the same if numbers replace all sentences."""

from __future__ import annotations

from typing import Any

import pytest
from kit.effort import examples
from kit.numbered import numbered
from kit.simulated.simulation import simulation_of
from kit.simulated.supervisor import Agent

from aelastic.agent.group import events as g
from aelastic.agent.group.worker_group import WorkerGroup
from aelastic.agent.run_event_source import RunEventSource
from aelastic.observe.run_state import RunState
from aelastic.rdzv.protocol import messages as m

pytestmark = pytest.mark.words  # replaces the texts itself
DECISIONS = m.Assigned | m.Interrupted | m.Ended | m.Settled


class Observed:
    """A worker group, as seen by its agent's observers."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group, self.source, self.state = group, RunEventSource(group), RunState()
        self.kinds: list[str] = []

    def handle(self, event: g.Event, now: float) -> None:
        for each in self.source.handle(event, now):
            self.kinds.append(type(each).__name__)
            self.state.tell(each, now)

    @property
    def seen(self) -> tuple[Any, ...]:
        state, spent = self.state, self.state.spent
        ends = [(each.cause, each.decision, each.round) for each in state.ends]
        counters = state.restart_count, state.drains, spent.failures, spent.hangs, spent.starts
        return self.kinds, state.restarts, counters, ends, spent.seconds


def decided_in(seed: int, endpoints: int, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Messages to the nodes of a simulation, events of their observers, and the end of each node."""
    simulation, received = simulation_of(seed, endpoints), list[Any]()
    receives, handle, groups = simulation.checks.receives, WorkerGroup.handle, dict[int, Observed]()

    def on_received(agent: Agent, message: m.LeaderMessage) -> None:
        if isinstance(message, DECISIONS):
            received.append((simulation.world.now, agent.node_id, message))
        receives(agent, message)

    def on_event(group: WorkerGroup, event: g.Event, now: float) -> list[g.Action]:
        observed = groups.setdefault(id(group), Observed(group))
        actions = handle(group, event, now)
        observed.handle(event, now)
        return actions

    simulation.checks.receives = on_received  # type: ignore[method-assign]
    with monkeypatch.context() as patched:
        patched.setattr(WorkerGroup, "handle", on_event)
        simulation.run()
    ends = [(agent.node_id, agent.group.phase, agent.group.state, agent.group.verdict) for agent in simulation.agents]
    return [received, ends, [each.seen for each in groups.values()]]


@pytest.mark.parametrize("endpoints", [1, 3])
@pytest.mark.parametrize("seed", range(examples(2) // 10))
def test_a_seed_decides_the_same_whatever_the_sentences_are(
    seed: int, endpoints: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with numbered() as sentences:
        decided = decided_in(seed, endpoints, monkeypatch)
        assert sentences, "observers receive reasons"
    assert decided == decided_in(seed, endpoints, monkeypatch)
