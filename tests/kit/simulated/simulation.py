# ruff: noqa: T201  a program prints its results
"""A simulation of the real rendezvous of a whole job, among faults from one seed.

`PYTHONPATH=tests python -m kit.simulated.simulation SEED [ENDPOINTS]` replays a seed and prints what happened.  The seed
decides everything: the size of the job, the endpoint, which worker fails when, each delay, and each fault.  At `until_s`
all faults stop; then all living nodes must reach one round or one verdict, within a bound that depends on what happened
shortly before (`bounds.py`).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from aelastic.rdzv.settings import RendezvousSettings
from kit.simulated.bounds import bound_s
from kit.simulated.checks import Checks, DeadVotersError, ForgottenError
from kit.simulated.endpoint import ENDPOINT, Endpoint, EndpointFaults
from kit.simulated.insight import connection_of
from kit.simulated.kernel import replaced_kernel
from kit.simulated.process import Clock
from kit.simulated.stores import OneStore, Stores
from kit.simulated.supervisor import Agent, Work
from kit.simulated.words import in_words, without_repetition
from kit.simulated.world import FIN, RST, TRACE_MAX, World

LEASE_S = 5.0
END_WITHIN_S = 120.0
LINES = 200
NO_ENDPOINT_FAULTS = EndpointFaults()


@dataclass(frozen=True)
class Faults:
    """What goes wrong, and how often: numbers count a whole run, chances are between 0 and 1."""

    until_s: float = 60.0
    cuts: int = 0  # between two hosts, or a host and the endpoint
    isolations: int = 0  # a host from all others, at times from the endpoint too
    breaks: int = 0  # of one connection
    freezes: int = 0
    suspends: int = 0  # of a machine with its clock
    crashes: int = 0
    leaves: int = 0
    jumps: int = 0  # of a clock, ahead
    endpoint_downs: int = 0
    endpoint_wipes: int = 0
    rejections: int = 0  # of connections between two hosts, by a middlebox
    partitions: int = 0  # of the hosts in two; the endpoint is on one side
    host_freezes: int = 0  # of node0, and of the endpoint if that is there
    deafenings: int = 0  # of the leader's host, to all others and at times to the endpoint
    endpoint: EndpointFaults = NO_ENDPOINT_FAULTS
    slow: float = 0.0  # chance of a message
    slow_s: float = 1.0
    drift: float = 0.01
    worker_fails: float = 0.0  # chance of a generation
    worker_ignores_term: float = 0.0
    leaves_something: float = 0.0
    prepares: float = 0.0  # chance of an agent: its fork server imports for a while


@dataclass(frozen=True)
class Size:
    """The job."""

    nodes: int = 3
    min_nodes: int = 1
    max_nodes: int = 3
    max_restarts: int = 3
    has_etcd: bool = False  # the endpoint is an etcd, so that nodes do not elect
    is_endpoint_on_node0: bool = False  # and lives and dies with the agent there
    endpoints: int = 1  # several are on as many of the hosts
    has_ranks: bool = False  # each node has a rank from the user, and keeps it when it returns
    works_s: float | None = None  # workers succeed after this long in one round
    join_timeout_s: float = 120.0
    last_call_timeout_s: float = 2.0
    survivor: str = "majority"  # as in `--rdzv-conf`


class Simulation:
    def __init__(self, seed: int, size: Size, faults: Faults) -> None:
        self.seed, self.size, self.faults = seed, size, faults
        self.world = World(seed, slow=faults.slow, slow_s=faults.slow_s, kernel=replaced_kernel)
        self.random = self.world.random
        if size.endpoints > 1:
            self.endpoint: Endpoint = Stores(self.world, self.hosts[: size.endpoints])
        else:
            hosts = ["node0"] if size.is_endpoint_on_node0 else []
            self.endpoint = OneStore(self.world, hosts, is_etcd=size.has_etcd)
        self.checks = Checks(self.world, self.endpoint, LEASE_S, size.min_nodes, size.max_nodes, size.max_restarts)
        self.agents = self.checks.agents
        self.checks.charges.late_s = faults.slow_s if faults.slow else 0.0
        self.is_calm, self.is_work_done = False, False
        self.is_forgotten = False  # the job ended, and another one followed
        self.awaits_dead = False
        self.agree_within_s = self.agreed_after_s = 0.0
        self._number = 0
        self._clocks: dict[str, Clock] = {}
        self._coming: set[str] = set()  # hosts that were lost and will return

    # The job.

    @property
    def hosts(self) -> list[str]:
        return [f"node{index}" for index in range(self.size.nodes)]

    @property
    def living(self) -> list[Agent]:
        return [agent for agent in self.agents if agent.is_alive]

    def on(self, host: str) -> Agent | None:
        return next((agent for agent in self.agents if agent.is_alive and agent.host == host), None)

    def start(self, host: str) -> Agent | None:
        if self.on(host) is not None:
            return None
        self.world.dark.discard(host)
        if host not in self._clocks:
            drift = self.random.uniform(-self.faults.drift, self.faults.drift)
            self._clocks[host] = Clock(self.random.uniform(0, 1000), 1 + drift)
        size = self.size
        settings = RendezvousSettings(
            "c10d",
            ",".join(f"{host}:29400" for host in self.hosts[: size.endpoints]),
            size.min_nodes,
            size.max_nodes,
            node_rank=int(host.removeprefix("node")) if size.has_ranks else None,
            config={
                "join_timeout": str(size.join_timeout_s),
                "last_call_timeout": str(size.last_call_timeout_s),
                "lease": str(LEASE_S),
                "survivor": "endpoint" if size.has_etcd else size.survivor,
            },
        )
        self._number += 1
        self.world.note(f"{host}#{self._number}", "starts")
        self.endpoint.on_host_up(host)
        agent = self.agent_on(host, settings)
        self.agents.append(agent)
        return agent

    def agent_on(self, host: str, settings: RendezvousSettings) -> Agent:
        """Starts an agent on a host."""
        return Agent(
            self.world,
            self.endpoint,
            self.checks,
            settings,
            self.size.max_restarts,
            host,
            self._number,
            self.work,
            self._clocks[host],
            prepares_s=self.prepares_s(),
        )

    def work(self, agent: Agent) -> Work:
        if self.is_calm:
            return Work(succeeds_after_s=0.5 if self.is_work_done else None, stops_within_s=0.05)
        random, faults, work_s = self.random, self.faults, self.size.works_s
        return Work(
            fails_after_s=random.uniform(0, 10) if random.random() < faults.worker_fails else None,
            fails_of=random.choice(("killed", "raised")),
            succeeds_after_s=None if work_s is None else work_s * random.uniform(0.9, 1.1),
            ignores_term=random.random() < faults.worker_ignores_term,
            leaves_something_s=random.uniform(0, 3) if random.random() < faults.leaves_something else 0.02,
        )

    def prepares_s(self) -> float:
        is_warm = self.faults.prepares and not self.is_calm and self.random.random() < self.faults.prepares
        return self.random.choice((0.5, 3.0, 30.0)) if is_warm else 0.0

    def gone(self, host: str) -> None:
        if self.endpoint.is_served_by(host):
            self.endpoint.on_host_gone(host)

    # Faults.

    def plan(self) -> None:
        """Schedules the faults."""
        until_s = self.faults.until_s
        for host in self.hosts:
            self.world.at(self.random.uniform(0, 2), partial(self.restart, host))
        kinds: list[tuple[int, Callable[[], None]]] = [
            (self.faults.cuts, self.cut),
            (self.faults.isolations, self.isolate),
            (self.faults.breaks, self.break_one),
            (self.faults.freezes, self.on_some(self.freeze)),
            (self.faults.suspends, self.on_some(self.suspend)),
            (self.faults.crashes, self.on_some(self.crash)),
            (self.faults.leaves, self.on_some(self.leave)),
            (self.faults.jumps, self.on_some(self.jump)),
            (self.faults.endpoint_downs, self.take_endpoint_down),
            (self.faults.endpoint_wipes, self.wipe_endpoint),
            (self.faults.rejections, self.reject),
            (self.faults.partitions, self.part),
            (self.faults.host_freezes, self.freeze_host),
            (self.faults.deafenings, self.deafen),
        ]
        for count, do in kinds:
            for _ in range(count):
                self.world.at(self.random.uniform(0, until_s), do)
        self.endpoint.faults = self.faults.endpoint

    def a_while(self) -> float:
        """A random duration: some faults are over at once, some outlast every lease."""
        return self.random.choice((0.3, 2.0, 6.0, 15.0)) * self.random.uniform(0.5, 1.2)

    def some(self) -> Agent | None:
        living = [agent for agent in self.living if not agent.is_frozen]
        return self.random.choice(living) if living else None

    def on_some(self, do: Callable[[Agent], None]) -> Callable[[], None]:
        """Makes it happen to one of the agents."""

        def strike() -> None:
            if (agent := self.some()) is not None:
                do(agent)

        return strike

    def cut(self) -> None:
        one, other = self.random.sample([*self.hosts, ENDPOINT], 2)
        ways = [(one, other), (other, one)]
        self._cut(ways if self.random.random() < 0.6 else ways[:1])

    def isolate(self) -> None:
        host = self.random.choice(self.hosts)
        others = [other for other in self.hosts if other != host] + ([ENDPOINT] if self.random.random() < 0.5 else [])
        self._cut([way for other in others for way in ((host, other), (other, host))])

    def deafen(self) -> None:
        host = next((agent.host for agent in self.living if agent.coordinates), self.hosts[0])
        others = [other for other in self.hosts if other != host] + ([ENDPOINT] if self.random.random() < 0.5 else [])
        ways = [(other, host) for other in others]
        self._cut(ways + [(host, other) for other in others if other != ENDPOINT] * (self.random.random() < 0.5))

    def part(self) -> None:
        hosts = self.random.sample(self.hosts, len(self.hosts))
        one = hosts[: self.random.randint(1, len(hosts) - 1)]
        other = [host for host in hosts if host not in one]
        near = "node0" if self.size.is_endpoint_on_node0 else hosts[0]
        (one if near in one else other).append(ENDPOINT)
        self._cut([way for a in one for b in other for way in ((a, b), (b, a))])

    def freeze_host(self) -> None:
        agent = self.on("node0")
        if agent is not None and not agent.is_frozen:
            agent.freeze()
            self._hold_machine(agent)

    def suspend(self, agent: Agent, seconds: float | None = None) -> None:
        """Suspends a machine, with its clock and the endpoint on it."""
        agent.suspend()
        self._hold_machine(agent, seconds)

    def _hold_machine(self, agent: Agent, seconds: float | None = None) -> None:
        host = agent.host
        self.endpoint.on_host_frozen(host)

        def thaw() -> None:
            agent.thaw()
            if host in self.endpoint.hosts:
                self.take_endpoint_up()

        self._after(seconds, thaw)

    def _after(self, seconds: float | None, do: Callable[[], None]) -> None:
        """Does it after this many seconds, by default after a while."""
        self.world.after(self.a_while() if seconds is None else seconds, do)

    def _cut(self, ways: list[tuple[str, str]], seconds: float | None = None) -> None:
        """Cuts the network for this many seconds, by default for a while."""
        ways = self._of_machines(ways)
        self.world.note("NETWORK", f"cut: {', '.join(f'{a} -> {b}' for a, b in ways)}")
        self.world.cut.update(ways)
        for way in ways:
            self.checks.charges.add("silence", self.world.now, *way)

        def heal() -> None:
            self.world.note("NETWORK", f"healed: {', '.join(f'{a} -> {b}' for a, b in ways)}")
            for way in ways:
                self.heal(*way)

        self._after(seconds, heal)

    def _of_machines(self, ways: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """Adds the paths of what shares a machine, such as the endpoint on node0."""
        if not self.size.is_endpoint_on_node0:
            return ways
        beside = {"node0": ENDPOINT, ENDPOINT: "node0"}
        twins = [(beside.get(a, a), beside.get(b, b)) for a, b in ways]
        return list(dict.fromkeys((a, b) for a, b in [*ways, *twins] if beside.get(a) != b))

    def heal(self, source: str, target: str) -> None:
        self.checks.charges.is_over("silence", self.world.now, source, target)
        self.world.heal(source, target)

    def reject(self) -> None:
        one, other = self.random.sample(self.hosts, 2)
        self._reject(one, other)

    def _reject(self, one: str, other: str, seconds: float | None = None) -> None:
        ways = {(one, other), (other, one)}
        self.world.note("NETWORK", f"resets connections between {one} and {other}")
        self.world.rejecting |= ways
        self.checks.charges.add("reset", self.world.now, one, other)

        def end() -> None:
            self.checks.charges.is_over("reset", self.world.now, one, other)
            self.world.note("NETWORK", f"carries connections between {one} and {other}")
            self.world.rejecting -= ways

        self._after(seconds, end)

    def break_one(self) -> None:
        self._break(self.some())

    def _break(self, agent: Agent | None) -> None:
        end = None if agent is None else connection_of(agent)
        if agent is not None and end is not None and end.is_open:
            self.world.note("NETWORK", f"breaks the connection of {agent}")
            is_noticed = end.break_off()
            self.checks.broke(agent, is_silent=not is_noticed)

    def freeze(self, agent: Agent, seconds: float | None = None) -> None:
        agent.freeze()
        self._after(seconds, agent.thaw)

    def crash(self, agent: Agent) -> None:
        agent.crash(self.random.choice((FIN, FIN, RST, "dark")))
        self.gone(agent.host)
        if self.random.random() < 0.7:
            self.restart_after(self.random.uniform(0.3, 12), agent.host)

    def restart_after(self, delay_s: float, host: str) -> None:
        """Restarts a host after the delay, or when faults stop, if that is sooner."""
        self._coming.add(host)

        def restart() -> None:
            if host in self._coming:
                self._coming.remove(host)
                self.restart(host)

        self.world.after(delay_s, restart)

    def restart(self, host: str) -> None:
        if self.checks.verdict_at is None:
            self.start(host)

    def leave(self, agent: Agent) -> None:
        self.world.note(agent.node_id, "is asked to leave")
        agent.ask_to_leave()
        if self.random.random() < 0.3:
            self.world.after(self.random.uniform(0, 2), agent.ask_to_leave)
        if self.random.random() < 0.7:
            self.restart_after(self.random.uniform(1, 15), agent.host)

    def jump(self, agent: Agent) -> None:
        agent.jump(self.random.choice((0.5, 3.0, 8.0)))

    def take_endpoint_down(self, seconds: float | None = None) -> None:
        self.world.note(ENDPOINT, "is down")
        self.checks.charges.add("endpoint", self.world.now, ENDPOINT)
        self.endpoint.go_down()
        self._after(seconds, self.take_endpoint_up)

    def take_endpoint_up(self) -> None:
        self.world.note(ENDPOINT, "is up again")
        self.checks.charges.is_over("endpoint", self.world.now, ENDPOINT)
        self.endpoint.come_up()

    def wipe_endpoint(self) -> None:
        self.world.note(ENDPOINT, "is wiped")
        self.checks.charges.add("endpoint", self.world.now, ENDPOINT, until=self.world.now)
        self.endpoint.wipe()

    @property
    def bound_s(self) -> float:
        faults = self.faults
        # The store of a host that was switched off answers only now; without it a majority may have been missing.
        store_comes_back = self.size.endpoints > 1 and bool(self.world.dark)
        return bound_s(
            self.checks.charges.faults,
            self.world.now,
            LEASE_S,
            is_led=any(agent.coordinates for agent in self.living),
            comes_back=bool(self._coming) or store_comes_back or any(self.on(host) is None for host in self._lacking),
            is_slow=bool(faults.slow) or faults.endpoint != NO_ENDPOINT_FAULTS,
            ignores_term=bool(faults.worker_ignores_term),
            leaves_something=bool(faults.leaves_something),
        )

    def calm_down(self) -> None:
        """All faults stop."""
        self.world.note("CALM", "all faults stop")
        self.agree_within_s = self.bound_s
        self.is_calm = True
        self.endpoint.faults = NO_ENDPOINT_FAULTS
        self.world.slow = 0.0
        for way in sorted(self.world.cut):
            self.heal(*way)
        for agent in self.living:
            agent.thaw()
        self.world.rejecting.clear()
        self.take_endpoint_up()
        for host in sorted(self._coming):
            self.restart(host)
        self._coming.clear()
        self.fill_up()
        self.world.dark.clear()

    def fill_up(self) -> None:
        """Brings back as many nodes as the job needs to continue."""
        if self.checks.verdict_at is not None:
            return
        for host in self.hosts:
            if host in self._lacking:
                self.start(host)
        self.world.after(1.0, self.fill_up)

    @property
    def _lacking(self) -> list[str]:
        """Hosts without which the job cannot continue; all hosts, if any of them will do."""
        staying = [agent for agent in self.living if not agent.is_leaving]
        return self.hosts if len(staying) < self.size.min_nodes else [*self.endpoint.needed_hosts]

    # The run.

    def run(self) -> None:
        """Runs the seed.

        Raises:
            AssertionError: a promise was broken.
        """
        try:
            self.plan()
            self.watch_ends()
            self.watch_rounds()
            self.world.run(lambda: False, self.faults.until_s)
            self.calm_down()
            self.agree()
            self.finish()
        except (ForgottenError, DeadVotersError) as error:
            self.world.note("END", error)
            self.is_forgotten = isinstance(error, ForgottenError)
            self.awaits_dead = not self.is_forgotten
        except Exception as error:
            error.add_note(self.story(LINES))
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Ends everything that still runs."""
        self.world.close()

    def watch_ends(self) -> None:
        """Takes down the endpoint of a host when its agent leaves."""
        if not self.endpoint.hosts:
            return

        def look() -> None:
            for host in self.endpoint.hosts:
                if self.on(host) is None and self.endpoint.is_served_by(host) and self._number:
                    self.gone(host)
            self.world.after(0.2, look)

        self.world.after(0.2, look)

    def watch_rounds(self) -> None:
        """No two rounds run side by side for long."""
        slow_s = self.faults.slow_s if self.faults.slow else 0.0
        self.checks.look_at_rounds(slow_s)
        self.world.after(0.1, self.watch_rounds)

    def until(self, condition: Callable[[], object], within_s: float, what: str = "it") -> float:
        """Lets time pass until a condition holds; returns how long that took.

        Raises:
            AssertionError: it does not hold within that time, or a promise was broken.
        """
        began = self.world.now
        try:
            if not self.world.run(lambda: bool(condition()), began + within_s):
                self.checks.fail(f"{what} has not come about within {within_s:g} s")
        except Exception as error:
            error.add_note(self.story(LINES))
            raise
        return self.world.now - began

    def agree(self) -> None:
        calm_at = self.world.now
        if not self.world.run(lambda: not self.checks.disagreement(), calm_at + self.agree_within_s):
            self.checks.give_up_if_forgotten()
            self.checks.fail(f"after {self.agree_within_s:g} s without faults {self.checks.disagreement()}")
        self.agreed_after_s = self.world.now - calm_at

    def finish(self) -> None:
        self.is_work_done = True
        for agent in self.living:
            agent.succeed_now()
        if not self.world.run(lambda: not self.living, self.world.now + END_WITHIN_S):
            self.checks.give_up_if_forgotten()
            self.checks.fail(f"{self.living} do not come to an end")

    def story(self, lines: int) -> str:
        trace = [
            (now, f"{actor:16} {in_words(what)}{''.join(f' | {in_words(each)}' for each in then)}")
            for now, actor, what, then in self.world.trace
        ]
        shown = [f"{now:9.4f}  {words}" for now, words in without_repetition(trace)]
        head = f"seed {self.seed}: {_changed(self.size)}; {_changed(self.faults)}"
        return "\n".join([head, *shown[-lines:], f"replay: PYTHONPATH=tests python -m {self.program}"])

    @property
    def program(self) -> str:
        """The command that replays it."""
        return f"kit.simulated.simulation {self.seed} {self.size.endpoints}"


