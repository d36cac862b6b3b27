"""Measures from crash to training again: torchrun, aelastic, and aelastic with `--preload`.

    python benchmarks/warm.py [--repeat 5] [--only restart2,memory] [--before FOLDER] [--out FOLDER]

Workers join a gloo group and pass a barrier, as a script does before its first step.  All launchers take turns in one
run.  Where a launcher loses a restart (gloo finds an address of the generation before), it is given another turn.

What a cold start costs is compared with an earlier aelastic, in the FOLDER of another checkout (`git worktree add`).

Writes `<date>-warm.json` and a readable `.md` of the same name.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

from arguments import Arguments
from one_node import HERE, Launcher, MeasurementError, descendants, proportional_mib
from report import describe_machine

PRELOAD = ("--preload", "torch,torch.distributed")
MANY = 8
LEARNING_S = 10  # from a start until the next crash: what the first workers imported is imported meanwhile
TURNS_MAX = 4


Samples: TypeAlias = dict[str, dict[str, list[float]]]


def restart_of(workers: int) -> Callable[[Launcher], float]:
    """Seconds from the crash of rank 1 until all workers are past a barrier again."""

    def measure(launcher: Launcher) -> float:
        with launcher.start("barrier.py", "1", workers=workers, max_restarts=1) as run:
            crash = run.wait_stamp("crashed", rank=1)
            last = max(run.wait_stamp("joined", rank=rank, restart=1).at for rank in range(workers))
            run.wait_exit()
        return last - crash.at

    return measure


def measure_start(launcher: Launcher) -> float:
    with launcher.start("barrier.py", "0", workers=MANY) as run:
        last = max(run.wait_stamp("joined", rank=rank).at for rank in range(MANY))
        run.wait_exit()
    return last - run.started_at


def measure_cold_start(launcher: Launcher) -> float:
    """Seconds from the command until two workers that import nothing have begun."""
    with launcher.start("stamp.py", "exit", workers=2) as run:
        last = max(run.wait_stamp("started", rank=rank).at for rank in range(2))
        run.wait_exit()
    return last - run.started_at


def measure_cold_group(launcher: Launcher) -> float:
    with launcher.start("barrier.py", "0", workers=2) as run:
        last = max(run.wait_stamp("joined", rank=rank).at for rank in range(2))
        run.wait_exit()
    return last - run.started_at


def measure_trainer(launcher: Launcher) -> float:
    """Seconds from the second crash until both workers' Trainer has done a step again."""
    with launcher.start("trainer.py", "2", f"{LEARNING_S}", workers=2, max_restarts=2) as run:
        for restart in range(2):
            run.wait_stamp("stepped", rank=1, restart=restart)
            crash = run.wait_stamp("crashed", rank=1, restart=restart)
        last = max(run.wait_stamp("stepped", rank=rank, restart=2).at for rank in range(2))
        run.wait_exit()
    return last - crash.at


def measure_memory(launcher: Launcher) -> float:
    """PSS of the fork server and of what it has parked, in units of one worker's; 0 where nothing is parked."""
    with launcher.start("barrier.py", "1", "30", workers=MANY) as run:
        workers = {run.wait_stamp("joined", rank=rank).pid for rank in range(MANY)}
        run.stays_for(4.0)
        parked = [
            pid for pid in descendants(run.pid, but=workers) if "forkserver" in Path(f"/proc/{pid}/cmdline").read_text()
        ]
        worker = statistics.median(alone_mib(pid) for pid in workers)
        return proportional_mib(parked) / worker


