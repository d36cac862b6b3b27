"""The command line as it was typed: which text each option has, and its value.

`read_options` finds for each option the text (command line, else `PET_<NAME>` or `AELASTIC_<NAME>`, else the
default) and reads it.  argparse does only the grammar, so prefixes, `-r3`, `--` and the arguments of the script mean
what they mean to torchrun; values are read here, so that a message about a bad one names its source.

Nothing here depends on the machine.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeAlias

import aelastic
from aelastic.base.record import Record
from aelastic.base.setting import Option, settings_of
from aelastic.cli.options import GROUPS
from aelastic.errors import InputError

_log = logging.getLogger(__name__)

Groups: TypeAlias = Mapping[str, tuple[Option, ...]]

# The names of commands, so that starting a job does not import their table (a test compares them).
OF_JOBS = "ps", "status", "why", "stacks", "logs", "drain", "cordon", "uncordon", "restart", "stop"
APART = "policy", "spent", "timeline", "rehearse"
VERBS = (*OF_JOBS, *APART)
# Earlier names of commands, which work and are shown nowhere.
ALIASES = {"exclude": "cordon", "include": "uncordon"}
COMMANDS = (*VERBS, "doctor", "help", "version")
PURPOSE = "Start, watch and restart distributed PyTorch workers."
FORMATTER_WIDTH = 100
# Names of other launchers (accelerate, DeepSpeed, mpirun, srun) for our options, and short forms.
_OF_WORKERS = "--nprocs", "--np", "--num-processes", "--num-procs", "--num-workers", "--num-gpus", "--workers"
_OTHER_NAMES = {
    **dict.fromkeys(_OF_WORKERS, "--nproc-per-node"),
    **dict.fromkeys(("--num-machines", "--num-nodes", "--nodes"), "--nnodes"),
    "--machine-rank": "--node-rank",
    "--main-process-ip": "--master-addr",
    "--main-process-port": "--master-port",
    "--restarts": "--max-restarts",
}


class Setting(NamedTuple):
    """One option's value, the text it was read from, and how a message names it (`PET_ROLE=x`)."""

    value: Any
    text: str | None
    source: str
    is_default: bool

    @property
    def variable(self) -> str:
        """The variable that the value comes from; empty for an option, and for a default."""
        return "" if self.is_default or self.source.startswith("-") else self.source.partition("=")[0]


class Settings(Record):
    """Every option's setting by `dest`, the script, and the script's arguments."""

    script: str
    script_args: tuple[str, ...]
    by_dest: Mapping[str, Setting]

    def __getitem__(self, dest: str) -> Any:
        return self.by_dest[dest].value

    def fields_of(self, kind: type[Any]) -> dict[str, Any]:
        """Returns the values of a class's fields, of those that have an option."""
        options = {name: each.option for name, each in settings_of(kind).items()}
        return {name: self[option.dest] for name, option in options.items() if option is not None}

    def source(self, dest: str) -> str:
        return self.by_dest[dest].source

    def log_ignored(self, because: str, *dests: str) -> None:
        """Logs which of these options were given and have no effect."""
        for dest in dests:
            if not self.by_dest[dest].is_default:
                _log.info("ignoring %s: %s", self.source(dest), because)

    def variables(self, *dests: str) -> list[str]:
        return [variable for dest in dests if (variable := self.by_dest[dest].variable)]


def read_options(
    argv: Sequence[str], environ: Mapping[str, str], groups: Groups = GROUPS, command: str = ""
) -> Settings:
    """Reads the command line.  `--help`, `--help-all`, `--version` and `--print-completion` print and leave.

    Args:
        groups: the options there are.
        command: the command that takes them, whose help `--help` prints; empty for running a job.

    Raises:
        InputError: an unknown option, a value that cannot be read, no script.
        SystemExit: after what only prints.
    """
    found = _find(argv, groups, command)
    by_dest = {option.dest: read_setting(option, found, environ) for option in _options(groups)}
    return Settings(found["script"], tuple(found["script_args"]), by_dest)


def _options(groups: Groups) -> Iterator[Option]:
    return (option for group in groups.values() for option in group)


def read_setting(option: Option, found: Mapping[str, Any], environ: Mapping[str, str]) -> Setting:
    """Returns one option's setting.

    Args:
        found: the texts from the command line, by `dest`.

    Raises:
        InputError: the text cannot be read.
    """
    text, source, is_default = option.default, option.name, True
    if option.dest in found:
        text = found[option.dest]
        source, is_default = f"{option.name} {_shown(text)}" if option.metavar else option.name, False
    elif variable := next((name for name in option.variables if environ.get(name)), ""):
        text, is_default = environ[variable], False
        source = f"{variable}={_shown(text)}"
    try:
        value = None if text is None else option.read(text)
    except ValueError as reason:
        raise InputError(f"{source}: {reason}") from None
    if text is not None and option.rule is not None and (remedy := option.rule(value)):
        raise InputError(f"{source}: {remedy}")
    return Setting(value, text, source, is_default)


