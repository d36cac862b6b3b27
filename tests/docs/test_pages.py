"""What pages show is true: tutorials are run block by block, and every command line elsewhere has options that exist."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.ports import quiet_port
from kit.warm import Warm
from sources import ROOT

from aelastic.cli.parser import read_options
from aelastic.timeline import command as timeline

PAGES = sorted([ROOT / "README.md", *(page for page in ROOT.glob("docs/**/*.md") if page.parent.name != "adr")])
TUTORIALS = sorted(ROOT.glob("docs/tutorials/*.md"))
LIMIT_S = 240.0
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:python3? -m aelastic(\.\w+)?|(?<![\w./@-])aelastic)[ \t]+([^\n]*)")
END = re.compile(r"\s(?:[|&;>]|2>|#)|[;`]|\)$")
VALUE = re.compile(r"\$\([^)]*\)|\$\{[^}]*\}|\$\w+|%\w")  # a shell's, or systemd's: some text


def blocks(page: Path) -> list[tuple[str, str, str]]:
    return [(match[1], match[2], match[3]) for match in FENCE.finditer(page.read_text())]


def shown_commands() -> Iterator[tuple[str, str, str]]:
    for page in PAGES:
        for language, _, text in blocks(page):
            if language in {"python", "diff", "mermaid", "json"}:
                continue
            for module, rest in COMMAND.findall(text.replace("\\\n", " ")):
                yield page.relative_to(ROOT).as_posix(), module, END.split(rest)[0]


@pytest.mark.parametrize("page, module, rest", sorted(set(shown_commands())))
def test_a_command_that_a_page_shows_has_options_that_exist_with_values_that_they_take(
    page: str, module: str, rest: str
) -> None:
    arguments = shlex.split(VALUE.sub("1", rest))
    match module:
        case "" | ".run":
            read_options([*arguments, "train.py"], {})
        case ".timeline":
            timeline._parser().parse_args(arguments)
        case _:
            assert module in {".under", ".launch"}, page


def test_commands_are_found_in_pages_and_a_misspelt_option_would_be() -> None:
    assert len(set(shown_commands())) > 12
    with pytest.raises(ValueError, match="did you mean --max-restarts"):
        read_options(["--max-restart5", "3", "train.py"], {})


@pytest.mark.all
@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_run_from_top_to_bottom_shows_what_it_says(tmp_path: Path, warm: Warm, page: Path) -> None:
    port, expected = str(quiet_port()), list[list[str]]()
    script = list[str]()
    for language, title, text in blocks(page):
        if name := re.search(r'title="(.+?)"', title):
            (tmp_path / name[1]).write_text(text)
        elif language == "console":
            lines = text.replace("29400", port).splitlines()
            commands = [line[2:] for line in lines if line.startswith("$ ")]
            # An agent in the background is one process, as in a shell that has `python` on its path.
            script += [line.replace("python ", f"{shlex.quote(sys.executable)} ", 1) for line in commands]
            script.append("echo; echo '=== end of a block'")
            expected.append([line for line in lines if not line.startswith("$ ")])
    assert expected, "a tutorial has something to run"
    output = run_in_shell(tmp_path, "\n".join(script), warm.env)
    told = output.split("=== end of a block\n")
    assert len(told) == len(expected) + 1, output
    for wanted, seen in zip(expected, told, strict=False):
        for line in wanted:
            pattern = ".*".join(re.escape(part) for part in line.split("…"))
            assert re.search(f"^{pattern}$", seen, re.MULTILINE), f"{line!r} is not in\n{seen}"


def run_in_shell(folder: Path, script: str, env: dict[str, str]) -> str:
    with subprocess.Popen(
        ["bash", "-c", script], cwd=folder, env={**os.environ, **env}, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    ) as shell:  # fmt: skip
        try:
            return shell.communicate(timeout=LIMIT_S)[0]
        except subprocess.TimeoutExpired:
            os.killpg(shell.pid, signal.SIGKILL)
            pytest.fail(f"not over after {LIMIT_S:.0f} s:\n{shell.communicate()[0]}")
