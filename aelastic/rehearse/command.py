"""The command `aelastic rehearse`."""

from __future__ import annotations

import argparse
import json
import re
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from aelastic.errors import EXIT_FAILURE, InputError
from aelastic.rehearse.cases import CannotError, Judged, Rehearsals
from aelastic.rehearse.play import Script
from aelastic.ui.commands import Parser, say, seconds

EXIT_CANNOT = 3
_WITH_VALUE = {"--metric", "--checkpoints", "--for", "--only", "--output"}


class Launch(NamedTuple):
    """The job's own command line."""

    options: Sequence[str]
    command: Sequence[str]  # the script, and its arguments
    nodes: tuple[int, int]
    workers: int  # of a node
    progress: str  # a pattern; empty: a step is a call of `notice.due()`


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="aelastic rehearse",
        usage="aelastic rehearse [these options] [options of a job] script [arguments of the script]",
        description="Runs a script undisturbed, then under one fault at a time, and says whether it resumes.",
        epilog="--progress, an option of the job, says which step the script is at; without, notice.due() counts.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--metric", type=_pattern, metavar="REGEX", help="a number that is to be the same, as 'loss (\\S+)'"
    )
    parser.add_argument("--checkpoints", type=Path, metavar="DIR", help="where the script saves (default: this folder)")
    parser.add_argument("--for", dest="for_s", type=seconds, default=600.0, metavar="S", help="of the undisturbed run")
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose names have it")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="for logs, and files of the script (default: a new one)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object at the end")
    return parser


def run_rehearsal(argv: Sequence[str], read: Callable[[Sequence[str]], Launch]) -> int:
    """Rehearses a script; gives the exit code: 0: all holds, 1: something does not, 3: it cannot be rehearsed.

    Args:
        argv: our options, then those of a job.
        read: reads the latter.

    Raises:
        InputError: something is wrong with them.
    """
    own, rest = split(argv)
    options = _parser().parse_args(own)
    try:
        launch = read(rest)
    except InputError as error:
        late = [name for name in (*_WITH_VALUE, "--json") if f"unknown option {name}:" in f"{error}:"]
        raise InputError(f"rehearse: name {late[0]} before options of the job") if late else error from None
    root = options.checkpoints or Path.cwd()
    if options.checkpoints is not None:
        with suppress(FileNotFoundError):
            if any(root.iterdir()):
                raise InputError(f"--checkpoints {root}: there are files in it: a rehearsal begins without")
        root.mkdir(parents=True, exist_ok=True)
    apart = Path(tempfile.mkdtemp(prefix="aelastic_rehearsal_")) if options.output is None else options.output
    if options.output is not None and apart.exists():
        raise InputError(f"--output {apart} is there: name a new folder")
    apart.mkdir(parents=True, exist_ok=True)
    step = re.compile(launch.progress) if launch.progress else None
    script = Script(*launch[:4], step, options.metric, root.resolve(), apart.resolve())
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _interrupt)
    return _rehearse(script, options)


def _interrupt(signum: int, frame: object) -> NoReturn:  # noqa: ARG001  as Python calls it
    raise KeyboardInterrupt  # the run that is on leaves nothing behind


def _rehearse(script: Script, options: argparse.Namespace) -> int:
    rehearsals, found = Rehearsals(script, options.for_s), list[dict[str, Any]]()
    if not any(options.only in name for name in rehearsals.cases):
        raise InputError(f"--only {options.only}: no case has it in its name: {', '.join(rehearsals.cases)}")

    def tell(name: str, judged: Judged, verdict: str) -> None:
        found.append({"name": name, **judged._asdict()})
        if not options.json:
            say(f"{len(found):2} {name:<34} {verdict:<5}{judged.text}")

    try:
        tell("undisturbed", Judged(True, rehearsals.first()), "")
    except CannotError as error:
        said: dict[str, Any] = {"code": "cannot", "text": str(error), "folder": str(script.apart)}
        say(json.dumps(said, indent=2) if options.json else f"aelastic: {error}; its logs are in {script.apart}")
        return EXIT_CANNOT
    for name in rehearsals.cases:
        if options.only in name:
            judged = rehearsals.run(name)
            tell(name, judged, "ok" if judged.holds else "FAIL")
    failed = [each for each in found if not each["holds"]]
    if options.json:
        said = {"code": "failed" if failed else "ok", "rehearsals": found, "folder": str(script.apart)}
        say(json.dumps(said, indent=2))
    else:
        for row in _table(found[1:]):
            say(row)
        say(f"{len(failed)} of {len(found) - 1} do not hold" if failed else f"all {len(found) - 1} hold")
        for advice in dict.fromkeys(each["advice"] for each in failed if each["advice"]):
            say(f"  {advice}")
        say(f"logs, and what the script has saved: {script.apart}")
    return EXIT_FAILURE if failed else 0


def _table(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield f"\n{'':<38}holds  from step  lost  back in  numbers"
    for each in found:
        back = "" if each["back_s"] is None else f"{each['back_s']:.2g} s"
        start, lost = ("", "") if each["resumed_at"] is None else (each["resumed_at"], each["lost"])
        row = (
            f"   {each['name']:<35}{'yes' if each['holds'] else 'NO':<7}{start:>9}{lost:>6}{back:>9}  {each['numbers']}"
        )
        yield row.rstrip()


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our options, and the rest, which begins with the first that is none of ours."""
    own, rest = list[str](), list(argv)
    while rest and (name := rest[0].partition("=")[0]) in {*_WITH_VALUE, "--json", "--help", "-h"}:
        takes = 2 if name in _WITH_VALUE and "=" not in rest[0] else 1
        own, rest = own + rest[:takes], rest[takes:]
    return own, rest


def _pattern(text: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression ({error})") from None
    if not pattern.groups:
        raise argparse.ArgumentTypeError(f"{text!r} has no group for the number: use 'loss (\\S+)'")
    return pattern
