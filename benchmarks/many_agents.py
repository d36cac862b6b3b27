"""Runs many agents' links in one process, over real sockets, and prints how long a round takes them, as JSON.

    python benchmarks/many_agents.py 1000 4000 8000 [--rounds 3]

What `many_nodes.py` runs for its last rows.  The agents have no workers: this is the rendezvous alone, with the
coordinator's end and all the others' in one thread, so a job of as many nodes has less to do in each process.  One
agent leads before the others start, and leases are long: heartbeats of all in one thread, every other second, would be
a part of each round that grows with the time it takes.  Of
several counts, each in a process of its own, it also prints the growth: how much more processor time a round takes
than that of the count before, and how many times as many agents that is.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import anyio

from aelastic.cli.main import collect_rarely
from aelastic.errors import ProcessFailure
from aelastic.rdzv.agent_link import AgentLink
from aelastic.rdzv.decisions import wording
from aelastic.rdzv.protocol.messages import (
    Assigned,
    Ended,
    Failed,
    Interrupted,
    LeaderMessage,
    Node,
    Ready,
)
from aelastic.rdzv.protocol.secret_file import SecretFile
from aelastic.rdzv.restart_policy import RestartPolicy
from aelastic.rdzv.settings import RendezvousSettings

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from kit.shared_cell import InProcessCell, SharedWorld

RUN_ID = "many"
LIMIT_S = 280.0
POLL_S = 0.001
PAUSE_S = 0.5  # between two rounds, so that one does not pay for the other's rests
LEASE_S = 60.0
DESCRIPTORS = 2  # of each agent: its end of the connection, the coordinator's end
# A round of as many nodes has no elections; without them, no agent listens for votes.
CONFIG = {"lease": str(LEASE_S), "survivor": "endpoint"}


class Instant(NamedTuple):
    """A point in time, or how long something took."""

    clock_s: float
    cpu_s: float

    @classmethod
    def now(cls) -> Instant:
        return cls(time.perf_counter(), time.process_time())

    @classmethod
    def since(cls, began: Instant) -> Instant:
        return cls(*(end - start for end, start in zip(cls.now(), began, strict=True)))


class Secret(SecretFile):
    """That of all agents; it is looked at once for all, as in each process of a job."""

    is_followed = False

    async def follow(self) -> None:
        if self.is_followed:
            await anyio.sleep_forever()
        self.is_followed = True
        await super().follow()


class Agents:
    """All of them, and how many have the ranks of the current round."""

    def __init__(self, count: int, rounds: int, secret: str | None = None) -> None:
        self._count = count
        self._secret = Secret(secret, RUN_ID) if secret else None
        self._settings = RendezvousSettings(
            backend="c10d", endpoint="localhost", min_nodes=count, max_nodes=count, config=CONFIG
        )
        self._policy = RestartPolicy(rounds)
        self._world = SharedWorld()
        self._links: list[AgentLink] = []
        self._told = 0
        self._round = 0
        self._all_told = anyio.Event()

    async def measure(self, rounds: int) -> dict[str, float | list[float]]:
        """Seconds from the first agent's start to the last one's ranks; from a failure to the last one's new ranks.

        Each by the clock, and of processor time.
        """
        with anyio.fail_after(LIMIT_S):
            async with anyio.create_task_group() as tasks:
                began = Instant.now()
                for number in range(self._count):
                    node = Node(f"id-{number}", f"host-{number}", "default", 1, "", 29500)
                    endpoint = InProcessCell(RUN_ID, self._world)
                    link = AgentLink(endpoint, self._settings, RUN_ID, node.node_id, self._policy, secret=self._secret)
                    self._links.append(link)
                    tasks.start_soon(link.run, self._listener_of(link, node))
                    link.send(Ready(node))
                    while not self._links[0].coordinates:  # noqa: ASYNC110  a link tells only of what agents have to do
                        await anyio.sleep(POLL_S)
                    await anyio.lowlevel.checkpoint()  # else all connect at once, in one thread, and time out
                await self._all_told.wait()
                first = Instant.since(began)
                again = [await self._fail() for _ in range(rounds)]
                tasks.cancel_scope.cancel()
        return {
            "first_s": first.clock_s,
            "again_s": [each.clock_s for each in again],
            "first_cpu_s": first.cpu_s,
            "again_cpu_s": [each.cpu_s for each in again],
        }

    async def _fail(self) -> Instant:
        """Seconds from one agent's failure until all agents are in the next round."""
        await anyio.sleep(PAUSE_S)
        self._told, self._all_told = 0, anyio.Event()
        victim = self._count // 2
        failure = ProcessFailure.from_elsewhere(f"host-{victim}", victim, 0, 1, 1, "exit code 1", "", 0)
        began = Instant.now()
        self._links[victim].send(Failed(f"id-{victim}", self._round, failure))
        await self._all_told.wait()
        return Instant.since(began)

    def _listener_of(self, link: AgentLink, node: Node) -> Callable[[LeaderMessage], None]:
        def deliver(message: LeaderMessage) -> None:
            match message:
                case Assigned():
                    self._told, self._round = self._told + 1, message.round
                    if self._told == self._count:
                        self._all_told.set()
                case Interrupted():
                    link.send(Ready(node))  # there are no workers that would have to end first
                case Ended():
                    sys.exit(f"the job ended: {wording.text_of(message.decision)}")
                case _:
                    pass  # others change nothing here

        return deliver


def main() -> None:
    parser = argparse.ArgumentParser(description="Many agents in one process.")
    parser.add_argument("counts", type=int, nargs="+", metavar="count")
    parser.add_argument("--rounds", type=int, default=3, help="after the first one (default: %(default)s)")
    parser.add_argument("--secret-file", metavar="PATH", help="agents prove it to each other; for one count")
    options = parser.parse_args()
    if len(options.counts) == 1:
        print(json.dumps(measure(options.counts[0], options.rounds, options.secret_file)))
        return
    taken = {count: measure_apart(count, options.rounds) for count in sorted(options.counts)}
    print(json.dumps({"agents": taken, "growth": growth(taken)}, indent=2))


def measure(count: int, rounds: int, secret: str | None) -> dict[str, Any]:
    needed = count * DESCRIPTORS + 100
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < needed:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, needed))
        except (ValueError, OSError):
            sys.exit(f"{count} agents need {needed} files, more than `ulimit -Hn` allows ({most})")
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    agents = Agents(count, rounds, secret)
    collect_rarely()  # as the command line does
    use_uvloop = {"use_uvloop": sys.platform != "win32"}
    return anyio.run(agents.measure, rounds, backend_options=use_uvloop)


def measure_apart(count: int, rounds: int) -> Any:
    command = [sys.executable, __file__, str(count), "--rounds", str(rounds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else sys.exit(done.returncode)


def growth(taken: dict[int, Any]) -> list[dict[str, float]]:
    """From each count to the next: times as many agents, and times as much processor time."""
    found = []
    for few, many in zip(taken, list(taken)[1:], strict=False):
        first = taken[many]["first_cpu_s"] / taken[few]["first_cpu_s"]
        again = min(taken[many]["again_cpu_s"]) / min(taken[few]["again_cpu_s"])  # those that least came between
        found.append({"from": few, "to": many, "agents": many / few, "first": first, "again": again})
    return found


if __name__ == "__main__":
    main()
