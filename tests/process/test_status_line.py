"""The live rows on a terminal: the state of the run and open bars, below the output, all the time, and gone in the end."""

from __future__ import annotations

import os
import re
import signal
import termios
import time
from collections.abc import Iterator
from typing import Any

import pytest
from kit.launching import Launcher, on_each_loop, wait_for
from kit.ports import quiet_port
from kit.screens import Screens, screens_of

RUNNING = r"^aelastic \d+ s \| running \| round 1 \| 1 rank \| no restarts$"


@pytest.fixture
def start(launch: Launcher) -> Iterator[Screens]:
    """Starts jobs on terminals."""
    yield from screens_of(launch)


# Runs.


@on_each_loop
def test_the_line_tells_where_the_job_stands_and_is_gone_in_the_end(start: Screens, loop: str) -> None:
    job, screen = start("say('working')\nwait_for('go')\nsay('done')", loop=loop)

    def is_drawn() -> bool:
        rows = screen.rows
        return (
            rows[:1] == ["working"] and len(rows) == 2 and bool(re.match(RUNNING, rows[1])) and screen.cursor == (1, 0)
        )

    wait_for(lambda: f"the output, and the line:\n{screen.story}", is_drawn)
    job.go()
    assert job.wait() == 0, screen.story
    screen.end()
    assert screen.rows == ["working", "done"]
    assert screen.cursor == (2, 0)


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
    told = []
    for ui in ("auto", "off"):
        job, screen = start(STEPS, f"--ui={ui}", name=ui)
        for number, end in enumerate([b" 3%\r\n", b"red\x1b[0m\r\n"]):
            screen.wait_output(end)
            if ui == "auto":
                screen.wait_row("^aelastic .* running")
            (job.folder / f"step{number}").touch()
        assert job.wait() == 0, screen.story
        screen.end()
        told.append((re.sub(rb"\r? \d%(?=\r)(?!\r\n)", b"", screen.output), [*screen.scrolled_away, *screen.rows]))
    assert told[0][1] == told[1][1]
    # The same, but for what a carriage return has overwritten.
    assert told[0][0].replace(b"\r", b"") == told[1][0].replace(b"\r", b"")
    assert told[0][0].startswith(b"a line\r\n 3%\r\n") and told[0][0].endswith(b"byte\r\nno newline at the end")


def test_an_open_prompt_and_the_newline_that_ends_it_stay_one_line(start: Screens) -> None:
    job, screen = start("say('begun')\nwait_for('go')\nos.write(1, b'50%')\nwait_for('end')\nos.write(1, b' 100%\\n')")
    screen.wait_row(RUNNING)
    wait_for("what it says first", lambda: screen.rows[:1] == ["begun"])
    job.go()

    def is_drawn() -> bool:
        rows = screen.rows
        is_below = rows[:2] == ["begun", "50%"] and len(rows) == 3 and bool(re.match(RUNNING, rows[2]))
        return is_below and screen.cursor == (1, 3)

    wait_for(lambda: f"the prompt, and the state below:\n{screen.story}", is_drawn)
    (job.folder / "end").touch()
    assert job.wait() == 0, screen.story
    screen.end()
    assert screen.rows == ["begun", "50% 100%"]


def test_ctrl_c_and_the_report_find_the_line_gone(start: Screens) -> None:
    job, screen = start("wait_for('never')", "--max-restarts=2", columns=200)
    screen.wait_row(r"^aelastic \d+ s \| running \| round 1 \| 1 rank \| restarts 0 of 2$")
    screen.type(b"\x03")
    assert job.wait() == -signal.SIGINT, screen.story
    screen.end()
    # What the terminal echoes stood where the rows were.  The worker's own last words may come before the agent's.
    assert screen.rows[0].startswith(("aelastic: W SIGINT", "Traceback"))
    assert [row for row in screen.rows if "aelastic: W SIGINT: stopping workers" in row]
    assert [row for row in screen.rows if row.startswith("aelastic: stopped by SIGINT")]
    assert not [row for row in screen.rows if "running" in row]


def test_a_failure_and_its_report_stand_alone(start: Screens) -> None:
    job, screen = start("wait_for('go')\nsys.exit(3)")
    screen.wait_row(RUNNING)
    job.go()
    assert job.wait() == 3, screen.story
    screen.end()
    assert screen.rows[0].startswith("aelastic: W rank 0 failed on ")
    assert not [row for row in screen.rows if "running" in row]


def test_missing_nodes_are_waited_for_in_the_line(start: Screens) -> None:
    job, screen = start("", "--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{quiet_port()}")
    screen.wait_row(r"^aelastic \d+ s \| waiting for 2 nodes \| 1 rank here")
    job.signal(signal.SIGTERM)
    assert job.wait() == -signal.SIGTERM, screen.story
    screen.end()
    assert screen.rows == ["aelastic: stopped by SIGTERM; all workers have ended"]


