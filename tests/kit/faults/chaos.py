"""Jobs under fire: agents on separate nodes, workers that fail together (`kit.faults.star`), faults, and their effects.

A `Battlefield` is one job of three nodes on one kind of endpoint.  A fault hits a node or the endpoint, and returns a
function that undoes it.  Workers record their steps, so the test sees which nodes progress in which round, and since when.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from kit.agents import COORDINATES, FAIL, HASTY, Agent, Meeting, Team, team_of
from kit.faults import netns
from kit.faults.netns import Net, Node
from kit.launching import Launcher, alive, stand_still
from kit.servers.etcd_servers import EtcdServer, distro_etcd
from kit.servers.stores import STORE
from kit.waiting import DEADLINE_S, wait_for

# `apart`: served by none of the agents.
ENDPOINTS = ("c10d", "c10d on three", "etcd-v3", "etcd-v2", "three etcds", "static")
LEASE_S = 3.0
TICK_S = 0.02
PORT, STAR_PORT = 29400, 7000
# The extra time of workers that import torch, all at once, on a busy machine with two cores.
IMPORTS_S = 20.0
TAIL_BYTES = 300

Undo = Callable[[], None]


@dataclass(frozen=True)
class Step:
    """A step that a worker made together with the others of its round."""

    at: float
    fence: int
    world_size: int

    @classmethod
    def of(cls, line: str) -> Step:
        at, fence, world_size, _ = line.split()
        return cls(float(at), int(fence), int(world_size))


@dataclass
class Battlefield:
    """A job of three nodes.

    Args:
        endpoint: one of `ENDPOINTS`.
        net: the network of the nodes.
        nodes: the nodes, each with an agent.
        endpoint_node: the node with etcd, or with the agent that serves the endpoint.
        team: the job.
        etcds: the servers of the endpoint.
        imports_s: how many seconds more than usual workers may take to start.
    """

    endpoint: str
    net: Net
    nodes: list[Node]
    endpoint_node: Node
    team: Team
    etcds: list[EtcdServer]
    imports_s: float = 0.0
    agents: list[Agent] = field(default_factory=list[Agent])  # the latest of each node
    places: list[int] = field(default_factory=list[int])  # nodes of all agents that were started
    # When and where the test made a worker fail.
    failed: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])

    @property
    def all_nodes(self) -> list[Node]:
        return [*self.nodes, *([] if self.endpoint_node in self.nodes else [self.endpoint_node])]

    def start(self, index: int) -> Agent:
        options = ("--node-rank", str(index)) if self.endpoint == "static" else ()
        self.places.append(index)
        return self.team.start(*options, prefix=self.nodes[index].prefix)

    def others(self, index: int) -> list[int]:
        return [other for other in range(len(self.nodes)) if other != index]

    @property
    def coordinator(self) -> int:
        return self.agents.index(self.team.coordinator)

    @property
    def restart(self) -> int:
        """The latest restart count that workers received."""
        return max(agent.starts[-1].restart for agent in self.agents if agent.starts)

    # What workers do.

    def last_step(self, index: int) -> Step | None:
        try:
            with (self.agents[index].folder / "progress").open("rb") as file:
                file.seek(max(os.fstat(file.fileno()).st_size - TAIL_BYTES, 0))
                lines = file.read().decode().rpartition("\n")[0].splitlines()
        except FileNotFoundError:
            return None
        return Step.of(lines[-1]) if lines else None

    def steps(self, agent: Agent) -> list[Step]:
        path = agent.folder / "progress"
        return [Step.of(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_progress(self, nodes: Sequence[int], since: float, *, above: int = 0) -> None:
        """Waits until exactly these nodes step together.

        Args:
            nodes: the nodes.
            since: count only steps after this time of the monotonic clock.
            above: count only rounds with a higher fence.
        """

        def found() -> bool:
            last = [self.last_step(index) for index in nodes]
            steps = [step for step in last if step is not None and step.at > since and step.fence > above]
            return len(steps) == len(nodes) == steps[0].world_size and len({step.fence for step in steps}) == 1

        deadline = max(since, time.monotonic()) + DEADLINE_S + self.imports_s
        while not found():
            over = [self.agents[index] for index in nodes if self.agents[index].is_over]
            if over or time.monotonic() > deadline:
                what = f"steps of nodes {list(nodes)} together"
                pytest.fail(f"{f'{over} ended' if over else 'none'}: {what}\n{self.story}")
            time.sleep(0.03)

    @property
    def fence(self) -> int:
        """The fence of the newest round that has made a step."""
        return max(step.fence for index in range(3) if (step := self.last_step(index)) is not None)

    def assert_not_side_by_side(self) -> None:
        """Fails if workers stepped beside a later round for longer than a lease and the machine's own delay."""
        agents = [agent.pid for agent in self.team.live]
        assert self._side_by_side_s() < LEASE_S + 1 + max(map(run_delay_s, agents), default=0.0), self.team.story

    def _side_by_side_s(self) -> float:
        """The longest time for which workers of an earlier round stepped beside those of a later one.

        Ignores the last step of a worker: one that was frozen or cut off finishes its current step afterwards.
        """
        first, last = dict[int, float](), dict[int, float]()
        for agent in self.team.agents:
            steps = self.steps(agent)
            for step in steps:
                first[step.fence] = min(first.get(step.fence, step.at), step.at)
            for step, after in pairwise(steps):
                if after.fence == step.fence:
                    last[step.fence] = max(last.get(step.fence, step.at), step.at)
        pairs = [(one, other) for one in last for other in first if other > one]
        return max((last[one] - first[other] for one, other in pairs), default=0.0)

    @property
    def story(self) -> str:
        steps = {agent: self.steps(agent)[-1:] for agent in self.agents}
        return f"now {time.monotonic():.3f}, last steps {steps}"

    # Faults of a node.

    def worker_killed(self, index: int) -> Undo:
        return self._worker_fails(index, signal.SIGKILL)

    def worker_raises(self, index: int) -> Undo:
        return self._worker_fails(index, FAIL)

    def _worker_fails(self, index: int, signum: int) -> Undo:
        starts = self.agents[index].starts
        if starts and alive(starts[-1].pid):
            self.failed.append((time.monotonic(), index))
            os.kill(starts[-1].pid, signum)
        return _nothing

    def agent_killed(self, index: int) -> Undo:
        return self._agent_ended(index, signal.SIGKILL)

    def agent_terminated(self, index: int) -> Undo:
        return self._agent_ended(index, signal.SIGTERM)

    def _agent_ended(self, index: int, signum: int) -> Undo:
        agent = self.agents[index]
        if not agent.is_over:
            agent.signal(signal.SIGCONT)
            agent.signal(signum)

        def undo() -> None:
            agent.wait()
            agent.wait_nothing_left()
            if self.agents[index] is agent:
                self.agents[index] = self.start(index)

        return undo

    def agent_stopped(self, index: int) -> Undo:
        agent = self.agents[index]
        if agent.is_over:
            return _nothing
        agent.stop()

        def undo() -> None:
            if not agent.is_over:
                agent.signal(signal.SIGCONT)

        return undo

    def host_frozen(self, index: int) -> Undo:
        """Freezes its agent, its workers, and the endpoint that it serves."""
        agent = self.agents[index]
        agent.stop()  # nothing new starts from now on
        frozen = agent.left()
        for pid in frozen:
            stand_still(pid)

        def undo() -> None:
            for pid in frozen:
                os.kill(pid, signal.SIGCONT)

        return undo

    def endpoints_silent(self) -> Undo:
        """Each node reaches at most the endpoint that it serves itself."""
        return self.net.filter(*(f"tcp {end}port {PORT} drop" for end in "sd"))

    def cut_off(self, index: int) -> Undo:
        return self._isolate(index, self.all_nodes)

    def cut_off_from_coordinator(self, index: int) -> Undo:
        coordinator = self.coordinator
        return self._isolate(index if index != coordinator else self.others(index)[0], [self.nodes[coordinator]])

    def deaf(self, index: int) -> Undo:
        return self._isolate(index, self.all_nodes, outbound=False)

    def cut_off_from_nodes(self, index: int) -> Undo:
        return self._isolate(index, self.nodes)

    def deaf_to_nodes(self, index: int) -> Undo:
        return self._isolate(index, self.nodes, outbound=False)

    def mute(self, index: int) -> Undo:
        return self._isolate(index, self.all_nodes, inbound=False)

    def _isolate(self, index: int, others: Sequence[Node], **ways: bool) -> Undo:
        node = self.nodes[index]
        return self.net.isolate(node, [other for other in others if other is not node], **ways)

    def agents_reset(self, index: int) -> Undo:
        """A middlebox resets the connections of agents, but not those of workers."""
        return self._rejected(index, "tcp reset", *(f"tcp {end}port {STAR_PORT} accept" for end in "sd"))

    def all_reset(self, index: int) -> Undo:
        return self._rejected(index, "tcp reset")

    def _rejected(self, index: int, how: str, *exceptions: str) -> Undo:
        address = self.nodes[index].v4()
        return self.net.filter(*exceptions, *(f"ip {way} {address} reject with {how}" for way in ("saddr", "daddr")))

    def leaky(self, index: int) -> Undo:
        address = self.nodes[index].v4()
        return self.net.filter(*(f"ip {way} {address} numgen random mod 100 < 30 drop" for way in ("saddr", "daddr")))

    def all_leaky(self, _: int, percent: int = 30) -> Undo:
        return self.net.filter(f"numgen random mod 100 < {percent} drop")

    def slow(self, index: int) -> Undo:
        return self.net.slow_down(self.nodes[index], "50kbit")

    def unplugged(self, index: int) -> Undo:
        return self.net.pull_out(self.nodes[index])

    def unreachable(self, index: int) -> Undo:
        return self._rejected(index, "icmp host-unreachable")

    def flapping(self, index: int) -> Undo:
        for _ in range(4):
            undo = self.cut_off(index)
            time.sleep(0.3)
            undo()
            time.sleep(0.2)
        return _nothing

    # Faults of the endpoint.

    def etcd_restarted(self, _: int) -> Undo:
        server = self._leading_etcd
        server.kill()
        return server.restart  # another fault may have started it meanwhile

    def etcd_frozen(self, _: int) -> Undo:
        server = self._leading_etcd
        server.stop()
        return server.cont

    def etcd_emptied(self, _: int) -> Undo:
        (server,) = self.etcds
        server.kill()
        server.forget()
        server.start()
        return _nothing

    @property
    def _leading_etcd(self) -> EtcdServer:
        """The only etcd, or the leader of several."""
        if len(self.etcds) == 1:
            return self.etcds[0]

        def found() -> EtcdServer | None:
            for server in self.etcds:
                answer = server.ask_there("POST", "/v3/maintenance/status")
                ids = re.search(r'"member_id":"(\d+)".*"leader":"(\d+)"', answer)
                if ids is not None and ids[1] == ids[2]:
                    return server
            return None

        leader: EtcdServer = wait_for("a leader of the etcds", found)
        return leader


