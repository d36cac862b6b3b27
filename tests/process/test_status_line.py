"""The live rows on a terminal: the run's state and open progress bars, always below the output, removed at the end."""

from __future__ import annotations

import io
import os
import re
import signal
import termios
from collections.abc import Iterator
from typing import Any

import pytest
from kit.launching import Launcher
from kit.screens import DRAWN, Screens, screens_of
from kit.waiting import wait_for

from aelastic.cli.arguments import parse
from aelastic.cli.main import _may_draw
from aelastic.errors import InputError

pytestmark = pytest.mark.usefixtures("warm_stores")

RUNNING = r"^aelastic \d+ s \| running \| round 1 \| 1 rank \| no restarts$"


@pytest.fixture
def start(launch: Launcher) -> Iterator[Screens]:
    """Starts jobs on terminals."""
    yield from screens_of(launch)


# Runs.


def test_the_line_is_below_all_that_is_written_and_gone_in_the_end(start: Screens) -> None:
    job, screen = start(
        "say('working')\nwait_for('go')\nos.write(1, b'50%')\nwait_for('end')\nos.write(1, b' 100%\\n')",
        wrapper="""
        import sys, threading, time, os
        def talk():
            while not os.path.exists("talk"):
                time.sleep(0.01)
            print("to stdout"); print("to stderr", file=sys.stderr)
        threading.Thread(target=talk, daemon=True).start()
        """,
    )

    def wait_drawn(above: list[str], cursor: tuple[int, int], state: str = RUNNING) -> None:
        def is_drawn() -> bool:
            *rows, last = screen.rows or [""]
            return rows == above and bool(re.match(state, last)) and screen.cursor == cursor

        wait_for(lambda: f"the output, and the line:\n{screen.story}", is_drawn)

    wait_drawn(["working"], (1, 0))
    (job.folder / "talk").touch()
    above = ["working", "to stdout", "to stderr"]
    wait_drawn(above, (3, 0))
    screen.resize(24, 24)
    wait_drawn(above, (3, 0), r"^aelastic \d+ s \| ru.*\.\.\.$")
    screen.resize(80, 24)
    job.go()
    wait_drawn([*above, "50%"], (3, 3))  # an unfinished line stays
    (job.folder / "end").touch()
    assert job.wait() == 0, screen.story
    screen.end()
    assert screen.rows == [*above, "50% 100%"] and screen.cursor == (4, 0)


STEPS = """
def step(number, fd, *pieces):
    for piece in pieces:
        os.write(fd, piece)
    wait_for(f"step{number}")

step(0, 1, b"a line\\n", b"\\r 1%", b"\\r 2%", b"\\r 3%\\n")
step(1, 2, b"an error\\n", b"\\x1b[31mred\\x1b[0m\\n")
os.write(1, (b"f" * 79 + b"\\n" + b"x" * 999 + b"\\n") * 10 + b"gr\\xc3\\xb6\\xc3\\x9fer, bad \\xff byte\\nno newline at the end")
"""


def test_the_output_is_what_it_is_without_the_rows_byte_for_byte_but_for_overwritten_bars(start: Screens) -> None:
    outputs = []
    for ui in ("auto", "off"):
        job, screen = start(STEPS, f"--ui={ui}", name=ui)
        for number, end in enumerate([b" 3%\r\n", b"red\x1b[0m\r\n"]):
            screen.wait_output(end)
            if ui == "auto":
                screen.wait_row("^aelastic .* running")
            (job.folder / f"step{number}").touch()
        assert job.wait() == 0, screen.story
        screen.end()
        outputs.append((re.sub(rb"\r? \d%(?=\r)(?!\r\n)", b"", screen.output), [*screen.scrolled_away, *screen.rows]))
    assert outputs[0][1] == outputs[1][1]
    # The same, except for what a carriage return has overwritten.
    assert outputs[0][0].replace(b"\r", b"") == outputs[1][0].replace(b"\r", b"")
    assert outputs[0][0].startswith(b"a line\r\n 3%\r\n") and outputs[0][0].endswith(b"byte\r\nno newline at the end")


