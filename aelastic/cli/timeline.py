"""The command `aelastic timeline`, or `python -m aelastic.timeline`: event logs in, a picture and a trace out.

It reads the logs, also while agents write them, and does not change them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aelastic.base.host.files import replace_file
from aelastic.cli.manual.parsing import parser_of
from aelastic.diagnose.failures.failure import printable
from aelastic.errors import EXIT_INPUT, InputError
from aelastic.observe.ui.commands import write_text
from aelastic.observe.ui.progress_line import ProgressLine
from aelastic.tools.timeline.files import read_all
from aelastic.tools.timeline.html import page, summary
from aelastic.tools.timeline.merge import timeline_from
from aelastic.tools.timeline.model import Timeline
from aelastic.tools.timeline.perfetto import trace
from aelastic.tools.timeline.reader import Log, runs_of


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the picture, as `python -m aelastic.timeline` does; returns the exit code."""
    try:
        return _make(parser_of("timeline", "python -m aelastic.timeline").parse_args(argv))
    except InputError as error:
        line = " ".join(printable(str(error)).splitlines())
        write_text(f"aelastic.timeline: error: {line} (see python -m aelastic.timeline --help)", sys.stderr)
        return EXIT_INPUT


def run_timeline(argv: Sequence[str]) -> int:
    """Makes the picture, and returns the exit code.

    Raises:
        InputError: the logs cannot be read, or the picture cannot be written.
    """
    return _make(parser_of("timeline").parse_args(argv))


def _make(options: argparse.Namespace) -> int:
    with ProgressLine() as progress:
        return _draw(options, progress)


def _draw(options: argparse.Namespace, progress: ProgressLine) -> int:
    logs = read_all(options.folders, progress.show)
    first: Path = options.folders[0]
    output: Path = options.output or (first if first.is_dir() else first.parent) / "timeline.html"
    trace_file: Path = options.trace or output.parent / f"{output.stem}.trace.json"
    for path in (output, trace_file):
        if os.path.realpath(path) in {os.path.realpath(log.source) for log in logs}:
            raise InputError(f"{path} is an event log: choose another output")
    if os.path.realpath(output) == os.path.realpath(trace_file):
        raise InputError(f"{output}: the picture and the trace need two files")
    if not any(log.entries for log in logs):
        damaged = sum(log.damaged for log in logs)
        raise InputError(f"{', '.join(map(str, options.folders))}: no record of a run ({damaged} damaged lines)")
    run, others = _choose(logs, options.run_id)
    progress.show("merging the logs")
    story = timeline_from(run)
    progress.show(f"drawing {output}")
    _write(output, page(story))
    progress.show(f"writing {trace_file}")
    _write(trace_file, json.dumps(trace(story), separators=(",", ":")) + "\n")
    progress.clear()
    if options.json:
        write_text(json.dumps(_described(story, output, trace_file, others), indent=2))
    else:
        _write_summary(story, output, trace_file, others)
    return 0


def _described(story: Timeline, output: Path, trace_file: Path, others: Sequence[str]) -> dict[str, Any]:
    return {
        "code": "ok",
        "run_id": story.run_id,
        "picture": str(output),
        "trace": str(trace_file),
        "length_s": round(story.length_s, 3),
        "spent_s": {name: round(part, 3) for name, part in story.spent.items()} if story.is_training_known else None,
        "restarts": len(story.restarts),
        "in_place": sum(restart.in_place for restart in story.restarts),
        "state": story.state or None,
        "reason": story.reason or None,
        "cause": story.culprit or None,
        "notes": [*story.notes],
        "other_runs": [*others],
    }


def _write_line(line: str) -> None:
    write_text(" ".join(printable(line).splitlines()))


def _write_summary(story: Timeline, output: Path, trace_file: Path, others: Sequence[str]) -> None:
    _write_line(f"picture  {output}")
    _write_line(f"trace    {trace_file}  (for https://ui.perfetto.dev)")
    _write_line(f"run      {story.run_id}: {summary(story)}")
    if story.state not in {"", "SUCCEEDED"}:
        _write_line(f"ended    {story.state}: {story.reason}")
    if story.culprit:
        _write_line(f"cause    {story.culprit}")
    for note in story.notes:
        _write_line(f"note     {note}")
    if others:
        ids = ", ".join(others[:5]) + (", …" if len(others) > 5 else "")
        _write_line(f"note     {len(others)} other runs found; use --run-id to choose one: {ids}")


def _choose(logs: Sequence[Log], run_id: str | None) -> tuple[list[Log], list[str]]:
    """The logs of the run to draw, and the ids of the other runs."""
    filled = [log for log in logs if log.entries]
    if run_id is not None:
        chosen = [log for log in filled if log.run_id == run_id]
        if not chosen:
            known = ", ".join(dict.fromkeys(log.run_id for log in filled[:20]))
            raise InputError(f"--run-id {run_id}: no such run here; found: {known}")
        others = {log.run_id for log in filled} - {run_id}
        return chosen, sorted(others)
    runs = runs_of(filled)
    return runs[-1], [run[0].run_id for run in runs[:-1]]


def _write(path: Path, text: str) -> None:
    try:
        replace_file(str(path), text.encode(errors="replace"))
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None
