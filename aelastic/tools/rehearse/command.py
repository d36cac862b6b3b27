"""The command `aelastic rehearse`."""

from __future__ import annotations

import io
import json
import re
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from aelastic.base.renamed import with_old_names
from aelastic.diagnose.failures.failure import printable
from aelastic.errors import EXIT_FAILURE, InputError
from aelastic.observe.status_text import duration
from aelastic.observe.ui.commands import Colour, paint_for, write_painted, write_text
from aelastic.observe.ui.progress_line import ProgressLine
from aelastic.tools.rehearse import habits
from aelastic.tools.rehearse.cases import SHARE, CannotError, Rehearsals
from aelastic.tools.rehearse.files import FOLDER, RESULT, Files
from aelastic.tools.rehearse.judging import CaseVerdict
from aelastic.tools.rehearse.noted import Habit
from aelastic.tools.rehearse.trial import Script, Trial

EXIT_CANNOT = 3
VERDICT_COLOURS = {"ok": Colour.GOOD, "FAIL": Colour.BAD}
EXIT_CODES = {"ok": 0, "failed": EXIT_FAILURE, "cannot": EXIT_CANNOT}


class Wanted(NamedTuple):
    """The options of a rehearsal, in their order."""

    metric: re.Pattern[str] | None  # a number that must be the same
    checkpoints: Path | None  # where the script saves; by default, the folder that it runs in
    for_s: float  # undisturbed, at most
    only: str  # cases whose names contain it
    output: Path | None  # for logs, and files of the script; by default, in `FOLDER`
    is_json: bool


def run_rehearsal(script: Script, wanted: Wanted) -> int:
    """Rehearses a script, and returns the exit code: 0: all cases passed, 1: not all did, 3: it cannot be rehearsed.

    Raises:
        InputError: the options cannot work.
    """
    root, apart = _folders(wanted)
    with ProgressLine() as progress:
        return _run(script, wanted, root, apart, progress)


def _run(script: Script, wanted: Wanted, root: Path, apart: Path, progress: ProgressLine) -> int:
    position = _Position(progress)
    rehearsals = Rehearsals(script, Files(root, apart), wanted.metric, wanted.for_s, position.watch)
    if not any(wanted.only in name for name in rehearsals.cases):
        raise InputError(f"--only {wanted.only}: no case name contains it; there are: {', '.join(rehearsals.cases)}")
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup
            signal.signal(signum, signal.default_int_handler)  # it leaves nothing behind
    try:
        root.mkdir(parents=True, exist_ok=True)
        _make(apart, wanted)
        (apart / RESULT).write_text("{}")
        return _rehearse(rehearsals, wanted, apart, position)
    except KeyboardInterrupt:
        progress.clear()
        write_text(f"interrupted; logs and saved files: {apart}", sys.stderr)
        raise
    except OSError as error:
        progress.clear()
        text = f"error: rehearse: {error}; logs and saved files: {apart}"
        write_text(f"aelastic: {text}", sys.stderr)
        if wanted.is_json:
            write_text(json.dumps({"code": "cannot", "text": text}))
        return EXIT_CANNOT


class _Position:
    """Where a rehearsal is, for the progress line."""

    def __init__(self, line: ProgressLine) -> None:
        self.line, self._case = line, ""

    def begin(self, number: int, of: int, name: str) -> None:
        self._case = f"{number} of {of}: {name}"
        self.line.show(f"rehearse: {self._case}", at_once=True)

    def watch(self, trial: Trial) -> None:
        step, took_s = trial.last(), time.monotonic() - trial.began
        at = f", step {step}" if step >= 0 else ""
        self.line.show(f"rehearse: {self._case}{at}, {took_s:.0f} s")


def _folders(wanted: Wanted) -> tuple[Path, Path]:
    """Returns where the script saves, and the folder of this rehearsal."""
    asked = wanted.checkpoints
    root, beside = (asked or Path.cwd()).resolve(), Path.cwd()
    if asked is not None:
        if root.exists() and not root.is_dir():
            raise InputError(f"--checkpoints {asked} is not a folder")
        if root.exists() and any(root.iterdir()):
            raise InputError(f"--checkpoints {asked} is not empty: a rehearsal needs an empty folder")
        beside = root.parent  # so that files need not be copied
    apart = (wanted.output or beside / FOLDER / secrets.token_hex(3)).resolve()
    if apart.exists():
        raise InputError(f"--output {wanted.output} already exists: name a new folder")
    if wanted.output and not apart.parent.is_dir():
        raise InputError(f"--output {wanted.output}: folder {apart.parent} does not exist")
    return root, apart


def _make(apart: Path, wanted: Wanted) -> None:
    if wanted.output is None:
        apart.parent.mkdir(exist_ok=True)
        (apart.parent / ".gitignore").write_text("*\n")  # as other tools do with what they leave in a project
    apart.mkdir()


def _clear(apart: Path, wanted: Wanted) -> bool:
    """Removes a folder that was not named by an option and cannot hold a file of the user; returns whether it did.

    Without `--checkpoints`, every new file was moved there, whatever wrote it.
    """
    if wanted.output is not None or (wanted.checkpoints is None and any(apart.glob("*/files/*"))):
        return False
    shutil.rmtree(apart)
    if [each.name for each in apart.parent.iterdir()] == [".gitignore"]:
        shutil.rmtree(apart.parent)
    return True


