"""Draws the figure of `goodput.py`: what each launcher's training achieved over time, and its share.

    python benchmarks/plot_goodput.py [FILE.json] [--to docs/goodput.png]

Needs matplotlib (`pip install matplotlib`).  Without a file it takes the newest of `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
COLORS = {
    "torchrun": "#8c8c8c",
    "aelastic": "#5b8ff9",
    "aelastic --preload": "#1a3a8f",
    "aelastic in place": "#1b7837",
}
LETTERS = {
    "worker killed": "K",
    "worker raises": "R",
    "agent killed": "A",
    "agent suspended": "S",
    "agent asked to go": "T",
    "node added": "+",
}


def draw(report: dict[str, Any], to: Path) -> None:
    """One panel for each number of nodes: seconds of training done, of the seed whose share is the median."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    step_s = report["settings"]["step_ms"] / 1000
    counts = sorted({run["nodes"] for run in report["runs"]}, reverse=True)
    figure, panels = plt.subplots(
        1, len(counts), figsize=(max(7.2, 5.2 * len(counts)), 3.9), squeeze=False, sharey=True
    )
    for panel, nodes in zip(panels[0], counts, strict=True):
        runs = [run for run in report["runs"] if run["nodes"] == nodes and run["curve"]]
        seed = shown_seed(runs)
        duration = report["settings"]["duration"]
        panel.plot([0, duration], [0, duration], color="#bbbbbb", linewidth=0.8, linestyle=":", label="without faults")
        for launcher in dict.fromkeys(run["launcher"] for run in runs):
            share = statistics.median(run["share"] for run in runs if run["launcher"] == launcher)
            label = f"{launcher}: {share:.0%}"
            for run in runs:
                if (run["launcher"], run["seed"]) == (launcher, seed):
                    done = [0.0, *(steps * step_s for steps in run["curve"])]
                    panel.plot(range(len(done)), done, color=COLORS.get(launcher), linewidth=1.8, label=label)
        for at, kind in max((run["faults"] for run in runs if run["seed"] == seed), key=len, default=[]):
            panel.axvline(at, color="#e0b0b0", linewidth=0.8, zorder=0)
            panel.text(at, duration * 1.01, LETTERS[kind], fontsize=7, ha="center", color="#a04040")
        panel.set_title(f"{nodes} nodes" if nodes > 1 else "1 node", fontsize=10, pad=14)
        panel.set_xlabel("seconds from the first step", fontsize=9)
        panel.set_xlim(0, duration)
        panel.set_ylim(0, duration)
        panel.tick_params(labelsize=8)
        panel.legend(fontsize=8, frameon=False, loc="upper left")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("seconds of training that counted", fontsize=9)
    told = "   ".join(f"{letter} {kind}" for kind, letter in LETTERS.items())
    figure.text(0.5, 0.01, told, fontsize=7, color="#a04040", ha="center")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(to, dpi=130, metadata={"Software": None})


def shown_seed(runs: list[dict[str, Any]]) -> int:
    """The seed at which the last launcher has its median."""
    own = sorted((run for run in runs if run["launcher"] == runs[-1]["launcher"]), key=lambda run: run["share"])
    seed: int = own[len(own) // 2]["seed"]
    return seed


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw the figure of effective training time under faults.")
    parser.add_argument("file", type=Path, nargs="?", help="what goodput.py has written (default: the newest)")
    parser.add_argument("--to", type=Path, default=HERE.parent / "docs" / "goodput.png", metavar="FILE")
    options = parser.parse_args()
    source = options.file or max((HERE / "results").glob("*-goodput.json"), default=None)
    if source is None:
        parser.error("there is no *-goodput.json in benchmarks/results; run benchmarks/goodput.py first")
    try:
        draw(json.loads(source.read_text()), options.to)
    except ModuleNotFoundError as error:
        parser.error(f"{error.name} is not installed; try: pip install matplotlib")
    print(f"written to {options.to}, of {source}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
