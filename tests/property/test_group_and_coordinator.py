"""Both cores together: agents' groups and one coordinator, in-order wires, seeded faults, virtual time.

A failing seed is in the test's name; `simulate(seed, Faults())` replays it.
"""

from __future__ import annotations

import heapq
import itertools
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from aelastic.errors import ProcessFailure
from aelastic.group import events as g
from aelastic.group.events import WorkerState
from aelastic.group.phases import KILL_COUNT_MAX, KILL_WAIT_S
from aelastic.group.worker_group import WorkerGroup
from aelastic.rdzv.coordinator import coordinator_events as c
from aelastic.rdzv.coordinator.coordinator import Coordinator
from aelastic.rdzv.coordinator.roster import RoundRules
from aelastic.rdzv.policy.restart_policy import RestartPolicy
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.settings import JOIN_TIMEOUT_S
from aelastic.spec import WorkerSpec

SHUTDOWN_S, BARRIER_S, LEASE_S, WORK_S = 30.0, 300.0, 5.0, 60.0


@dataclass(frozen=True)
class Faults:
    """What goes wrong, and how often.  Everything stops going wrong at `until_s`."""

    until_s: float = 300.0
    crashes: int = 3  # agents that vanish with their workers, some to come again
    stops: int = 1  # agents that are asked to leave
    delay_s: float = 0.5  # of a message, at most
    worker_fails: float = 0.08  # of one worker in one generation
    worker_hangs: float = 0.02  # the same
    worker_ignores_term: float = 0.1
    worker_ignores_kill: float = 0.0
    leaves_something: float = 0.1  # that takes seconds to go


NO_FAULTS = Faults(crashes=0, stops=0, worker_fails=0, worker_hangs=0, worker_ignores_term=0, leaves_something=0)
# From when it is found that a worker hangs until the group is told.
LOOKS_FOR_STACKS_S = 2.0
HANGS = "timer 'step' expired"


@dataclass
class Agent:
    node_id: str
    host: str
    group: WorkerGroup
    lives: bool = True
    asked: bool = False
    left: bool = False
    finished: str | None = None
    alive: dict[int, int] = field(default_factory=dict)  # local rank to generation, until it exits
    uncleared: set[tuple[int, int]] = field(default_factory=set)
    heard: list[m.CoordinatorMessage] = field(default_factory=list)


