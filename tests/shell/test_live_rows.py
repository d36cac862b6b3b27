"""Turns on a terminal, without a job: output next to the live rows, and the times at which they are drawn."""

from __future__ import annotations

import os
import pty
import sys
import termios
import threading
import tty
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import anyio
import pytest
from kit.screens import DRAWN
from kit.virtual_clock import on_virtual_time
from kit.waiting import DEADLINE_S, wait_for

from aelastic.logs import terminal as terminal_module
from aelastic.logs.lines import PrefixedLines
from aelastic.logs.pump import sinks_of
from aelastic.logs.terminal import Terminal, TerminalStream
from aelastic.observe import run_events as ev
from aelastic.observe.observer import Observers
from aelastic.observe.ui.status_line import BACKGROUND_INTERVAL_S, INTERVAL_S, ROWS_INTERVAL_S, StatusLine, status_line
from aelastic.workers.states import Phase, WorkerState

# Turns.


@pytest.fixture
def ends() -> Iterator[tuple[int, int]]:
    ours, theirs = pty.openpty()
    tty.setraw(theirs)
    yield ours, theirs
    for fd in (ours, theirs):
        os.close(fd)


@pytest.fixture
def terminal(ends: tuple[int, int]) -> Terminal:
    return Terminal(ends[1])


def drawn(ends: tuple[int, int]) -> list[bytes]:
    """The rows, if nothing else was written."""
    found = DRAWN.fullmatch(read(ends))
    assert found
    return found[1].split(b"\x1b[K\r\n")


def read(ends: tuple[int, int]) -> bytes:
    """Everything written so far: the kernel passes it on in pieces, so this reads up to a mark of its own."""
    master, theirs = ends
    os.write(theirs, b"\0")
    read = b""
    while not read.endswith(b"\0"):
        read += os.read(master, 1 << 16)
    return read[:-1]


