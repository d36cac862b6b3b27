"""Commands on a terminal of two widths: coloured states, and a progress line that is erased when a long command ends.

Without a terminal, or with colours off, commands print the same words and never move the cursor.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kit.launching import LAUNCH_TIMEOUT_S, Launcher
from kit.screens import Screen
from kit.verbs import json_of
from kit.waiting import wait_for

# In the command: it draws the line from the beginning, and every time.
EAGER = """
from aelastic.observe.ui import progress_line
progress_line.PATIENCE_S = progress_line.INTERVAL_S = 0
from aelastic.tools.timeline import files
files.LINES_EACH = 1
from aelastic.cli.main import main_and_exit
main_and_exit()
"""
SGR = re.compile(rb"\x1b\[(\d+)m([^\x1b]*)\x1b\[0m")
# A drawn line, up to the control sequence that erases the rest of the row.
LINE = re.compile(rb"\r([^\r\n]+)\x1b\[K")
GREEN, RED = b"32", b"31"
TRAINS = """
for step in range(20):
    print("step", step, flush=True)
    time.sleep(0.05)
"""
WIDTHS = pytest.mark.parametrize("columns", [80, pytest.param(160, marks=[pytest.mark.all, pytest.mark.ci])])


class Terminal:
    """Runs commands on terminals."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._screens: list[Screen] = []

    def run(
        self,
        *argv: str,
        columns: int = 80,
        streams: tuple[str, ...] = ("stdout", "stderr"),
        env: dict[str, str] | None = None,
    ) -> tuple[int, Screen]:
        """Returns the exit code, and the screen at that time."""
        screen = Screen(columns, rows=60)
        self._screens.append(screen)
        environ = {name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "COLUMNS"}}
        environ |= {"TERM": "xterm", "XDG_RUNTIME_DIR": str(self.folder), "TMPDIR": str(self.folder), **(env or {})}
        with open(self.folder / "stdout", "wb") as out:
            to = [screen.theirs if name in streams else out for name in ("stdout", "stderr")]
            command = [sys.executable, "-c", EAGER, *argv]
            done = subprocess.run(
                command,
                cwd=self.folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=to[0],
                stderr=to[1],
                timeout=LAUNCH_TIMEOUT_S,
                check=False,
            )
        screen.end()
        return done.returncode, screen

    @property
    def stdout(self) -> str:
        """Output on stdout, if that was not the terminal."""
        return (self.folder / "stdout").read_text()


@pytest.fixture
def terminal(tmp_path: Path) -> Terminal:
    return Terminal(tmp_path)


def drawn(screen: Screen) -> list[str]:
    return [line.decode() for line in LINE.findall(screen.written)]


def assert_is_gone(screen: Screen, of: str) -> None:
    """Checks that nothing of the drawn lines remains, and that each was cut to the width of the terminal."""
    assert drawn(screen) and not [row for row in screen.rows if row.startswith(of)], screen.story
    assert max(map(len, drawn(screen))) < screen._screen.columns


@WIDTHS
def test_states_are_green_or_red_on_a_terminal_and_say_the_same_without_colour(launch: Launcher, columns: int) -> None:
    job = launch("print('up', flush=True)\nrest()", "--rdzv-id=resnet")
    job.wait_line("up")
    wait_for(
        lambda: f"it runs: {job.story}",
        lambda: json_of(job.folder, "status").get("nodes", [{}])[0].get("phase") == "running",
    )
    terminal = Terminal(job.folder)
    for command in ("status", "ps"):
        code, screen = terminal.run(command, columns=columns)
        assert code == 0 and (GREEN, b"running") in SGR.findall(screen.written), screen.story
        rows = screen.rows
        assert any("running" in row for row in rows), screen.story
        for env in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
            code, plain = terminal.run(command, columns=columns, env=env)
            assert code == 0 and b"\x1b" not in plain.written
            assert without_times(plain.rows) == without_times(rows)
        assert terminal.run(command, streams=("stderr",))[0] == 0
        assert "\x1b" not in terminal.stdout and without_times(terminal.stdout.splitlines()) == without_times(rows)


