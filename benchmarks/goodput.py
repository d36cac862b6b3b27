"""Measures effective training time under faults: torchrun, aelastic, with `--preload`, and with recovery in place.

    python benchmarks/goodput.py [--seeds 3] [--nodes 1,3] [--fault-every 12] [--duration 156] [--only torchrun]

A small data-parallel training with a fixed step time, an all_reduce in each step and a checkpoint every so many, and a
seeded schedule of faults, the same for each launcher.  The script is the same for all, but for recovery in place, which
needs a decorated function (`workers/train_in_place.py`).  Agents are restarted from outside after a fixed delay, as
pods are (`pods.py`).  What counts is computed from what the workers have written (`training_time.py`): the share of the
time, from the first step of all nodes on, that is in steps which no later round had to do again.

All launchers take turns in one run.  Writes `<date>-goodput.json` (every run, for `plot_goodput.py`) and a readable
`.md` of the same name.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from jobs import free_port, is_healthy
from one_node import HERE, MeasurementError
from pods import ETCD, FIRST_STEP_LIMIT_S, IN_PLACE, ON_ETCD, ON_THREE, Pods, Training, agent_command, launchers
from report import Report, describe_machine
from training_time import ANNOUNCED, KINDS, Pause, counted_each_second, pauses, progress, schedule, share

THEIRS = "torchrun"
TURNS_MAX = 3
# By launcher and number of nodes: the share to reach, and how many times torchrun's it has to be.
TARGETS = {("aelastic --preload", 3): (0.80, 4.0), (IN_PLACE, 3): (0.98, 4.0)}


@dataclass(frozen=True)
class Run:
    """One job of one launcher.

    Attributes:
        share: of the time, in steps that counted.
        work: the same, where a step counts as much as the share of the nodes that took part in it.
        lost: steps that were finished, and lost or done again.
        start_s: from the start of the agents to the first step of all nodes.
        agents: how many were started.
        faults: seconds from the first step, and kind.
        curve: how many of the counted steps were finished by the first second, the second, …
        failed: why there are no figures, if there are none; the share is 0 then.
    """

    launcher: str
    nodes: int
    seed: int
    share: float = 0.0
    work: float = 0.0
    lost: int = 0
    start_s: float = 0.0
    agents: int = 0
    faults: tuple[tuple[float, str], ...] = ()
    pauses: tuple[Pause, ...] = ()
    curve: tuple[int, ...] = ()
    failed: str = ""


def measure(options: argparse.Namespace, launcher: str, nodes: int, seed: int) -> Run:
    """One run; a job that does not come to its first step is given another turn."""
    for _ in range(TURNS_MAX):
        try:
            return measure_once(options, launcher, nodes, seed)
        except MeasurementError as error:
            failed = str(error)
            print(f"nodes {nodes}, seed {seed}, {launcher}: {failed}", flush=True)
    return Run(launcher, nodes, seed, failed=failed)


def measure_once(options: argparse.Namespace, launcher: str, nodes: int, seed: int) -> Run:
    with job_folder(options.keep, f"{launcher.replace(' ', '')}-{nodes}-{seed}") as folder:
        training = Training(
            agent_command(launcher, (options.min_nodes, nodes + 2), free_port(), folder.name, options.announced),
            nodes,
            options.step_ms / 1000,
            options.checkpoint_every,
            options.restart_delay,
            options.suspended,
            (signal.SIGTERM if launcher == THEIRS else signal.SIGUSR1, options.announced),
            "train_in_place.py" if launcher == IN_PLACE else "train.py",
        )
        pods = Pods(training, folder, lives_s=options.duration + 2 * FIRST_STEP_LIMIT_S)
        try:
            outcome = pods.run(
                schedule(seed, options.duration, options.fault_every, options.announced), options.duration
            )
        finally:
            pods.stop()
    start, end = outcome.start, outcome.end
    made = progress(outcome.done, start, end, nodes)
    return Run(
        launcher,
        nodes,
        seed,
        round(share(len(made.counted), training.step_s, start, end), 4),
        round(share(made.work, training.step_s, start, end), 4),
        made.lost,
        round(outcome.start_s, 3),
        outcome.agents,
        tuple((round(fault.at - start, 3), fault.kind) for fault in outcome.faults),
        tuple(
            Pause(round(pause.at - start, 3), round(pause.seconds, 3), pause.cause)
            for pause in pauses(outcome.done, outcome.faults, training.step_s, start, end)
        ),
        tuple(counted_each_second(made.counted, start, end)),
    )


@contextmanager
def job_folder(keep: Path | None, name: str) -> Iterator[Path]:
    """A folder whose name no other job has; kept if so wished."""
    if keep:
        keep.mkdir(parents=True, exist_ok=True)
        yield Path(tempfile.mkdtemp(prefix=f"{name}-", dir=keep.absolute()))
    else:
        with tempfile.TemporaryDirectory(prefix="aelastic-bench-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)


# --- the report -------------------------------------------------------------------------------------------------------


def of(runs: list[Run], launcher: str, nodes: int) -> list[Run]:
    return [run for run in runs if (run.launcher, run.nodes) == (launcher, nodes)]


HEADS = (
    "nodes",
    "launcher",
    "share",
    "each seed",
    "ratio",
    "share × nodes",
    "ratio",
    "lost or repeated",
    "first step",
    "",
)


def shares_table(runs: list[Run]) -> Iterator[str]:
    yield f"| {' | '.join(HEADS)} |"
    yield "|---" * len(HEADS) + "|"
    for nodes in sorted({run.nodes for run in runs}):
        for launcher in launchers():
            if own := of(runs, launcher, nodes):
                yield f"| {' | '.join(shares_row(own, of(runs, THEIRS, nodes)))} |"


def shares_row(own: list[Run], theirs: list[Run]) -> Iterator[str]:
    ours, ratio = median_and_ratio([run.share for run in own], [run.share for run in theirs])
    work, work_ratio = median_and_ratio([run.work for run in own], [run.work for run in theirs])
    yield str(own[0].nodes)
    yield own[0].launcher
    yield f"{ours:.3f}"
    yield ", ".join(f"{run.share:.2f}" for run in own)
    yield "" if ratio is None else f"{ratio:.2f}"
    yield f"{work:.3f}"
    yield "" if work_ratio is None else f"{work_ratio:.2f}"
    yield f"{statistics.median(run.lost for run in own):g} steps"
    yield f"{statistics.median(run.start_s for run in own):.1f} s"
    if (target := TARGETS.get((own[0].launcher, own[0].nodes))) is None:
        yield ""
        return
    least, times = target
    is_met = ours >= least and (ratio is None or ratio >= times)
    beside = "" if ratio is None else f", ratio ≥ {times:g}"  # torchrun may not have been measured
    yield f"{'ok' if is_met else 'MISSED'} (≥ {least:g}{beside})"


def median_and_ratio(own: list[float], theirs: list[float]) -> tuple[float, float | None]:
    ours, base = statistics.median(own), statistics.median(theirs) if theirs else 0.0
    return ours, ours / base if base else None


def pauses_table(runs: list[Run], nodes: int) -> Iterator[str]:
    """Per kind of fault: how long training stood per fault of that kind, and the longest pause."""
    present = [launcher for launcher in launchers() if of(runs, launcher, nodes)]
    yield f"| cause, {nodes} node{'s' if nodes > 1 else ''} | " + " | ".join(present) + " |"
    yield "|---|" + "---|" * len(present)
    for kind in (*KINDS, ANNOUNCED, "none"):
        cells = []
        for launcher in present:
            own = of(runs, launcher, nodes)
            times = sum(name == kind for run in own for _, name in run.faults)
            lengths = [pause.seconds for run in own for pause in run.pauses if pause.cause == kind]
            if kind == "none":
                cells.append(f"{sum(lengths):.1f} s in all" if lengths else "")
            else:
                cells.append(f"{sum(lengths) / times:.1f} s; {max(lengths, default=0.0):.1f} s" if times else "")
        yield f"| {kind} | " + " | ".join(cells) + " |"


def write_report(options: argparse.Namespace, machine: dict[str, str], runs: list[Run]) -> None:
    method = (
        f"The same training of a worker on each node, step {options.step_ms:g} ms, checkpoint every "
        f"{options.checkpoint_every} steps, and a fault every {options.fault_every:g} s for {options.duration:g} s, "
        "all kinds in an order of the seed's, the same for each launcher"
        + (f", each second one a node that is told {options.announced:g} s before" if options.announced else "")
        + ". An agent that has ended is replaced after "
        f"{options.restart_delay:g} s; a suspended one is continued after {options.suspended:g} s. Training goes on "
        f"with {options.min_nodes} to nodes + 2 nodes. Share: of the time from the first step of all nodes, in steps "
        "that no later round did again; × nodes: a step counts as much as the share of the nodes that took part in it. "
        f"Medians of {options.seeds} schedules; all agents on one machine."
    )
    lines = [*shares_table(runs), "", "Training stood, on average for each fault of the kind; the longest pause:", ""]
    for nodes in sorted({run.nodes for run in runs}):
        lines += [*pauses_table(runs, nodes), ""]
    lines += [f"- {run.launcher}, {run.nodes} nodes, seed {run.seed}: {run.failed}" for run in runs if run.failed]
    settings = {name: value for name, value in vars(options).items() if not isinstance(value, Path | None)}
    Report("Effective training time under faults", method, machine).write(
        options.out, f"goodput{'-announced' if options.announced else ''}", lines,
        settings=settings, runs=[asdict(run) for run in runs],
    )  # fmt: skip


# --- the command ------------------------------------------------------------------------------------------------------


def main() -> int:
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left behind then, either
    machine = describe_machine()
    runs: list[Run] = []
    for nodes in options.nodes:
        for seed in range(1, options.seeds + 1):
            for launcher in options.only:
                run = measure(options, launcher, nodes, seed)
                runs.append(run)
                longest = max((pause.seconds for pause in run.pauses), default=0.0)
                said = run.failed or f"share {run.share:.3f}, {run.lost} steps lost, longest pause {longest:.1f} s"
                print(f"nodes {nodes}, seed {seed}, {launcher}: {said}", flush=True)
    write_report(options, machine, runs)
    return 1 if any(run.failed for run in runs) else 0


def parse_arguments() -> argparse.Namespace:
    known = list(launchers())
    parser = argparse.ArgumentParser(description="Measure effective training time under faults.")
    add = parser.add_argument
    add("--seeds", type=int, default=3, metavar="N", help="schedules of faults (default: %(default)s)")
    add("--nodes", type=lambda text: [int(each) for each in text.split(",")], default=[1, 3], metavar="N,N")
    add("--min-nodes", type=int, default=1, metavar="N", help="training goes on with so many (default: %(default)s)")
    add(
        "--duration",
        type=float,
        default=156.0,
        metavar="S",
        help="of each run (default: %(default)g: two of each kind)",
    )
    add("--fault-every", type=float, default=12.0, metavar="S", help="0: no faults (default: %(default)g)")
    usual = [name for name in known if name not in {ON_THREE, ON_ETCD}]
    add("--only", type=lambda text: text.split(","), default=usual, help=f"some of: {','.join(known)}")
    add("--step-ms", type=float, default=40.0, metavar="MS", help="length of a step (default: %(default)g)")
    add("--checkpoint-every", type=int, default=25, metavar="STEPS", help="(default: %(default)s)")
    add("--restart-delay", type=float, default=2.0, metavar="S", help="until a lost agent is replaced (%(default)g)")
    add("--suspended", type=float, default=8.0, metavar="S", help="how long an agent is suspended (%(default)g)")
    add(
        "--announced",
        type=float,
        default=0.0,
        metavar="S",
        help="each second fault is a node that goes and is told so many seconds before, by SIGTERM for torchrun",
    )
    add("--keep", type=Path, metavar="FOLDER", help="keep what agents and workers have written")
    add("--out", type=Path, default=HERE / "results", metavar="FOLDER")
    options = parser.parse_args()
    if unknown := set(options.only) - set(known):
        parser.error(f"--only knows {', '.join(known)}; not {', '.join(sorted(unknown))}")
    if ON_ETCD in options.only and not is_healthy(ETCD):
        parser.error(f"no etcd answers at {ETCD}: start one there for {ON_ETCD!r}")
    if options.seeds < 1 or not 1 <= options.min_nodes <= min(options.nodes):
        parser.error("--seeds and --min-nodes need at least 1, and --nodes at least --min-nodes")
    return options


if __name__ == "__main__":
    sys.exit(main())
