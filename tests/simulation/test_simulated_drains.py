"""Drains, simulated: all ranks save at the same call of `notice.due`, or none does, whatever is lost meanwhile."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
from kit.effort import DRAIN_SEEDS
from kit.simulated.insight import restart_count_of
from kit.simulated.simulation import Faults, Simulation, Size
from kit.simulated.supervisor import Agent
from kit.simulated.training import Training
from kit.simulated.world import FIN

from aelastic.rdzv.leader.drain import MARGIN_S
from aelastic.rdzv.protocol.messages import Outcome
from aelastic.rdzv.protocol.requests import Verb

DEADLINE_S = 15.0
SEEDS_IN_A_TEST = 20
FAULTS = (
    "nothing",
    "coordinator dies",
    "coordinator freezes",
    "connection breaks",
    "node dies",
    "worker fails",
    "endpoint down",
)


class Drained(Simulation):
    """A job of training workers; nothing goes wrong except what its test does."""

    def __init__(self, seed: int, hosts: int = 4, *, step_s: tuple[float, float] = (0.005, 0.02), **size: Any) -> None:
        super().__init__(seed, Size(nodes=hosts, max_nodes=hosts, **size), Faults())
        self.watch_rounds()
        self.is_calm = True
        self.world.step_s = step_s
        for host in self.hosts:
            assert self.start(host) is not None
            self.pass_time(0.3)
        self.wait(lambda: self.ranks == hosts and self.calls > 3)

    def pass_time(self, seconds: float) -> None:
        end = self.world.now + seconds
        self.until(lambda: self.world.now >= end or not self.world.run(lambda: False, end), seconds + 1)

    def wait(self, is_so: Any, within_s: float = 40.0) -> None:
        self.until(is_so, within_s)

    @property
    def training(self) -> Training | None:
        """The newest round's training."""
        return self.world.trainings[max(self.world.trainings)] if self.world.trainings else None

    @property
    def ranks(self) -> int:
        """How many ranks train together now."""
        return 0 if self.training is None else len(self.training.ranks)

    @property
    def calls(self) -> int:
        return 0 if self.training is None else max(each.calls for each in self.training.ranks.values())

    def agent(self, host: int) -> Agent:
        agent = self.on(f"node{host}")
        assert agent is not None
        return agent

    @property
    def coordinator(self) -> Agent:
        return next(agent for agent in self.living if agent.coordinates)

    def look_for_splits(self) -> None:
        """Checks that all ranks of a round that ended with a save saved at the same call."""
        for training in self.world.trainings.values():
            for call, ranks in training.saves.items():
                others = {rank: each.calls for rank, each in training.ranks.items() if rank not in ranks}
                passed = {rank: calls for rank, calls in others.items() if calls > call}
                assert not passed, f"ranks {sorted(ranks)} saved at call {call}, and others continued: {passed}"


def drained(simulation: Drained, agent: Agent, within_s: float = DEADLINE_S) -> None:
    began = simulation.world.now
    agent.holds.ask(Verb.DRAIN, within_s)
    simulation.wait(lambda: not agent.is_alive, within_s)
    assert simulation.world.now - began < within_s - 1.0, "the agent has left a second before"
    simulation.look_for_splits()


def test_all_ranks_save_at_one_call_and_the_node_leaves_for_free() -> None:
    simulation = Drained(1)
    training, agent = simulation.training, simulation.agent(2)
    assert training is not None
    began = simulation.world.now
    drained(simulation, agent)
    assert simulation.world.now - began < 2.0, "it does not wait for the deadline"
    ((_, ranks),) = training.saves.items()
    assert ranks == {*range(4)}
    assert agent.group.is_drained and [each.is_applied for each in agent.answers] == [True]
    simulation.wait(lambda: simulation.training is not training and simulation.calls > 3)
    assert [restart_count_of(each) for each in simulation.living] == [0, 0, 0]


def test_the_coordinators_own_node_leaves_in_the_same_way() -> None:
    simulation = Drained(2)
    training = simulation.training
    drained(simulation, simulation.coordinator)
    simulation.wait(lambda: simulation.training is not training and simulation.ranks == 3)