def test_the_view_shows_the_ranks_and_is_gone_in_the_end(start: Screens) -> None:
    pytest.importorskip("rich")
    wrapper = "from aelastic.observe.ui import rank_view\nrank_view.INTERVAL_S = 0.2\n"
    job, screen = start("say('working')\nwait_for('go')", "--ui=view", "--nproc-per-node=2", wrapper=wrapper)
    screen.wait_row(r"^ +1 +1 +\d+ +running +\d+% +\d+ MiB$")  # CPU appears with the second sample
    state = r"aelastic \d+ s \| running \| round 1 \| 2 ranks \| no restarts$"

    def is_drawn() -> bool:
        rows = screen.rows
        is_below = rows[:2] == ["working", "working"] and len(rows) > 4 and bool(re.match(state, rows[2]))
        has_head = is_below and rows[4].split() == ["rank", "local", "pid", "state", "CPU", "memory"]
        return has_head and screen.cursor == (2, 0)

    wait_for(lambda: f"the output of both, and the view below:\n{screen.story}", is_drawn)
    job.go()
    assert job.wait() == 0, screen.story
    screen.end()
    assert screen.rows == ["working", "working"]


BARS = """
rank = int(os.environ["RANK"])
for number in range(40):
    os.write(2, b"\\r%s: %3d%%|%s|" % (b"rank %d" % rank, number * 5 // 2, b"#" * number))
    if number % 10 == 0:
        say(f"at {number}")
wait_for("go")
os.write(2, b"\\r%s: 100%%|%s|\\n" % (b"rank %d" % rank, b"#" * 40))
say("ended")
"""


def test_bars_are_one_row_for_each_rank_and_leave_their_last_state(start: Screens) -> None:
    ranks = 4
    job, screen = start(BARS, f"--nproc-per-node={ranks}", columns=80, rows=30)
    lasts = [f"[{rank}] rank {rank}:  97%|{'#' * 39}|" for rank in range(ranks)]

    def below() -> list[str]:
        return screen.rows[-ranks - 1 :]

    wait_for("the last bars, in order", lambda: below()[:-1] == lasts and re.match("aelastic .* running", below()[-1]))
    rows = screen.rows  # once: the state may be drawn again
    assert [row for row in rows if "|" in row] == rows[-ranks - 1 :]
    screen.resize(40, 30)
    wait_for("cut", lambda: below()[:-1] == [last[:39] for last in lasts])
    job.go()
    assert job.wait() == 0, screen.story
    screen.end()
    rows = [*screen.scrolled_away, *screen.rows]
    assert sorted(row for row in rows if row.startswith("at ")) == sorted(["at 0", "at 10", "at 20", "at 30"] * ranks)
    text = "".join(rows)
    for rank in range(ranks):
        assert text.count(f"rank {rank}: 100%|") == 1 and f"rank {rank}: 100%|{'#' * 40}|" in text
    assert rows.count("ended") == ranks and "rank 0:  " not in text


@pytest.mark.parametrize("end", [-signal.SIGTERM, -signal.SIGKILL, 3])
def test_a_terminal_is_as_it_was_whatever_ends_the_agent(start: Screens, end: int) -> None:
    job, screen = start(
        "signal.signal(signal.SIGTERM, signal.SIG_DFL)\nos.write(1, b'working\\n\\r 1%')\nwait_for('go')\n"
        "sys.exit(3 if rank == 1 else 0)",
        "--nproc-per-node=2",
    )
    screen.wait_row(r"^aelastic \d+ s \| running")
    wait_for("both", lambda: screen.rows[:4] == ["working", "working", "[0]  1%", "[1]  1%"])
    job.go() if end == 3 else job.signal(-end)
    assert job.wait() == end
    os.write(screen.theirs, b"the shell writes on: " + b"x" * 80)
    wait_for("all of it", lambda: any(row.startswith("x" * 21) for row in screen.rows))
    rows = screen.rows
    at = next(at for at, row in enumerate(rows) if row.startswith("the shell"))
    assert rows[at + 1].startswith("x" * 21)  # rows wrap, as before
    if end == -signal.SIGKILL:
        assert at == 2  # it overwrites the remaining rows
        return
    assert rows[:2] == ["working", "working"] and rows.count(" 1%") == 2
    assert not [row for row in rows if "running" in row or "%aelastic" in row]
    if end == 3:
        assert [row for row in rows if row.startswith("aelastic: W rank 1 failed on ")], "in the first column"
    else:
        assert rows[at - 1].startswith("aelastic: ") and len(rows) == at + 2