def _rehearse(rehearsals: Rehearsals, wanted: Wanted, apart: Path, position: _Position) -> int:
    found, to = list[CaseVerdict](), None if not wanted.is_json else io.StringIO()
    paint = paint_for(to or sys.stdout)
    in_place = rehearsals.in_place
    names = ["undisturbed"]
    asked = [name for name in rehearsals.cases if wanted.only in name]

    def report(verdict: CaseVerdict, word: str) -> None:
        found.append(verdict)
        position.line.clear()
        name, text = f"{names[len(found) - 1]:<31}", f"{word:<5}{verdict.text}"
        shown = paint(word, VERDICT_COLOURS.get(word))
        write_painted(f"{len(found):2} {name} {shown}{printable(text.removeprefix(word))}", to)

    def end(code: str, text: str) -> int:
        where = None if code == "ok" and _clear(apart, wanted) else apart
        cases = [
            with_old_names("rehearsals", {"name": name, **verdict._asdict()})
            for name, verdict in zip(names, found, strict=False)
        ]
        if where is not None and code != "cannot":
            text += f"\nlogs and saved files: {where}"
        broken = [{**habit._asdict(), "breaks": habits.breaks(habit)} for habit in in_place.habits]
        result = {
            "code": code, "text": text, "rehearsals": cases, "habits": broken, "folder": where and str(where)
        }  # fmt: skip
        as_json = json.dumps(result, indent=2)
        if where is not None:
            (where / RESULT).write_text(as_json)
        position.line.clear()
        write_text(as_json if wanted.is_json else text)
        return EXIT_CODES[code]

    least = [name for name in asked if name not in in_place.cases] or asked
    write_text(_expected(1 + len(least)), to)
    position.begin(1, 1 + len(least), names[0])
    try:
        report(CaseVerdict(True, rehearsals.first()), "")
    except CannotError as error:
        return end("cannot", "\n".join([f"aelastic: {error}; logs: {apart}", *_against(in_place.habits)]))
    names += [name for name in asked if name in rehearsals.cases]
    write_text(f"   about {duration(rehearsals.takes_s(names[1:]))} to go", to)
    if in_place.why_not:
        write_text(f"   recovery in place is not rehearsed: {in_place.why_not}", to)
    try:
        _run_cases(rehearsals, names, position, report)
    finally:  # also if it is interrupted
        position.line.clear()
        if len(found) > 1:
            write_text("\n".join(_table(dict(zip(names[1:], found[1:], strict=False)))), to)
    failed = [each for each in found if each.passed is False]
    untested = sum(each.passed is None for each in found)
    tested = len(names) - 1 - untested
    if not tested:
        why = f": {in_place.why_not}" if len(names) == 1 else ""
        return end("cannot", f"aelastic: nothing could be tested{why}; logs and saved files: {apart}")
    all_passed = f"all {tested} passed" if tested > 1 else "the only case passed"
    text = f"{len(failed)} of {tested} failed" if failed else all_passed
    text += f", {untested} not tested" if untested else ""
    advice = [f"  {each}" for each in dict.fromkeys(each.advice for each in failed if each.advice)]
    is_broken = any(map(habits.breaks, in_place.habits))
    return end("failed" if failed or is_broken else "ok", "\n".join([text, *advice, *_against(in_place.habits)]))


def _against(found: Collection[Habit]) -> list[str]:
    """Returns which rules of recovery in place a script breaks."""
    lines = [f"  {line}" for line in habits.lines_of(found)]
    return ["rules of recovery in place that the script breaks:", *lines] if lines else []


def _run_cases(
    rehearsals: Rehearsals, names: Sequence[str], position: _Position, report: Callable[[CaseVerdict, str], None]
) -> None:
    """Runs all cases but the undisturbed run, which is the first of the names."""
    for number, name in enumerate(names[1:], 2):
        position.begin(number, len(names), name)
        verdict = rehearsals.run(name)
        report(verdict, "ok" if verdict.passed else "skip" if verdict.passed is None else "FAIL")


def _expected(runs: int) -> str:
    """Says how long it takes, as far as that is known before the script has run."""
    times = round(1 + SHARE * (runs - 1))
    return f"{runs} runs of the script, most of them in part: about {times} times its own time, plus a few seconds each"


def _table(found: Mapping[str, CaseVerdict]) -> Iterator[str]:
    yield f"\n{'':<35}passed      from step  lost  back in  numbers  checkpoint"
    for name, each in found.items():
        passed = "not tested" if each.passed is None else "yes" if each.passed else "NO"
        back = "" if each.back_s is None else f"{each.back_s:.2g} s"
        start, lost = ("", "") if each.resumed_at is None else (each.resumed_at, each.lost)
        row = f"   {name:<32}{passed:<12}{start:>9}{lost:>6}{back:>9}  {each.numbers:<9}{each.checkpoint}"
        yield row.rstrip()