class Simulation:
    def __init__(self, seed: int, faults: Faults, *, nodes: int, min_nodes: int, max_nodes: int, restarts: int) -> None:
        self.random = random.Random(seed)
        self.faults, self.restarts = faults, restarts
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.count = itertools.count()
        self.wires: dict[tuple[str, str], float] = {}  # when the last message on it arrives
        self.core = Coordinator(RoundRules(min_nodes, max_nodes), RestartPolicy(restarts))
        self.agents: dict[str, Agent] = {}
        self.failures_of: set[int] = set()  # rounds in which a worker failed
        self.unhealthy = 0  # workers that count as failed, and lived
        self.rounds: dict[int, dict[str, m.Assigned]] = {}
        self.verdicts: set[m.Ended] = set()
        self.log: list[str] = []
        for index in range(nodes):
            self.at(self.random.uniform(0, 3), partial(self.come, f"node{index}"))
        for _ in range(faults.crashes):
            self.at(self.random.uniform(0, faults.until_s), self.crash)
        for _ in range(faults.stops):
            self.at(self.random.uniform(0, faults.until_s), self.ask_to_stop)

    # The clock.

    def at(self, time: float, call: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (time, next(self.count), call))

    def after(self, most_s: float, call: Callable[[], None]) -> None:
        self.at(self.now + self.random.uniform(0, most_s), call)

    def run(self, until_s: float) -> None:
        while self.queue and self.queue[0][0] <= until_s:
            self.now, _, call = heapq.heappop(self.queue)
            call()
            self.check()
        self.now = until_s

    def chance(self, probability: float) -> bool:
        return self.now < self.faults.until_s and self.random.random() < probability

    # Wires.

    def send(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        last = self.wires.get((source, target), 0.0)
        arrives = max(last, self.now + self.random.uniform(0, self.faults.delay_s))
        self.wires[source, target] = arrives
        self.at(arrives, deliver)

    def tell_coordinator(self, agent: Agent, message: m.NodeMessage) -> None:
        self.send(agent.node_id, "", lambda: self.coordinate(message))

    def coordinate(self, event: c.Event) -> None:
        sends = self.core.handle(event, self.now)
        if self.core.forming.is_unconfirmed:
            sends += self.core.handle(c.Confirmed(self.core.forming.losses), self.now)
        for send in sends:
            self.log.append(f"{self.now:.2f} {send.node_id} <- {send.message}")
            if isinstance(send.message, m.Assigned):
                self.rounds.setdefault(send.message.round, {})[send.node_id] = send.message
            if isinstance(send.message, m.Ended):
                self.verdicts.add(send.message)
            if not isinstance(send.message, m.Departed):  # that is for the next coordinator
                self.send("", send.node_id, partial(self.hear, self.agents[send.node_id], send.message))
        if self.core.deadline is not None:
            self.at(self.core.deadline, lambda: self.coordinate_if_due(self.core.deadline))

    def coordinate_if_due(self, deadline: float | None) -> None:
        if deadline is not None and self.now >= deadline:
            self.coordinate(c.DeadlinePassed())

    def hear(self, agent: Agent, message: m.CoordinatorMessage) -> None:
        if agent.lives:
            agent.heard.append(message)
            if isinstance(message, m.Waiting | m.Look | m.Compared | r.Reply):
                assert agent.finished is not None or agent.group.phase == "joining"  # for people only
            else:
                self.post(agent, message)

    # Agents.

    def come(self, host: str) -> None:
        spec = WorkerSpec(
            entrypoint="x",
            local_world_size=self.random.randint(1, 3),
            shutdown_timeout_s=SHUTDOWN_S,
            exit_barrier_timeout_s=BARRIER_S,
        )
        agent = Agent(f"{host}-{next(self.count)}", host, WorkerGroup(spec))
        self.agents[agent.node_id] = agent
        self.post(agent, g.Start())

    @property
    def living(self) -> list[Agent]:
        return [agent for agent in self.agents.values() if agent.lives and agent.finished is None]

    def crash(self) -> None:
        if self.living:
            self.crash_of(self.random.choice(self.living))

    def crash_of(self, agent: Agent) -> None:
        agent.lives = False
        agent.alive.clear()
        agent.uncleared.clear()
        lost = c.Lost(agent.node_id, "its connection closed")
        self.after(LEASE_S, lambda: self.send(agent.node_id, "", lambda: self.coordinate(lost)))
        if self.random.random() < 0.7:
            self.after(20, lambda: self.come(agent.host))

    def ask_to_stop(self) -> None:
        if self.living:
            agent = self.random.choice(self.living)
            for _ in range(self.random.randint(1, 3)):
                self.after(3, lambda: self.ask(agent))

    def ask(self, agent: Agent) -> None:
        agent.asked = True
        self.post(agent, g.StopRequested())

    def post(self, agent: Agent, event: g.Event) -> None:
        if not agent.lives or agent.finished is not None:
            return
        self.log.append(f"{self.now:.2f} {agent.node_id} {agent.group.phase} {event}")
        for action in agent.group.handle(event, self.now):
            assert agent.finished is None, f"{action} after Finish"
            self.carry_out(agent, action)
        if agent.group.deadline is not None:
            self.at(agent.group.deadline, lambda: self.post_if_due(agent))

    def post_if_due(self, agent: Agent) -> None:
        if agent.group.deadline is not None and self.now >= agent.group.deadline:
            self.post(agent, g.DeadlinePassed())

    def carry_out(self, agent: Agent, action: g.Action) -> None:
        match action:
            case g.Join():
                assert not agent.alive and not agent.uncleared
                node = m.Node(agent.node_id, agent.host, "default", agent.group.spec.local_world_size, agent.node_id, 1)
                self.tell_coordinator(agent, m.Ready(node))
            case g.Spawn(generation):
                assert not agent.alive and not agent.uncleared, "two generations alive at once"
                self.spawn(agent, generation)
            case g.TellFailed(round_, failure, _):
                self.failures_of.add(round_)
                self.tell_coordinator(agent, m.Failed(agent.node_id, round_, failure))
            case g.TellSucceeded(round_):
                self.tell_coordinator(agent, m.Succeeded(agent.node_id, round_))
            case g.TellLeft(reason):
                agent.left = True
                self.tell_coordinator(agent, m.Left(agent.node_id, reason))
            case g.Stop(generation, local_ranks, signum):
                for rank in local_ranks:
                    self.signal(agent, generation, rank, signum)
            case g.Finish(reason):
                agent.finished = reason

    # Workers.

    def spawn(self, agent: Agent, generation: int) -> None:
        ranks = range(agent.group.spec.local_world_size)
        agent.alive = dict.fromkeys(ranks, generation)
        agent.uncleared = {(generation, rank) for rank in ranks}
        self.post_later(agent, 0.1, g.Spawned(generation, {rank: rank for rank in ranks}))
        for rank in ranks:
            fails = self.chance(self.faults.worker_fails)
            life_s = self.random.uniform(0, WORK_S) if fails else WORK_S
            if self.chance(self.faults.worker_hangs):
                self.at(self.now + self.random.uniform(0, WORK_S), partial(self.find, agent, generation, rank))
            else:
                self.at(self.now + life_s, partial(self.exit, agent, generation, rank, fails))

    def find(self, agent: Agent, generation: int, rank: int) -> None:
        """It hangs, and is stopped for that unless it is being stopped for something else."""
        if agent.alive.get(rank) == generation and agent.group.phase == "running":
            self.after(LOOKS_FOR_STACKS_S, partial(self.find_unhealthy, agent, generation, rank))

    def find_unhealthy(self, agent: Agent, generation: int, rank: int) -> None:
        failure = failure_of(agent, rank, HANGS)
        self.post(agent, g.FoundUnhealthy(generation, rank, failure, signal.SIGKILL))
        self.unhealthy += agent.group.exits.failed.get(rank) is failure

    def post_later(self, agent: Agent, most_s: float, event: g.Event) -> None:
        self.after(most_s, lambda: self.post(agent, event))

    def exit(self, agent: Agent, generation: int, rank: int, fails: bool) -> None:
        if agent.alive.get(rank) != generation:
            self.post(agent, g.Exited(generation, rank, failure_of(agent, rank)))  # told late, or twice
            return
        del agent.alive[rank]
        self.post(agent, g.Exited(generation, rank, failure_of(agent, rank) if fails else None))
        leftover_s = 8.0 if self.chance(self.faults.leaves_something) else 0.1
        self.after(leftover_s, lambda: self.clear(agent, generation, rank))

    def clear(self, agent: Agent, generation: int, rank: int) -> None:
        if agent.lives and (generation, rank) in agent.uncleared:
            agent.uncleared.discard((generation, rank))
            self.post(agent, g.Cleared(generation, rank))

    def signal(self, agent: Agent, generation: int, rank: int, signum: int) -> None:
        ignores = self.faults.worker_ignores_kill if signum == signal.SIGKILL else self.faults.worker_ignores_term
        if not self.chance(ignores):
            self.after(2, lambda: self.exit(agent, generation, rank, fails=True))

    # What always holds.

    def check(self) -> None:
        rounds: set[int] = set()
        ranks: list[int] = []
        for agent in self.living:
            assigned = agent.group.assigned
            # A node that left is not waited for: its workers may take their time to end.
            if agent.alive and assigned is not None and not agent.left:
                rounds.add(assigned.round)
                ranks += [agent.group.workers[rank].global_rank for rank in agent.alive]
        assert len(rounds) <= 1, f"workers of two rounds are alive: {rounds}"
        assert len(set(ranks)) == len(ranks), "two workers with one rank"
        assert self.core.forming.restart_count <= min(self.restarts, len(self.failures_of))
        assert len(self.verdicts) <= 1, "two verdicts"

    def check_rounds(self) -> None:
        for number, heard in self.rounds.items():
            views = {(m.restart_count, m.ranks.world_size, m.master_addr) for m in heard.values()}
            assert len(views) == 1, f"round {number} looks different to different nodes"
            spans = sorted((m.ranks.first_rank, m.ranks.local_world_size) for m in heard.values())
            assert list(itertools.accumulate((size for _, size in spans), initial=0))[:-1] == [at for at, _ in spans]
        counts = [next(iter(heard.values())).restart_count for _, heard in sorted(self.rounds.items())]
        assert counts == sorted(counts)


def failure_of(agent: Agent, rank: int, message: str = "ValueError") -> ProcessFailure:
    return ProcessFailure.from_elsewhere(agent.host, agent.group.workers[rank].global_rank, rank, 1, 1, message, "", 0)


def simulate(seed: int, faults: Faults, **size: int) -> Simulation:
    world = Simulation(seed, faults, **{"nodes": 4, "min_nodes": 2, "max_nodes": 4, "restarts": 3, **size})
    # Once faults stop: the slowest stop, the join timeout or a whole run of the workers, the barrier.
    stop_s = SHUTDOWN_S + (KILL_COUNT_MAX + 1) * KILL_WAIT_S
    try:
        world.run(faults.until_s + 2 * stop_s + JOIN_TIMEOUT_S + 2 * WORK_S + BARRIER_S)
        world.check_rounds()
        assert not world.living, f"still at it: {[(a.node_id, a.group.phase) for a in world.living]}"
    except BaseException as error:
        error.add_note(f"seed {seed}, {faults}\n" + "\n".join(world.log[-60:]))
        raise
    return world


def ends(world: Simulation) -> set[WorkerState]:
    return {agent.group.state for agent in world.agents.values() if agent.lives and not agent.asked}


@pytest.mark.parametrize("seed", range(10))
def test_without_faults_one_round_succeeds_everywhere(seed: int) -> None:
    world = simulate(seed, NO_FAULTS)
    assert (len(world.rounds), ends(world)) == (1, {WorkerState.SUCCEEDED})
    assert all(agent.group.generation == 1 for agent in world.agents.values())


@pytest.mark.parametrize("seed", range(10))
def test_a_failure_restarts_all_nodes_at_the_price_of_one_until_the_budget_is_used_up(seed: int) -> None:
    faults = Faults(crashes=0, stops=0, worker_fails=1, worker_hangs=0, worker_ignores_term=0, until_s=10_000)
    world = simulate(seed, faults, restarts=2)
    assert (len(world.rounds), world.core.forming.restart_count) == (3, 2)
    assert {verdict.outcome for verdict in world.verdicts} == {m.Outcome.FAILED}
    assert ends(world) == {WorkerState.FAILED}


@pytest.mark.parametrize("seed", range(10))
def test_a_worker_that_hangs_costs_what_a_failure_does(seed: int) -> None:
    faults = Faults(crashes=0, stops=0, worker_fails=0, worker_hangs=1, worker_ignores_term=0, until_s=10_000)
    world = simulate(seed, faults, restarts=2)
    assert (len(world.rounds), world.core.forming.restart_count) == (3, 2)
    assert world.unhealthy >= 3
    (verdict,) = world.verdicts
    assert verdict.outcome is m.Outcome.FAILED
    assert verdict.cause is not None
    assert verdict.cause.message == HANGS
    assert ends(world) == {WorkerState.FAILED}


@pytest.mark.parametrize("seed", range(120))
def test_whatever_goes_wrong_every_agent_comes_to_an_end_and_all_to_the_same(seed: int) -> None:
    world = simulate(seed, Faults())
    outcomes = {verdict.outcome for verdict in world.verdicts}
    told = [said for a in world.agents.values() for said in a.heard if isinstance(said, m.Ended)]
    assert set(told) <= world.verdicts
    if outcomes == {m.Outcome.SUCCEEDED}:
        assert ends(world) <= {WorkerState.SUCCEEDED}


@pytest.mark.parametrize("seed", range(40))
def test_a_node_whose_workers_survive_sigkill_leaves_and_the_others_go_on(seed: int) -> None:
    faults = Faults(crashes=0, worker_fails=0.2, worker_ignores_term=0.5, worker_ignores_kill=0.5)
    world = simulate(seed, faults, min_nodes=1, restarts=9)
    assert ends(world) <= {WorkerState.SUCCEEDED, WorkerState.UNKNOWN, WorkerState.FAILED}


@pytest.mark.parametrize("seed", range(40))
def test_spares_and_newcomers_come_and_go(seed: int) -> None:
    simulate(seed, Faults(crashes=6, worker_fails=0.02), nodes=7, min_nodes=2, max_nodes=4)


def test_the_seeds_reach_what_they_are_for() -> None:
    """A simulation in which nothing happens would pass."""
    worlds = [simulate(seed, Faults()) for seed in range(40)]
    heard = [message for world in worlds for agent in world.agents.values() for message in agent.heard]
    assert max(len(world.rounds) for world in worlds) >= 4
    assert {verdict.outcome for world in worlds for verdict in world.verdicts} == {
        m.Outcome.SUCCEEDED, m.Outcome.FAILED, m.Outcome.TIMED_OUT
    }  # fmt: skip
    assert sum(isinstance(message, m.Interrupted) for message in heard) > 50
    assert sum(world.unhealthy for world in worlds) > 10
    states: set[Any] = {agent.group.state for world in worlds for agent in world.agents.values()}
    assert {WorkerState.SUCCEEDED, WorkerState.FAILED, WorkerState.STOPPED} <= states
