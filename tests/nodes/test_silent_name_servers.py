"""Nodes that know each other by name, and lose their name server while the job runs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kit.agents import COORDINATES, LONG_LEASE_S, Agent, Meeting, Team, team_of
from kit.faults import netns
from kit.faults.netns import Net, Node
from kit.launching import Launcher
from kit.servers.etcd_servers import EtcdServer, distro_etcd, etcd
from kit.servers.name_servers import NameServer, files_of, name_server

# An unanswered lookup takes twice as long as this, longer than any test waits.
PATIENT = "timeout:30 attempts:2"


@contextmanager
def endpoint_of(backend: str, net: Net, folder: Path, server: NameServer) -> Iterator[str]:
    """An endpoint by name: an etcd on a node of its own, or the first agent's store."""
    if backend == "c10d":
        yield "host0:29400"
        return
    node = net.node("etcd")
    server.learn({"etcd": node.v4()})
    with etcd(EtcdServer(distro_etcd(), folder / "etcd", host=node.v4(), port=2379, prefix=node.prefix)):
        yield "etcd:2379"


def start(team: Team, number: int, node: Node) -> Agent:
    return team.start("--local-addr", f"host{number}", prefix=node.prefix)


@pytest.mark.all
@pytest.mark.parametrize("backend", [pytest.param("c10d", marks=pytest.mark.ci), "etcd-v3"])
def test_the_others_continue_without_the_coordinator_and_end_on_request(
    backend: str, launch: Launcher, tmp_path: Path
) -> None:
    with netns.opened() as net:
        server = name_server(net, tmp_path)
        files = files_of([server], tmp_path, PATIENT)
        nodes = [net.node(f"host{number}", files=files) for number in range(3)]
        server.learn({f"host{number}": node.v4() for number, node in enumerate(nodes)})
        conf = {"last_call_timeout": 2, "settle_time": 0.1, "lease": LONG_LEASE_S}
        with (
            endpoint_of(backend, net, tmp_path, server) as endpoint,
            # Workers that don't look each other up.
            team_of(launch, Meeting(backend, endpoint), "1:3", conf=conf, env={"STAR_SOLO": "1"}) as team,
        ):
            first = start(team, 0, nodes[0])
            first.wait_logged(COORDINATES)
            others = [start(team, number, nodes[number]) for number in (1, 2)]
            round_ = team.wait_round([first, *others])
            server.fall_silent()
            first.crash()
            round_ = team.wait_round(others, round_)
            assert round_.restart == 0
            for agent in others:
                agent.signal(signal.SIGTERM)
            for agent in others:
                assert agent.wait() == -signal.SIGTERM, team.story
