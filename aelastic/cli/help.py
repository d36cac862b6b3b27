"""Makes the texts of `aelastic --help`, `--help-all` and `COMMAND --help` from the tables of commands and options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from aelastic.base.setting import Option
from aelastic.cli.manual import table
from aelastic.cli.manual.text import entry, example_lines, exit_code_lines, help_of, option_lines, sentence, wrap
from aelastic.cli.options import GROUPS, OPTIONS

# The options used most, with a phrase that fits a line.
MOST_USED = {
    "--nproc-per-node": "workers on this node: a number, auto, gpu or cpu",
    "--nnodes": "nodes in the job: a number, or a range",
    "--rdzv-backend": "how the nodes find each other: static, c10d, etcd",
    "--rdzv-endpoint": "where the nodes meet, the same on every node",
    "--rdzv-id": "name of the job, the same on every node",
    "--max-restarts": "restarts after failures (default: 0)",
    "--log-dir": "folder for log files",
    "--tee": "streams to log and show: 1 stdout, 2 stderr, 3 both",
    "--progress": r"how the script prints its step, e.g. 'step (\d+)'",
    "--hang-timeout": "fail a worker without sign of life for this long",
    "--preload": "modules to import once for all workers, or auto",
    "--secret-file": "file with the secret that all agents share",
}
_USAGE = "Usage: aelastic [OPTIONS] SCRIPT [ARGS]...  or  aelastic COMMAND [OPTIONS]"
_RULES = (
    "--like-this and --like_this are the same, and an unambiguous prefix is enough. Variables set defaults: "
    "PET_NPROC_PER_NODE and the like for torchrun's options (except --logs-specs, --numa-binding and "
    "--print-completion), AELASTIC_LOOP and the like for those of aelastic only. An empty variable is ignored; a "
    "flag is 1 or 0."
)


def short_help(groups: Mapping[str, tuple[Option, ...]] = GROUPS) -> str:
    """Returns the commands, the options used most, and two examples.

    Args:
        groups: the available options; those that `GROUPS` lacks are shown.
    """
    return _text(_short_lines(groups))


def full_help(groups: Mapping[str, tuple[Option, ...]] = GROUPS) -> str:
    """Returns all commands, all options and all exit codes."""
    return _text(_full_lines(groups))


def command_help(name: str) -> str:
    """Returns the text that `--help` of a command prints."""
    command = table.COMMANDS[name]
    by_name = {option.name: option for option in OPTIONS}
    return help_of(command, f"aelastic {name}", [by_name[each] for each in command.job_options])


def _text(lines: Iterator[str]) -> str:
    return "\n".join(lines) + "\n"


def _short_lines(groups: Mapping[str, tuple[Option, ...]]) -> Iterator[str]:
    yield sentence(table.RUN.phrase)
    yield ""
    yield _USAGE
    yield ""
    yield from _command_lines(table.GROUPS[:-1])
    yield ""
    yield "Options used most (all: aelastic --help-all; of a command: COMMAND --help):"
    by_name = {option.name: option for option in OPTIONS}
    for name, phrase in MOST_USED.items():
        yield from entry(f"{', '.join(by_name[name].names)} {by_name[name].metavar}", phrase)
    yield from option_lines(option for group in groups.values() for option in group if option not in OPTIONS)
    yield ""
    yield "Examples:"
    yield from (f"  {example.command}" for example in table.RUN.examples)


def _full_lines(groups: Mapping[str, tuple[Option, ...]]) -> Iterator[str]:
    yield sentence(table.RUN.phrase)
    yield ""
    yield _USAGE
    yield ""
    yield from wrap("Options come before the script. aelastic ./status runs a script that has the name of a command.")
    yield ""
    yield from _command_lines(table.GROUPS)
    for title, options in groups.items():
        yield ""
        yield f"{title[0].upper()}{title[1:]}:"
        yield from option_lines(options)
    yield ""
    yield "Help and version:"
    yield from entry("-h, --help", "show the commands and the options used most, and exit")
    yield from entry("--help-all", "show this, and exit")
    yield from entry("--version", "show the version, and exit")
    yield ""
    yield from wrap(_RULES)
    yield ""
    yield from example_lines(table.RUN)
    yield ""
    yield from exit_code_lines(table.RUN)


def _command_lines(groups: tuple[str, ...]) -> Iterator[str]:
    for group in groups:
        yield f"{group}:"
        for command in table.COMMANDS.values():
            if command.group == group:
                yield from entry(command.title, command.phrase, column=18)
