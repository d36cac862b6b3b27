# ruff: noqa: T201  a program prints its results
"""A simulation of recovery in place: a whole job whose workers recover in place, among faults from one seed.

`PYTHONPATH=tests python -m kit.simulated.in_place SEED` replays a seed and prints what happened.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from aelastic.agent.group.in_place import GRACE_S
from aelastic.rdzv.protocol.requests import Verb
from aelastic.rdzv.settings import RendezvousSettings
from kit.simulated.crews import Habits, Place, Process, Workplace
from kit.simulated.endpoint import EndpointFaults
from kit.simulated.in_place_agent import InPlaceAgent
from kit.simulated.in_place_checks import InPlaceChecks
from kit.simulated.simulation import LEASE_S, Faults, Simulation, Size
from kit.simulated.supervisor import Agent
from kit.simulated.world import TRACE_MAX

# From the moment all are in one round until they train: a replacement's import, a group, the state, a step.
TRAINS_S = 10.0
SECOND_S = 0.06  # a second worker is lost within this time


@dataclass(frozen=True)
class WorkerFaults:
    """Faults of workers, and how often each happens in a whole run."""

    kills: int = 0
    doubles: float = 0.0  # chance that another one is lost at once
    hangs: int = 0
    drains: int = 0
    restarts: int = 0  # by hand
    others_opt_in: float = 1.0  # chance of a node


class InPlaceSimulation(Simulation):
    def __init__(
        self, seed: int, size: Size, faults: Faults, workers: int, habits: Habits, worker_faults: WorkerFaults
    ) -> None:
        super().__init__(seed, size, faults)
        self.workers, self.worker_faults = workers, worker_faults
        args = self.world, self.endpoint, LEASE_S, size.min_nodes, size.max_nodes, size.max_restarts
        self.checks: InPlaceChecks = InPlaceChecks(*args)
        self.checks.charges.late_s = faults.slow_s if faults.slow else 0.0
        self.agents = self.checks.agents
        self.workplace = Workplace(self.world, self.checks, habits, size.works_s)

    def agent_on(self, host: str, settings: RendezvousSettings) -> Agent:
        opt_in = self.workplace.habits.opt_in
        return InPlaceAgent(
            self.workplace,
            self.world,
            self.endpoint,
            self.checks,
            settings,
            self.size.max_restarts,
            host,
            self._number,
            self.work,
            self._clocks[host],
            workers=self.workers,
            opt_in=opt_in if self.random.random() < self.worker_faults.others_opt_in else 0.0,
        )

    @property
    def program(self) -> str:
        return f"kit.simulated.in_place {self.seed}"

    # Faults.

    def plan(self) -> None:
        super().plan()
        faults = self.worker_faults
        kinds: list[tuple[int, Callable[[], None]]] = [
            (faults.kills, self.kill),
            (faults.hangs, self.hang),
            (faults.drains, self.on_some(self.drain)),
            (faults.restarts, self.on_some(self.restart_by_hand)),
        ]
        for count, do in kinds:
            for _ in range(count):
                self.world.at(self.random.uniform(3, self.faults.until_s), do)

    @property
    def _processes(self) -> list[Process]:
        return [process for process in self.checks.processes if process.is_alive]

    def kill(self) -> None:
        if not (processes := self._processes):
            return
        self.random.choice(processes).fail()
        if self.random.random() < self.worker_faults.doubles:
            self.world.after(self.random.uniform(0, SECOND_S), self.kill)

    def hang(self) -> None:
        inside = [process for process in self._processes if process.place is Place.IN_ROUND]
        if inside:
            process = self.random.choice(inside)
            process.node.find_unhealthy(process)

    def drain(self, agent: Agent) -> None:
        agent.post("asks", partial(agent.holds.ask, Verb.DRAIN, 10.0))
        self.restart_after(self.random.uniform(3, 15), agent.host)

    def restart_by_hand(self, agent: Agent) -> None:
        agent.post("asks", partial(agent.holds.ask, Verb.RESTART))

    def calm_down(self) -> None:
        super().calm_down()
        self.workplace.is_calm = True
        for process in self._processes:
            process.wake_up()
        self.agree_within_s += GRACE_S + 1.0

    # The run.

    def watch_rounds(self) -> None:
        self.checks.look_at_processes()
        super().watch_rounds()

    def agree(self) -> None:
        super().agree()
        self.until(lambda: not self._problem, TRAINS_S + self.agree_within_s, "training")

    @property
    def _problem(self) -> str:
        return self.checks.disagreement() or self.checks.training_problem()

    def finish(self) -> None:
        self.workplace.is_work_done = True
        super().finish()
        self.checks.check_end()


def in_place_simulation_of(seed: int) -> InPlaceSimulation:
    """The job and the faults of a seed."""
    dice = random.Random(f"in place {seed}")
    nodes = dice.choice((1, 2, 2, 3, 3, 4))
    min_nodes = dice.randint(1, nodes)
    has_etcd = dice.random() < 0.5
    size = Size(
        nodes=nodes,
        min_nodes=min_nodes,
        max_nodes=dice.randint(min_nodes, nodes),
        max_restarts=dice.choice((3, 100, 100)),
        has_etcd=has_etcd,
        is_endpoint_on_node0=not has_etcd and dice.random() < 0.3,
        works_s=dice.choice((None, None, 8.0, 20.0)),
    )
    busy = dice.choice((0.1, 0.3, 0.6))

    def some(most: int) -> int:
        return dice.randint(1, most) if dice.random() < busy else 0

    def chance(most: float) -> float:
        return dice.uniform(0, most) if dice.random() < busy else 0.0

    several = nodes > 1
    faults = Faults(
        until_s=40.0,
        cuts=some(4) * several,
        isolations=some(2) * several,
        breaks=some(5),
        freezes=some(3),
        suspends=some(2),
        crashes=some(5),
        leaves=some(2),
        jumps=some(1),
        endpoint_downs=some(2),
        endpoint=EndpointFaults(chance(0.2), chance(0.2), chance(0.2)),
        slow=chance(0.4),
        slow_s=dice.choice((0.05, 0.5)),
        worker_ignores_term=chance(0.3),
        leaves_something=chance(0.3),
        partitions=some(2) * several,
    )
    habits = Habits(
        opt_in=dice.choice((1.0, 1.0, 1.0, 1.0, 0.9)),
        starts_s=dice.choice((0.05, 0.5, 3.0)),
        begins_late=chance(0.2),
        dies_starting=chance(0.1),
        dies_ready=chance(0.1),
        dies_forming=chance(0.2),
        dies_sharing=chance(0.2),
        dies_done=chance(0.2),
        dies_leaving=chance(0.3),
        sticks=chance(0.3),
        never_ready=chance(0.1),
        tears=chance(0.3),
        has_checkpoint=dice.random() < 0.6,
    )
    worker_faults = WorkerFaults(
        kills=dice.randint(1, 8),
        doubles=chance(0.6),
        hangs=some(3),
        drains=some(2),
        restarts=some(1),
        others_opt_in=dice.choice((1.0, 1.0, 1.0, 1.0, 0.7)),
    )
    return InPlaceSimulation(seed, size, faults, dice.choice((1, 2, 2, 3)), habits, worker_faults)


def simulate_in_place(seed: int) -> InPlaceSimulation:
    simulation = in_place_simulation_of(seed)
    simulation.run()
    return simulation


def main(seed: int) -> None:
    simulation = in_place_simulation_of(seed)
    try:
        simulation.run()
    finally:
        print(simulation.story(TRACE_MAX))
        print(simulation.checks.counts)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
