"""Trains on the nodes of a Ray cluster: Ray finds the nodes, and an agent on each keeps the workers running.

    pip install ray
    python ray_nodes.py --nodes 2 --workers 2 ddp.py --checkpoint /shared/checkpoint.pt

Each node runs one Ray task, which is an agent of aelastic.  The agent restarts failed workers inside its task, in a
fraction of a second and without Ray; Ray restarts a task only when the task itself is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from aelastic import AelasticError, RendezvousSettings, Supervisor, WorkerSpec


@ray.remote(num_cpus=0)
def free_address() -> str:
    """An endpoint on the node that runs this, where the agents meet."""
    with socket.create_server(("", 0)) as taken:
        return f"{ray.util.get_node_ip_address()}:{taken.getsockname()[1]}"


@ray.remote(num_cpus=1, max_retries=3)
def agent(run_id: str, endpoint: str, rank: int, options: argparse.Namespace) -> str:
    """One agent.  Its answer is how the job ended; a string, since errors of workers may not travel."""
    nodes = RendezvousSettings(
        backend="c10d", endpoint=endpoint, min_nodes=options.min_nodes, max_nodes=options.nodes, node_rank=rank
    )
    spec = WorkerSpec(
        entrypoint=sys.executable,
        args=("-u", options.script, *options.args),
        local_world_size=options.workers,
        max_restarts=options.max_restarts,
        run_id=run_id,
        rdzv=nodes,
    )
    try:
        result = asyncio.run(Supervisor(spec).run())
    except AelasticError as error:
        return str(error)
    return "" if not result.is_failed() else result.reason or "the workers failed"


def main() -> int:
    parser = argparse.ArgumentParser(description="Train on the nodes of a Ray cluster.")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--min-nodes", type=int, default=0, help="continue with at least this many (default: all)")
    parser.add_argument("--workers", type=int, default=1, help="on each node")
    parser.add_argument("--max-restarts", type=int, default=3)
    parser.add_argument("script", type=os.path.abspath, help="a path that all nodes have")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    options.min_nodes = options.min_nodes or options.nodes

    ray.init()
    group = placement_group([{"CPU": 1}] * options.nodes, strategy="SPREAD")
    ray.get(group.ready())
    places = [PlacementGroupSchedulingStrategy(group, index) for index in range(options.nodes)]
    endpoint = ray.get(free_address.options(scheduling_strategy=places[0]).remote())
    run_id = ray.get_runtime_context().get_job_id()
    answers = [
        agent.options(scheduling_strategy=place).remote(run_id, endpoint, rank, options)
        for rank, place in enumerate(places)
    ]
    ends = [end for end in ray.get(answers) if end]
    print("\n".join(ends) or "ray_nodes: the job has succeeded")
    return 1 if ends else 0


if __name__ == "__main__":
    sys.exit(main())
