"""The command `aelastic rehearse`."""

from __future__ import annotations

import argparse
import io
import json
import re
import secrets
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from aelastic.errors import EXIT_FAILURE, InputError
from aelastic.rehearse.cases import CannotError, Rehearsals
from aelastic.rehearse.files import RESULT, Files
from aelastic.rehearse.judging import Judged
from aelastic.rehearse.play import Script
from aelastic.ui.commands import Parser, say, seconds

EXIT_CANNOT = 3
EXIT_CODES = {"ok": 0, "failed": EXIT_FAILURE, "cannot": EXIT_CANNOT}
_WITH_VALUE = {"--metric", "--checkpoints", "--for", "--only", "--output"}


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="aelastic rehearse",
        usage="aelastic rehearse [these options] [options of a job] script [arguments of the script]",
        description="Runs a script undisturbed, then under one fault at a time, and says whether it resumes.",
        epilog="--progress, an option of the job, says which step the script is at; without, notice.due() counts.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--metric", type=_pattern, metavar="REGEX", help="a number that is to be the same, as 'loss (\\S+)'")
    add("--checkpoints", type=Path, metavar="DIR", help="where the script saves (default: this folder)")
    add("--for", dest="for_s", type=seconds, default=600.0, metavar="S", help="undisturbed, at most")
    add("--only", default="", metavar="WORD", help="cases whose names have it")
    add("--output", type=Path, metavar="DIR", help="for logs, and files of the script (default: a new one beside)")
    add("--json", action="store_true", help="one JSON object at the end")
    return parser


def run_rehearsal(argv: Sequence[str], read: Callable[[Sequence[str]], Script]) -> int:
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
        script = read(rest)
    except InputError as error:
        late = [name for name in (*_WITH_VALUE, "--json") if re.search(rf"option:? {name}[: ]", f"{error} ")]
        raise InputError(f"rehearse: name {late[0]} before options of the job") if late else error from None
    root, apart = _folders(options)
    rehearsals = Rehearsals(script, Files(root, apart), options.metric, options.for_s)
    if not any(options.only in name for name in rehearsals.cases):
        raise InputError(f"--only {options.only}: no case has it in its name: {', '.join(rehearsals.cases)}")
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup
            signal.signal(signum, signal.default_int_handler)  # it leaves nothing behind
    try:
        root.mkdir(parents=True, exist_ok=True)
        apart.mkdir()
        (apart / RESULT).write_text("{}")
        return _rehearse(rehearsals, options, apart)
    except KeyboardInterrupt:
        say(f"interrupted; logs, and what the script has saved: {apart}", sys.stderr)
        raise
    except OSError as error:
        say(f"aelastic: error: rehearse: {error}; logs, and what the script has saved: {apart}", sys.stderr)
        return EXIT_CANNOT


def _folders(options: argparse.Namespace) -> tuple[Path, Path]:
    """Where the script saves, and where rehearsals are kept apart."""
    asked = options.checkpoints
    root, beside = (asked or Path.cwd()).resolve(), Path.cwd()
    if asked is not None:
        if root.exists() and not root.is_dir():
            raise InputError(f"--checkpoints {asked} is no folder")
        if root.exists() and any(root.iterdir()):
            raise InputError(f"--checkpoints {asked}: there are files in it: a rehearsal begins without")
        beside = root.parent  # so that files need not be copied
    apart = (options.output or beside / f"aelastic_rehearsal_{secrets.token_hex(3)}").resolve()
    if apart.exists():
        raise InputError(f"--output {options.output} is there: name a new folder")
    if options.output and not apart.parent.is_dir():
        raise InputError(f"--output {options.output}: there is no folder {apart.parent}")
    return root, apart


def _rehearse(rehearsals: Rehearsals, options: argparse.Namespace, apart: Path) -> int:
    found, to = list[Judged](), None if not options.json else io.StringIO()
    names = ["undisturbed", *(name for name in rehearsals.cases if options.only in name)]

    def tell(judged: Judged, verdict: str) -> None:
        found.append(judged)
        say(f"{len(found):2} {names[len(found) - 1]:<31} {verdict:<5}{judged.text}", to)

    def end(code: str, text: str) -> int:
        each = [{"name": name, **judged._asdict()} for name, judged in zip(names, found, strict=False)]
        said = json.dumps({"code": code, "text": text, "rehearsals": each, "folder": str(apart)}, indent=2)
        (apart / RESULT).write_text(said)
        say(said if options.json else text)
        return EXIT_CODES[code]

    try:
        tell(Judged(True, rehearsals.first()), "")
    except CannotError as error:
        return end("cannot", f"aelastic: {error}; its logs are in {apart}")
    for name in names[1:]:
        judged = rehearsals.run(name)
        tell(judged, "ok" if judged.holds else "skip" if judged.holds is None else "FAIL")
    for row in _table(dict(zip(names[1:], found[1:], strict=True))):
        say(row, to)
    failed = [each for each in found if each.holds is False]
    untested = sum(each.holds is None for each in found)
    tested = len(names) - 1 - untested
    if not tested:
        return end("cannot", f"aelastic: nothing could be tested; logs, and what the script has saved: {apart}")
    text = f"{len(failed)} of {tested} do not hold" if failed else f"all {tested} hold"
    text += f", {untested} not tested" if untested else ""
    advice = [f"  {each}" for each in dict.fromkeys(each.advice for each in failed if each.advice)]
    text = "\n".join([text, *advice, f"logs, and what the script has saved: {apart}"])
    return end("failed" if failed else "ok", text)


def _table(found: Mapping[str, Judged]) -> Iterator[str]:
    yield f"\n{'':<35}holds       from step  lost  back in  numbers  checkpoint"
    for name, each in found.items():
        holds = "not tested" if each.holds is None else "yes" if each.holds else "NO"
        back = "" if each.back_s is None else f"{each.back_s:.2g} s"
        start, lost = ("", "") if each.resumed_at is None else (each.resumed_at, each.lost)
        row = f"   {name:<32}{holds:<12}{start:>9}{lost:>6}{back:>9}  {each.numbers:<9}{each.checkpoint}"
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
