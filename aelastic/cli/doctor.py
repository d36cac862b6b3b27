"""`aelastic doctor`: checks this host and the rendezvous endpoints, one line each, and starts no job."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from aelastic.cli.parser import Groups, read_options
from aelastic.cli.spec_fields import rendezvous_fields
from aelastic.doctor.endpoint_checks import check_endpoints
from aelastic.doctor.finding import Finding
from aelastic.doctor.host_checks import check_host
from aelastic.errors import EXIT_FAILURE, InputError
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.ui.commands import say

# Lines of a finding after the first begin below its text.
INDENT = " " * 9


def examine(argv: Sequence[str], environ: Mapping[str, str], groups: Groups) -> int:
    """Prints the findings, and returns the exit code: 1 if there is an error among them.

    Args:
        argv: the options of a job, and perhaps its script.

    Raises:
        InputError: an option is wrong.
        SystemExit: after `--help` and `--version`.
    """
    try:
        chosen = read_options([*argv, "--", "doctor"], environ, groups, "doctor")
    except InputError as error:
        raise InputError(f"{error} (see aelastic doctor --help)") from None
    fields = rendezvous_fields(chosen, environ)
    log_dir = Path(chosen["log_dir"]) if chosen["log_dir"] else None
    levels = {_say(finding) for finding in check_host(environ, log_dir, chosen["nnodes"][1])}
    settings: RendezvousSettings | None = fields.get("rdzv")
    if settings is None:
        levels |= {_say(Finding("ok", "rendezvous", "a single node needs none"))}
    else:
        import asyncio

        levels |= asyncio.run(_examine_endpoints(settings, fields["run_id"], environ))
    return EXIT_FAILURE if "error" in levels else 0


async def _examine_endpoints(settings: RendezvousSettings, run_id: str, environ: Mapping[str, str]) -> set[str]:
    note = f"; {settings.endpoint_note}" if settings.endpoint_note else ""
    findings = check_endpoints(settings, run_id, environ)
    return {_say(found if found.level == "ok" else found.replace(words=found.words + note)) async for found in findings}


def _say(finding: Finding) -> str:
    text = str(finding)
    if sys.stdout is not None and sys.stdout.isatty():  # elsewhere one line each, for programs
        width = shutil.get_terminal_size().columns - 1
        text = textwrap.fill(text, width, subsequent_indent=INDENT, break_long_words=False, break_on_hyphens=False)
    say(text)
    return finding.level
