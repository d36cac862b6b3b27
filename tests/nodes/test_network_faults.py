"""Agents on nodes of their own, over networks that are cut, slow, of another kind, or more than one."""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kit import agents as kit_agents
from kit.agents import COORDINATES, FAIL, Agent, Meeting, Round, Team, team_of
from kit.effort import EFFORT, REPETITIONS
from kit.faults import netns
from kit.faults.chaos import STORE
from kit.faults.netns import Net, Node
from kit.launching import LAUNCH_TIMEOUT_S, Launcher, wait_for
from kit.ports import listening

from aelastic.errors import EXIT_FAILURE

# The start of a store's process is part of it.
JOIN_TIMEOUT_S = 8.0
PORT = 29400
LEASE_S = 2.0
# What a node is missed after: so the README promises it.  Then others may work on the machine, too.
MISSED_S = LEASE_S + 1.0
LOAD_S = 3.0
# How long a cut lasts that begins two sides, after what each was seen to do.
CUT_S = {"soak": 60.0}.get(EFFORT, 2 * LEASE_S)

# Tells its round, and whether the store of group rank 0 can be reached, before it talks to the others.
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

# A name server that writes down what it is asked, and knows nothing; a silent one does not even say so.
NAME_SERVER = """
import socket, sys

server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind((sys.argv[1], 53))
print("ready", flush=True)
while True:
    question, peer = server.recvfrom(4096)
    labels, at = [], 12
    while question[at]:
        labels.append(question[at + 1 : at + 1 + question[at]].decode())
        at += 1 + question[at]
    with open(sys.argv[2], "a") as asked:
        print(".".join(labels), file=asked)
    # The same question, as an answer: there is no such name (RFC 1035, 4.1.1).
    if sys.argv[3] != "silent":
        server.sendto(question[:2] + b"\\x81\\x83" + question[4:6] + b"\\0\\0\\0\\0\\0\\0" + question[12:at + 5], peer)
"""


@contextmanager
def team_on(
    launch: Launcher,
    endpoint: str,
    nnodes: str,
    *,
    lease_s: float = LEASE_S,
    join_timeout_s: float = 600.0,
    **others: Any,
) -> Iterator[Team]:
    """The agents of one job, each to be started on a node."""
    conf = {"last_call_timeout": 2, "lease": lease_s, "join_timeout": join_timeout_s}
    with team_of(launch, Meeting("c10d", endpoint), nnodes, conf=conf, **{"worker": WORKER, **others}) as team:
        yield team


def start_on(team: Team, nodes: Sequence[Node]) -> list[Agent]:
    return [team.start(prefix=node.prefix) for node in nodes]


def wait_reached(team: Team, agents: Sequence[Agent], after: Round | None = None) -> Round:
    """Waits until some agents, and they alone, are in one round, and have all reached its rank 0."""
    round_ = team.wait_round(agents, after, limit_s=LAUNCH_TIMEOUT_S / 2)
    for agent in agents:
        agent.wait_line("reached", len(agent.starts))
    return round_


def counts(agents: Sequence[Agent]) -> list[int]:
    """How many workers each has started."""
    return [len(agent.starts) for agent in agents]


def fences(agent: Agent) -> list[int]:
    return [int(line.split()[1]) for line in agent.lines if line.startswith("reached")]


def reigns(team: Team) -> int:
    """How often an agent has become the coordinator."""
    return sum(len(re.findall(COORDINATES, agent.stderr)) for agent in team.agents)


def at(node: Node, family: str = "v4") -> str:
    """The endpoint of a node."""
    return f"{node.v4()}:{PORT}" if family == "v4" else f"[{node.v6()}]:{PORT}"


@pytest.fixture
def v4() -> Iterator[Net]:
    """A network without IPv6."""
    with netns.opened() as net:
        yield net


def serve_board(net: Net, node: Node) -> str:
    """Starts a store on a node; gives its endpoint."""
    popen = net.start(node, sys.executable, "-c", STORE, str(PORT))
    assert popen.stdout is not None and popen.stdout.readline() == b"ready\n"
    return at(node)