def test_several_notices_are_one_and_the_earliest_deadline_holds() -> None:
    simulation = Drained(3, step_s=(8.0, 8.0))  # nobody reaches a call in time
    first, second, began = simulation.agent(1), simulation.agent(2), simulation.world.now
    first.holds.ask(Verb.DRAIN, 60.0)
    simulation.pass_time(0.5)
    second.holds.ask(Verb.DRAIN, 6.0)
    simulation.wait(lambda: not first.is_alive and not second.is_alive, 7.0)
    assert 3.0 <= simulation.world.now - began <= 5.5 + 1.0
    simulation.wait(lambda: simulation.ranks == 2)


def test_ranks_that_have_saved_continue_where_they_were_once_the_notice_is_called_off() -> None:
    simulation = Drained(4, step_s=(0.3, 0.5))
    agent, training = simulation.agent(1), simulation.training
    assert training is not None
    agent.holds.ask(Verb.DRAIN, 60.0)
    simulation.wait(lambda: any(training.saves.values()))
    agent.holds.ask(Verb.CANCEL)
    (call,) = training.saves
    simulation.wait(lambda: min(each.calls for each in training.ranks.values()) > call + 3)
    assert agent.is_alive and simulation.training is training, "no round was ended"


def test_too_few_nodes_are_left_and_the_job_ends_to_be_tried_again() -> None:
    simulation = Drained(5, min_nodes=4)
    agents = simulation.living
    drained(simulation, simulation.agent(3))
    simulation.wait(lambda: not simulation.living)
    outcomes = {agent.group.verdict.outcome.value for agent in agents if agent.group.verdict is not None}
    assert outcomes == {"timed out"}


def test_a_spare_takes_the_place_of_the_node_that_leaves() -> None:
    simulation = Drained(6, hosts=3)
    drained(simulation, simulation.agent(0))
    assert simulation.start("node0") is not None
    simulation.wait(lambda: simulation.ranks == 3)


@pytest.mark.parametrize("left_s", [2.0, 1.0, 0.5, -1.0])
@pytest.mark.parametrize("verb", [Verb.DRAIN, Verb.STOP])
def test_an_accepted_request_is_carried_out_though_hardly_any_time_is_left_once_the_endpoint_is_back(
    verb: Verb, left_s: float
) -> None:
    """All ranks have saved and are waiting; the coordinator may not decide before the endpoint is back."""
    simulation = Drained(1, hosts=3, step_s=(2.5, 3.0), has_etcd=True)
    training, agent = simulation.training, simulation.agent(1)
    assert training is not None
    agent.holds.ask(verb, DEADLINE_S, at_save=verb is Verb.STOP)
    simulation.pass_time(0.05)
    simulation.take_endpoint_down(DEADLINE_S - left_s)
    simulation.wait(partial(_is_gone, agent), DEADLINE_S + 5.0)
    assert [answer.is_applied for answer in agent.answers] == [True]
    assert [*training.saves.values()] == [{0, 1, 2}]
    if verb is Verb.STOP:
        assert agent.group.verdict is not None and agent.group.verdict.outcome is Outcome.SAVED


def strike(simulation: Drained, fault: str, dice: random.Random) -> None:
    """A fault, some time after the request."""
    # Most agreements take some 10 ms, a save some 100.
    simulation.pass_time(dice.choice([dice.uniform(0, 0.03), dice.uniform(0, 1.5)]))
    if not simulation.living:
        return
    coordinator = next((agent for agent in simulation.living if agent.coordinates), None)
    bystander = dice.choice(simulation.living)
    match fault:
        case "coordinator dies" if coordinator is not None:
            coordinator.crash(FIN)
        case "coordinator freezes" if coordinator is not None:
            coordinator.freeze()
            simulation.world.after(dice.uniform(0.1, 9.0), coordinator.thaw)
        case "connection breaks":
            simulation.break_one()
        case "node dies":
            bystander.crash(FIN)
        case "worker fails" if bystander.alive and bystander.has_spawned:
            bystander.fail_now()
        case "endpoint down":
            simulation.take_endpoint_down()


