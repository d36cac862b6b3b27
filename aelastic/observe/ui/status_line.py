"""The state of the run on the last rows of a terminal, below the output and the workers' unfinished lines.

An observer of the run.  It draws the state once a second at most, and ten times a second while workers draw progress
bars; other writers redraw the rows themselves.  `status_text.py` makes the text, `terminal.py` keeps lines apart.
It draws in the thread that writes the command line's stderr: a terminal that a user has stopped does not stop the
agent.  During a run it replaces `sys.stdout` and `sys.stderr` with streams that take turns.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Literal

import anyio

from aelastic.base.loop import clock
from aelastic.logs.terminal import Terminal, streams_in_turns
from aelastic.observe.observer import Observer
from aelastic.observe.run_events import RunEvent
from aelastic.observe.status_text import Frame, StatusText

if TYPE_CHECKING:
    from aelastic.observe.ui.rank_view import RankView

# The state is drawn at most this often.  A shorter run shows none.
INTERVAL_S = 1.0
# Rows of the workers are drawn at most this often.
ROWS_INTERVAL_S = 0.1
# No event reports that a shell takes us to the foreground.
BACKGROUND_INTERVAL_S = 5.0
# A timer may be this much early.
STEP_S = 0.01

# Runs something in the thread that writes to stderr, in its turn.
Do = Callable[[Callable[[], None]], None]


class StatusLine(Observer):
    """Status line of one run.

    Args:
        terminal: to draw on.
        do: runs what draws.
        kind: one line, or the view of nodes and ranks.
    """

    def __init__(self, terminal: Terminal, do: Do, kind: Literal["line", "view"]) -> None:
        self._terminal = terminal
        self._do = do
        self._kind = kind
        self._woken = anyio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drawn: object = None  # the key of the state that is shown
        self._drawn_at = 0.0  # when that was made
        self._rows_at = 0.0  # when rows were drawn
        self._is_drawing = False
        self._error: Exception | None = None

    def tell(self, event: RunEvent, now: float) -> None:  # noqa: ARG002  the state has it
        self._woken.set()

    # Called in the loop's thread.

    def redraw(self) -> None:
        """Draws again soon, because the size of the terminal has changed."""
        self._drawn_at, self._drawn = min(self._drawn_at, clock.now() - INTERVAL_S), None
        self._woken.set()

    def suspend(self) -> None:
        """Leaves the terminal to others."""
        self._terminal.suspend()

    def resume(self) -> None:
        self._terminal.resume()
        self.redraw()

    def end(self) -> None:
        """Removes all rows for good.  Called in the thread that draws."""
        self._terminal.end()

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._drawn_at = clock.now()
        face: StatusText | RankView = (text := StatusText(self.run_state))
        if self._kind == "view":
            from aelastic.observe.ui.rank_view import RankView

            face = RankView(text)
        while self.run_state.ended is None:
            self._woken = anyio.Event()
            with anyio.move_on_after(self._look(face, clock.now())) as waiting:
                await self._woken.wait()
            if self._error is not None:
                raise self._error
            if not waiting.cancelled_caught:
                await anyio.sleep(ROWS_INTERVAL_S)

    def _look(self, face: StatusText | RankView, now: float) -> float | None:
        """Draws if it is time to; returns when to look again, in seconds from now; `None`: when a line has ended."""
        terminal = self._terminal
        if not terminal.is_ours:
            return BACKGROUND_INTERVAL_S
        terminal.call_on_change(self._wake)
        if terminal.is_in_the_way:
            return None
        frame = face.frame(now, *terminal.size)
        is_state = frame.key != self._drawn
        is_due = self._drawn_at + INTERVAL_S <= now
        if is_state and is_due:
            self._drawn_at = self._rows_at = now
            self._draw(frame)
        elif (terminal.has_changed or not terminal.is_shown) and self._drawn is not None:
            if (wait_s := self._rows_at + ROWS_INTERVAL_S - now) > STEP_S:
                return wait_s
            self._rows_at = now
            self._draw(None)
        if is_state and not is_due:
            return self._drawn_at + INTERVAL_S - now
        return face.changes_at(now) - now + STEP_S

    def _draw(self, frame: Frame | None) -> None:
        if not self._is_drawing:  # else the terminal has been stopped
            self._is_drawing = True
            self._do(lambda: self._draw_now(frame))

    def _draw_now(self, frame: Frame | None) -> None:
        """Draws, in the thread."""
        try:
            is_drawn = self._terminal.draw(None if frame is None else frame.rows)
            if not is_drawn:
                self._wake()
            elif frame is not None:
                self._drawn = frame.key
        except Exception as error:  # noqa: BLE001  raised by `run`, where it can end this observer only
            self._error = error
            self._wake()
        finally:
            self._is_drawing = False

    def _wake(self) -> None:
        """Wakes the loop, from any thread."""
        with suppress(RuntimeError):  # the loop is closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._wake_up)

    def _wake_up(self) -> None:
        self._woken.set()


@contextmanager
def status_line(do: Do, kind: Literal["line", "view"]) -> Iterator[StatusLine]:
    """Yields the status line of this process, on the terminal of stderr."""
    terminal = Terminal(sys.stderr.fileno())
    with streams_in_turns(terminal, do):
        yield StatusLine(terminal, do, kind)