def test_others_take_the_rows_away_and_draw_them_again_below_what_they_write(
    ends: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, theirs = ends
    monkeypatch.setattr(Terminal, "is_ours", True)
    terminal = Terminal(theirs)
    with terminal.writing(b"out\n") as whole:
        assert whole == b"out\n"  # nothing is shown yet
    assert terminal.draw(lambda: [b"the line"])
    frame = read(ends)
    assert DRAWN.fullmatch(frame)[1] == b"the line"  # type: ignore[index]
    with terminal.writing(b"out\n") as whole:
        assert whole == b"\r\x1b[Jout\n" + frame
    assert terminal.is_shown
    with terminal.writing(b"open") as whole:
        assert whole == b"\r\x1b[Jopen" + b"\x1bD\x1b[1A\x1b7\x1b[?7l\x1b[0m\r\nthe line\x1b[J\x1b[?7h\x1b8"
    with terminal.writing(b" line\n") as whole:
        assert whole == b"\x1b[J line\n" + frame
    monkeypatch.setattr(Terminal, "is_ours", False)
    with terminal.writing(b"out\n") as whole:
        assert whole == b"\r\x1b[Jout\n"  # a shell's prompt may be there


@pytest.mark.parametrize("line", [b"x" * 80, b"a\tb", b"\x1b[31mred", b"\xc3", b"x" * 5000])
def test_behind_an_open_line_whose_end_is_not_known_nothing_is_drawn(terminal: Terminal, line: bytes) -> None:
    assert terminal.draw(lambda: [b"the line"])
    with terminal.writing(line) as whole:
        assert whole.endswith(line)
    assert not terminal.draw()
    with terminal.writing(b"\n"):
        pass
    assert terminal.draw()


def test_rows_that_workers_hold_are_drawn_above_the_state_by_rank_and_cut_to_the_terminal(
    ends: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Terminal, "size", (20, 12))
    terminal = Terminal(ends[1])
    calls: list[str] = []
    terminal.call_on_change(lambda: calls.append("told"))
    terminal.hold((1, 2), ["[1] 10%"])
    terminal.hold((0, 2), ["[0] 20% and much more than fits"])
    terminal.hold((0, 2), ["[0] 20% and much more than fits"])
    assert calls == ["told"] and terminal.has_changed
    assert terminal.draw(lambda: [b"the line"])
    assert drawn(ends) == [b"[0] 20% and much mo", b"[1] 10%", b"the line"]
    for rank in range(8):
        terminal.hold((rank, 2), [f"[{rank}]"])
    assert terminal.draw()
    assert drawn(ends) == [b"[0]", b"[1]", b"[2]", b"[3]", b"and 4 more", b"the line"]
    for rank in range(8):
        terminal.hold((rank, 2), [])
    assert terminal.draw()
    assert drawn(ends) == [b"the line"]


def test_rows_are_away_while_this_process_is_suspended(ends: tuple[int, int], terminal: Terminal) -> None:
    assert terminal.draw(lambda: [b"the line"])
    read(ends)
    terminal.suspend()
    assert read(ends) == b"\r\x1b[J" and not terminal.draw()
    terminal.resume()
    assert terminal.draw()


def test_nothing_is_drawn_while_others_write_or_when_it_is_over(ends: tuple[int, int], terminal: Terminal) -> None:
    line = lambda: [b"the line"]  # noqa: E731
    with terminal.writing(b"whole\n"):
        refused: list[bool] = []
        other = threading.Thread(target=lambda: refused.append(terminal.draw(line)))
        other.start()
        other.join(DEADLINE_S)
        assert refused == [False]
    assert terminal.draw(line)
    terminal.end()
    assert not terminal.draw(line)
    assert DRAWN.sub(b"", read(ends)) == b"\r\x1b[J"


def test_a_stopped_terminal_is_not_drawn_on_and_not_waited_for(
    ends: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal_module, "ERASE_TIMEOUT_S", 0.01)
    _, theirs = ends
    terminal = Terminal(theirs)
    assert terminal.draw(lambda: [b"the line"])
    read(ends)
    termios.tcflow(theirs, termios.TCOOFF)
    assert not terminal.draw(lambda: [b"another"])
    terminal.end()
    termios.tcflow(theirs, termios.TCOON)
    os.write(theirs, b"!")
    assert read(ends) == b"!"


def test_writers_take_turns_and_none_writes_twice_while_another_waits(
    ends: tuple[int, int], terminal: Terminal
) -> None:
    wrote: list[str] = []
    begun, ended = threading.Event(), threading.Event()

    def flood() -> None:
        for number in range(3):
            with terminal.writing(b"flood\n"):
                wrote.append("flood")
                if number == 0:
                    begun.set()
                    wait_for("a thread that waits", terminal._queue.locked)
        ended.set()

    flooding = threading.Thread(target=flood)
    flooding.start()
    assert begun.wait(DEADLINE_S)
    with terminal.writing(b"word\n"):
        wrote.append("word")
    flooding.join(DEADLINE_S)
    assert wrote == ["flood", "word", "flood", "flood"]


def test_a_print_amid_a_write_does_not_wait(ends: tuple[int, int], terminal: Terminal) -> None:
    with terminal.writing(b"a line\n"), terminal.writing(b"of a finalizer\n") as inner:
        assert inner == b"of a finalizer\n"


def test_a_view_makes_room_before_it_is_drawn(ends: tuple[int, int], terminal: Terminal) -> None:
    assert terminal.draw(lambda: [b"one", b"two", b"three"])
    assert read(ends) == (b"\x1bD\x1bD\x1b[2A\x1b7\x1b[?7l\x1b[0mone\x1b[K\r\ntwo\x1b[K\r\nthree\x1b[J\x1b[?7h\x1b8")


def test_streams_and_sinks_of_one_terminal_share_its_turns(ends: tuple[int, int], terminal: Terminal) -> None:
    with open(ends[1], "w", closefd=False) as plain:
        stream = TerminalStream(plain, terminal)
        out, err = sinks_of(stream, plain)
        assert out is err
        cut = PrefixedLines(None)
        terminal.draw(lambda: [b"the line"])
        read(ends)
        out.show(cut, cut.feed(b"from a worker\n"))
        assert read(ends) == b"\r\x1b[Jfrom a worker\n"
        terminal.draw(lambda: [b"the line"])
        read(ends)
        print("größer\n", end="", file=stream)
        assert read(ends) == b"\r\x1b[Jgr\xc3\xb6\xc3\x9fer\n"


def test_a_line_of_the_agent_begins_at_column_0_and_so_does_what_a_worker_writes_next(
    ends: tuple[int, int], terminal: Terminal
) -> None:
    with open(ends[1], "w", closefd=False) as plain:
        stream = TerminalStream(plain, terminal)
        sink, _ = sinks_of(stream, plain)
        bar, other = PrefixedLines(None), PrefixedLines(None)
        sink.show(bar, bar.feed(b"\r 40/120"))
        print("aelastic: W rank 1 failed\n", end="", file=stream)
        sink.show(other, other.feed(b"from another worker\n"))
        sink.show(bar, bar.feed(b"\r 41/120"))
        print("a prompt: ", end="", file=stream, flush=True)
        sink.show(other, other.feed(b"more\n"))
    assert read(ends) == (b"\r 40/120\naelastic: W rank 1 failed\nfrom another worker\n\r 41/120\na prompt: \nmore\n")


def test_the_streams_are_put_back_once_everything_is_written(
    ends: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    callbacks: list[Callable[[], None]] = []
    monkeypatch.setattr("os.tcgetpgrp", lambda fd: 1)
    with open(ends[1], "w", closefd=False) as plain:
        monkeypatch.setattr("sys.stdout", plain)
        monkeypatch.setattr("sys.stderr", plain)
        with status_line(callbacks.append, "line"):
            assert isinstance(sys.stderr, TerminalStream) and sys.stdout is sys.stderr
        assert sys.stderr is not plain  # pending output removes the line
        for each in callbacks:
            each()
        assert sys.stdout is plain and sys.stderr is plain


# Drawing.


class Paper:
    """A stand-in for a terminal: what was drawn, and when."""

    def __init__(self) -> None:
        self.is_shown, self.is_in_the_way, self.has_changed, self.is_ours = False, False, False, True
        self.size = (80, 24)
        self.takes = True
        self.drawn: list[tuple[float, bytes]] = []
        self.state = b""
        self.looks = 0
        self._on_change: Callable[[], None] | None = None

    def call_on_change(self, callback: Callable[[], None]) -> None:
        self._on_change = callback
        self.looks += 1

    def write(self, *, is_in_the_way: bool = False) -> None:
        """Others write, which redraws the rows unless the others' unfinished line is in the way."""
        self.is_in_the_way, self.is_shown = is_in_the_way, self.is_shown and not is_in_the_way
        if not self.is_shown:
            self._notify()

    def hold(self) -> None:
        self.has_changed = True
        self._notify()

    def _notify(self) -> None:
        callback, self._on_change = self._on_change, None
        if callback is not None:
            callback()

    def draw(self, rows: Callable[[], list[bytes]] | None) -> bool:
        if self.takes:
            self.state = self.state if rows is None else rows()[0]
            self.drawn.append((anyio.current_time(), self.state))
            self.is_shown, self.has_changed = True, False
        return self.takes

    @property
    def times(self) -> list[float]:
        return [time for time, _ in self.drawn]


BEGAN = ev.RunBegan(
    run_id="run", node_id="node", host="host", pid=1, role="default", entrypoint="train.py", local_world_size=1,
    min_nodes=1, max_nodes=1, max_restarts=0, rdzv_backend="",
)  # fmt: skip


def line_on(paper: Paper) -> Observers:
    observers = Observers([StatusLine(paper, lambda do: do(), "line")])  # type: ignore[arg-type]
    observers.tell(BEGAN, 0.0)
    return observers


@on_virtual_time
async def test_an_idle_job_is_drawn_ever_more_seldom() -> None:
    paper = Paper()
    with anyio.move_on_after(3600):
        await line_on(paper).run()
    assert all(later - earlier >= INTERVAL_S for earlier, later in zip(paper.times, paper.times[1:], strict=False))
    assert INTERVAL_S <= paper.times[0] <= 2 * INTERVAL_S
    assert len([time for time in paper.times if time <= 60]) <= 22
    assert len([time for time in paper.times if 60 < time <= 3600]) <= 355
    assert paper.looks == 1 + len(paper.drawn)  # the first one, at the start; it wakes up for nothing else


@asynccontextmanager
async def drawing(paper: Paper) -> AsyncIterator[Observers]:
    """Draws a line on it for the duration of the block."""
    observers = line_on(paper)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(observers.run)
        yield observers
        tasks.cancel_scope.cancel()


@on_virtual_time
async def test_output_of_others_costs_no_look_while_the_rows_stay() -> None:
    paper = Paper()
    async with drawing(paper):
        await anyio.sleep(10.5)
        looks, drawn = paper.looks, len(paper.drawn)
        for _ in range(1000):
            paper.write()
            await anyio.sleep(0.001)
        assert paper.looks <= looks + 2 and len(paper.drawn) <= drawn + 2


@on_virtual_time
async def test_bars_are_drawn_ten_times_a_second_at_most_and_the_state_once() -> None:
    paper = Paper()
    async with drawing(paper):
        for _ in range(1000):
            paper.hold()
            await anyio.sleep(0.01)
        assert paper.times[0] >= INTERVAL_S
        assert 60 <= len(paper.drawn) <= 10 / ROWS_INTERVAL_S
        assert len({state for _, state in paper.drawn}) <= 10
        count = len(paper.drawn)
        await anyio.sleep(0.5)
        assert paper.drawn[count - 1 :] and not paper.has_changed  # the very last state


@on_virtual_time
async def test_an_open_line_that_is_in_the_way_is_waited_for_without_looking() -> None:
    paper = Paper()
    async with drawing(paper):
        await anyio.sleep(5.5)
        paper.write(is_in_the_way=True)
        await anyio.sleep(1)
        count, looks = len(paper.drawn), paper.looks
        await anyio.sleep(1000)
        assert (len(paper.drawn), paper.looks) == (count, looks)
        paper.write()
        await anyio.sleep(2)
        assert len(paper.drawn) == count + 1


@on_virtual_time
async def test_a_terminal_that_takes_nothing_is_asked_once_a_second() -> None:
    paper = Paper()
    paper.takes = False
    async with drawing(paper):
        await anyio.sleep(100.5)
        assert not paper.drawn and 50 <= paper.looks <= 310
        paper.takes = True
        await anyio.sleep(2)
        assert paper.drawn


@on_virtual_time
async def test_nothing_is_drawn_in_the_background() -> None:
    paper = Paper()
    paper.is_ours = False
    async with drawing(paper):
        await anyio.sleep(100)
        assert not paper.drawn
        paper.is_ours = True
        await anyio.sleep(BACKGROUND_INTERVAL_S + 0.5)
        assert paper.drawn


@on_virtual_time
async def test_what_happens_is_shown_soon_and_nothing_after_the_end() -> None:
    paper = Paper()
    async with drawing(paper) as line:
        await anyio.sleep(70.5)
        line.tell(ev.Changed(Phase.INIT, Phase.RUNNING, WorkerState.HEALTHY, ""), anyio.current_time())
        await anyio.sleep(1)
        assert b"running" in paper.drawn[-1][1]
        count = len(paper.drawn)
        line.tell(ev.RunEnded(WorkerState.SUCCEEDED, ""), anyio.current_time())
        await anyio.sleep(100)
        assert len(paper.drawn) == count


@on_virtual_time
async def test_a_line_that_cannot_be_made_costs_the_line_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Torn(Paper):
        def draw(self, rows: Callable[[], list[bytes]] | None) -> bool:
            raise ValueError("torn")

    observers = line_on(Torn())
    await observers.run()
    assert "observer StatusLine raised and was disabled: ValueError: torn" in caplog.text
