# ruff: noqa: T201  a program prints its results
"""Supervisors that submit any possible message, in any order and at any time, to the real rendezvous among faults.

The only promise is that their agents survive: no core reaches an impossible state, no connection is aborted because of
a message from an agent of the same version, and each rendezvous ends only for a permitted reason.

`PYTHONPATH=tests python -m kit.simulated.babble SEED` replays a seed and prints what happened.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import anyio

from aelastic.diagnose.failures.places import Place
from aelastic.errors import ProcessFailure
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.settings import RendezvousSettings
from kit.simulated.endpoint import EndpointFaults
from kit.simulated.insight import phase_of
from kit.simulated.simulation import Faults, Simulation, Size
from kit.simulated.supervisor import Agent
from kit.simulated.world import TRACE_MAX

PAUSES_S = (0.0, 0.0, 0.0, 0.001, 0.003, 0.02, 0.3, 1.0)
LEAVES_S = 0.02  # chance that a message is the last
CALM_S = 8.0
# A farewell: unsent messages, a lease on the endpoint, and two leases for agents without the verdict.
ENDS_WITHIN_S = 40.0


class Silence:
    """Checks nothing: the promises to sane supervisors do not apply to these."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class Babbler(Agent):
    """An agent whose supervisor has lost its mind."""

    submitted: set[tuple[str, str]]  # phases of members, and what was submitted in them: of the whole simulation
    has_enough = False

    async def _supervise(self) -> None:
        dice, words = self.world.random, Words(self)
        await self._send(words.ready())
        while not self.has_enough:
            await anyio.sleep(dice.choice(PAUSES_S))
            if dice.random() < LEAVES_S:
                break
            await self._send(words.any())
        if dice.random() < 0.5:
            await self._send(m.Left(self.node_id, "it has enough"))
        if dice.random() < 0.3 and self.link is not None:
            self.link.cut_short()

    async def _send(self, message: Any) -> None:
        self.submitted.add((str(phase_of(self)), type(message).__name__))
        self.send(message)

    def _deliver(self, message: m.LeaderMessage) -> None:
        if isinstance(message, m.Assigned):
            self.round_of_workers = message


@dataclass
class Words:
    """The messages that a supervisor can submit."""

    agent: Babbler
    asks: int = 0

    def any(self) -> Any:
        """Any of these messages."""
        choices = [self.ready, self.prepared, self.ask, self.fetch, self.fetched, self.saved, self.frozen]
        if self.agent.round_of_workers is not None:
            choices += [self.failed, self.succeeded, self.opted_in, self.hangs, self.saw, self.failed, self.hangs]
        return self._dice.choice(choices)()

    @property
    def _dice(self) -> random.Random:
        return self.agent.world.random

    @property
    def _round(self) -> int:
        """The round that it was last assigned to, or an earlier one."""
        assigned = self.agent.round_of_workers
        assert assigned is not None
        return assigned.round if self._dice.random() < 0.8 else self._dice.randint(1, assigned.round)

    def ready(self) -> m.Ready:
        node = m.Node(self.agent.node_id, self.agent.host, "", 1, "", 29500, self.agent.settings.node_rank)
        unfit = "its disk is full" if self._dice.random() < 0.1 else ""
        after = 0 if self.agent.round_of_workers is None else self._round
        return m.Ready(node.replace(starts=self._dice.choice([*m.Starts]), unfit=unfit), after=after)

    def failed(self) -> m.Failed:
        host, round_ = self.agent.host, self._round
        failure = ProcessFailure.from_elsewhere(host, 0, 0, 1, self._dice.choice((1, -9)), "it failed", "", 0)
        return m.Failed(self.agent.node_id, round_, failure, self._dice.uniform(0, 2))

    def succeeded(self) -> m.Succeeded:
        return m.Succeeded(self.agent.node_id, self._round)

    def prepared(self) -> m.Prepared:
        return m.Prepared(self.agent.node_id, self._dice.choice([*m.Starts]))

    def opted_in(self) -> m.OptedIn:
        return m.OptedIn(self.agent.node_id, self._round)

    def hangs(self) -> m.Hangs:
        is_stopped, is_last = self._dice.random() < 0.3, self._dice.random() < 0.5
        return m.Hangs(self.agent.node_id, self._round, "no output", 60.0, is_stopped, is_last)

    def saw(self) -> m.Saw:
        places = tuple(Place(rank, self.agent.host, 77, "train.py:1") for rank in range(self._dice.randint(0, 2)))
        return m.Saw(self.agent.node_id, self._round, places)

    def ask(self) -> r.Ask:
        dice, verb = self._dice, self._dice.choice([*r.Verb])
        if verb in {r.Verb.STOP, r.Verb.KILL} and dice.random() < 0.9:  # the job would be over soon
            verb = r.Verb.RESTART
        target = dice.choice(("", "node0", "node1", self.agent.node_id, "nobody"))
        round_ = 0 if self.agent.round_of_workers is None else self._round
        at_save = verb in {r.Verb.RESTART, r.Verb.STOP} and dice.random() < 0.5
        return r.Ask(self.agent.node_id, self._ask_id, verb, target, dice.uniform(0, 20), "why not", round_, at_save)

    @property
    def _ask_id(self) -> str:
        """A new id, or one that was used before."""
        self.asks += self._dice.random() < 0.8
        return f"{self.agent.node_id}-{self.asks}"

    def fetch(self) -> r.Fetch:
        target = self._dice.choice(("", "node0#1", self.agent.node_id))
        return r.Fetch(self.agent.node_id, self._ask_id, self._dice.choice([*r.What]), target)

    def fetched(self) -> r.Fetched:
        asker = self._dice.choice(("node0#1", "node1#2", self.agent.node_id))
        return r.Fetched(self.agent.node_id, asker, f"{asker}-1", "0", "text", is_last=self._dice.random() < 0.5)

    def frozen(self) -> r.Frozen:
        dice = self._dice
        return r.Frozen(self.agent.node_id, dice.randint(1, 3), dice.randint(0, 9), dice.randint(0, 1), 0)

    def saved(self) -> r.Saved:
        return r.Saved(self.agent.node_id, self._dice.randint(1, 3))