def test_a_suspended_agent_leaves_the_terminal_to_the_shell_and_comes_back(start: Screens) -> None:
    shell = 'set -m; "$@"; echo "the shell"; while [ ! -e back ]; do sleep 0.05; done; fg >fg; exit $?'
    job, screen = start("say('working')\nwait_for('go')", shell=shell)
    screen.wait_row(RUNNING)
    screen.wait_row("^working$")
    screen.type(b"\x1a")
    screen.wait_row("the shell")
    assert not [row for row in screen.rows if "running" in row]
    (job.folder / "back").touch()
    screen.wait_row(RUNNING)
    job.go()
    assert job.wait() == 0, screen.story
    screen.end()
    assert screen.rows[0] == "working" and not [row for row in screen.rows if "running" in row]


def test_ctrl_c_and_the_report_find_the_line_gone_and_a_stdout_elsewhere_has_the_output_alone(start: Screens) -> None:
    job, screen = start(
        "say('working')\nwait_for('never')", "--max-restarts=2", columns=200, streams=("stdin", "stderr")
    )
    screen.wait_row(r"^aelastic \d+ s \| running \| round 1 \| 1 rank \| restarts 0 of 2$")
    job.wait_line("working")
    assert screen.output == b""
    screen.type(b"\x03")
    assert job.wait() == -signal.SIGINT, screen.story
    screen.end()
    # The terminal's echo appeared where the rows were.  The worker's last words may come before the agent's.
    assert screen.rows[0].startswith(("aelastic: W SIGINT", "Traceback"))
    assert [row for row in screen.rows if "aelastic: W SIGINT: stopping workers" in row]
    assert [row for row in screen.rows if row.startswith("aelastic: stopped by SIGINT")]
    assert not [row for row in screen.rows if "running" in row]
    assert job.stdout == "working\n"


def test_a_terminal_that_is_stopped_blocks_no_worker(start: Screens) -> None:
    wrapper = "import aelastic.logs.terminal\naelastic.logs.terminal.ERASE_TIMEOUT_S = 0.1\n"
    job, screen = start("wait_for('go')", wrapper=wrapper)
    screen.wait_row(RUNNING)
    termios.tcflow(screen.theirs, termios.TCOOFF)  # like Ctrl-S
    job.go()
    job.assert_ends()
    termios.tcflow(screen.theirs, termios.TCOON)


def test_the_state_is_drawn_again_with_each_line_that_a_worker_writes(start: Screens) -> None:
    # Once the state is shown, nothing else makes the agent draw it again.
    wrapper = """
    import os, threading, time
    def draw_no_more():
        while not os.path.exists("shown"):
            time.sleep(0.01)
        status_line.INTERVAL_S = status_line.ROWS_INTERVAL_S = 600.0
        open("rare", "w").close()
    threading.Thread(target=draw_no_more, daemon=True).start()
    """
    worker = "wait_for('rare')\nfor number in range(5):\n    say('line', number)\n    wait_for(f'seen{number}')\n"
    job, screen = start(worker, wrapper=wrapper)

    def wait_drawn_below(line: bytes) -> None:
        def is_drawn() -> bool:
            _, found, after = screen.written.partition(line)
            return bool(found) and DRAWN.match(after) is not None

        wait_for(f"the state below {line!r}", is_drawn)

    screen.wait_row(RUNNING)
    (job.folder / "shown").touch()
    for number in range(5):
        wait_drawn_below(b"line %d\r\n" % number)
        (job.folder / f"seen{number}").touch()
    assert job.wait() == 0, screen.story
    screen.end()
    assert screen.rows == [f"line {number}" for number in range(5)]