def run_delay_s(pid: int) -> float:
    """How long the threads of a process could have run and others did (`/proc/…/schedstat`), all together."""
    stats = (thread.read_text().split() for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(waited) for _, waited, _ in stats) / 1e9


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Fault:
    """What can go wrong.

    Args:
        name: of the method that does it.
        hold_s: for how long, at most, before it is undone.
        needs: only on these endpoints.
    """

    name: str
    hold_s: float = 0.0
    needs: str = ""

    def do(self, field_: Battlefield, index: int) -> Undo:
        undo: Undo = getattr(field_, self.name)(index)
        return undo

    def is_for(self, endpoint: str) -> bool:
        return self.needs in endpoint and not (self.name == "etcd_emptied" and endpoint == "three etcds")


LONG_S = LEASE_S + 1.0  # by then a node is lost
FAULTS = [
    Fault("worker_killed"),
    Fault("worker_raises"),
    Fault("agent_killed", 1.0),
    Fault("agent_terminated", 1.0),
    Fault("agent_stopped", LONG_S),
    Fault("agent_stopped", 1.0),
    Fault("cut_off", LONG_S),
    Fault("cut_off", 1.0),
    Fault("cut_off_from_coordinator", LONG_S),
    Fault("deaf", LONG_S),
    Fault("mute", LONG_S),
    Fault("agents_reset", 2.0),
    Fault("all_reset", 1.0),
    Fault("leaky", 3.0),
    Fault("slow", 3.0),
    Fault("flapping"),
    Fault("etcd_restarted", 1.0, needs="etcd"),
    Fault("etcd_frozen", LONG_S, needs="etcd"),
    Fault("etcd_emptied", needs="etcd"),
]
# Long faults: cuts of up to ten leases, partitions (also asymmetric ones), packet loss everywhere, a minute's sleep.
LONG_FAULTS = [
    Fault("cut_off", 2 * LEASE_S),
    Fault("cut_off", 5 * LEASE_S),
    Fault("cut_off", 10 * LEASE_S),
    Fault("cut_off_from_nodes", 3 * LEASE_S),
    Fault("cut_off_from_coordinator", 4 * LEASE_S),
    Fault("deaf", 4 * LEASE_S),
    Fault("mute", 4 * LEASE_S),
    Fault("deaf_to_nodes", 3 * LEASE_S),
    Fault("all_leaky", 4 * LEASE_S),
    Fault("agent_stopped", 60.0),
]


