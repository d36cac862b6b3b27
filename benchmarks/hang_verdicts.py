"""Counts how often the rank that a job waits for is named: seeded jobs with gloo, each of which stands still.

    python benchmarks/hang_verdicts.py [--jobs 60] [--seed 0] [--out FOLDER]

Each job has 2 or 3 agents and 4 to 8 ranks.  One rank does not come to a collective: it computes in C or in Python,
waits for a file, sleeps, waits for a lock, has left the loop, or waits in a collective of another branch; or there are
two groups of ranks.  Half of the jobs start their workers warm.  A job counts as right if every agent names that rank
and no other, and as wrong if any agent names another; else it cannot tell.

Then one job of 8 agents with 8 workers each stands still, without torch: how long after the time-out until each agent
has named the rank.

Writes `<date>-hang-verdicts.json` (every single job) and a readable `.md` of the same name.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from arguments import Arguments
from jobs import free_port
from one_node import HERE
from report import Report, describe_machine

HOWS = ("C", "C without the GIL", "Python", "disk", "asleep", "lock", "left", "branch", "groups")
TIMEOUT_S = 3.0
DEADLINE_S = 180.0
MANY_TIMEOUT_S = 15.0  # 64 interpreters begin within that on two cores
RIGHT_MIN_SHARE = 57 / 60
NAMED = re.compile(r"rank (\d+) on \S+ does not")


@dataclass(frozen=True)
class Plan:
    """One job."""

    seed: int
    how: str
    agents: int
    workers: int  # of each agent
    culprit: int
    step: int
    is_warm: bool


@dataclass(frozen=True)
class Outcome:
    plan: Plan
    verdict: str
    texts: tuple[str, ...]  # of each agent
    took_s: float


def plans(seed: int, count: int) -> Iterator[Plan]:
    for number in range(count):
        dice = random.Random(f"{seed} {number}")  # noqa: S311  jobs are to be the same each time
        agents = dice.choice((2, 3))
        workers = dice.choice((2, 3, 4) if agents == 2 else (2,))
        culprit, step = dice.randrange(agents * workers), dice.randint(3, 40)
        yield Plan(number, HOWS[number % len(HOWS)], agents, workers, culprit, step, number // len(HOWS) % 2 == 1)


def run(plan: Plan, *options: str, **variables: str) -> Outcome:
    """Runs a job to its end.

    Args:
        options: of the agents, instead of hang detection.
        variables: of the workers' environment.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as held:
        fifo = Path(folder, "fifo")
        os.mkfifo(fifo)
        began = time.monotonic()
        warm = ["--preload=torch"] if plan.is_warm else []
        command = [
            sys.executable, "-m", "aelastic", f"--nnodes={plan.agents}", f"--nproc-per-node={plan.workers}",
            "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=job",
            *(options or (f"--hang-timeout={TIMEOUT_S:g}",)), "--shutdown-timeout=0.5", *warm,
            str(HERE / "workers" / "desynchronised.py"), str(plan.culprit), plan.how, str(plan.step),
        ]  # fmt: skip
        env = {**os.environ, **variables, "DESYNCHRONISED_FIFO": str(fifo)}
        agents = [
            subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            for _ in range(plan.agents)
        ]
        for agent in agents:
            held.callback(agent.terminate)  # if another one hangs
        told = [agent.communicate(timeout=DEADLINE_S)[1] for agent in agents]
        took_s = time.monotonic() - began
    texts = tuple(_cause_in(each) for each in told)
    named = [{int(rank) for rank in NAMED.findall(text)} for text in texts]
    is_wrong = any(ranks - {plan.culprit} for ranks in named)
    verdict = "wrong" if is_wrong else "right" if all(named) else "cannot tell"
    return Outcome(plan, verdict, texts, took_s)


def _cause_in(told: str) -> str:
    """The cause in an agent's report, which its exit message and `RunResult` have, too."""
    causes = [line.partition(":")[2].strip() for line in told.splitlines() if re.match(r"\s+cause +:", line)]
    return causes[-1] if causes else told[-500:]


def named_within_s(culprit: int = 37) -> float:
    """Of 64 ranks on 8 agents: from the time-out of the first to stand still until every agent has named the rank."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as held:
        command = [
            sys.executable, "-m", "aelastic", "--nnodes=8", "--nproc-per-node=8", "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=many", f"--hang-timeout={MANY_TIMEOUT_S:g}",
            "--hang-action=report", str(HERE / "workers" / "phase.py"), str(culprit), folder,
        ]  # fmt: skip
        env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        outputs = [Path(folder, f"agent-{number}") for number in range(8)]
        for output in outputs:
            file = held.enter_context(output.open("wb"))
            agent = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=file)
            held.callback(agent.wait)
            held.callback(agent.terminate)
        deadline = time.monotonic() + DEADLINE_S
        while not all(f"rank {culprit} on".encode() in output.read_bytes() for output in outputs):
            if time.monotonic() > deadline:
                raise TimeoutError("\n".join(output.read_text() for output in outputs))
            time.sleep(0.01)
        stood_still = min(float(Path(folder, str(rank)).read_text()) for rank in range(64))
        return time.monotonic() - stood_still - MANY_TIMEOUT_S


def table(outcomes: list[Outcome], many_s: float) -> list[str]:
    counts = Counter(outcome.verdict for outcome in outcomes)
    is_met = counts["right"] >= RIGHT_MIN_SHARE * len(outcomes) and not counts["wrong"]
    found = f"right on every node: {counts['right']}, wrong on any: {counts['wrong']}, not: {counts['cannot tell']}"
    lines = [
        f"Named {found} (target: 57 of 60 right, none wrong): {'ok' if is_met else 'MISSED'}.",
        "",
        f"8 agents with 8 workers each: every agent names the rank {many_s:.2f} s after the time-out (target: 3 s).",
        "",
        "| the rank that does not come | jobs | right | wrong | cannot tell |",
        "|---|---|---|---|---|",
    ]
    for how in HOWS:
        of_it = Counter(outcome.verdict for outcome in outcomes if outcome.plan.how == how)
        lines.append(f"| {how} | {of_it.total()} | {of_it['right']} | {of_it['wrong']} | {of_it['cannot tell']} |")
    return lines


def main() -> int:
    parser = Arguments("Count how often the rank that a job waits for is named.", repeat=1)
    parser.add_argument("--jobs", type=int, default=60, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the jobs (default: %(default)s)")
    options = parser.read()
    machine = describe_machine()
    outcomes = []
    for plan in plans(options.seed, options.jobs):
        outcome = run(plan)
        outcomes.append(outcome)
        print(plan.seed, plan.how, outcome.verdict, f"{outcome.took_s:.1f} s", outcome.texts[0], flush=True)
    many_s = named_within_s()
    method = f"{len(outcomes)} seeded jobs of 2 or 3 agents and 4 to 8 ranks with gloo, that stand still."
    Report("Which rank hangs", method, machine).write(
        options.out, "hang-verdicts", table(outcomes, many_s),
        many_s=many_s, outcomes=[asdict(outcome) for outcome in outcomes],
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
