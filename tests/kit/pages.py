"""The pages of the documentation, their code blocks, and a shell to run them in."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from sources import ROOT

from aelastic.cli.manual.parsing import parser_of
from aelastic.cli.parser import COMMANDS, read_options
from aelastic.cli.rehearsal import ALL_GROUPS

PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(page for page in ROOT.glob("docs/**/*.md") if page.parent.name != "adr"),
    ]
)
TUTORIALS = sorted(ROOT.glob("docs/tutorials/*.md"))
FENCE = re.compile(r"^( *)```(\w*)([^\n]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:python3? -m aelastic(\.\w+)?|(?<![\w./@-])aelastic)[ \t]+([^\n]*)")
END = re.compile(r"\s(?:[|&;>]|2>|#)|[;`]|\)$")
QUOTED = re.compile(r"'[^']*'")
VALUE = re.compile(r"\$\([^)]*\)|\$\{[^}]*\}|\$\w+|%\w")  # a shell's, or systemd's: some text


class Block(NamedTuple):
    language: str
    title: str  # the text after the language
    text: str

    @property
    def commands(self) -> list[str]:
        """The lines that a reader types, without the prompt; all lines if none has a prompt."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line[2:] for line in lines if line.startswith("$ ")] or lines

    @property
    def shown(self) -> list[str]:
        """The lines of output that a reader should see."""
        lines = self.text.replace("\\\n", " ").splitlines()
        typed = [line.startswith("$ ") for line in lines]
        return [line for line, is_typed in zip(lines, typed, strict=True) if any(typed) and not is_typed]

    @property
    def launches(self) -> Iterator[tuple[str, str]]:
        """For each of our command lines, the module below `aelastic` and the rest of the line."""
        for module, rest in COMMAND.findall(self.text.replace("\\\n", " ")):
            end = END.search(QUOTED.sub(lambda match: "x" * len(match[0]), rest))
            yield module, rest if end is None else rest[: end.start()]


def blocks(page: Path) -> list[Block]:
    return [
        Block(match[2], match[3], re.sub(f"^{match[1]}", "", match[4], flags=re.MULTILINE))
        for match in FENCE.finditer(page.read_text())
    ]


def read_launch(module: str, rest: str) -> None:
    """Parses a command line as the command does.

    Raises:
        ValueError: it has an unknown option or an invalid value.
    """
    arguments = shlex.split(VALUE.sub("1", rest))
    match module:
        case "" if arguments[:1] == ["rehearse"]:
            read_options(arguments[1:], {}, ALL_GROUPS)
        case "" if arguments and arguments[0] in COMMANDS and arguments[0] != "doctor":
            parser_of(arguments[0]).parse_args(arguments[1:])
        case "" | ".run":
            read_options([*(arguments[1:] if arguments[:1] == ["doctor"] else arguments), "train.py"], {})
        case ".timeline":
            parser_of("timeline").parse_args(arguments)
        case _:
            assert module in {".under", ".launch"}


def run_in_shell(folder: Path, script: str, env: Mapping[str, str], limit_s: float) -> str:
    """Runs a script and returns its output; none of its processes is left."""
    with subprocess.Popen(
        ["bash", "-c", script], cwd=folder, env={**os.environ, **env}, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    ) as shell:  # fmt: skip
        try:
            return shell.communicate(timeout=limit_s)[0]
        except subprocess.TimeoutExpired:
            os.killpg(shell.pid, signal.SIGKILL)
            pytest.fail(f"not over after {limit_s:.0f} s:\n{shell.communicate()[0]}")
