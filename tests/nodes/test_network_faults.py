"""Agents on separate nodes, over networks that are cut, of another kind, or doubled."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kit import agents as kit_agents
from kit.agents import COORDINATES, FAIL, LONG_LEASE_S, Agent, Meeting, Round, Team, team_of
from kit.effort import EFFORT
from kit.faults import netns
from kit.faults.chaos import serve_endpoint
from kit.faults.netns import Net, Node
from kit.launching import LAUNCH_TIMEOUT_S, Launcher
from kit.ports import listening
from kit.waiting import wait_for

PORT = 29400
# For tests in which a node falls silent.
LEASE_S = 2.0
# How long a cut lasts after both sides have been seen to react to it.
CUT_S = {"soak": 60.0}.get(EFFORT, 2 * LEASE_S)

# Reports its round, and whether it can reach the store of group rank 0, before it talks to the others.
REACHES = """
until = time.monotonic() + 20.0
while True:
    try:
        socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 20.0).close()
        break
    except ConnectionRefusedError:  # as torch's client: the node of rank 0 may begin a moment later
        if time.monotonic() > until:
            raise
        time.sleep(0.02)
say("reached", os.environ["AELASTIC_ROUND"])
begin_talk()
rest()
"""
WORKER = kit_agents.WORKER.replace("begin_talk()\nrest()\n", REACHES)

ALL_REDUCE = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(3) * (rank + 1)
dist.all_reduce(total)
say("sum", rank, int(total[0]), os.environ["MASTER_ADDR"])
dist.barrier()
dist.destroy_process_group()
"""

# A name server that logs its queries and does not answer.
NAME_SERVER = """
import socket, sys

server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind((sys.argv[1], 53))
print("ready", flush=True)
while True:
    question, peer = server.recvfrom(4096)
    with open(sys.argv[2], "a") as asked:
        print(question, file=asked)
"""


@contextmanager
def team_on(
    launch: Launcher,
    endpoint: str,
    nnodes: str,
    *,
    lease_s: float = LONG_LEASE_S,
    **others: Any,
) -> Iterator[Team]:
    """The agents of one job, each on a node of its own."""
    conf = {"last_call_timeout": 2, "settle_time": 0.1, "lease": lease_s}
    with team_of(launch, Meeting("c10d", endpoint), nnodes, conf=conf, **{"worker": WORKER, **others}) as team:
        yield team


def start_on(team: Team, nodes: Sequence[Node]) -> list[Agent]:
    return [team.start(prefix=node.prefix) for node in nodes]


def wait_reached(team: Team, agents: Sequence[Agent], after: Round | None = None) -> Round:
    """Waits until exactly these agents are in one round, and all have reached its rank 0."""
    round_ = team.wait_round(agents, after, limit_s=LAUNCH_TIMEOUT_S / 2)

    def has_reached(agent: Agent) -> bool:
        return f"reached {round_.number}\n" in agent.stdout

    def is_decided() -> bool:
        return all(has_reached(agent) or agent.starts[-1].round > round_.number for agent in agents)

    wait_for(lambda: f"round {round_.number} is reached, or over:\n{team.story}", is_decided)
    if all(has_reached(agent) for agent in agents):
        return round_
    return wait_reached(team, agents, round_)  # another round began before all workers had reported


def at(node: Node, family: str = "v4") -> str:
    """The endpoint on a node."""
    return f"{node.v4()}:{PORT}" if family == "v4" else f"[{node.v6()}]:{PORT}"


@pytest.fixture
def v4() -> Iterator[Net]:
    """A network without IPv6."""
    with netns.opened() as net:
        yield net


# Where nodes find each other.


def found_at(agents: Sequence[Agent]) -> list[dict[int, set[str]]]:
    """Where each agent and its helpers listen, by port; workers meet on ports of their own (`kit.faults.star`)."""
    return [listening(pid for pid in agent.left() if not is_worker(pid)) for agent in agents]


def is_worker(pid: int) -> bool:
    try:
        return b"\0RANK=" in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return True  # it has ended


