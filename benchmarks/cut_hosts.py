"""Jobs of nodes whose network is cut or loses packets, and what is decided meanwhile, for `many_nodes.py`.

The endpoint is on a host of its own.  Workers need no peer, so nobody but its agent ends a worker that is cut off.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jobs import LIMIT_S, Agent, Job, open_job
from kit.faults.chaos import Undo, serve_endpoint
from kit.faults.netns import Node
from lost_hosts import LEASE_S, SETTLE_S, TWO_LEASES_S, Hosts, hosts_of
from one_node import Launcher, MeasurementError, descendants

LOOK_S = 0.02
# How long an earlier round may run beside a later one.
BESIDE_S = LEASE_S + 1


@dataclass(frozen=True)
class CutHosts(Hosts):
    """Three hosts, and one that serves the endpoint."""

    served_by: Node
    endpoint: str

    def cut(self, number: int, *, inbound: bool = True, outbound: bool = True) -> Undo:
        """Cuts a host off from all others; returns what connects it again."""
        node = self.nodes[number]
        others = [other for other in (*self.nodes, self.served_by) if other is not node]
        return self.net.isolate(node, others, inbound=inbound, outbound=outbound)


@contextmanager
def cut_hosts() -> Iterator[CutHosts]:
    with hosts_of(3) as hosts:
        served_by = hosts.net.node("endpoint")
        yield CutHosts(hosts.net, hosts.nodes, served_by, serve_endpoint(hosts.net, served_by))


# --- cuts -------------------------------------------------------------------------------------------------------------


def measure_cut(key: str, *, inbound: bool = True, outbound: bool = True) -> Callable[[Launcher], dict[str, float]]:
    """A host that does not lead is cut off, both ways or one way."""

    def measure(launcher: Launcher) -> dict[str, float]:
        with cut_hosts() as hosts, open_job(launcher, "1:3", endpoint=hosts.endpoint) as job:
            hosts.start_and_settle(job)
            worker, lost_at = worker_of(job, 2), time.monotonic()
            hosts.cut(2, inbound=inbound, outbound=outbound)
            running_at = job.wait_running(2, after=lost_at)
            ended_at = wait_gone(worker, lost_at + LIMIT_S)
            return {f"{key}_s": running_at - lost_at, f"{key}_beside_s": max(ended_at - running_at, 0.0)}

    return measure


def measure_loss(key: str, percent: int, *, endpoints: int) -> Callable[[Launcher], dict[str, float]]:
    """Packets are lost and the leader's host is cut off for two leases: perhaps no round begins meanwhile."""

    def measure(launcher: Launcher) -> dict[str, float]:
        with cut_hosts() as hosts:
            endpoint = hosts.endpoint if endpoints == 1 else hosts.endpoints(endpoints)
            with open_job(launcher, "1:3", endpoint=endpoint) as job:
                hosts.start_and_settle(job, first_leads=endpoints == 1)
                leader = next(number for number, agent in enumerate(job.agents) if agent.coordinates)
                worker, lost_at = worker_of(job, leader), time.monotonic()
                undos = hosts.net.filter(f"numgen random mod 100 < {percent} drop"), hosts.cut(leader)
                ended_at = wait_gone(worker, lost_at + TWO_LEASES_S)
                time.sleep(max(lost_at + TWO_LEASES_S - time.monotonic(), 0.0))
                for undo in undos:
                    undo()
                job.wait_running(3, after=lost_at)
                later = [*job.workers(2, lost_at).values(), *job.workers(3, lost_at).values()]
                return {key: max(ended_at - min(stamp.at for stamp in later), 0.0)}

    return measure


def worker_of(job: Job, number: int) -> int:
    """The worker of an agent of three."""
    below = {*descendants(job.agents[number].process.pid)}
    (pid,) = (stamp.pid for stamp in job.workers(3).values() if stamp.pid in below)
    return pid


