"""Pages are true: tutorials run from top to bottom, and every command line has options that exist."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from kit.pages import PAGES, TUTORIALS, blocks, read_launch, run_in_shell
from kit.ports import quiet_port
from kit.warm.interpreters import Warm
from sources import ROOT

LIMIT_S = 240.0
SHOWN = sorted(
    {
        (page.relative_to(ROOT).as_posix(), *launch)
        for page in PAGES
        for block in blocks(page)
        if block.language not in {"python", "diff", "mermaid", "json"}
        for launch in block.launches
    }
)


@pytest.mark.parametrize("page, module, rest", SHOWN)
def test_a_command_that_a_page_shows_has_options_that_exist_with_values_that_they_take(
    page: str, module: str, rest: str
) -> None:
    read_launch(module, rest)


def test_commands_are_found_in_pages_and_a_misspelt_option_would_be() -> None:
    assert len(SHOWN) > 12
    with pytest.raises(ValueError, match="did you mean --max-restarts"):
        read_launch("", "--max-restart5 3 train.py")


@pytest.mark.all
@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_run_from_top_to_bottom_shows_what_it_says(tmp_path: Path, warm: Warm, page: Path) -> None:
    port, expected = str(quiet_port()), list[list[str]]()
    script = list[str]()
    for as_written in blocks(page):
        block = as_written._replace(text=as_written.text.replace("29400", port))
        if name := re.search(r'title="(.+?)"', block.title):
            (tmp_path / name[1]).write_text(block.text)
        elif block.language == "console":
            # A background agent is a single process, as in a shell that has `python` on its path.
            script += [line.replace("python ", f"{shlex.quote(sys.executable)} ", 1) for line in block.commands]
            script.append("echo; echo '=== end of a block'")
            expected.append(block.shown)
    assert expected, "a tutorial must have commands"
    # These pages need the users' own kind of workers, not our forks.
    is_looked_into = page.stem in {"hang", "in-place", "rehearse", "spent"}
    output = run_in_shell(tmp_path, "\n".join(script), {} if is_looked_into else warm.env, LIMIT_S)
    printed = output.split("=== end of a block\n")
    assert len(printed) == len(expected) + 1, output
    for wanted, seen in zip(expected, printed, strict=False):
        for line in wanted:
            pattern = ".*".join(re.escape(part) for part in line.split("…"))
            assert re.search(f"^{pattern}$", seen, re.MULTILINE), f"{line!r} is not in\n{seen}"
