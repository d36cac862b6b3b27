"""Runs a function on several workers and collects what each returns.

    python function.py --workers 4 --start-method spawn

The entrypoint is a plain function instead of a script.  `multiprocessing` starts it in a process per worker, with the
environment variables of a distributed job, and `RunResult.return_values` maps global ranks to return values.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys

from aelastic import Supervisor, WorkerSpec


def count_hits(samples: int) -> int:
    """How many of `samples` random points of the unit square are inside the quarter circle.

    Runs in each worker, so it must be importable: at the top level of a module, with the `__main__` guard below.
    """
    numbers = random.Random(int(os.environ["RANK"]))
    return sum(numbers.random() ** 2 + numbers.random() ** 2 < 1.0 for _ in range(samples))


def main() -> int:
    parser = argparse.ArgumentParser(description="Estimate pi on several workers.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=100_000, help="points for each worker")
    parser.add_argument("--start-method", choices=["spawn", "fork", "forkserver"], default="spawn")
    options = parser.parse_args()

    spec = WorkerSpec(
        entrypoint=count_hits,
        args=(options.samples,),
        local_world_size=options.workers,
        start_method=options.start_method,
        max_restarts=1,
    )
    result = asyncio.run(Supervisor(spec).run())
    if result.is_failed():
        for rank, failure in sorted(result.failures.items()):
            print(f"rank {rank}: {failure}", file=sys.stderr)
        return 1
    for rank, hits in sorted(result.return_values.items()):
        print(f"rank {rank}: {hits} of {options.samples} points inside")
    hits = sum(result.return_values.values())
    print(f"pi is about {4 * hits / (options.samples * options.workers):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
