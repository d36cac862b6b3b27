"""Whole agents whose endpoint is several stores: claims and verdicts among stores that freeze, forget, are cut off and answer late or twice."""

from __future__ import annotations

import pytest
from kit.effort import CLAIM_SEEDS, ENDPOINTS_SEEDS
from kit.simulated.checks import BrokenPromiseError
from kit.simulated.insight import phase_of
from kit.simulated.simulation import LEASE_S, Faults, Simulation, Size, simulate, simulation_of
from kit.simulated.stores import Stores
from kit.simulated.supervisor import Agent
from kit.simulated.world import FIN

SEEDS_IN_A_TEST = 10


@pytest.mark.parametrize("first", range(0, ENDPOINTS_SEEDS, SEEDS_IN_A_TEST))
def test_whatever_happens_to_endpoints_one_coordinator_decides_and_there_is_one_verdict(first: int) -> None:
    _simulate_all(range(first, min(first + SEEDS_IN_A_TEST, ENDPOINTS_SEEDS)))


def test_votes_that_are_counted_twice_are_found_with_several_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worlds are harsh enough: leaders lose the stores, and the nodes on the same hosts."""
    monkeypatch.setattr("aelastic.rdzv.log.votes.is_more_than_half", lambda *_: True)
    with pytest.raises(BrokenPromiseError, match=r"is committed, and .* know that"):
        simulate(6, endpoints=3)


def _simulate_all(seeds: range) -> None:
    for seed in seeds:
        simulate(seed, endpoints=3)


class _Claim(Simulation):
    """The leader falls silent, and the host of the agent that claims its place dies after some writes have begun.

    Args:
        seed: for the delays.
        endpoints: with three, the leader is back when its successor dies; with five, it stays away.
        fault: the successor's.
        begun: number of writes.
    """

    def __init__(self, seed: int, endpoints: int, fault: str, begun: int) -> None:
        size = Size(nodes=endpoints, max_nodes=endpoints, min_nodes=2, endpoints=endpoints)
        super().__init__(seed, size, Faults())
        self.fault, self.left, self.is_calm = fault, begun, True
        self.lost_at: float | None = None
        for host in self.hosts:
            self.start(host)
        self.watch_rounds()
        self.staying = set(self.hosts)
        self.until(self.is_at_work, 20, "the first round")
        self.world.run(lambda: False, self.world.now + 1 + seed / 2)
        (self.first,) = [agent for agent in self.living if agent.coordinates]

    def is_at_work(self) -> bool:
        """Whether the remaining hosts, and no others, run a round."""
        agents = [agent for agent in self.living if agent.host in self.staying]
        rounds = {self.checks.round_of(agent) for agent in agents if agent.group.phase == "running"}
        (round_, *others) = rounds or {None}
        sizes = {assigned.ranks.group_world_size for assigned in round_.received.values()} if round_ else set()
        return len(agents) == len(self.staying) and not others and sizes == {len(self.staying)}

    def has_lost_next_leader(self) -> bool:
        return self.lost_at is not None

    def note_write(self, agent: Agent) -> None:
        """A process asks a store to write; those that campaign make claims."""
        if phase_of(agent) != "campaigning":
            return
        self.left -= 1
        if self.left >= 0 or self.lost_at is not None:
            return
        self.lost_at = self.world.now
        self.staying.discard(agent.host)
        if self.size.endpoints == 3:
            self.first.thaw()
        else:
            self.staying.discard(self.first.host)
        if self.fault == "killed":
            agent.crash(FIN)
            self.gone(agent.host)
        elif self.fault == "frozen":
            agent.freeze()
            self.endpoint.on_host_frozen(agent.host)
        else:
            others = [host for host in self.hosts if host != agent.host]
            self.world.cut |= {way for other in others for way in ((agent.host, other), (other, agent.host))}


def test_a_seed_that_found_a_bug_finds_it_no_more() -> None:
    """A leader that had been suspended read of the next round, and kept its workers for a lease."""
    simulation_of(1350114, 3).run()


@pytest.mark.parametrize("endpoints", [3, pytest.param(5, marks=pytest.mark.all)])
@pytest.mark.parametrize("begun", range(6))
@pytest.mark.parametrize("fault", ["killed", "frozen", "cut off"])
def test_the_others_wait_for_a_lease_when_the_next_leader_goes_in_the_middle_of_its_claim(
    fault: str, begun: int, endpoints: int
) -> None:
    for seed in range(CLAIM_SEEDS):
        story = _Claim(seed, endpoints, fault, begun)
        assert isinstance(story.endpoint, Stores)
        story.endpoint.on_write = story.note_write  # type: ignore[assignment]
        story.first.freeze()
        story.until(story.has_lost_next_leader, 2 * LEASE_S, "a claim")
        story.until(story.is_at_work, LEASE_S + 1, "a round of the others")
