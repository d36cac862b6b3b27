"""Measures what timers cost the agent: a worker sets and clears them as torch's client does, so many in a second.

    python benchmarks/timers.py [--repeat 3] [--seconds 10] [--out FOLDER]

torchrun and aelastic take turns.  Processor time is what the kernel counted for all threads of the agent
(`/proc/PID/task/TID/schedstat`); of what the writer was asked for, the table says how much it managed.

Writes `<date>-timers.json` (every single figure) and a readable `.md` of the same name.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from arguments import Arguments
from one_node import HERE, LIMIT_S, SETTLE_S, MeasurementError, describe_machine
from watching import cpu_s

RATES = (0, 1_000, 10_000)  # timers in a second; each is set and cleared
TARGET_SHARE = 0.1  # of a core, at the last of them


@dataclass(frozen=True)
class Cost:
    rate: float  # that the writer managed
    cpu_share: float  # of a core


def measure(command: tuple[str, ...], rate: int, seconds: float) -> Cost:
    with tempfile.TemporaryDirectory(prefix="aelastic-bench-") as folder:
        counter = Path(folder, "count")
        counter.write_bytes(bytes(8))
        worker = [str(HERE / "workers" / "set_timers.py"), str(rate), str(counter)]
        env = {**os.environ, "TORCHELASTIC_ENABLE_FILE_TIMER": "1", "OMP_NUM_THREADS": "1", "TMPDIR": folder}
        with subprocess.Popen(
            [*command, "--standalone", "--max-restarts", "0", *worker], env=env, stdin=subprocess.DEVNULL
        ) as agent:
            try:
                wait_for_timers(agent, counter, rate)
                time.sleep(SETTLE_S)
                before_s, set_before, began = cpu_s(agent.pid), count(counter), time.monotonic()
                time.sleep(seconds)
                took_s = time.monotonic() - began
                cost = Cost((count(counter) - set_before) / took_s, (cpu_s(agent.pid) - before_s) / took_s)
                if agent.poll() is not None:
                    raise MeasurementError(f"{command[0]} ended with code {agent.returncode}")
                return cost
            finally:
                agent.terminate()


def wait_for_timers(agent: subprocess.Popen[bytes], counter: Path, rate: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while rate and not count(counter):
        if time.monotonic() > deadline or agent.poll() is not None:
            raise MeasurementError("no timer was set")
        time.sleep(0.01)


def count(counter: Path) -> int:
    return int.from_bytes(counter.read_bytes(), "little")


def median(costs: list[Cost]) -> Cost:
    return Cost(statistics.median(c.rate for c in costs), statistics.median(c.cpu_share for c in costs))


def as_markdown(date: str, repeats: int, machine: dict[str, str], costs: dict[str, dict[int, Cost]]) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in machine.items())
    lines = [
        f"# Timers, {date}",
        "",
        f"One worker sets and clears timers; medians of {repeats} runs, in turn. {facts}.",
        "",
        "| timers/s asked for | torchrun: set | agent, share of a core | aelastic: set | agent, share of a core |",
        "|---|---|---|---|---|",
    ]
    for rate in RATES:
        cells = [f"{cost.rate:,.0f} /s | {cost.cpu_share:.2%}" for cost in (costs[name][rate] for name in costs)]
        lines.append(f"| {rate:,} | " + " | ".join(cells) + " |")
    share = costs["aelastic"][RATES[-1]].cpu_share
    verdict = "ok" if share < TARGET_SHARE else "MISSED"
    return "\n".join([*lines, "", f"At {RATES[-1]:,}/s: {share:.2%} (target < {TARGET_SHARE:.0%}): {verdict}.", ""])


def main() -> int:
    options = Arguments("Measure what timers of workers cost the agent.", repeat=3, seconds=10.0).read()
    commands = {
        "torchrun": (str(Path(sys.executable).with_name("torchrun")),),
        "aelastic": (sys.executable, "-m", "aelastic"),
    }
    machine = describe_machine()
    samples: dict[str, dict[int, list[Cost]]] = {name: {rate: [] for rate in RATES} for name in commands}
    for turn in range(options.repeat):
        for rate in RATES:
            for name, command in commands.items():
                print(f"timers: {name}, {rate:,}/s, turn {turn + 1} of {options.repeat}", flush=True)
                try:
                    samples[name][rate].append(measure(command, rate, options.seconds))
                except MeasurementError as error:
                    print(f"bench: {error}", file=sys.stderr)
                    return 1
    date = datetime.now(UTC).date().isoformat()
    medians = {name: {rate: median(taken) for rate, taken in of.items()} for name, of in samples.items()}
    text = as_markdown(date, options.repeat, machine, medians)
    report = {"date": date, "machine": machine, "repeat": options.repeat, "seconds": options.seconds}
    report["samples"] = {
        name: {str(rate): [asdict(cost) for cost in taken] for rate, taken in of.items()}
        for name, of in samples.items()
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{date}-timers.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    (options.out / f"{date}-timers.md").write_text(text)
    print("\n" + text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
