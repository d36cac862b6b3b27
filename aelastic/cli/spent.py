"""The command `aelastic spent`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from aelastic.cli.manual.parsing import parser_of
from aelastic.errors import InputError
from aelastic.observe.time_spent import WORDS
from aelastic.observe.ui.commands import write_text
from aelastic.observe.ui.progress_line import ProgressLine
from aelastic.tools.spent.report import CostReport, report_of
from aelastic.tools.timeline.files import read_all
from aelastic.tools.timeline.text import counted, duration


def run_spent(argv: Sequence[str]) -> int:
    """Prints how the time of a job was spent, and returns the exit code.

    Raises:
        InputError: the logs cannot be read, or are not those of one job.
    """
    args = parser_of("spent").parse_args(argv)
    with ProgressLine() as progress:
        logs = read_all(args.events, progress.show)
    ids = [*dict.fromkeys(log.run_id for log in logs if log.entries)]
    if not ids:
        raise InputError(f"{', '.join(map(str, args.events))}: no record of a job")
    if len(ids) > 1:
        raise InputError(f"the logs belong to {len(ids)} jobs, name those of one: {', '.join(ids[:5])}")
    report = report_of(logs, args.cost, args.save)
    write_text(
        json.dumps({"code": "ok", **asdict(report), "cost": report.cost}, indent=2) if args.json else as_text(report)
    )
    return 0


def as_text(report: CostReport) -> str:
    """Returns the report as text for people."""
    cost = "" if report.cost is None else f", {report.cost:.2f}"
    lines = [f"{report.run_id}: {counted(report.workers, 'worker')}, {duration(report.length_s)}{cost}"]
    for name, share in report.shares.items():
        spent = "" if report.costs is None else f"{report.costs[name]:>10.2f}"
        note = report.notes.get(name, "") if share else ""
        time = duration(report.seconds[name])
        lines.append(f"  {WORDS.get(name, name):<14}{share:>6.1f} %{time:>15}{spent}   {note}".rstrip())
    lines += [f"{'to get some back' if place == 0 else '':<17} {each}" for place, each in enumerate(report.advice)]
    if report.damaged:
        lines.append(f"{counted(report.damaged, 'record')} left out: damaged")
    return "\n".join(lines)
