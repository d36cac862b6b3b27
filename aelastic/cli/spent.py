"""The command `aelastic spent`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from aelastic.cli.manual.parsing import parser_of
from aelastic.errors import InputError
from aelastic.observe.time_spent import WORDS
from aelastic.observe.ui.commands import say
from aelastic.observe.ui.progress_line import ProgressLine
from aelastic.tools.spent.bill import Bill, bill_of
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
    bill = bill_of(logs, args.cost, args.save)
    say(json.dumps({"code": "ok", **asdict(bill), "cost": bill.cost}, indent=2) if args.json else as_text(bill))
    return 0


def as_text(bill: Bill) -> str:
    """Returns the bill as text for people."""
    cost = "" if bill.cost is None else f", {bill.cost:.2f}"
    lines = [f"{bill.run_id}: {counted(bill.workers, 'worker')}, {duration(bill.length_s)}{cost}"]
    for name, share in bill.shares.items():
        spent = "" if bill.costs is None else f"{bill.costs[name]:>10.2f}"
        note = bill.notes.get(name, "") if share else ""
        time = duration(bill.seconds[name])
        lines.append(f"  {WORDS.get(name, name):<14}{share:>6.1f} %{time:>15}{spent}   {note}".rstrip())
    lines += [f"{'to get some back' if place == 0 else '':<17} {each}" for place, each in enumerate(bill.advice)]
    if bill.damaged:
        lines.append(f"{counted(bill.damaged, 'record')} left out: damaged")
    return "\n".join(lines)
