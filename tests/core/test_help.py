"""Help: one table of commands produces `--help`, the parsers and the reference; the examples in it work."""

from __future__ import annotations

import io
import logging
import re
import shlex
import sys
from collections.abc import Callable
from typing import Any

import pytest

from aelastic.cli import rehearsal
from aelastic.cli.commands import run_command
from aelastic.cli.help import MOST_USED, command_help, full_help, short_help
from aelastic.cli.manual import table
from aelastic.cli.manual.parsing import parser_of
from aelastic.cli.manual.rows import Command
from aelastic.cli.manual.topics import HelpfulFormatter
from aelastic.cli.options import GROUPS, LAUNCH_GROUPS, OPTIONS
from aelastic.cli.parser import ALIASES, COMMANDS, read_options
from aelastic.cli.verbs import asking
from aelastic.cli.verbs.jobs import EXIT_NO_ANSWER, EXIT_NO_JOB
from aelastic.errors import EXIT_INPUT, InputError, RendezvousConnectionError
from aelastic.rdzv.restart_rules import parse as rules_in

WIDTH, LINES_MAX, GROUP_MAX = 80, 40, 9
ASKING = {*COMMANDS} - {"policy", "spent", "timeline", "rehearse", "doctor", "help", "version"}
ROWS = [pytest.param(command, id=command.title or "run") for command in (table.RUN, *table.COMMANDS.values())]


def typed(*argv: str) -> int | str | None:
    """The exit code of `aelastic COMMAND …`."""
    try:
        return run_command(argv, {}, GROUPS, print)
    except SystemExit as left:
        return left.code or 0


def test_a_job_starts_without_the_table_which_has_the_same_names() -> None:
    assert {*COMMANDS} == {*table.COMMANDS} and {*ALIASES.values()} <= {*COMMANDS}
    assert not ALIASES.keys() & {*COMMANDS}
    assert {command.group for command in table.COMMANDS.values()} == {*table.GROUPS}


# The help of aelastic.


