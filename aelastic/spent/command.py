"""The command `aelastic spent`."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from aelastic.errors import InputError
from aelastic.observe.time_spent import WORDS
from aelastic.spent.bill import Bill, bill_of
from aelastic.timeline.files import read_all
from aelastic.timeline.text import counted, duration
from aelastic.ui.commands import Parser, say, seconds

_PRICE = re.compile(r"\$?(\d+(?:\.\d+)?)/(gpu-|worker-)?h")


def run_spent(argv: Sequence[str]) -> int:
    """Says where the time of a job went; gives the exit code.

    Raises:
        InputError: the logs cannot be read, or are not those of one job.
    """
    parser = Parser(
        prog="aelastic spent",
        description="Says what the time of a job was spent on, and what would get it back, by its event logs.",
        allow_abbrev=False,
    )
    parser.add_argument("events", nargs="+", metavar="EVENTS", type=Path, help="event logs of all nodes, or folders")
    parser.add_argument("--cost", type=_price, metavar="PRICE", help="as 2.10/gpu-h, of each worker; 12/h, of the job")
    a_save = partial(seconds, least=0.001)
    parser.add_argument("--save", type=a_save, metavar="S", help="what a save takes (default: as drains have shown)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args(argv)
    logs = read_all(args.events)
    ids = [*dict.fromkeys(log.run_id for log in logs if log.entries)]
    if not ids:
        raise InputError(f"{', '.join(map(str, args.events))}: no record of a job")
    if len(ids) > 1:
        raise InputError(f"these are logs of {len(ids)} jobs: name those of one: {', '.join(ids[:5])}")
    bill = bill_of(logs, args.cost, args.save)
    say(json.dumps({"code": "ok", **asdict(bill), "cost": bill.cost}, indent=2) if args.json else as_text(bill))
    return 0


def _price(text: str) -> tuple[float, str]:
    if (match := _PRICE.fullmatch(text)) is None:
        raise argparse.ArgumentTypeError(f"{text!r}: use a price and what it is for, as in 2.10/gpu-h or 12/h")
    return float(match[1]), match[2] or ""


def as_text(bill: Bill) -> str:
    """For people."""
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