def _changed(values: Any) -> str:
    """The values that differ from their defaults."""
    default = type(values)()
    pairs = [(field.name, getattr(values, field.name)) for field in fields(values)]
    return ", ".join(f"{name} {value}" for name, value in pairs if value != getattr(default, name))


def simulation_of(seed: int, endpoints: int = 1) -> Simulation:
    """The job and the faults of a seed."""
    dice = random.Random(f"job {seed}")
    nodes = max(dice.choice((2, 3, 3, 4, 4, 5, 6)), endpoints)
    min_nodes = dice.randint(1, nodes)
    has_etcd = dice.random() < 0.5 and endpoints == 1
    size = Size(
        nodes=nodes,
        min_nodes=min_nodes,
        max_nodes=dice.randint(min_nodes, nodes),
        max_restarts=dice.choice((1, 3, 100)),
        has_etcd=has_etcd,
        is_endpoint_on_node0=not has_etcd and dice.random() < 0.4 and endpoints == 1,
        endpoints=endpoints,
        has_ranks=dice.random() < 0.4,
        works_s=dice.choice((None, None, None, 8.0, 25.0)),
    )

    busy = dice.choice((0.2, 0.4, 0.7))

    def some(most: int) -> int:
        """Gives each seed only some kinds of fault, so that each kind is also tested alone."""
        return dice.randint(1, most) if dice.random() < busy else 0

    def chance(most: float) -> float:
        return dice.uniform(0, most) if dice.random() < busy else 0.0

    faults = Faults(
        cuts=some(5),
        isolations=some(3),
        breaks=some(8),
        freezes=some(4),
        suspends=some(2),
        crashes=some(6),
        leaves=some(3),
        jumps=some(2),
        endpoint_downs=some(2),
        endpoint_wipes=some(1) if not has_etcd else 0,
        endpoint=EndpointFaults(chance(0.3), chance(0.3), chance(0.2)),
        slow=chance(0.5),
        slow_s=dice.choice((0.05, 0.5, 2.0)),
        worker_fails=chance(0.4),
        worker_ignores_term=chance(0.3),
        leaves_something=chance(0.3),
        rejections=some(3),
        partitions=some(3),
        host_freezes=some(2),
        deafenings=some(2),
    )
    if endpoints > 1:  # leaders are displaced and stores are lost while claims and verdicts are pending
        faults = replace(
            faults,
            freezes=faults.freezes + dice.randint(1, 3),
            isolations=faults.isolations + dice.randint(1, 3),
            endpoint_downs=faults.endpoint_downs + dice.randint(0, 2),
            endpoint_wipes=dice.randint(0, 5),
            endpoint=EndpointFaults(*(chance(0.1) for _ in range(3))),
        )
    return Simulation(seed, size, faults)


def simulate(seed: int, endpoints: int = 1) -> Simulation:
    simulation = simulation_of(seed, endpoints)
    simulation.run()
    return simulation


def main(seed: int, endpoints: int = 1) -> None:
    simulation = simulation_of(seed, endpoints)
    try:
        simulation.run()
    finally:
        print(simulation.story(TRACE_MAX))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