def _shown(text: str) -> str:
    """Returns the text for messages, without the passwords that `--rdzv-conf` takes for etcd."""
    return re.sub(r"(?<=password=)[^,]+|(?<=://)[^/@]*@", "…", text)


class _Parser(argparse.ArgumentParser):
    groups: Groups = GROUPS
    command = ""

    def error(self, message: str) -> NoReturn:
        raise InputError(message)

    def format_help(self) -> str:
        from aelastic.cli.help import command_help, short_help  # nothing else pays for it

        return command_help(self.command) if self.command else short_help(self.groups)

    def print_help(self, _: Any = None) -> None:
        from aelastic.observe.ui.commands import write_help

        write_help(self.format_help())


class _ShowAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from aelastic.cli.help import full_help
        from aelastic.observe.ui.commands import write_help

        assert isinstance(parser, _Parser)
        write_help(full_help(parser.groups))
        parser.exit()


class _ShowVersion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from aelastic.observe.ui.commands import write_text  # nothing else pays for it

        write_text(version_text())
        parser.exit()


def version_text() -> str:
    """Returns the text that `--version` prints."""
    found = versions()
    return f"aelastic {found['aelastic']} (torch {found['torch'] or 'not installed'}, Python {found['python']})"


def versions() -> dict[str, str | None]:
    """Returns the versions of aelastic, torch (`None` if it is not installed) and Python."""
    python = ".".join(map(str, sys.version_info[:3]))
    return {"aelastic": aelastic.__version__, "torch": aelastic.version_of("torch"), "python": python}


class _PrintCompletion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, _: object, shell: Any, __: str | None = None) -> None:
        from aelastic.cli.shells.completion import print_completion  # as above

        assert isinstance(parser, _Parser)
        print_completion(shell, parser.groups)
        parser.exit()


def _build_parser(groups: Groups = GROUPS) -> _Parser:
    # Unused, but argparse makes one for each option; without a width it imports shutil to ask the terminal: 4 ms.
    formatter = partial(argparse.HelpFormatter, width=FORMATTER_WIDTH)
    parser = _Parser(prog="aelastic", argument_default=argparse.SUPPRESS, formatter_class=formatter)
    parser.groups = groups
    # As with torchrun, whatever else of ours begins so.
    parser.add_argument("--h", "--he", "--hel", action="help")
    parser.add_argument("--re", dest="redirects")
    parser.add_argument("--no-", "--no_", dest="no_python", action="store_const", const="1")
    for option in _options(groups):
        if option.dest == "print_completion":
            parser.add_argument(*option.spellings, dest=option.dest, action=_PrintCompletion)
        elif option.metavar:
            parser.add_argument(*option.spellings, dest=option.dest)
        else:
            parser.add_argument(*option.spellings, dest=option.dest, action="store_const", const="1")
    parser.add_argument("--help-all", "--help_all", action=_ShowAll, nargs=0)
    parser.add_argument("--version", action=_ShowVersion, nargs=0)
    for positional in (parser.add_argument("script"), parser.add_argument("script_args", nargs=argparse.REMAINDER)):
        positional.required = False  # an unknown option is reported first, and without a script our own words
    return parser


def _find(argv: Sequence[str], groups: Groups, command: str) -> dict[str, Any]:
    """Returns the texts on the command line by `dest`, including `script` and `script_args`."""
    parser = _build_parser(groups)
    parser.command = command
    found, unknown = parser.parse_known_args(argv)
    if unknown:
        raise InputError(unknown_option(unknown[0].partition("=")[0], groups))
    if "script" not in found:
        raise InputError("no script given: name what to run after the options")
    return vars(found)


def unknown_option(name: str, groups: Groups) -> str:
    """Returns the message for an unknown option."""
    from difflib import get_close_matches  # only a misspelled command line pays for it

    known = ["--version", "--help", "--help-all", *(name for option in _options(groups) for name in option.names)]
    spelled = name.replace("_", "-")
    meant = _OTHER_NAMES.get(spelled) or next(iter(get_close_matches(spelled, known, n=1)), "")
    return f"unknown option {name}" + (f": did you mean {meant}?" if meant else "")
