"""The reference of the command line: `docs/reference/cli.md`, from the table of options."""

from __future__ import annotations

import sys

from markdown import code, lines, table
from sources import ROOT

sys.path.insert(0, str(ROOT))  # `make docs` needs no installed package

from aelastic.cli.options import GROUPS, LAUNCH_GROUPS, Option

PAGE = "docs/reference/cli.md"
HEAD = """\
<!-- Generated from the table of options by `make docs`: change aelastic/cli/options.py, not this page. -->

# Command line

`aelastic [OPTIONS] SCRIPT [ARGUMENTS]`, or `python -m aelastic`. Options come before the script. Each one with several
words has both spellings (`--nproc-per-node`, `--nproc_per_node`), and every prefix that names one option only is taken
for it. A variable sets the default; an empty one counts as unset.
[From torchrun](../how-to/from-torchrun.md#flag-by-flag) compares flag by flag."""
DOCTOR = """\
`aelastic doctor [OPTIONS]` takes the same options, and starts no job: it checks this host and each rendezvous endpoint,
and prints one line for each check: `ok`, `warning` or `error`, what was found, and what to do. It exits with 0, with 1
if there is an error, and with 2 if the options are invalid.
[Before the first job](rendezvous.md#before-the-first-job) shows one. A script of that name is `./doctor`."""
LAUNCH = """\
`python -m aelastic.launch` takes the same options, and stands for `torch.distributed.launch`: scripts get
`--local-rank=N` as an argument, unless `--use-env` is given. `python -m aelastic.run` is `python -m aelastic`."""


def pages() -> dict[str, str]:
    """The page, by its path below the root of the repository."""
    parts = [part for title, options in GROUPS.items() for part in (f"## {_title(title)}", _table(options))]
    own = next(iter(LAUNCH_GROUPS.values()))
    return {PAGE: lines(HEAD, *parts, "## Doctor", DOCTOR, "## As torch.distributed.launch", LAUNCH, _table(own))}


def _title(title: str) -> str:
    return title[0].upper() + title[1:]


def _table(options: tuple[Option, ...]) -> str:
    return table(("option", "default", "variable", ""), [_row(option) for option in options])


def _row(option: Option) -> tuple[str, ...]:
    names = ", ".join(code(f"{name} {option.metavar}".strip()) for name in option.names)
    default = "" if option.default in {None, ""} or not option.metavar else code(str(option.default))
    return names, default, ", ".join(map(code, option.variables)), option.text.replace("<", "&lt;")
