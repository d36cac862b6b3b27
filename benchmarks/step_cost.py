"""Measures what recovery in place costs per step: `round.steps` against `range`, in turn in one process.

    python benchmarks/step_cost.py [--pairs 400] [--steps 25] [--only adamw,batchnorm,ddp] [--out FOLDER]

A pair is a block of steps with each of the two loops, one right after the other; which comes first alternates.  The
cost is the difference within a pair, of the main thread's processor time, so that other work on the machine changes
little.  With several ranks, a step takes longer than that: what it waits for the others is left out.

Writes `<date>-step-cost.json` (every single figure) and a readable `.md` of the same name.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

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


def measure(case: Case, pairs: int, steps: int) -> dict[str, list[float]]:
    """Processor seconds per step of each block, by loop."""
    command = [sys.executable, "-m", "aelastic", "--standalone", "--max-restarts", "1"]
    command += ["--nproc-per-node", str(case.workers)]
    worker = [str(HERE / "workers" / "step_cost.py"), case.key, str(pairs), str(steps)]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--steps", type=int, default=25, help="in a block")
    parser.add_argument("--only", default=",".join(case.key for case in CASES))
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    machine = describe_machine()
    cases = [case for case in CASES if case.key in options.only.split(",")]
    found = {case.key: measure(case, options.pairs, options.steps) for case in cases}
    lines = [
        "| what | pairs | step with `range` | cost | its quartiles | share | target | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [row(case, found[case.key]) for case in cases]
    method = f"`round.steps` against `range`, blocks of {options.steps} steps in turn; processor time of main threads."
    Report("Recovery in place: cost per step", method, machine).write(options.out, "step-cost", lines, taken=found)


if __name__ == "__main__":
    main()