def without_numbers(screen: Screen) -> list[str]:
    """Replaces numbers: free memory changes between looks."""
    return re.sub(r"\d+", "…", " ".join(screen.rows)).split()


def without_times(rows: list[str]) -> str:
    """The whole screen, with rows joined where the terminal wrapped them."""
    return "".join("".join(re.sub(r"\d+ (ms|s|min|%)", "…", row).split()) for row in rows)


@pytest.mark.all
@pytest.mark.ci
@WIDTHS
def test_doctor_shows_what_it_waits_for_and_colours_its_levels(terminal: Terminal, columns: int) -> None:
    code, screen = terminal.run("doctor", "--nproc-per-node", "1", columns=columns)
    assert code in {0, 1}, screen.story
    assert drawn(screen)[0] == "doctor: importing torch" and "doctor: checking this host" in drawn(screen)
    assert_is_gone(screen, "doctor: ")
    assert (GREEN, b"ok") in SGR.findall(screen.written)
    assert screen.rows[-1].startswith("ok       rendezvous: a single node needs none")
    code, plain = terminal.run("doctor", columns=columns, env={"NO_COLOR": "1"})
    assert not SGR.search(plain.written) and without_numbers(plain) == without_numbers(screen) and drawn(plain)
    code, dumb = terminal.run("doctor", columns=columns, env={"TERM": "dumb"})
    assert b"\x1b" not in dumb.written and without_numbers(dumb) == without_numbers(screen)


@pytest.mark.all
@pytest.mark.ci
@WIDTHS
def test_a_rehearsal_shows_which_case_runs_and_the_step_it_is_at(terminal: Terminal, columns: int) -> None:
    (terminal.folder / "train.py").write_text("import time\n" + TRAINS)
    rehearse = "rehearse", "--only", "frozen", "--progress", r"step (\d+)", "train.py"
    code, screen = terminal.run(*rehearse, columns=columns)
    assert code in {0, 1}, screen.story
    assert_is_gone(screen, "rehearse: ")
    cases = [re.match(r"rehearse: (\d) of 2: (.*?)(, step \d+)?, \d+ s$", line) for line in drawn(screen)]
    seen = {(found[1], found[2], bool(found[3])) for found in cases if found}
    assert {("1", "undisturbed", True), ("2", "a rank frozen for 3 s", True)} <= seen, drawn(screen)
    code, _ = terminal.run(*rehearse, streams=())
    assert "\x1b" not in terminal.stdout and "\r" not in terminal.stdout


@pytest.mark.all
@pytest.mark.ci
@WIDTHS
def test_a_timeline_shows_how_much_of_the_logs_is_read(terminal: Terminal, launch: Launcher, columns: int) -> None:
    job = launch("", "--log-dir", "logs")
    assert job.wait() == 0, job.story
    code, screen = terminal.run("timeline", str(job.folder / "logs"), columns=columns)
    assert code == 0
    shares = [int(found[1]) for line in drawn(screen) if (found := re.match(r"reading 1 event log: (\d+) %", line))]
    assert len(shares) > 3 and shares == sorted(shares)
    assert any(line.startswith("drawing /") for line in drawn(screen))
    assert_is_gone(screen, "reading")
    words = [found[1] for row in screen.rows if (found := re.match(r"([a-z]+) {2,}", row))]
    assert words == ["picture", "trace", "run"], screen.story
    for argv in (("spent", str(job.folder / "logs")), ("policy", "explain", str(job.folder / "logs"))):
        code, screen = terminal.run(*argv, columns=columns)
        assert code == 0
        assert_is_gone(screen, "reading")
    code, _ = terminal.run("timeline", str(job.folder / "logs"), "--json", streams=("stderr",))
    assert code == 0 and json.loads(terminal.stdout)["state"] == "SUCCEEDED"
