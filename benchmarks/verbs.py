"""Measures how long verbs take: `python benchmarks/verbs.py [--agents 64] [--times 50]`.

Agents of one job in one process, over real sockets, whose workers are tasks that wait: what is measured is the way of a
request to the coordinator, to all nodes, and back.  Each is asked of a random node.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence

import anyio
from jobs import free_port

from aelastic import Supervisor, WorkerBackend, WorkerExit, WorkerSpec, WorkerStart
from aelastic.cli.main import collect_rarely
from aelastic.observe.run_events import WorkersStarted
from aelastic.rdzv.settings import RendezvousSettings


class Waiting(WorkerBackend):
    """A worker that waits until it is stopped."""

    def __init__(self) -> None:
        self._stopped: dict[int, anyio.Event] = {}

    async def start(self, starts: Sequence[WorkerStart]) -> Mapping[int, int | None]:
        self._stopped = {start.local_rank: anyio.Event() for start in starts}
        return dict.fromkeys(self._stopped)

    async def wait(self, local_rank: int) -> WorkerExit:
        await self._stopped[local_rank].wait()
        return WorkerExit(-15)

    async def clear(self, local_rank: int) -> None:
        """Nothing is left."""

    def stop(self, local_rank: int, signum: int) -> bool:  # noqa: ARG002
        self._stopped[local_rank].set()
        return True

    async def aclose(self) -> None:
        for stopped in self._stopped.values():
            stopped.set()


async def measure(agents: int, times: int) -> dict[str, object]:
    port, dice = free_port(), random.Random(1)  # noqa: S311  nothing is guarded by it
    found: dict[str, list[float]] = {"status": [], "restart": []}
    supervisors = [
        Supervisor(
            WorkerSpec(
                entrypoint="true",
                run_id="verbs",
                rdzv=RendezvousSettings(
                    "c10d", f"127.0.0.1:{port}", min_nodes=agents, max_nodes=agents, config={"last_call_timeout": "1"}
                ),
                max_restarts=0,
            ),
            backend=Waiting(),
        )
        for _ in range(agents)
    ]
    async with anyio.create_task_group() as tasks:
        for supervisor in supervisors:
            tasks.start_soon(supervisor.run)
            await anyio.sleep(0.01)
        with anyio.fail_after(120):
            while len(await supervisors[0].status()) < agents:  # noqa: ASYNC110  all are there
                await anyio.sleep(0.5)
        await anyio.sleep(1)
        for _ in range(times):
            supervisor = dice.choice(supervisors)
            began = time.perf_counter()
            nodes = await supervisor.status()
            found["status"].append(time.perf_counter() - began)
            assert len(nodes) == agents
        for _ in range(times // 5):
            supervisor = dice.choice(supervisors)
            events = supervisor.events()
            began = time.perf_counter()
            await supervisor.restart("measured")
            found["restart"].append(time.perf_counter() - began)
            async for event in events:
                if isinstance(event, WorkersStarted):
                    break
        await supervisors[0].stop_job("measured")
    return {
        "agents": agents,
        **{
            f"{verb}_ms": [round(sorted(each)[int(len(each) * part)] * 1e3, 1) for part in (0.5, 0.9, 0.99)]
            for verb, each in found.items()
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure how long verbs take.")
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--times", type=int, default=50)
    options = parser.parse_args()
    collect_rarely()  # as agents do
    print(json.dumps(anyio.run(measure, options.agents, options.times, backend_options={"use_uvloop": True})))
    return 0


if __name__ == "__main__":
    sys.exit(main())