def alone_mib(pid: int) -> float:
    """What a worker would take by itself: all of its resident memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS:"))) / 1024


@dataclass(frozen=True)
class Case:
    key: str
    caption: str
    unit: str
    take: Callable[[Launcher], float]
    target: float
    is_ratio: bool = True
    launchers: tuple[str, ...] = ("torchrun", "aelastic", "warm")  # the first is the measure, the last is judged
    preload: tuple[str, ...] = PRELOAD


COLD = ("before", "aelastic")

CASES = (
    Case("restart2", "crash → 2 gloo workers past a barrier again", "s", restart_of(2), 0.10),
    Case(f"restart{MANY}", f"crash → {MANY} gloo workers past a barrier again", "s", restart_of(MANY), 0.04),
    Case("start", f"command → {MANY} gloo workers past a barrier", "s", measure_start, 0.35),
    Case(
        "trainer",
        "second crash → first step of a Hugging Face Trainer, `--preload auto`",
        "s",
        measure_trainer,
        0.20,
        preload=("--preload", "auto"),
    ),
    Case(
        "cold", "cold: command → first line of 2 workers (left: before)", "s", measure_cold_start, 1.02, launchers=COLD
    ),
    Case("cold2", "cold: command → 2 gloo workers past a barrier", "s", measure_cold_group, 1.02, launchers=COLD),
    Case(
        "memory",
        f"fork server and {MANY} parked processes (PSS), in workers",
        "",
        measure_memory,
        1.4,
        False,
        ("warm",),
    ),
)


def main() -> int:
    arguments = Arguments("Measure warm starts against torchrun on one node.", repeat=5, keys=[c.key for c in CASES])
    arguments.add_argument("--before", type=Path, metavar="FOLDER", help="the checkout of an earlier aelastic")
    options = arguments.read()
    command = (sys.executable, "-P", "-m", "aelastic")  # -P: not the one in the current folder
    launchers = {
        "torchrun": Launcher("torchrun", (sys.executable, "-m", "torch.distributed.run")),
        "aelastic": Launcher("aelastic", ("env", f"PYTHONPATH={HERE.parent}", *command)),
        "before": Launcher("before", ("env", f"PYTHONPATH={options.before}", *command)),
    }
    machine = describe_machine()
    samples: Samples = {}
    lost: Counter[str] = Counter()
    for case in CASES:
        if case.key not in options.only:
            continue
        if why := obstacle_of(case, options.before):
            print(f"{case.key} is left out: {why}", flush=True)
            continue
        aelastic = launchers["aelastic"].command
        launchers["warm"] = Launcher("warm", (*aelastic, *case.preload))
        taken = samples[case.key] = {name: [] for name in case.launchers}
        for turn in range(options.repeat):
            for name in case.launchers:
                taken[name].append(take(case, launchers[name], lost))
                print(f"{case.key} {turn} {name}: {taken[name][-1]:.4g}", flush=True)
    write_report(options.out, options.repeat, machine, samples, lost)
    return 0


def obstacle_of(case: Case, before: Path | None) -> str:
    """Why this cannot be measured here, or ""."""
    if "before" in case.launchers and before is None:
        return "it needs an earlier aelastic (--before FOLDER)"
    if case.take is measure_trainer and not all(map(find_spec, ("transformers", "accelerate"))):
        return "transformers and accelerate are not installed"
    return ""


def take(case: Case, launcher: Launcher, lost: Counter[str]) -> float:
    """One figure; infinity if no turn brings one."""
    for _ in range(TURNS_MAX):
        try:
            return case.take(launcher)
        except MeasurementError as error:
            print(f"{case.key} {launcher.name}: {error}", flush=True)
            lost[launcher.name] += 1
    return math.inf


def write_report(folder: Path, repeats: int, machine: dict[str, str], samples: Samples, lost: Counter[str]) -> None:
    date = datetime.now(UTC).date().isoformat()
    facts = ", ".join(f"{name} {value}" for name, value in machine.items())
    lines = [
        f"# Warm starts, {date}",
        "",
        f"Medians of {repeats} runs each, in turn; warm is `aelastic {' '.join(PRELOAD)}`, if not said. {facts}.",
        "",
        "| what | torchrun | aelastic | warm | warm / torchrun (never: / aelastic) | target | |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        if case.key not in samples:
            continue
        medians = {name: statistics.median(values) for name, values in samples[case.key].items()}
        # Where torchrun never came back, the same without a fork server is the measure.
        other = case.launchers[0] if math.isfinite(medians[case.launchers[0]]) else "aelastic"
        judged = medians[case.launchers[-1]] / (medians[other] if case.is_ratio else 1)
        cells = [
            (f"{medians[name]:.3g} {case.unit}".strip() if math.isfinite(medians[name]) else "never")
            if name in medians
            else ""
            for name in ("before" if "before" in medians else "torchrun", "aelastic", "warm")
        ]
        ratio = f"{judged:.3f}" if case.is_ratio else ""
        verdict = "ok" if judged <= case.target else "MISSED"
        lines.append(f"| {case.caption} | {' | '.join(cells)} | {ratio} | ≤ {case.target:g} | {verdict} |")
    if lost:
        told = ", ".join(f"{name} {count}" for name, count in lost.items())
        lines += ["", f"Turns in which workers did not come back within a minute, or failed again: {told}."]
    text = "\n".join(lines) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    report = {"date": date, "machine": machine, "repeat": repeats, "samples": samples, "lost": lost}
    (folder / f"{date}-warm.json").write_text(json.dumps(report, indent=2) + "\n")
    (folder / f"{date}-warm.md").write_text(text)
    print("\n" + text)


if __name__ == "__main__":
    sys.exit(main())