@contextmanager
def battlefield(
    launch: Launcher,
    endpoint: str,
    folder: Path,
    *,
    max_restarts: int = 100,
    wrapper: str = HASTY,
    coordinator: int | None = None,
    **env: str,
) -> Iterator[Battlefield]:
    """A job of three nodes that step together; it leaves nothing behind.

    Args:
        launch: ends what is left of it.
        endpoint: one of `ENDPOINTS`, or `c10d apart`.
        folder: for etcd's data.
        max_restarts: the job's `--max-restarts`.
        wrapper: the wrapper of the agents.
        coordinator: this node's agent begins alone, and so leads; with `None`, any agent may lead.
        env: the environment of the workers.
    """
    with netns.opened() as net, ExitStack() as stack:
        nodes = [net.node(f"node{index}") for index in range(3)]
        endpoint_node, etcds = nodes[0], list[EtcdServer]()
        served = nodes if endpoint == "c10d on three" else nodes[:1]
        meeting = Meeting(endpoint.split(maxsplit=1)[0], ",".join(f"{node.v4()}:{PORT}" for node in served))
        if "etcd" in endpoint:
            endpoint_node = net.node("endpoint")
            etcds = _etcds(endpoint_node, folder, 3 if endpoint == "three etcds" else 1)
            for server in etcds:
                stack.callback(server.kill)
                server.start()
            wait_for("etcd serves", lambda: all(server.health() for server in etcds))
            endpoints = ",".join(server.endpoint for server in etcds)
            meeting = Meeting("etcd-v2" if endpoint == "etcd-v2" else "etcd-v3", endpoints)
        elif endpoint == "c10d apart":
            endpoint_node = net.node("endpoint")
            meeting = Meeting("c10d", serve_endpoint(net, endpoint_node))
        conf = {"lease": LEASE_S, "settle_time": 0.1, "last_call_timeout": 2}
        team = stack.enter_context(
            team_of(
                launch,
                meeting,
                "3" if endpoint == "static" else "2:3",
                conf=conf,
                options=("--max-restarts", str(max_restarts), "--log-dir", "logs"),
                env={"STAR_PORT": str(STAR_PORT), "STAR_TICK_S": str(TICK_S), **env},
                wrapper=wrapper,
            )
        )
        imports_s = IMPORTS_S if "STAR_GLOO" in env else 0.0
        there = Battlefield(endpoint, net, nodes, endpoint_node, team, etcds, imports_s)
        started = dict[int, Agent]()
        for index in sorted(range(3), key=lambda index: index != coordinator):
            started[index] = there.start(index)
            if index == coordinator:
                started[index].wait_logged(COORDINATES)
        there.agents = [started[index] for index in range(3)]
        there.wait_progress(range(3), time.monotonic())
        yield there


def serve_endpoint(net: Net, node: Node) -> str:
    """Starts a store on a node; returns its endpoint."""
    popen = net.start(node, sys.executable, "-c", STORE, str(PORT))
    assert popen.stdout is not None and popen.stdout.readline()
    return f"{node.v4()}:{PORT}"


def _etcds(node: Node, folder: Path, count: int) -> list[EtcdServer]:
    peers = [2380 + 10 * number for number in range(count)]
    return [
        EtcdServer(
            distro_etcd(),
            folder / f"etcd{number}",
            ["--enable-v2"],
            host=node.v4(),
            port=2379 + 10 * number,
            prefix=node.prefix,
            peer_port=peers[number],
            peers=peers if count > 1 else (),
        )
        for number in range(count)
    ]