# Where the nodes find each other.


def found_at(agents: Sequence[Agent]) -> list[dict[int, set[str]]]:
    """Where each agent and its helpers listen, by port; workers meet at ports of their own (`kit.faults.star`)."""
    return [listening(pid for pid in agent.left() if not is_worker(pid)) for agent in agents]


def is_worker(pid: int) -> bool:
    try:
        return b"\0RANK=" in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return True  # it has ended


@pytest.mark.parametrize("family", ["v4", "v6"])
def test_each_port_listens_where_other_nodes_are_told_to_come(family: str, launch: Launcher, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("a secret of the tests, in one line")
    options = ("--secret-file", str(secret), "--max-restarts", "3")
    with netns.opened(has_v4=family == "v4", has_v6=family == "v6") as net:
        nodes = [net.node() for _ in range(3)]
        own = [getattr(node, family)() for node in nodes]
        with team_on(launch, at(nodes[0], family), "3", options=options) as team:
            # Rank 0 is another node than that of the endpoint.
            agents = [*start_on(team, nodes[:2]), team.start("--node-rank", "0", prefix=nodes[2].prefix)]
            round_ = wait_reached(team, agents)
            for _ in range(2):
                assert agents[2].starts[-1].rank == 0 and round_.starts[0].master_addr == own[2]
                for address, ports in zip(own, found_at(agents), strict=True):
                    elsewhere = {port: at for port, at in ports.items() if at - {"127.0.0.1", "::1"} != {address}}
                    assert ports and not elsewhere, team.story
                round_.tell(FAIL, agents[1].starts[-1].rank)
                round_ = wait_reached(team, agents, round_)
            assert not [agent for agent in agents if "all addresses" in agent.stderr]
            team.finish(round_)


def test_a_node_listens_at_all_addresses_if_told_to_or_if_others_know_it_by_one_that_it_has_not(
    v4: Net, launch: Launcher
) -> None:
    nodes = [v4.node() for _ in range(2)]
    elsewhere = "10.99.0.1"  # as a router's that leads to this node
    nodes[1].run(f"ip route add {elsewhere} via 10.71.{nodes[1].number}.1")
    v4.forward(elsewhere, nodes[0])
    with team_on(launch, at(nodes[0]), "2") as team:
        first = team.start("--local-addr", elsewhere, prefix=nodes[0].prefix)
        first.wait_said(COORDINATES)
        second = team.start("--bind-all", "--node-rank", "0", prefix=nodes[1].prefix)
        round_ = wait_reached(team, [first, second])
        known, told = found_at([first, second])
        everywhere = [port for port, at in known.items() if at & {"0.0.0.0", "::"}]
        assert len(everywhere) == 2 and PORT not in everywhere, "coordinator and votes; the endpoint is its own address"
        assert "at all addresses of this host" in first.stderr, "one line says so"
        assert all(at & {"0.0.0.0", "::"} for at in told.values()) and "all addresses" not in second.stderr
        team.finish(round_)


@pytest.mark.all
@pytest.mark.parametrize("family", ["v4", "v6"])
def test_torch_meets_across_nodes(family: str, launch: Launcher) -> None:
    with netns.opened(has_v4=family == "v4", has_v6=family == "v6") as net:
        nodes = [net.node() for _ in range(2)]
        more: dict[str, Any] = {"worker": ALL_REDUCE, "env": {"GLOO_SOCKET_IFNAME": "net1"}}
        with team_on(launch, at(nodes[0], family), "2", lease_s=10.0, **more) as team:
            for agent in start_on(team, nodes):
                assert agent.wait(LAUNCH_TIMEOUT_S) == 0, team.story
                assert agent.wait_line("sum")[0].split()[2:] == ["3", getattr(nodes[0], family)()]


@pytest.mark.all
def test_where_the_name_server_is_silent_none_is_asked(v4: Net, launch: Launcher, tmp_path: Path) -> None:
    # Each question would take 20 s.
    server, asked = name_server(v4, tmp_path, "silent")
    nodes = [v4.node(f"node{i}", files=names(tmp_path, server)) for i in range(2)]
    with team_on(launch, at(nodes[0]), "2") as team:
        agents = start_on(team, nodes)
        round_ = wait_reached(team, agents)
        round_.tell(FAIL, 1)
        team.finish(wait_reached(team, agents, round_))
    assert not asked.exists(), asked.read_text()


def test_a_host_that_calls_itself_127_0_1_1_is_found_by_the_others(v4: Net, launch: Launcher, tmp_path: Path) -> None:
    # What Debian writes into /etc/hosts; the others know the host by its real address.
    server, _ = name_server(v4, tmp_path)
    own, other = tmp_path / "own", tmp_path / "other"
    own.write_text("127.0.0.1 localhost\n127.0.1.1 alpha\n")
    other.touch()
    nodes = [
        v4.node("alpha", files={**names(tmp_path, server), "hosts": own}),
        v4.node("beta", files={**names(tmp_path, server), "hosts": other}),
    ]
    other.write_text(f"127.0.0.1 localhost\n127.0.1.1 beta\n{nodes[0].v4()} alpha\n")
    with team_on(launch, f"alpha:{PORT}", "2") as team:
        round_ = wait_reached(team, start_on(team, nodes))
        assert round_.starts[0].master_addr in {node.v4() for node in nodes}
        team.finish(round_)


def name_server(net: Net, folder: Path, manner: str = "") -> tuple[Node, Path]:
    """Starts a name server on a node of its own; gives that, and where it writes down what it is asked."""
    node, asked = net.node("names"), folder / "asked"
    popen = net.start(node, sys.executable, "-c", NAME_SERVER, node.v4(), str(asked), manner)
    assert popen.stdout is not None and popen.stdout.readline() == b"ready\n"
    return node, asked


def names(folder: Path, server: Node) -> dict[str, Path]:
    """How a node looks up names: no file knows any, and one name server is asked."""
    contents = {
        "hosts": "",
        "resolv.conf": f"nameserver {server.v4()}\noptions timeout:10 attempts:2\n",
        "nsswitch.conf": "hosts: files dns\n",
    }
    for name, text in contents.items():
        (folder / name).write_text(text)
    return {name: folder / name for name in contents}


@pytest.mark.parametrize("is_told", [False, pytest.param(True, marks=pytest.mark.all)], ids=["found out", "told"])
def test_of_two_networks_workers_use_the_one_the_agents_met_on_unless_told(
    v4: Net, launch: Launcher, is_told: bool
) -> None:
    """Group ranks follow the names of hosts, in their natural order."""
    nodes = [v4.node(host, networks=(1, 2), default_route=1) for host in ("node10", "node2", "node1")]
    with team_on(launch, f"{nodes[1].v4(2)}:{PORT}", "3") as team:
        agents = [team.start(*(["--local-addr", node.v4(1)] if is_told else []), prefix=node.prefix) for node in nodes]
        round_ = wait_reached(team, agents)
        assert [agent.starts[-1].rank for agent in agents] == [2, 1, 0]
        assert round_.starts[0].master_addr == nodes[2].v4(1 if is_told else 2)
        team.finish(round_)


# Cut off, and back.


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.all
def test_nodes_are_cut_off_and_come_back_again_and_again(v4: Net, launch: Launcher) -> None:
    """A plain member and the coordinator's node in turn; the board is elsewhere, and the run id stays the same."""
    endpoint = serve_board(v4, v4.node("board"))
    nodes = [v4.node(f"node{i}") for i in range(3)]
    ways: list[Callable[[Node], None]] = [v4.cut, v4.pull_out, lambda node: v4.cut(node, how="unreachable")]
    missed, back = [], []
    with team_on(launch, endpoint, "1:3") as team:
        agents = start_on(team, nodes)
        round_ = wait_reached(team, agents)
        for turn in range(REPETITIONS):
            coordinator = team.coordinator
            victim = coordinator if turn % 2 else next(agent for agent in agents if agent is not coordinator)
            before, started, began = reigns(team), len(victim.starts), time.monotonic()
            ways[turn // 2 % 3](nodes[agents.index(victim)])
            round_ = wait_reached(team, [agent for agent in agents if agent is not victim], round_)
            missed.append(time.monotonic() - began)
            assert reigns(team) - before == turn % 2
            # Whether its workers are of use still cannot be said there; with `1:3` it must not go on alone.
            assert len(victim.starts) == started
            began = time.monotonic()
            v4.heal()
            round_ = wait_reached(team, agents, round_)
            back.append(time.monotonic() - began)
        assert statistics.median(missed) < MISSED_S + LOAD_S, (missed, back)
        team.finish(round_)


@pytest.mark.all
def test_a_cut_that_is_shorter_than_a_lease_disturbs_no_node(v4: Net, launch: Launcher) -> None:
    nodes = [v4.node(f"node{i}") for i in range(2)]
    with team_on(launch, at(nodes[0]), "1:2", lease_s=6.0) as team:
        round_ = wait_reached(team, start_on(team, nodes))
        for _ in range(3):
            unheard = nodes[1].tcp_count("RetransSegs")
            v4.cut(nodes[1])
            nodes[1].wait_tcp_count("RetransSegs", unheard + 2)
            v4.heal()
            for node in nodes:
                node.wait_delivered()  # else three short cuts are a long one, for a connection that tries again in each
        team.assert_untouched(round_)
        team.finish(round_)


def test_while_the_board_is_cut_off_workers_run_on_and_a_restart_waits_for_it(v4: Net, launch: Launcher) -> None:
    board = v4.node("board")
    endpoint = serve_board(v4, board)
    nodes = [v4.node(f"node{i}") for i in range(2)]
    with team_on(launch, endpoint, "2") as team:
        agents = start_on(team, nodes)
        round_ = wait_reached(team, agents)
        coordinator = nodes[agents.index(team.coordinator)]
        v4.cut(board)
        # On a connection that was cut, TCP tries again ever more rarely: new ones show that the way is free again.
        coordinator.wait_tcp_count("ActiveOpens", coordinator.tcp_count("ActiveOpens") + 3)
        round_.tell(FAIL, agents[0].starts[-1].rank)
        wait_for("the failure is seen", lambda: "failed on node0" in agents[0].stderr)
        assert counts(agents) == [1, 1]
        v4.heal()
        again = wait_reached(team, agents, round_)
        assert again.restart == 1
        team.finish(again)


@pytest.mark.all
def test_new_agents_with_the_endpoint_begin_no_round_beside_the_one_that_is_cut_off_with_them(
    v4: Net, launch: Launcher
) -> None:
    """The endpoint is no agent's: it goes on naming a coordinator that is silent, and the round that this one began."""
    board = v4.node("board")
    at_work, new = ([v4.node(f"node{i}") for i in each] for each in (range(3), range(3, 5)))
    often = "from aelastic.rdzv.coordinator import leader\nleader.WAITING_TEXT_INTERVAL_S = 2.0\n"
    with team_on(launch, serve_board(v4, board), "2:5", wrapper=often) as team:
        round_ = wait_reached(team, start_on(team, at_work))
        for node in at_work:
            for other in (board, *new):
                v4.cut(node, other)
        newcomers = start_on(team, new)
        # Until a lease had passed they would have waited in any case.
        waits = "2 of 2-5 nodes joined", "node0, node1, node2 cannot be reached and may be running without this node"
        wait_for("they wait", lambda: any(all(words in agent.stderr for words in waits) for agent in newcomers))
        time.sleep(CUT_S)
        team.assert_untouched(round_)
        assert counts(team.agents) == [1, 1, 1, 0, 0]
        v4.heal()
        last = wait_reached(team, team.agents, round_)
        assert last.restart == 0
        # None of the three was stopped before there was a round with the others.  The one that coordinated learns that another
        # does when its way to the board is back, which may be later than for the two: then it joins their round.
        with_all = [[2, 2, 2, 1, 1]]
        without_one = [
            [2 if place == late else count for place, count in enumerate([3, 3, 3, 2, 2])] for late in range(3)
        ]
        assert counts(team.agents) in with_all + without_one, team.story
        team.finish(last)


@pytest.mark.all
def test_two_sides_of_which_one_has_an_empty_endpoint_are_told_apart_and_become_one(v4: Net, launch: Launcher) -> None:
    """The page on endpoints says that an empty one knows of no round; so both sides are at work, under two fences."""
    nodes = [v4.node(f"node{i}") for i in range(5)]
    with team_on(launch, at(nodes[0]), "2:5") as team:
        (gone,) = start_on(team, nodes[:1])
        gone.wait_said(COORDINATES)
        rest = start_on(team, nodes[1:4])
        round_ = wait_reached(team, [gone, *rest])
        gone.crash()
        one_side = wait_reached(team, rest, round_)
        for node in nodes[1:4]:
            for other in (nodes[0], nodes[4]):
                v4.cut(node, other)
        new = start_on(team, [nodes[0], nodes[4]])
        other_side = wait_reached(team, new)
        time.sleep(CUT_S)
        for side in (one_side, other_side):
            team.assert_untouched(side)
        assert min(fences(agent)[-1] for agent in new) > max(fence for agent in rest for fence in fences(agent))
        v4.heal()
        both = Round((*one_side.starts, *other_side.starts), one_side.at)
        last = wait_reached(team, rest + new, both)
        assert last.restart == 0
        team.finish(last)


@pytest.mark.all
def test_a_node_that_stays_cut_off_gives_up_in_the_end(v4: Net, launch: Launcher) -> None:
    nodes = [v4.node(f"node{i}") for i in range(2)]
    with team_on(launch, at(nodes[0]), "1:2", join_timeout_s=JOIN_TIMEOUT_S) as team:
        (stays,) = start_on(team, nodes[:1])
        stays.wait_line("reached")
        (leaves,) = start_on(team, nodes[1:])
        round_ = wait_reached(team, [stays, leaves])
        v4.cut(nodes[1])
        assert leaves.wait() == EXIT_FAILURE, team.story
        assert f"no coordinator for {JOIN_TIMEOUT_S:g} s" in leaves.stderr.splitlines()[-1], team.story
        leaves.assert_nothing_left()
        team.finish(wait_reached(team, [stays], round_))


@pytest.mark.all
def test_a_node_that_is_cut_off_from_the_coordinator_alone_disturbs_no_other(v4: Net, launch: Launcher) -> None:
    endpoint = serve_board(v4, v4.node("board"))
    nodes = [v4.node(f"node{i}") for i in range(3)]
    with team_on(launch, endpoint, "2:3") as team:
        agents = start_on(team, nodes)
        round_ = wait_reached(team, agents)
        coordinator = team.coordinator
        outsider = next(agent for agent in agents if agent is not coordinator)
        rest = [agent for agent in agents if agent is not outsider]
        one, other = (nodes[agents.index(agent)] for agent in (coordinator, outsider))
        for from_, to in ((one, other), (other, one)):  # both ways at once: `test_chaos.py`
            v4.cut_one_way(from_, to)
            round_ = wait_reached(team, rest, round_)
            attempts = other.tcp_count("ActiveOpens")
            # Each attempt takes longer than a lease.
            other.wait_tcp_count("ActiveOpens", attempts + 2)
            team.assert_untouched(round_)
            v4.heal()
            round_ = wait_reached(team, agents, round_)
            assert reigns(team) == 1
        team.finish(round_)


@pytest.mark.all
def test_a_slow_network_that_loses_packets_carries_a_job_through_a_restart(v4: Net, launch: Launcher) -> None:
    # From node to node a packet takes 100 ms; of 20, one is lost.
    nodes = [v4.node(delay_s=0.05, loss=0.025) for _ in range(3)]
    with team_on(launch, at(nodes[0]), "3", lease_s=5.0) as team:
        agents = start_on(team, nodes)
        round_ = wait_reached(team, agents)
        round_.tell(FAIL, 2)
        again = wait_reached(team, agents, round_)
        assert again.restart == 1
        team.finish(again)
