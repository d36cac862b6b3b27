"""The command line of `aelastic rehearse`: its options and those of the job, in any order before the script."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from aelastic.cli.arguments import parse
from aelastic.cli.converters import read_flag
from aelastic.cli.options import GROUPS, OPTIONS, Option
from aelastic.cli.parser import Settings, option_lines, read_options, unknown_option
from aelastic.errors import InputError
from aelastic.rehearse.command import Wanted, run_rehearsal
from aelastic.rehearse.play import Script
from aelastic.ui.commands import read_seconds


def read_metric(text: str) -> re.Pattern[str]:
    """A pattern with a group for a number.

    Raises:
        ValueError: it is none.
    """
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression ({error})") from None
    if not pattern.groups:
        raise ValueError(f"{text!r} has no group for the number: use 'loss (\\S+)'")
    return pattern


OWN = (
    Option(("--metric",), read_metric, None, "REGEX", "a number that is to be the same, as 'loss (\\S+)'", ()),
    Option(("--checkpoints",), Path, None, "DIR", "where the script saves (default: this folder)", ()),
    Option(("--for",), read_seconds, "600", "S", "undisturbed, at most", ()),
    Option(("--only",), str, "", "WORD", "cases whose names have it", ()),
    Option(("--output",), Path, None, "DIR", "for logs, and files of the script (default: in aelastic_rehearsals)", ()),
    Option(("--json",), read_flag, "0", "", "one JSON object at the end", ()),
)
ALL_GROUPS = {"rehearse": OWN, **GROUPS}


def rehearse(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Rehearses a script; gives the exit code.

    Args:
        argv: options, the script and its arguments.

    Raises:
        InputError: something is wrong with them.
        SystemExit: after `--help`.
    """
    try:
        chosen = _read(argv, environ)
    except InputError as error:
        raise InputError(f"{error} (see aelastic rehearse --help)") from None
    spec = parse(argv, environ, ALL_GROUPS).spec
    nodes = (1, 1) if spec.rdzv is None else (spec.rdzv.min_nodes, spec.rdzv.max_nodes)
    step = re.compile(chosen["progress"]) if chosen["progress"] else None
    command = chosen.script, *chosen.script_args
    script = Script(_options_of_job(chosen), command, nodes, spec.local_world_size, step, environ)
    return run_rehearsal(script, Wanted._make(chosen[option.dest] for option in OWN))


def _read(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    chosen = read_options(argv, environ, ALL_GROUPS, "\n".join(_help_lines()) + "\n")
    before = argv[: len(argv) - len(chosen.script_args)]
    for option in OWN:
        _check_spelling(option, chosen, before)
    return chosen


def _options_of_job(chosen: Settings) -> list[str]:
    """Those of the command line; what variables say, agents read themselves."""
    given = [(option, chosen.by_dest[option.dest]) for option in OPTIONS if option.dest != "standalone"]
    return [
        f"{option.name}={setting.text}" if option.metavar else option.name
        for option, setting in given
        if not setting.is_default and not setting.variable
    ]


def _check_spelling(option: Option, chosen: Settings, typed: Sequence[str]) -> None:
    """Refuses the beginning of an option's name: only those of a job can be shortened, as torchrun's."""
    names = [word.partition("=")[0] for word in typed]
    if chosen.by_dest[option.dest].is_default or option.name in names:
        return
    short = next(name for name in names if name.startswith("--") and option.name.startswith(name))
    raise InputError(unknown_option(short, ALL_GROUPS))


def _help_lines() -> Iterator[str]:
    yield "usage: aelastic rehearse [options] [options of a job] script [arguments of the script]"
    yield ""
    yield "Runs a script undisturbed, then under one fault at a time, and says whether it resumes."
    yield ""
    yield "options, in any order with those of a job (aelastic --help):"
    yield from option_lines(OWN)
    yield ""
    yield "--progress, an option of a job, says which step the script is at; without, notice.due() counts."
    yield ""
    yield "examples:"
    yield "  aelastic rehearse --nproc-per-node 2 --progress 'step (\\d+)' --checkpoints ckpt train.py"
    yield "  aelastic rehearse --only killed --metric 'loss (\\S+)' --progress 'step (\\d+)' train.py"