PLAIN: dict[str, dict[str, Any]] = {  # other settings: `_may_draw`, below
    "CI": {"env": {"CI": "true"}},
    "off": {"env": {"AELASTIC_UI": "off"}},
    "no terminal": {"streams": ("stdin", "stdout")},
}


def test_plain_lines_have_no_control_sequence_and_begin_at_the_first_column_too(start: Screens) -> None:
    worker = "say('working')\nos.write(2, b'\\r 40/120')\nwait_for('go')\nsys.exit(3)"
    plain = {name: start(worker, name=name.replace(" ", "_"), **more) for name, more in PLAIN.items()}
    other, clock = start(worker, name="clock")
    # Started last: by the time its line is drawn, any other line would have been drawn.
    wait_for("a line", lambda: clock.drawn)
    for name, (job, screen) in plain.items():
        wait_for(f"the bar: {name}", lambda job=job, screen=screen: b"40/120" in screen.written + job.stderr.encode())  # type: ignore[misc]
    for job, _ in [*plain.values(), (other, clock)]:
        job.go()
    for name, (job, screen) in plain.items():
        assert job.wait() == 3, (name, screen.story)
        screen.end()
        assert "working" in screen.rows[:2] and b"\x1b" not in screen.written, name
        assert "\x1b" not in job.stderr
        shown = job.stderr if name == "no terminal" else "\n".join(screen.rows)
        assert "40/120\naelastic: W rank 0 failed" in shown.replace("\nworking", ""), (name, shown)
    assert other.wait() == 3


# Where rows may be drawn.


@pytest.mark.parametrize(
    "ui, environ, answer",
    [
        ("auto", {"TERM": "xterm"}, True),
        ("auto", {"TERM": "xterm", "NO_COLOR": "", "CI": ""}, True),
        ("auto", {"TERM": "xterm", "CI": "false"}, True),
        ("auto", {"TERM": "xterm", "NO_COLOR": "1"}, False),
        ("auto", {"TERM": "xterm", "CI": "1"}, False),
        ("auto", {"TERM": "xterm", "JPY_PARENT_PID": "1"}, False),
        ("auto", {"TERM": "dumb"}, False),
        ("auto", {}, False),
        ("line", {"TERM": "xterm", "CI": "1", "NO_COLOR": "1"}, True),
        ("view", {"TERM": "xterm", "CI": "1"}, True),
        ("line", {"TERM": "dumb"}, False),
        ("off", {"TERM": "xterm"}, False),
    ],
)
def test_plain_lines_are_shown_where_they_are_requested(
    ui: str, environ: dict[str, str], answer: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    with (tmp_path / "terminal").open("w") as file:
        monkeypatch.setattr("sys.stderr", file)
        assert not _may_draw(ui, environ)
        monkeypatch.setattr("os.tcgetpgrp", lambda fd: 1)
        assert _may_draw(ui, environ) is answer
        with monkeypatch.context() as other:
            other.setattr("sys.stdout", io.StringIO())
            assert not _may_draw(ui, environ)
    assert not _may_draw(ui, environ)  # closed
    for stream in (None, io.StringIO()):
        monkeypatch.setattr("sys.stderr", stream)
        assert not _may_draw(ui, environ)


def test_a_view_without_rich_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(InputError, match=r"--ui view: rich is not installed: pip install rich, or use line"):
        parse(["--ui=view", str(script)], {})
    assert parse(["--ui=line", str(script)], {}).ui == "line"
