"""Measures what recovery in place costs per step: `round.steps` against `range`, in turn in one process.

    python benchmarks/step_cost.py [--pairs 400] [--steps 25] [--only adamw,batchnorm,ddp,vote,two,four] [--out FOLDER]

A pair is a block of steps with each of the two loops, one right after the other; which comes first alternates.  The
cost is the difference within a pair, of the main thread's processor time, so that other work on the machine changes
little.  With several ranks, a step takes longer than that: what it waits for the others is left out.

The vote before an update (ADR 37) is a wait for others, so its time is what a clock shows: measure it on a quiet
machine.  `vote` makes the steps of HSDP in turn with the vote and without; `two` and `four` time what the vote calls, a
barrier, in turn with a small all-reduce.

Writes `<date>-step-cost.json` (every single figure) and a readable `.md` of the same name.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import Report, describe_machine

HERE = Path(__file__).parent
LIMIT_S = 900.0
TARGET_PERCENT = 1.0


@dataclass(frozen=True)
class Case:
    key: str
    caption: str
    workers: int = 1


CASES = (
    Case("adamw", "one rank, 4 linear layers, AdamW"),
    Case("batchnorm", "the same with BatchNorm after each layer"),
    Case("ddp", "4 gloo ranks, DDP, AdamW", workers=4),
)
WAITS = (
    Case("vote", "HSDP, 2 x 2 gloo ranks, AdamW: a step without the vote; with it", workers=4),
    Case("two", "2 gloo ranks: a small all-reduce; a barrier", workers=2),
    Case("four", "4 gloo ranks: a small all-reduce; a barrier", workers=4),
)
WORKER = "--worker"  # this file is the worker of `WAITS`: then its kind, pairs and steps follow


def measure(case: Case, pairs: int, steps: int) -> dict[str, list[float]]:
    """Seconds per step of each block, by way."""
    command = [sys.executable, "-m", "aelastic", "--standalone", "--max-restarts", "1"]
    command += ["--nproc-per-node", str(case.workers)]
    worker = [__file__, WORKER] if case in WAITS else [str(HERE / "workers" / "step_cost.py")]
    worker += [case.key, str(pairs), str(steps)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([*command, *worker], env=env, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True)
    (line,) = (line for line in ended.stdout.splitlines() if line.startswith("taken "))
    taken: dict[str, list[float]] = json.loads(line.removeprefix("taken "))
    return taken


def row(case: Case, taken: dict[str, list[float]]) -> str:
    plain = statistics.median(taken["range"])
    costs = [ours - theirs for ours, theirs in zip(taken["steps"], taken["range"], strict=True)]
    low, median, high = statistics.quantiles(costs, n=4)
    percent = 100 * median / plain
    verdict = "ok" if percent <= TARGET_PERCENT else "MISSED"
    return (
        f"| {case.caption} | {len(costs)} | {plain * 1e3:.2f} ms | {median * 1e6:+.1f} µs | {low * 1e6:+.0f} to "
        f"{high * 1e6:+.0f} µs | {percent:+.2f} % | ≤ {TARGET_PERCENT:g} % | {verdict} |"
    )


def row_of_wait(case: Case, taken: dict[str, list[float]]) -> str:
    """Of the second table."""
    one, other = taken.values()
    low, median, high = statistics.quantiles([b - a for a, b in zip(one, other, strict=True)], n=4)
    return (
        f"| {case.caption} | {len(one)} | {statistics.median(one) * 1e3:.2f} ms | "
        f"{statistics.median(other) * 1e3:.2f} ms | {median * 1e3:+.2f} ms | {low * 1e3:+.2f} to {high * 1e3:+.2f} ms |"
    )


# The worker of `WAITS`.  torch is imported in workers only.


def compare_votes(pairs: int, steps: int) -> None:
    """Steps of HSDP, with the vote and without."""
    import torch
    from torch import distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from aelastic import in_place

    torch.set_num_threads(1)

    @in_place
    def train(round: Any) -> None:  # noqa: A002  as the pages have it
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(4)))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        done = round.share(model, optimizer, replicas=mesh["replicate"].get_group())
        kept = round._kept  # noqa: SLF001  only a benchmark needs it
        vote, x = kept.hold_vote, torch.randn(32, 128)
        assert vote is not None, "these ranks do not vote"

        def make_step() -> None:
            nonlocal done
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            round.commit(done)

        def steps_without() -> float:
            kept.hold_vote = None  # as in a round that does not need it
            try:
                return seconds_per_call(make_step, steps)
            finally:
                kept.hold_vote = vote

        tell(in_turn({"without": steps_without, "with": lambda: seconds_per_call(make_step, steps)}, pairs))

    train()


def compare_waits(pairs: int, steps: int) -> None:
    """What the vote calls, and an all-reduce."""
    import torch
    from torch import distributed as dist

    from aelastic import in_place

    @in_place
    def wait(_: Any) -> None:
        dist.init_process_group("gloo")
        one = torch.ones(1)
        ways = {
            "all-reduce": lambda: seconds_per_call(lambda: dist.all_reduce(one), steps),
            "barrier": lambda: seconds_per_call(dist.barrier, steps),
        }
        tell(in_turn(ways, pairs))

    wait()


def seconds_per_call(call: Callable[[], object], count: int) -> float:
    from torch import distributed as dist

    dist.barrier()  # all ranks begin at once
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count


def in_turn(ways: dict[str, Callable[[], float]], pairs: int) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for pair in range(-5, pairs):  # the first ones warm up
        for way in ways if pair % 2 else reversed(ways):
            each = ways[way]()
            if pair >= 0:
                taken[way].append(each)
    return taken


def tell(taken: dict[str, list[float]]) -> None:
    if os.environ["RANK"] == "0":
        print("taken", json.dumps(taken), flush=True)


def main() -> None:
    if sys.argv[1:2] == [WORKER]:
        kind, pairs, steps = sys.argv[2:]
        compare = compare_votes if kind == "vote" else compare_waits
        compare(int(pairs), int(steps))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--steps", type=int, default=25, help="in a block")
    parser.add_argument("--only", default=",".join(case.key for case in (*CASES, *WAITS)))
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    machine = describe_machine()
    wanted = options.only.split(",")
    cases, waits = ([case for case in some if case.key in wanted] for some in (CASES, WAITS))
    found = {case.key: measure(case, options.pairs, options.steps) for case in (*cases, *waits)}
    lines: list[str] = []
    if cases:
        lines += ["`round.steps` against `range`, by the processor time of main threads:", ""]
        lines += ["| what | pairs | step with `range` | cost | its quartiles | share | target | |"]
        lines += ["|---|---|---|---|---|---|---|---|", *(row(case, found[case.key]) for case in cases), ""]
    if waits:
        lines += ["The vote before an update, by the clock:", ""]
        lines += ["| what | pairs | one | other | difference | its quartiles |", "|---|---|---|---|---|---|"]
        lines += [row_of_wait(case, found[case.key]) for case in waits]
    method = f"Two ways in turn, in blocks of {options.steps} steps; medians of both, and of the differences in a pair."
    Report("Recovery in place: cost per step", method, machine).write(options.out, "step-cost", lines, taken=found)


if __name__ == "__main__":
    main()
