"""The command line of `aelastic rehearse`: its options and those of the job, in any order before the script."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from aelastic.base.setting import Option
from aelastic.cli.arguments import parse
from aelastic.cli.options import GROUPS, OPTIONS
from aelastic.cli.own_options import own_options
from aelastic.cli.parser import Settings, read_options, unknown_option
from aelastic.errors import InputError
from aelastic.tools.rehearse.command import Wanted, run_rehearsal
from aelastic.tools.rehearse.trial import Script

OWN = own_options("rehearse")
ALL_GROUPS = {"rehearse": OWN, **GROUPS}


def rehearse(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Rehearses a script, and returns the exit code.

    Args:
        argv: options, the script and its arguments.

    Raises:
        InputError: an option or the script is wrong.
        SystemExit: after `--help`.
    """
    chosen = _read(argv, environ)
    spec = parse(argv, environ, ALL_GROUPS).spec
    nodes = (1, 1) if spec.rdzv is None else (spec.rdzv.min_nodes, spec.rdzv.max_nodes)
    step = re.compile(chosen["progress"]) if chosen["progress"] else None
    command = chosen.script, *chosen.script_args
    script = Script(_options_of_job(chosen), command, nodes, spec.local_world_size, step, environ)
    return run_rehearsal(script, Wanted._make(chosen[option.dest] for option in OWN))


def _read(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    chosen = read_options(argv, environ, ALL_GROUPS, "rehearse")
    before = argv[: len(argv) - len(chosen.script_args)]
    for option in OWN:
        _check_spelling(option, chosen, before)
    return chosen


def _options_of_job(chosen: Settings) -> list[str]:
    """Returns the options given on the command line; agents read variables themselves."""
    given = [(option, chosen.by_dest[option.dest]) for option in OPTIONS if option.dest != "standalone"]
    return [
        f"{option.name}={setting.text}" if option.metavar else option.name
        for option, setting in given
        if not setting.is_default and not setting.variable
    ]


def _check_spelling(option: Option, chosen: Settings, typed: Sequence[str]) -> None:
    """Refuses a shortened name: only options of a job can be shortened, as in torchrun."""
    names = [word.partition("=")[0] for word in typed]
    if chosen.by_dest[option.dest].is_default or option.name in names:
        return
    short = next(name for name in names if name.startswith("--") and option.name.startswith(name))
    raise InputError(unknown_option(short, ALL_GROUPS))