def test_a_terminal_that_is_stopped_blocks_no_worker(start: Screens) -> None:
    job, screen = start("wait_for('go')")
    screen.wait_row(RUNNING)
    termios.tcflow(screen.theirs, termios.TCOOFF)  # as Ctrl-S does
    job.go()
    assert job.wait() == 0
    termios.tcflow(screen.theirs, termios.TCOON)
    job.assert_nothing_left()


def test_only_stderr_matters_and_a_stdout_elsewhere_has_the_output_alone(start: Screens) -> None:
    job, screen = start("say('working')\nwait_for('go')", streams=("stdin", "stderr"))
    screen.wait_row(RUNNING)
    job.go()
    assert job.wait() == 0, screen.story
    assert job.stdout == "working\n"
    screen.end()
    assert screen.rows == [] and screen.output == b""


def test_what_this_process_prints_does_not_mix_with_the_line(start: Screens) -> None:
    job, screen = start(
        "wait_for('go')",
        wrapper="""
        import sys, threading, time, os
        def talk():
            while not os.path.exists("talk"):
                time.sleep(0.01)
            print("to stdout"); print("to stderr", file=sys.stderr)
        threading.Thread(target=talk, daemon=True).start()
        """,
    )
    screen.wait_row(RUNNING)
    (job.folder / "talk").touch()
    wait_for("both, and the line below", lambda: len(screen.rows) == 3 and re.match(RUNNING, screen.rows[2]))
    assert screen.rows[:2] == ["to stdout", "to stderr"]
    job.go()
    assert job.wait() == 0, screen.story
    screen.end()
    assert screen.rows == ["to stdout", "to stderr"]


def test_a_narrow_terminal_shows_the_beginning_on_one_row(start: Screens) -> None:
    job, screen = start("wait_for('go')", columns=24)
    screen.wait_row(r"^aelastic \d+ s \| ru.*\.\.\.$")
    assert len(screen.rows) == 1
    screen.resize(60, 24)
    wait_for("all of it", lambda: screen.drawn[-1].endswith(b" | no restarts"))
    job.go()
    assert job.wait() == 0, screen.story


def test_the_view_shows_the_ranks_and_is_gone_in_the_end(start: Screens) -> None:
    pytest.importorskip("rich")
    job, screen = start("say('working')\nwait_for('go')", "--ui=view", "--nproc-per-node=2")
    screen.wait_row(r"^ +1 +1 +\d+ +running +\d+% +\d+ MiB$")  # CPU comes with the second look
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


@pytest.mark.all
def test_the_view_is_there_while_the_ranks_write_all_the_time(start: Screens) -> None:
    pytest.importorskip("rich")
    job, screen = start(
        "while not os.path.exists('go'):\n    say('working')\n    time.sleep(0.05)", "--ui=view", "--nproc-per-node=2"
    )
    screen.wait_row(r"^ +1 +1 +\d+ +running +\d+% +\d+ MiB$")
    job.go()
    assert job.wait() == 0, screen.story
    screen.end()
    assert set(screen.rows) == {"working"}


BARS = """
rank = int(os.environ["RANK"])
for number in range(40):
    os.write(2, b"\\r%s: %3d%%|%s|" % (b"rank %d" % rank, number * 5 // 2, b"#" * number))
    if number % 10 == 0:
        say(f"at {number}")
    time.sleep(0.05)
wait_for("go")
os.write(2, b"\\r%s: 100%%|%s|\\n" % (b"rank %d" % rank, b"#" * 40))
say("ended")
"""


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.all), pytest.param(2, marks=pytest.mark.all), 8])
def test_bars_are_one_row_for_each_rank_and_leave_their_last_state(start: Screens, ranks: int) -> None:
    job, screen = start(BARS, f"--nproc-per-node={ranks}", columns=80, rows=30)
    labels = [f"[{rank}] " if ranks > 1 else "" for rank in range(ranks)]
    lasts = [f"{label}rank {rank}:  97%|{'#' * 39}|" for rank, label in enumerate(labels)]

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


