"""Jobs of nodes on hosts of their own, which lose hosts, stores and packets, for `many_nodes.py`.

Each node is in a network namespace of its own: nobody serves the endpoint of another host.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from jobs import LIMIT_S, LOOK_AGAIN_S, Job, SkippedError, etcd_program, open_job
from one_node import Launcher, MeasurementError

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from kit.faults import netns
from kit.faults.chaos import serve_endpoint
from kit.faults.netns import Net, Node
from kit.servers.etcd_servers import EtcdServer

PORT = 29400
SETTLE_S = 2.0
LEASE_S = 5.0  # aelastic's default
TWO_LEASES_S = 2 * LEASE_S + 1
AWAY_S = 60.0
LOST_PERCENT = 28


@dataclass(frozen=True)
class Hosts:
    """A network with one host for each node."""

    net: Net
    nodes: list[Node]

    def endpoints(self, count: int = 1) -> str:
        """Of the first so many nodes."""
        return ",".join(f"{node.v4()}:{PORT}" for node in self.nodes[:count])

    def start(self, job: Job, numbers: Sequence[int]) -> float:
        """Starts agents on these hosts; when the last of them began."""
        for number in numbers:
            job.start(prefix=self.nodes[number].prefix)
        return job.agents[-1].started_at

    def start_and_settle(self, job: Job, *, first_leads: bool = True) -> None:
        """Starts all, and returns when nothing more is to come."""
        numbers = range(len(self.nodes))
        if first_leads:
            self.start(job, numbers[:1])
            job.wait_coordinating(job.agents[0])
        self.start(job, numbers[1:] if first_leads else numbers)
        job.wait_running(len(self.nodes))
        time.sleep(SETTLE_S)


@contextmanager
def hosts_of(count: int) -> Iterator[Hosts]:
    """A network with so many hosts.

    Raises:
        SkippedError: this machine makes none.
    """
    if reason := netns.why_not():
        raise SkippedError(f"no network of our own can be made here: {reason}")
    with netns.opened() as net:
        yield Hosts(net, [net.node(f"host{number}") for number in range(count)])


def crash(job: Job, count: int) -> float:
    """Kills the worker of rank 0; when."""
    at = time.monotonic()
    os.kill(job.workers(count)[0].pid, signal.SIGKILL)
    return at


# --- hosts ------------------------------------------------------------------------------------------------------------


def measure_first_host(count: int, key: str) -> Callable[[Launcher], dict[str, float]]:
    """Every process of the first host is killed: agent, worker, and the endpoint's store."""

    def measure(launcher: Launcher) -> dict[str, float]:
        with hosts_of(count) as hosts, open_job(launcher, f"1:{count}", endpoint=hosts.endpoints()) as job:
            hosts.start_and_settle(job)
            lost_at = job.agents[0].kill_node()
            return {key: job.wait_running(count - 1, after=lost_at) - lost_at}

    return measure


def measure_power(launcher: Launcher) -> dict[str, float]:
    """The first host of three loses its power: nobody is told."""
    with hosts_of(3) as hosts, open_job(launcher, "1:3", endpoint=hosts.endpoints()) as job:
        hosts.start_and_settle(job)
        hosts.net.pull_out(hosts.nodes[0])
        lost_at = job.agents[0].kill_node()
        return {"power_s": job.wait_running(2, after=lost_at) - lost_at}


def measure_endpoint(launcher: Launcher) -> dict[str, float]:
    """Nobody reaches the endpoint for more than two leases, and no worker notices; then one crashes."""
    with hosts_of(3) as hosts:
        served_by = hosts.net.node("endpoint")
        endpoint = serve_endpoint(hosts.net, served_by)
        with open_job(launcher, "3", endpoint=endpoint, max_restarts=3) as job:
            hosts.start_and_settle(job)
            hosts.net.isolate(served_by, hosts.nodes)
            job.stays_untouched(3, TWO_LEASES_S)
            crashed_at = crash(job, 3)
            return {"endpoint_s": job.wait_running(3, after=crashed_at) - crashed_at}


def measure_all_restarted(launcher: Launcher) -> dict[str, float]:
    """All agents are killed and started again, that of the endpoint's host last."""
    with hosts_of(3) as hosts, open_job(launcher, "3", endpoint=hosts.endpoints()) as job:
        hosts.start_and_settle(job)
        for agent in job.agents:
            agent.kill_node()
        lost_at = time.monotonic()
        started_at = hosts.start(job, (2, 1, 0))
        return {"all_restarted_s": job.wait_running(3, after=lost_at) - started_at}


# --- stores -----------------------------------------------------------------------------------------------------------


def measure_loss(launcher: Launcher) -> dict[str, float]:
    """Three endpoints, over a network that loses packets: the leader's host is killed."""
    with hosts_of(3) as hosts, open_job(launcher, "1:3", endpoint=hosts.endpoints(3)) as job:
        hosts.start_and_settle(job, first_leads=False)
        hosts.net.filter(f"numgen random mod 100 < {LOST_PERCENT} drop")
        leader = next(agent for agent in job.agents if agent.coordinates)
        lost_at = leader.kill_node()
        return {"loss_s": job.wait_running(2, after=lost_at) - lost_at}