@pytest.mark.parametrize("begin", range(0, DRAIN_SEEDS, SEEDS_IN_A_TEST))
@pytest.mark.parametrize("fault", FAULTS)
def test_no_rank_saves_where_others_continue_whatever_fails_meanwhile(fault: str, begin: int) -> None:
    for seed in range(begin, min(begin + SEEDS_IN_A_TEST, DRAIN_SEEDS)):
        dice = random.Random(f"{fault} {seed}")
        steps = dice.choice([(0.005, 0.02), (0.05, 0.1), (0.2, 0.5)])
        simulation = Drained(seed, dice.choice([2, 3, 4]), step_s=steps, has_etcd=dice.random() < 0.5)
        leaving = dice.choice(simulation.living)
        leaving.holds.ask(Verb.DRAIN, DEADLINE_S)
        asked_at = simulation.world.now
        strike(simulation, fault, dice)
        try:
            simulation.wait(partial(_is_gone, leaving), DEADLINE_S - (simulation.world.now - asked_at) + 10.0)
            simulation.look_for_splits()
        except Exception as error:
            raise AssertionError(f"{fault}, seed {seed}: {error}\n{simulation.story(60)}") from error


@pytest.mark.parametrize("begin", range(0, DRAIN_SEEDS, SEEDS_IN_A_TEST))
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_asked_of_the_whole_job_is_done_once_whatever_fails_meanwhile(fault: str, begin: int) -> None:
    for seed in range(begin, min(begin + SEEDS_IN_A_TEST, DRAIN_SEEDS)):
        ask_of_all(fault, seed)


def ask_of_all(fault: str, seed: int) -> None:
    """Requests a restart, a stop or a kill, and causes a fault."""
    dice = random.Random(f"{fault} {seed} all")
    simulation = Drained(seed, dice.choice([2, 3, 4]), has_etcd=dice.random() < 0.5)
    asker, before = dice.choice(simulation.living), simulation.training
    verb, at_save = dice.choice([Verb.RESTART, Verb.STOP, Verb.KILL]), dice.random() < 0.5
    rounds = len(simulation.world.trainings)
    asker.holds.ask(verb, DEADLINE_S if at_save else 0.0, at_save=at_save and verb is not Verb.KILL)
    strike(simulation, fault, dice)
    try:
        if verb is Verb.RESTART:
            simulation.wait(partial(_is_done, simulation, asker, before))
            # A node that does not notice its broken connection is lost, and the others begin another round.
            has_lost_none = len({len(round_.received) for round_ in simulation.checks.rounds.values()}) == 1
            is_mild = fault in {"nothing", "endpoint down"} or (fault == "connection breaks" and has_lost_none)
            most = 1 if is_mild else 3
            assert len(simulation.world.trainings) - rounds <= most, "a repeated request is not carried out twice"
        else:
            simulation.wait(partial(_is_gone, asker))
        simulation.look_for_splits()
    except Exception as error:
        raise AssertionError(f"{fault}, {verb}, seed {seed}: {error}\n{simulation.story(60)}") from error
    if fault == "nothing" and verb is not Verb.RESTART:
        outcomes = {agent.group.verdict.outcome for agent in simulation.agents if agent.group.verdict is not None}
        assert outcomes == {Outcome.KILLED if verb is Verb.KILL else Outcome.SAVED if at_save else Outcome.STOPPED}


@pytest.mark.parametrize(
    "fault, seed", [("coordinator dies", 1711), ("coordinator freezes", 2263), ("coordinator freezes", 6168)]
)
def test_requests_that_found_a_bug_find_it_no_more(fault: str, seed: int) -> None:
    ask_of_all(fault, seed)


def _is_done(simulation: Drained, asker: Agent, before: Training | None) -> bool:
    """Whether another round trains, or nobody is left who requested one."""
    return not asker.is_alive or (simulation.training is not before and simulation.calls > 3)


def _is_gone(agent: Agent) -> bool:
    return not agent.is_alive


def test_the_margin_is_enough_for_an_agent_to_leave() -> None:
    assert MARGIN_S / 2 > 1.0