@pytest.mark.parametrize("kind", ["line", pytest.param("view", marks=pytest.mark.all)])
@pytest.mark.parametrize("every_s", [0.02, pytest.param(0.2, marks=pytest.mark.all)])
def test_the_state_is_there_however_often_a_worker_writes(start: Screens, kind: str, every_s: float) -> None:
    pytest.importorskip("rich")
    worker = f"number = 0\nwhile not os.path.exists('go'):\n    say(f'line {{number}}')\n    number += 1\n    time.sleep({every_s})"
    job, screen = start(worker, f"--ui={kind}", columns=100)
    screen.wait_row(r"^aelastic \d+ s \| running")
    looks = []
    for _ in range(20):
        looks.append(any(re.match(r"aelastic \d+ s \| running", row) for row in screen.rows))
        time.sleep(0.05)
    wait_for("five lines", lambda: "line 4" in [*screen.scrolled_away, *screen.rows])
    job.go()
    assert job.wait() == 0, screen.story
    screen.end()
    assert looks.count(True) > 10  # else the emulator is in the middle of a frame
    rows = [*screen.scrolled_away, *screen.rows]
    assert rows == [f"line {number}" for number in range(len(rows))] and len(rows) >= 5


def test_the_agents_lines_begin_at_the_first_column_above_open_bars(start: Screens) -> None:
    worker = "os.write(2, b'\\r 40/120')\nwait_for('go')\nsys.exit(3 if os.environ['RANK'] == '1' else 0)"
    job, screen = start(worker, "--nproc-per-node=2")
    wait_for("both bars", lambda: screen.rows[:2] == ["[0]  40/120", "[1]  40/120"])
    job.go()
    assert job.wait() == 3, screen.story
    screen.end()
    assert [row for row in screen.rows if "aelastic" in row] and not [row for row in screen.rows if "20aelastic" in row]
    assert screen.rows.count(" 40/120") == 2


def test_without_live_rows_the_agents_lines_begin_at_the_first_column_too(start: Screens, launch: Launcher) -> None:
    worker = "os.write(2, b'\\r 40/120')\nwait_for('go')\nsys.exit(3)"
    job, screen = start(worker, "--ui=off")
    screen.wait_row("40/120")
    piped = launch(worker, name="piped")
    wait_for("the bar", lambda: "40/120" in piped.stderr)
    for each in (job, piped):
        each.go()
        assert each.wait() == 3
    screen.end()
    assert screen.rows[0] == " 40/120" and screen.rows[1].startswith("aelastic: W rank 0 failed")
    assert "40/120\naelastic: W rank 0 failed" in piped.stderr


@pytest.mark.parametrize("signum", [pytest.param(signal.SIGTERM, marks=pytest.mark.all), signal.SIGKILL])
def test_a_terminal_is_as_it_was_whatever_ends_the_agent(start: Screens, signum: int) -> None:
    job, screen = start(
        "signal.signal(signal.SIGTERM, signal.SIG_DFL)\nos.write(1, b'working\\n\\r 1%')\nwait_for('never')",
        "--nproc-per-node=2",
    )
    screen.wait_row(r"^aelastic \d+ s \| running")
    wait_for("both", lambda: screen.rows[:4] == ["working", "working", "[0]  1%", "[1]  1%"])
    job.signal(signum)
    assert job.wait() == -signum
    os.write(screen.theirs, b"the shell writes on: " + b"x" * 80)
    wait_for("all of it", lambda: any(row.startswith("x" * 21) for row in screen.rows))
    rows = screen.rows
    at = next(at for at, row in enumerate(rows) if row.startswith("the shell"))
    assert rows[at + 1].startswith("x" * 21)  # rows wrap, as before
    if signum == signal.SIGTERM:
        assert rows[:2] == ["working", "working"] and rows.count(" 1%") == 2
        assert rows[at - 1].startswith("aelastic: ")
        assert len(rows) == at + 2 and not [row for row in rows if "running" in row]
    else:
        assert at == 2  # it writes over the rows that are left


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


PLAIN: dict[str, dict[str, Any]] = {
    "NO_COLOR": {"env": {"NO_COLOR": "1"}},
    "CI": {"env": {"CI": "true"}},
    "dumb": {"env": {"TERM": "dumb"}},
    "off": {"env": {"AELASTIC_UI": "off"}},
    "no terminal": {"streams": ("stdin", "stdout")},
}


@pytest.mark.all
def test_plain_lines_have_no_control_sequence(start: Screens) -> None:
    worker = "say('working')\nwait_for('go')\nsys.exit(3)"
    plain = {name: start(worker, name=name.replace(" ", "_"), **more) for name, more in PLAIN.items()}
    other, clock = start(worker, name="clock")
    # Started last: by the time that its line has been drawn twice, any other would have been drawn.
    wait_for("a second line", lambda: len(clock.drawn) >= 2)
    for job, _ in [*plain.values(), (other, clock)]:
        job.go()
    for name, (job, screen) in plain.items():
        assert job.wait() == 3, (name, screen.story)
        screen.end()
        assert screen.rows[0] == "working" and b"\x1b" not in screen.written, name
        assert "\x1b" not in job.stderr
    assert other.wait() == 3


# Where it may be drawn.


# Turns.


# When it is drawn.


# The group has ended: so has the line.
