"""The reports of benchmarks: what was measured on which machine, as JSON with every single figure, and as Markdown."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Figure:
    """A number a measure yields; `target` bounds aelastic's share of torchrun's figure, or its figure itself."""

    key: str
    caption: str
    unit: str
    target: float | None = None
    is_ratio: bool = True
    is_least: bool = False  # the target is what it is to be at least


@dataclass(frozen=True)
class Row:
    caption: str
    torchrun: str
    aelastic: str
    ratio: float | None  # none where torchrun has nothing to compare with
    target: str
    verdict: str


def judge(figure: Figure, taken: Mapping[str, list[float]], instead: str = "") -> Row:
    """The medians, the ratio where there are two of them, and whether the target is met.

    Args:
        figure: which.
        taken: by launcher.
        instead: of torchrun's, where it has none.
    """
    ours = statistics.median(taken["aelastic"])
    theirs = statistics.median(taken["torchrun"]) if taken.get("torchrun") else None
    ratio = ours / theirs if theirs else None
    target, verdict = "", ""
    if figure.target is not None:
        bound = f"{'≥' if figure.is_least else '≤'} {figure.target:g}"
        target = f"ratio {bound}" if figure.is_ratio else f"{bound} {figure.unit}"
        judged = ratio if figure.is_ratio else ours
        is_met = judged is not None and (judged >= figure.target if figure.is_least else judged <= figure.target)
        verdict = "ok" if is_met else "MISSED"
    told = instead if theirs is None else f"{theirs:.3g} {figure.unit}"
    return Row(figure.caption, told, f"{ours:.3g} {figure.unit}", ratio, target, verdict)


def describe_machine() -> dict[str, str]:
    meminfo = Path("/proc/meminfo").read_text().splitlines()
    memory_kib = next(int(line.split()[1]) for line in meminfo if line.startswith("MemTotal:"))
    return {
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory_kib / 2**20:.1f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": version_of("torch"),
        "aelastic": version_of("aelastic"),
        "load before": f"{os.getloadavg()[0]:.2f}",
    }


def version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


@dataclass(frozen=True)
class Report:
    """Of one benchmark, of today.

    Args:
        title: what it measures.
        method: how.
        machine: where, as `describe_machine` says before it begins.
    """

    title: str
    method: str
    machine: Mapping[str, str]
    date: str = field(default_factory=lambda: datetime.now(UTC).date().isoformat())

    def text(self, lines: Sequence[str]) -> str:
        facts = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        head = [f"# {self.title}, {self.date}", "", f"{self.method} {facts}.", ""]
        return "\n".join([*head, *lines]).rstrip() + "\n"

    def compared(self, rows: Sequence[Row]) -> list[str]:
        """Both launchers, in a table."""
        cells = [
            f"| {row.caption} | {row.torchrun} | {row.aelastic} | {'' if row.ratio is None else f'{row.ratio:.3f}'} "
            f"| {row.target} | {row.verdict} |"
            for row in rows
        ]
        return ["| what | torchrun | aelastic | ratio | target | |", "|---|---|---|---|---|---|", *cells]

    def write(self, folder: Path, name: str, lines: Sequence[str], **record: Any) -> None:
        """Writes both, and prints the Markdown.

        Args:
            folder: where to.
            name: of the files, after the date.
            lines: of the Markdown, below its head.
            record: what else is in the JSON.
        """
        folder.mkdir(parents=True, exist_ok=True)
        text, path = self.text(lines), folder / f"{self.date}-{name}"
        told = {"date": self.date, "machine": self.machine, **record}
        path.with_suffix(".json").write_text(json.dumps(told, ensure_ascii=False) + "\n")
        path.with_suffix(".md").write_text(text)
        print(f"\n{text}\nwritten to {path}.json and .md")
