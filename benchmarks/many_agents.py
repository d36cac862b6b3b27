"""Runs many agents' links in this process, over real sockets, and prints how long a round takes them, as JSON.

    python benchmarks/many_agents.py 1000 [--rounds 3]

What `many_nodes.py` runs for its last rows.  The agents have no workers: this is the rendezvous alone, with the
coordinator's end and all the others' in one thread, so a job of as many nodes has less to do in each process.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import anyio

from aelastic.cli.main import collect_rarely
from aelastic.errors import ProcessFailure
from aelastic.rdzv.agent_link import AgentLink
from aelastic.rdzv.coordinator.restart_policy import RestartPolicy
from aelastic.rdzv.protocol.messages import (
    Assigned,
    CoordinatorMessage,
    Ended,
    Failed,
    Interrupted,
    Node,
    Ready,
)
from aelastic.rdzv.settings import RendezvousSettings

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from kit.shared_board import InProcessBoard, SharedWorld

RUN_ID = "many"
LIMIT_S = 120.0
PAUSE_S = 0.5  # between two rounds, so that one does not pay for the other's rests
DESCRIPTORS = 3  # of each agent: the listener of its claim, its end of the connection, the coordinator's end


class Agents:
    """All of them, and how many have the ranks of the current round."""

    def __init__(self, count: int, rounds: int) -> None:
        self._count = count
        self._settings = RendezvousSettings(backend="c10d", endpoint="localhost", min_nodes=count, max_nodes=count)
        self._policy = RestartPolicy(rounds)
        self._world = SharedWorld()
        self._links: list[AgentLink] = []
        self._told = 0
        self._round = 0
        self._all_told = anyio.Event()

    async def measure(self, rounds: int) -> dict[str, float | list[float]]:
        """Seconds from the first agent's start to the last one's ranks; from a failure to the last one's new ranks."""
        with anyio.fail_after(LIMIT_S):
            async with anyio.create_task_group() as tasks:
                began = time.perf_counter()
                for number in range(self._count):
                    node = Node(f"id-{number}", f"host-{number}", "default", 1, "", 29500)
                    board = InProcessBoard(RUN_ID, self._world)
                    link = AgentLink(board, self._settings, RUN_ID, node.node_id, self._policy)
                    self._links.append(link)
                    tasks.start_soon(link.run, self._listener_of(link, node))
                    link.tell(Ready(node))
                await self._all_told.wait()
                first_s = time.perf_counter() - began
                again_s = [await self._fail() for _ in range(rounds)]
                tasks.cancel_scope.cancel()
        return {"first_s": first_s, "again_s": again_s}

    async def _fail(self) -> float:
        """Seconds from one agent's failure until all agents are in the next round."""
        await anyio.sleep(PAUSE_S)
        self._told, self._all_told = 0, anyio.Event()
        victim = self._count // 2
        failure = ProcessFailure.from_elsewhere(f"host-{victim}", victim, 0, 1, 1, "exit code 1", "", 0)
        began = time.perf_counter()
        self._links[victim].tell(Failed(f"id-{victim}", self._round, failure))
        await self._all_told.wait()
        return time.perf_counter() - began

    def _listener_of(self, link: AgentLink, node: Node) -> Callable[[CoordinatorMessage], None]:
        def deliver(message: CoordinatorMessage) -> None:
            match message:
                case Assigned():
                    self._told, self._round = self._told + 1, message.round
                    if self._told == self._count:
                        self._all_told.set()
                case Interrupted():
                    link.tell(Ready(node))  # there are no workers that would have to end first
                case Ended():
                    sys.exit(f"the job ended: {message.reason}")
                case _:
                    pass  # others change nothing here

        return deliver


def main() -> None:
    parser = argparse.ArgumentParser(description="Many agents in one process.")
    parser.add_argument("count", type=int)
    parser.add_argument("--rounds", type=int, default=3, help="after the first one (default: %(default)s)")
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most != resource.RLIM_INFINITY and most < options.count * DESCRIPTORS + 100:
        sys.exit(f"{options.count} agents need more files than `ulimit -Hn` allows ({most})")
    agents = Agents(options.count, options.rounds)
    collect_rarely()  # as the command line does
    use_uvloop = {"use_uvloop": sys.platform != "win32"}
    print(json.dumps(anyio.run(agents.measure, options.rounds, backend_options=use_uvloop)))


if __name__ == "__main__":
    main()
