"""`aelastic doctor`: checks this host and the rendezvous endpoints, one line each, and starts no job."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from aelastic.cli.doctor.endpoint_checks import check_endpoints
from aelastic.cli.doctor.finding import Finding
from aelastic.cli.doctor.host_checks import check_host
from aelastic.cli.own_options import own_options
from aelastic.cli.parser import Groups, read_options
from aelastic.cli.spec_fields import rendezvous_fields
from aelastic.diagnose.failures.failure import printable
from aelastic.errors import EXIT_FAILURE
from aelastic.observe.ui.commands import Colour, paint_for, write_painted, write_text
from aelastic.observe.ui.progress_line import ProgressLine
from aelastic.rdzv.settings import RendezvousSettings

# Lines of a finding after the first begin below its text.
INDENT = " " * 9
COLOURS = {"ok": Colour.GOOD, "warning": Colour.DOUBTFUL, "error": Colour.BAD}


def examine(argv: Sequence[str], environ: Mapping[str, str], groups: Groups) -> int:
    """Prints the findings, and returns the exit code: 1 if there is an error among them.

    Args:
        argv: the options of a job, and perhaps its script.

    Raises:
        InputError: an option is wrong.
        SystemExit: after `--help` and `--version`.
    """
    chosen = read_options([*argv, "--", "doctor"], environ, {"doctor": own_options("doctor"), **groups}, "doctor")
    fields = rendezvous_fields(chosen, environ)
    log_dir = Path(chosen["log_dir"]) if chosen["log_dir"] else None
    settings: RendezvousSettings | None = fields.get("rdzv")
    with ProgressLine() as progress:
        report = _Report(progress, is_json=chosen["json"])
        progress.show("doctor: importing torch", at_once=True)
        for finding in check_host(environ, log_dir, chosen["nnodes"][1]):
            report.add(finding)
            progress.show("doctor: checking this host", at_once=True)
        if settings is None:
            report.add(Finding("ok", "rendezvous", "a single node needs none"))
        else:
            import asyncio

            asyncio.run(_examine_endpoints(settings, fields["run_id"], environ, report, progress))
    return report.end()


async def _examine_endpoints(
    settings: RendezvousSettings, run_id: str, environ: Mapping[str, str], report: _Report, progress: ProgressLine
) -> None:
    note = f"; {settings.endpoint_note}" if settings.endpoint_note else ""
    waiting = f"doctor: waiting for an answer from {settings.endpoint or 'the endpoint'}"
    progress.show(waiting, at_once=True)
    async for found in check_endpoints(settings, run_id, environ):
        report.add(found if found.level == "ok" else found.replace(words=found.words + note))
        progress.show(waiting, at_once=True)


class _Report:
    """The findings: printed one by one, or as one JSON object at the end."""

    def __init__(self, progress: ProgressLine, *, is_json: bool) -> None:
        self._progress, self._is_json = progress, is_json
        self._findings: list[Finding] = []

    def add(self, finding: Finding) -> None:
        self._findings.append(finding)
        if not self._is_json:
            self._progress.clear()
            write_finding(finding)

    def end(self) -> int:
        """Prints the findings if they are printed as JSON, and returns the exit code."""
        has_failed = any(finding.level == "error" for finding in self._findings)
        if self._is_json:
            found = [{"level": each.level, "subject": each.subject, "text": each.words} for each in self._findings]
            write_text(json.dumps({"code": "failed" if has_failed else "ok", "findings": found}, indent=2))
        return EXIT_FAILURE if has_failed else 0


def write_finding(finding: Finding) -> None:
    """Prints a finding: on a terminal with colours, and wrapped; elsewhere on one line, for programs."""
    text = printable(str(finding))
    if sys.stdout is not None and sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 1
        text = textwrap.fill(text, width, subsequent_indent=INDENT, break_long_words=False, break_on_hyphens=False)
    level = finding.level
    write_painted(paint_for(sys.stdout)(level, COLOURS[level]) + text.removeprefix(level))