@pytest.mark.parametrize("family", [pytest.param("v4", marks=pytest.mark.all), "v6"])
def test_each_port_listens_at_the_addresses_that_other_nodes_are_given(
    family: str, launch: Launcher, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("a secret of the tests, in one line")
    options = ("--secret-file", str(secret), "--max-restarts", "3")
    with netns.opened(has_v4=family == "v4", has_v6=family == "v6") as net:
        nodes = [net.node() for _ in range(3)]
        own = [getattr(node, family)() for node in nodes]
        with team_on(launch, at(nodes[0], family), "3", options=options) as team:
            # Rank 0 is not on the endpoint's node.
            agents = [*start_on(team, nodes[:2]), team.start("--node-rank", "0", prefix=nodes[2].prefix)]
            round_ = wait_reached(team, agents)
            for _ in range(2):
                assert agents[2].starts[-1].rank == 0 and round_.starts[0].master_addr == own[2]
                for address, ports in zip(own, found_at(agents), strict=True):
                    elsewhere = {port: at for port, at in ports.items() if at - {"127.0.0.1", "::1"} != {address}}
                    assert ports and not elsewhere, team.story
                round_.send_signal(FAIL, agents[1].starts[-1].rank)
                round_ = wait_reached(team, agents, round_)
            assert not [agent for agent in agents if "all addresses" in agent.stderr]
            team.finish(round_)


def test_a_node_listens_at_all_addresses_if_told_to_or_if_others_know_it_by_one_that_it_has_not(
    v4: Net, launch: Launcher
) -> None:
    nodes = [v4.node() for _ in range(2)]
    elsewhere = "10.99.0.1"  # the address of a router that forwards to this node
    nodes[1].run(f"ip route add {elsewhere} via 10.71.{nodes[1].number}.1")
    v4.forward(elsewhere, nodes[0])
    with team_on(launch, at(nodes[0]), "2") as team:
        first = team.start("--local-addr", elsewhere, prefix=nodes[0].prefix)
        first.wait_logged(COORDINATES)
        second = team.start("--bind-all", "--node-rank", "0", prefix=nodes[1].prefix)
        round_ = wait_reached(team, [first, second])
        known, restricted = found_at([first, second])
        everywhere = [port for port, at in known.items() if at & {"0.0.0.0", "::"}]
        assert len(everywhere) == 2 and PORT not in everywhere, "leader and votes; the endpoint is on its own address"
        assert "at all addresses of this host" in first.stderr, "reported in one line"
        assert all(at & {"0.0.0.0", "::"} for at in restricted.values()) and "all addresses" not in second.stderr
        team.finish(round_)


@pytest.mark.all
def test_torch_meets_across_nodes_over_ipv6(launch: Launcher) -> None:
    """`test_chaos.py` covers IPv4."""
    with netns.opened(has_v4=False, has_v6=True) as net:
        nodes = [net.node() for _ in range(2)]
        more: dict[str, Any] = {"worker": ALL_REDUCE, "env": {"GLOO_SOCKET_IFNAME": "net1"}}
        with team_on(launch, at(nodes[0], "v6"), "2", **more) as team:
            for agent in start_on(team, nodes):
                assert agent.wait(LAUNCH_TIMEOUT_S) == 0, team.story
                assert agent.wait_line("sum")[0].split()[2:] == ["3", nodes[0].v6()]


@pytest.mark.all
def test_a_host_that_calls_itself_127_0_1_1_is_found_and_a_silent_name_server_is_not_asked(
    v4: Net, launch: Launcher, tmp_path: Path
) -> None:
    """The first host has Debian's /etc/hosts; the other does not know its own name.  A query would take 20 s."""
    server, asked = name_server(v4, tmp_path)
    own, other = tmp_path / "own", tmp_path / "other"
    own.write_text("127.0.0.1 localhost\n127.0.1.1 alpha\n")
    other.touch()
    nodes = [
        v4.node("alpha", files={**names(tmp_path, server), "hosts": own}),
        v4.node("beta", files={**names(tmp_path, server), "hosts": other}),
    ]
    other.write_text(f"{nodes[0].v4()} alpha\n")
    with team_on(launch, f"alpha:{PORT}", "2") as team:
        agents = start_on(team, nodes)
        round_ = wait_reached(team, agents)
        assert round_.starts[0].master_addr in {node.v4() for node in nodes}
        round_.send_signal(FAIL, 1)
        team.finish(wait_reached(team, agents, round_))
    assert not asked.exists(), asked.read_text()


def name_server(net: Net, folder: Path) -> tuple[Node, Path]:
    """Starts a silent name server on a node of its own; returns the node and the log of its queries."""
    node, asked = net.node("names"), folder / "asked"
    popen = net.start(node, sys.executable, "-c", NAME_SERVER, node.v4(), str(asked))
    assert popen.stdout is not None and popen.stdout.readline() == b"ready\n"
    return node, asked


def names(folder: Path, server: Node) -> dict[str, Path]:
    """Name resolution of a node: no names in files, and one name server."""
    contents = {
        "hosts": "",
        "resolv.conf": f"nameserver {server.v4()}\noptions timeout:10 attempts:2\n",
        "nsswitch.conf": "hosts: files dns\n",
    }
    for name, text in contents.items():
        (folder / name).write_text(text)
    return {name: folder / name for name in contents}


@pytest.mark.all
def test_of_two_networks_workers_use_the_one_the_agents_met_on_unless_told(v4: Net, launch: Launcher) -> None:
    """Group ranks follow the natural order of host names."""
    nodes = [v4.node(host, networks=(1, 2), default_route=1) for host in ("node10", "node2", "node1")]
    with team_on(launch, f"{nodes[1].v4(2)}:{PORT}", "3") as team:
        agents = start_on(team, nodes)
        round_ = wait_reached(team, agents)
        assert [agent.starts[-1].rank for agent in agents] == [2, 1, 0]
        assert round_.starts[0].master_addr == nodes[2].v4(2)
        for agent in agents:
            agent.crash()
        agents = [team.start("--local-addr", node.v4(1), prefix=node.prefix) for node in nodes]
        round_ = wait_reached(team, agents, round_)
        assert round_.starts[0].master_addr == nodes[2].v4(1)
        team.finish(round_)


# Two sides (`test_chaos.py` covers nodes that are cut off and come back).


def counts(agents: Sequence[Agent]) -> list[int]:
    """How many workers each agent has started."""
    return [len(agent.starts) for agent in agents]


@pytest.mark.all
def test_new_agents_with_the_endpoint_begin_no_round_beside_the_one_that_is_cut_off_with_them(
    v4: Net, launch: Launcher
) -> None:
    """The endpoint runs outside the agents: it still names the silent leader and the round which that leader began."""
    endpoint = v4.node("endpoint")
    at_work, new = ([v4.node(f"node{i}") for i in each] for each in (range(3), range(3, 5)))
    often = "from aelastic.rdzv.leader import leader\nleader.WAITING_TEXT_INTERVAL_S = 2.0\n"
    with team_on(launch, serve_endpoint(v4, endpoint), "2:5", lease_s=LEASE_S, wrapper=often) as team:
        round_ = wait_reached(team, start_on(team, at_work))
        undos = [v4.isolate(node, [endpoint, *new]) for node in at_work]
        newcomers = start_on(team, new)
        # Within a lease they would have waited in any case.
        waits = "there is no quorum: node0, node1, node2 cannot be reached, and may be running without this node"
        wait_for("they wait", lambda: any(waits in agent.stderr for agent in newcomers))
        time.sleep(CUT_S)
        team.assert_untouched(round_)
        assert counts(team.agents) == [1, 1, 1, 0, 0]
        for undo in undos:
            undo()
        last = wait_reached(team, team.agents, round_)
        assert last.restart == 0
        # None of the three was stopped before there was a round with the others.  The old leader learns of the new one
        # when it reaches the endpoint again, possibly after the other two: then it joins their round.
        with_all = [[2, 2, 2, 1, 1]]
        without_one = [
            [2 if place == late else count for place, count in enumerate([3, 3, 3, 2, 2])] for late in range(3)
        ]
        assert counts(team.agents) in with_all + without_one, team.story
        team.finish(last)


@pytest.mark.all
def test_most_nodes_continue_when_the_host_of_the_endpoint_falls_silent_and_another_node_coordinates(
    v4: Net, launch: Launcher
) -> None:
    nodes = [v4.node(f"node{i}") for i in range(3)]
    with team_on(launch, at(nodes[0]), "1:3", lease_s=LEASE_S) as team:
        agents = start_on(team, nodes[:1])
        agents[0].wait_logged(COORDINATES)
        agents += start_on(team, nodes[1:])
        round_ = wait_reached(team, agents)
        agents[0].signal(signal.SIGSTOP)  # its store, a separate process, keeps running, but another agent leads
        round_ = wait_reached(team, agents[1:], round_)
        agents[0].signal(signal.SIGCONT)
        round_ = wait_reached(team, agents, round_)
        assert team.coordinator is not agents[0], team.story
        undo = v4.isolate(nodes[0], nodes[1:])
        rest = wait_reached(team, agents[1:], round_)
        assert rest.restart == 0
        undo()
        last = wait_reached(team, agents, rest)
        assert last.restart == 0
        team.finish(last)