def measure_most_endpoints(launcher: Launcher) -> dict[str, float]:
    """Of three endpoints two are away for a minute, and no worker notices; one crashes, and they are back."""
    with hosts_of(3) as hosts, open_job(launcher, "3", endpoint=hosts.endpoints(3), max_restarts=3) as job:
        hosts.start_and_settle(job, first_leads=False)
        undo = hosts.net.filter(*(f"tcp {end}port {PORT} drop" for end in "sd"))
        job.stays_untouched(3, AWAY_S)
        return {"most_endpoints_s": restart_once_back(job, undo)}


def measure_most_etcds(launcher: Launcher) -> dict[str, float]:
    """The same with two of three etcd servers."""
    with hosts_of(3) as hosts, three_etcds(hosts.net) as servers:
        endpoint = ",".join(server.endpoint for server in servers)
        with open_job(launcher, "3", backend="etcd-v3", endpoint=endpoint, max_restarts=3) as job:
            hosts.start_and_settle(job)
            for server in servers[:2]:
                server.stop()
            job.stays_untouched(3, AWAY_S)

            def undo() -> None:
                for server in servers[:2]:
                    server.cont()

            return {"most_etcds_s": restart_once_back(job, undo)}


def restart_once_back(job: Job, undo: Callable[[], None]) -> float:
    """Seconds from when most stores are back until a worker that has crashed meanwhile runs again, with all others."""
    crashed_at = crash(job, 3)
    time.sleep(SETTLE_S)
    undo()
    back_at = time.monotonic()
    return job.wait_running(3, after=crashed_at) - back_at


@contextmanager
def three_etcds(net: Net) -> Iterator[list[EtcdServer]]:
    """A cluster on a host of its own.

    Raises:
        SkippedError: there is no etcd.
    """
    program, node, peers = etcd_program(), net.node("etcd"), [2380, 2390, 2400]
    with (
        tempfile.TemporaryDirectory(prefix="aelastic-bench-", ignore_cleanup_errors=True) as folder,
        ExitStack() as stack,
    ):
        servers = [
            EtcdServer(
                program,
                Path(folder) / str(peer),
                host=node.v4(),
                port=peer - 1,
                prefix=node.prefix,
                peer_port=peer,
                peers=peers,
            )
            for peer in peers
        ]
        for server in servers:
            stack.callback(server.kill)
            server.start()
        deadline = time.monotonic() + LIMIT_S
        while not all(server.health() for server in servers):
            if time.monotonic() > deadline:
                raise MeasurementError(f"three of {program} do not serve")
            time.sleep(LOOK_AGAIN_S)
        yield servers


# --- recovery in place ------------------------------------------------------------------------------------------------


@contextmanager
def open_in_place(launcher: Launcher, nnodes: str) -> Iterator[Job]:
    """A job of three nodes whose workers keep their processes."""
    with hosts_of(3) as hosts:
        endpoint = serve_endpoint(hosts.net, hosts.net.node("endpoint"))
        with open_job(launcher, nnodes, endpoint=endpoint, max_restarts=9, worker="in_place_node.py") as job:
            for number, node in enumerate(hosts.nodes):
                job.start(prefix=[*node.prefix, "env", "GLOO_SOCKET_IFNAME=net1"], options=("--preload", "torch"))
                if number == 0:
                    job.wait_coordinating(job.agents[0])
            job.wait_running(3)
            time.sleep(SETTLE_S)
            yield job


def measure_place_rank(launcher: Launcher) -> dict[str, float]:
    with open_in_place(launcher, "3") as job:
        before = {stamp.pid for stamp in job.workers(3).values()}
        lost_at = time.monotonic()
        os.kill(job.workers(3)[2].pid, signal.SIGKILL)
        running_at = job.wait_running(3, after=lost_at)
        check_kept(before, job, 3, lost_at, kept=2)
        return {"place_rank_s": running_at - lost_at}


def measure_place_agent(*, leader: bool, key: str) -> Callable[[Launcher], dict[str, float]]:
    def measure(launcher: Launcher) -> dict[str, float]:
        with open_in_place(launcher, "1:3") as job:
            before = {stamp.pid for stamp in job.workers(3).values()}
            lost_at = job.agents[0 if leader else 2].kill_node()
            running_at = job.wait_running(2, after=lost_at)
            check_kept(before, job, 2, lost_at, kept=2)
            return {key: running_at - lost_at}

    return measure


def check_kept(before: set[int], job: Job, count: int, after: float, *, kept: int) -> None:
    """So many workers are the same processes as before.

    Raises:
        MeasurementError: fewer are.
    """
    now = {stamp.pid for stamp in job.workers(count, after).values()}
    if len(before & now) != kept:
        raise MeasurementError(f"{len(before & now)} of {kept} workers have kept their processes")