SENT = {each.__name__ for each in get_args(m.NodeMessage)} - {"Left"}


class Babble(Simulation):
    """A job of such agents."""

    def __init__(self, seed: int, size: Size, faults: Faults) -> None:
        super().__init__(seed, size, faults)
        self.submitted: set[tuple[str, str]] = set()

    def agent_on(self, host: str, settings: RendezvousSettings) -> Agent:
        silence: Any = Silence()
        clock = self._clocks[host]
        babbler = Babbler(
            self.world, self.endpoint, silence, settings, self.size.max_restarts, host, self._number, self.work, clock,
        )  # fmt: skip
        babbler.submitted = self.submitted
        return babbler

    def restart(self, host: str) -> None:
        self.start(host)

    def fill_up(self) -> None:
        """No node has to return."""

    def watch_rounds(self) -> None:
        """Checks nothing: rounds of these agents are meaningless."""

    def watch_returns(self) -> None:
        """Restarts agents that have left."""
        for host in self.hosts:
            if self.on(host) is None and host not in self._coming and not self.is_calm:
                self.restart_after(self.random.uniform(0, 2), host)
        self.world.after(1.0, self.watch_returns)

    def agree(self) -> None:
        self.world.run(lambda: False, self.world.now + CALM_S)

    def finish(self) -> None:
        for agent in self.living:
            agent.has_enough = True  # type: ignore[attr-defined]
        self.until(lambda: not self.living, ENDS_WITHIN_S, "an end")

    @property
    def program(self) -> str:
        return f"kit.simulated.babble {self.seed}"


def babble_of(seed: int) -> Babble:
    """The job and the faults of a seed."""
    dice = random.Random(f"babble {seed}")
    nodes = dice.choice((1, 2, 3))
    has_etcd, endpoints = dice.random() < 0.3, dice.choice((1, 1, 1, 3))
    size = Size(
        nodes=max(nodes, endpoints),
        max_nodes=max(nodes, endpoints),
        max_restarts=dice.choice((3, 100)),
        has_etcd=has_etcd and endpoints == 1,
        endpoints=endpoints,
        has_ranks=dice.random() < 0.3,
    )

    def chance(most: float) -> float:
        return dice.uniform(0, most) if dice.random() < 0.5 else 0.0

    several = size.nodes > 1
    faults = Faults(
        until_s=15.0,
        cuts=dice.randint(0, 3),
        isolations=dice.randint(0, 2),
        breaks=dice.randint(0, 20),
        freezes=dice.randint(0, 2),
        suspends=dice.randint(0, 1),
        crashes=dice.randint(0, 2),
        endpoint_downs=dice.randint(0, 2),
        rejections=dice.randint(0, 2) * several,
        endpoint=EndpointFaults(chance(0.3), chance(0.3), chance(0.2)),
        slow=chance(0.5),
        slow_s=dice.choice((0.02, 0.3)),
    )
    return Babble(seed, size, faults)


def babble(seed: int) -> Babble:
    simulation = babble_of(seed)
    simulation.watch_returns()
    simulation.run()
    return simulation


def main(seed: int) -> None:
    simulation = babble_of(seed)
    try:
        simulation.watch_returns()
        simulation.run()
    finally:
        print(simulation.story(TRACE_MAX))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