def wait_gone(worker: int, until: float) -> float:
    """The time when a worker has ended.

    Raises:
        MeasurementError: it runs on.
    """
    while Path(f"/proc/{worker}").exists():
        if time.monotonic() > until:
            raise MeasurementError("the worker of a host that is cut off runs on")
        time.sleep(LOOK_S)
    return time.monotonic()


# --- decisions while a leader is lost ---------------------------------------------------------------------------------


def measure_verdict_cut(launcher: Launcher) -> dict[str, float]:
    """A job fails while a host is cut off; that host's agent reads the verdict when it is back."""
    with cut_hosts() as hosts, open_job(launcher, "3", endpoint=hosts.endpoint) as job:
        hosts.start_and_settle(job)
        connect = hosts.cut(2)
        os.kill(worker_of(job, 0), signal.SIGKILL)
        code = wait_ended(job.agents[:2], 2 * LEASE_S + LIMIT_S)
        connect()
        back_at = time.monotonic()
        if wait_ended(job.agents[2:], LIMIT_S) != code:
            raise MeasurementError("the agent that was cut off has ended with another code")
        return {"verdict_cut_s": time.monotonic() - back_at}


def measure_verdict_leader(launcher: Launcher) -> dict[str, float]:
    """The leader's host, which is cordoned, is killed as a worker of another one crashes, and no restart is left."""
    with led_from_outside(launcher) as (job, _):
        os.kill(job.workers(2)[0].pid, signal.SIGKILL)
        lost_at = job.agents[0].kill_node()
        wait_ended(job.agents[1:], LIMIT_S)
        return {"verdict_leader_s": time.monotonic() - lost_at}


def measure_request(launcher: Launcher) -> dict[str, float]:
    """The same host is killed once it has acknowledged a request: to keep another host out of the job."""
    with led_from_outside(launcher) as (job, door):
        ask(door, "cordon", "host1")
        lost_at = job.agents[0].kill_node()
        return {"request_s": job.wait_running(1) - lost_at}


@contextmanager
def led_from_outside(launcher: Launcher) -> Iterator[tuple[Job, Path]]:
    """Two hosts at work, and a third that leads, so that its loss costs no round; also the last agent's folder."""
    with (
        cut_hosts() as hosts,
        tempfile.TemporaryDirectory(prefix="aelastic-bench-", ignore_cleanup_errors=True) as folder,
        open_job(launcher, "1:3", endpoint=hosts.endpoint) as job,
    ):
        doors = [Path(folder) / str(number) for number in range(3)]
        for node, door in zip(hosts.nodes, doors, strict=True):
            door.mkdir(mode=0o700)
            job.start(prefix=[*node.prefix, "env", f"XDG_RUNTIME_DIR={door}"])
            job.wait_coordinating(job.agents[0])
        job.wait_running(3)
        asked_at = time.monotonic()
        ask(doors[2], "cordon", "host0")
        job.wait_running(2, after=asked_at)
        time.sleep(SETTLE_S)
        yield job, doors[2]


def ask(door: Path, *argv: str) -> None:
    """Asks an agent for something; returns once that is acknowledged.

    Raises:
        MeasurementError: it is refused.
    """
    command, env = [sys.executable, "-m", "aelastic", *argv], {**os.environ, "XDG_RUNTIME_DIR": str(door)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise MeasurementError(f"{' '.join(argv)}: {done.stderr.strip()}")


def wait_ended(agents: list[Agent], limit_s: float) -> int:
    """The exit code of all these agents, once they have ended.

    Raises:
        MeasurementError: one does not end, or they end with several codes.
    """
    deadline = time.monotonic() + limit_s
    try:
        codes = {agent.process.wait(max(deadline - time.monotonic(), 0.1)) for agent in agents}
    except subprocess.TimeoutExpired:
        raise MeasurementError(f"an agent has not ended after {limit_s:.0f} s") from None
    if len(codes) > 1:
        raise MeasurementError(f"agents have ended with the codes {sorted(codes)}")
    return codes.pop()
