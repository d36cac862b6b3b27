"""Jobs of nodes that know each other by name, and lose coordinator and name server together, for `many_nodes.py`.

Each node is in a network namespace of its own, with a resolver that asks one or two name servers there.  They answer
until the job runs; then they swallow what they are asked, as a name server on a dead host does.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jobs import SkippedError, etcd_program, open_job
from one_node import Launcher

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from kit.faults import netns
from kit.faults.netns import Net, Node
from kit.servers.etcd_servers import EtcdServer
from kit.servers.name_servers import NameServer, files_of, name_server

SETTLE_S = 2.0
HOSTS = 3


def measure_etcd(launcher: Launcher) -> dict[str, float]:
    """The one name server falls silent."""
    with named_hosts(1) as hosts, hosts.etcd() as endpoint:
        return {"named_etcd_s": lose_coordinator(launcher, hosts, hosts.servers, "etcd-v3", endpoint)}


def measure_second(launcher: Launcher) -> dict[str, float]:
    """The first of two name servers falls silent."""
    with named_hosts(2) as hosts, hosts.etcd() as endpoint:
        return {"named_second_s": lose_coordinator(launcher, hosts, hosts.servers[:1], "etcd-v3", endpoint)}


def measure_servers(launcher: Launcher) -> dict[str, float]:
    """Of two etcd servers the first one is dead, and the one name server falls silent."""
    with named_hosts(1) as hosts, hosts.etcd() as endpoint:
        hosts.tell({"dead": "10.99.0.1"})
        endpoints = f"dead:2379,{endpoint}"
        return {"named_servers_s": lose_coordinator(launcher, hosts, hosts.servers, "etcd-v3", endpoints)}


def measure_c10d(launcher: Launcher) -> dict[str, float]:
    """The one name server falls silent; the store goes with the coordinator."""
    with named_hosts(1) as hosts:
        return {"named_c10d_s": lose_coordinator(launcher, hosts, hosts.servers, "c10d", "host0:29400")}


@dataclass(frozen=True)
class Hosts:
    """Nodes named host0, host1 and so on, and the name servers that they ask."""

    net: Net
    folder: Path
    servers: list[NameServer]
    nodes: list[Node]

    def tell(self, addresses: Mapping[str, str]) -> None:
        """All name servers know these addresses, by name."""
        for server in self.servers:
            server.learn(addresses)

    @contextmanager
    def etcd(self) -> Iterator[str]:
        """The endpoint of an etcd on a node of its own, by name.

        Raises:
            SkippedError: there is none.
        """
        node = self.net.node("etcd")
        self.tell({"etcd": node.v4()})
        server = EtcdServer(etcd_program(), self.folder / "etcd", host=node.v4(), port=2379, prefix=node.prefix)
        try:
            server.start()
            yield f"etcd:{server.port}"
        finally:
            server.kill()


@contextmanager
def named_hosts(name_servers: int) -> Iterator[Hosts]:
    """A network with some name servers.

    Raises:
        SkippedError: this machine makes none.
    """
    if reason := netns.why_not():
        raise SkippedError(f"no network of our own can be made here: {reason}")
    with tempfile.TemporaryDirectory(prefix="aelastic-bench-") as name, netns.opened() as net:
        folder = Path(name)
        servers = [name_server(net, folder) for _ in range(name_servers)]
        files = files_of(servers, folder)
        hosts = Hosts(net, folder, servers, [net.node(f"host{number}", files=files) for number in range(HOSTS)])
        hosts.tell({f"host{number}": node.v4() for number, node in enumerate(hosts.nodes)})
        yield hosts


def lose_coordinator(
    launcher: Launcher, hosts: Hosts, silent: Sequence[NameServer], backend: str, endpoint: str
) -> float:
    """Seconds from the death of the coordinator's agent, as name servers fall silent, until the others' workers run."""
    with open_job(launcher, f"1:{HOSTS}", backend=backend, endpoint=endpoint) as job:
        for number, node in enumerate(hosts.nodes):
            job.start(prefix=node.prefix, options=("--local-addr", f"host{number}"))
            if not number:
                job.wait_coordinating(job.agents[0])
        job.wait_running(HOSTS)
        time.sleep(SETTLE_S)
        for server in silent:
            server.fall_silent()
        lost_at = job.agents[0].signal(signal.SIGKILL)
        return job.wait_running(HOSTS - 1, after=lost_at) - lost_at