@pytest.mark.parametrize("prefix", ["-h", "--h", "--he", "--hel", "--help"])
def test_every_beginning_of_help_shows_the_short_help(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        read_options([prefix], {})
    assert capsys.readouterr().out == short_help()
    assert typed("help") == 0 and capsys.readouterr().out == short_help()


@pytest.mark.parametrize("prefix", ["--help-", "--help-all", "--help_all"])
def test_help_all_shows_everything(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        read_options([prefix], {})
    assert capsys.readouterr().out == full_help()


def test_the_short_help_fits_a_screen_and_names_the_commands_and_the_options_used_most() -> None:
    lines = short_help().splitlines()
    assert len(lines) <= LINES_MAX and max(map(len, lines)) <= WIDTH
    for command in table.COMMANDS.values():
        is_listed = any(re.match(rf"  {command.title} +{re.escape(command.phrase)}$", line) for line in lines)
        assert is_listed or command.group == table.HELP, command.title
    assert len(MOST_USED) == 12 and all(any(name in line for line in lines) for name in MOST_USED)
    assert [f"  {example.command}" for example in table.RUN.examples] == lines[-2:]
    assert "--help-all" in short_help() and "--help)" in short_help()
    assert "--use-env" in short_help(LAUNCH_GROUPS) and "--use-env" not in short_help()


@pytest.mark.parametrize(
    "values, extra, end",
    [
        ((), {"topic": "no-control-socket"}, " (help: no-control-socket)"),
        (
            (RendezvousConnectionError("no answer"),), {"topic": "no-control-socket"},
            " no answer (help: no-control-socket)",
        ),
        ((RendezvousConnectionError("no answer"),), {}, " no answer (help: no-answer-from-the-endpoint)"),
        ((OSError("no room"),), {}, " no room"),
        ((), {}, ""),
    ],
)  # fmt: skip
def test_a_log_line_ends_with_its_topic_or_that_of_the_error_in_it(
    values: tuple[object, ...], extra: dict[str, str], end: str
) -> None:
    record = logging.getLogger("aelastic.x").makeRecord(
        "aelastic.x", logging.WARNING, "x.py", 1, "it says" + " %s" * len(values), values, None, extra=extra
    )
    assert HelpfulFormatter("%(message)s").format(record) == f"it says{end}"


def test_help_explains_the_topic_that_a_message_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert typed("help", "no-answer-from-the-endpoint") == 0
    assert capsys.readouterr().out.startswith(
        "No answer from the endpoint\n\n- `no answer from the rendezvous endpoint"
    )


def test_the_full_help_names_every_option_in_a_group_that_is_not_a_drawer() -> None:
    text = full_help()
    assert max(map(len, text.splitlines())) <= WIDTH
    for option in OPTIONS:
        assert all(re.search(rf"^  .*{re.escape(name)}\b", text, re.MULTILINE) for name in option.names), option
    for command in table.COMMANDS.values():
        assert re.search(rf"^  {command.title} +{re.escape(command.phrase)}$", text, re.MULTILINE)
    assert max(map(len, GROUPS.values())) <= GROUP_MAX
    assert "Exit codes:" in text and "Examples:" in text


# The help of a command.


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_a_help_of_its_own_however_it_is_requested(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, text = table.COMMANDS[name], command_help(name)
    for argv in ((name, "--help"), (name, "-h"), ("help", name), ("help", *command.title.split())):
        assert typed(*argv) == 0
        assert capsys.readouterr().out == text, argv
    first, empty, usage, *_ = lines = text.splitlines()
    assert (first.lower(), empty) == (f"{command.phrase}.".lower(), "")
    assert usage.startswith(f"Usage: aelastic {command.title}")
    assert max(map(len, lines)) <= WIDTH and text.isascii()
    for argument in command.arguments:
        shown = argument.metavar if argument.is_positional else argument.names[-1]
        assert re.search(rf"^  .*{re.escape(shown)}\b", text, re.MULTILINE), shown
    for option in command.job_options:
        assert f"  {option} " in text
    examples = lines[lines.index("Examples:") :]
    assert len([line for line in examples if re.match("  (python -m )?aelastic ", line)]) >= 2
    codes = lines[lines.index("Exit codes:") + 1 :]
    assert [line.split()[0] for line in codes if not line.startswith("   ")] == [code for code, _ in command.exit_codes]


@pytest.mark.parametrize("alias, name", ALIASES.items())
def test_an_earlier_name_works_and_is_shown_nowhere(alias: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ((alias, "--help"), ("help", alias)):
        assert typed(*argv) == 0
        assert capsys.readouterr().out == command_help(name)
    every = [short_help(), full_help(), *map(command_help, COMMANDS)]
    assert not any(re.search(rf"\b{alias}\b", text) for text in every)


def test_all_texts_are_ascii_so_that_any_terminal_shows_them() -> None:
    assert short_help().isascii() and full_help().isascii()


@pytest.mark.parametrize("name", sorted(ASKING))
def test_the_exit_codes_of_a_command_that_asks_an_agent_are_those_of_the_code(name: str) -> None:
    codes = {*asking.EXIT_CODES.values(), EXIT_INPUT, EXIT_NO_JOB, EXIT_NO_ANSWER}
    assert [code for code, _ in table.COMMANDS[name].exit_codes] == [str(code) for code in sorted(codes)]


# Examples.


def read_as_the_program_does(words: list[str]) -> Any:
    """Parses `aelastic …` with the program's own parser."""
    first, rest = words[0], words[1:]
    if first not in COMMANDS:
        return read_options(words, {})
    if first == "doctor":
        return read_options([*rest, "--", "doctor"], {}, GROUPS, "doctor")
    if first == "rehearse":
        return rehearsal._read(rest, {})
    if first not in ASKING:
        return parser_of(first).parse_args(rest)
    asked = asking._read(words)
    ranks = [asked.rank] if first == "logs" else getattr(asked, "ranks", [])
    assert not asked.more and all(asking.RANK.fullmatch(rank) for rank in ranks), words
    return asked


@pytest.mark.parametrize("command", ROWS)
def test_each_example_is_read_as_the_program_reads_it(command: Command) -> None:
    assert len(command.examples) >= 2
    for example in command.examples:
        program, *words = shlex.split(example.command.removeprefix("python -m "))
        assert program == "aelastic" and command.name in {"", words[0]}
        read = read_as_the_program_does(words)
        if command.name == "policy" and read.restart_policy:
            assert rules_in(read.restart_policy)


@pytest.mark.parametrize(
    "wrong",
    [
        "aelastic --nproc-per-nodes 8 train.py", "aelastic --nnodes four train.py", "aelastic doctor --nnode-s 2",
        "aelastic rehearse --check ckpt train.py", "aelastic drain --when 3", "aelastic logs", "aelastic logs first",
        "aelastic spent logs --cost 2", "aelastic policy tell logs", "aelastic version now", "aelastic stop a --job b",
    ],
)  # fmt: skip
def test_an_example_that_is_wrong_would_be_found(wrong: str) -> None:
    with pytest.raises((InputError, AssertionError)):
        read_as_the_program_does(shlex.split(wrong)[1:])


# Wrong usage.


@pytest.mark.parametrize(
    "argv, words",
    [
        ("help statsu", "help: there is no command or topic statsu: did you mean status?"),
        ("help xyz", "help: there is no command or topic xyz"),
        ("version now", "version: unrecognized arguments: now"),
        ("policy logs", "policy: argument explain: invalid choice: 'logs'"),
        ("policy", "policy: no subcommand given, as in aelastic policy explain logs"),
        ("timeline logs --outptu=x", "timeline: unknown option --outptu: did you mean --output?"),
        ("policy explain", "policy: no EVENTS given: name the --log-dir that the job ran with, as in aelastic policy"),
        ("doctor --nnode-s 2", "unknown option --nnode-s: did you mean --nnodes?"),
        ("timeline -o x", "timeline: no LOGDIR given: name the --log-dir that the job ran with"),
        ("spent logs --cost 2", "argument --cost: '2': use a price and its unit, e.g. 2.10/gpu-h, or 12/h"),
    ],
)
def test_wrong_usage_of_a_command_is_one_line(argv: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        run_command(argv.split(), {}, GROUPS, print)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "argv, words",
    [
        ("logs -f", "logs: no RANK given: name a worker, as in aelastic logs 0"),
        ("cordon", "cordon: no NODE given: name a node that aelastic status lists"),
        ("logs --flolow", "logs: unknown option --flolow: did you mean --follow?"),
        ("status --jbo x", "status: unknown option --jbo: did you mean --job?"),
    ],
)
def test_wrong_usage_of_a_command_about_a_job_is_one_line(argv: str, words: str) -> None:
    complaints = list[str]()
    assert run_command(argv.split(), {}, GROUPS, complaints.append) == EXIT_INPUT
    assert complaints == [f"aelastic: error: {words} (see aelastic {argv.split(maxsplit=1)[0]} --help)"]


def test_a_file_that_has_the_name_of_a_command_is_pointed_out(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "version").touch()
    complaints = list[str]()
    assert run_command(["version"], {}, GROUPS, complaints.append) == 0
    assert complaints == ["aelastic: version runs the command of that name; to run the file, use ./version"]


# Terminals.


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    "stdout, environ, is_bold",
    [
        (Terminal, {"TERM": "xterm-256color"}, True),
        (Terminal, {"TERM": "xterm-256color", "NO_COLOR": "1"}, False),
        (Terminal, {"TERM": "dumb"}, False),
        (Terminal, {}, False),
        (io.StringIO, {"TERM": "xterm-256color"}, False),
    ],
)
def test_headings_are_bold_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, stdout: Callable[[], io.StringIO], environ: dict[str, str], is_bold: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("TERM", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    for argv, text in ((("help",), short_help()), (("drain", "--help"), command_help("drain"))):
        monkeypatch.setattr(sys, "stdout", seen := stdout())
        assert typed(*argv) == 0
        shown = seen.getvalue()
        assert ("\x1b[1mExamples:\x1b[0m\n" in shown) is is_bold
        assert re.sub(r"\x1b\[[01]m", "", shown) == text


def test_a_closed_stdout_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert typed("help") == typed("help", "drain") == 0
