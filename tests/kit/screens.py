"""Jobs on their own terminal, and what a person sees there: an emulated pseudo terminal that is read all the time."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import textwrap
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pyte

from kit.launching import Job, Launcher
from kit.waiting import wait_for

# Sequences that draw the live line, and that erase it.
DRAWN = re.compile(rb"(?:\x1bD)*(?:\x1b\[\d+A)?\x1b7\x1b\[\?7l\x1b\[0m(.*?)\x1b\[J\x1b\[\?7h\x1b8", re.DOTALL)
ERASED = re.compile(rb"\r?\x1b\[J")
# Makes the terminal on stdin the session's terminal, as a shell does.
_TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
)
# In the agent: it draws often, so that tests see it soon.
_OFTEN = """
from aelastic.observe.ui import status_line
status_line.INTERVAL_S = status_line.BACKGROUND_INTERVAL_S = 0.1
"""


class Screen:
    """A terminal."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self.ours, self.theirs = pty.openpty()
        self.resize(columns, rows)
        self._lock = threading.Lock()
        self._screen = pyte.HistoryScreen(columns, rows, history=100_000)
        self._stream = pyte.ByteStream(self._screen)
        self._written = b""
        self._has_ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def resize(self, columns: int, rows: int) -> None:
        if hasattr(self, "_screen"):
            with self._lock:
                self._screen.resize(rows, columns)
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _read(self) -> None:
        with suppress(OSError):  # EIO: no process has it open any more
            while data := os.read(self.ours, 1 << 16):
                with self._lock:
                    self._written += data
                    self._stream.feed(data)

    @property
    def written(self) -> bytes:
        """Every byte written so far."""
        with self._lock:
            return self._written

    @property
    def drawn(self) -> list[bytes]:
        """The texts of the live line so far."""
        return DRAWN.findall(self.written)

    @property
    def output(self) -> bytes:
        """Everything written besides the live line."""
        return ERASED.sub(b"", DRAWN.sub(b"", self.written))

    @property
    def rows(self) -> list[str]:
        """The visible rows, down to the last that is not empty."""
        with self._lock:
            rows = [row.rstrip() for row in self._screen.display]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    @property
    def scrolled_away(self) -> list[str]:
        """The rows that have scrolled off the top of the screen."""
        with self._lock:
            columns = range(self._screen.columns)
            return ["".join(row[column].data for column in columns).rstrip() for row in self._screen.history.top]

    @property
    def cursor(self) -> tuple[int, int]:
        """Row and column."""
        with self._lock:
            return self._screen.cursor.y, self._screen.cursor.x

    @property
    def story(self) -> str:
        return "\n".join(self.rows)

    def wait_row(self, pattern: str) -> str:
        """Waits until a row matches, and returns it."""

        def found() -> str:
            return next((row for row in self.rows if re.search(pattern, row)), "")

        row: str = wait_for(f"{pattern!r} on the screen:\n{self.story}", found)
        return row

    def wait_output(self, end: bytes) -> None:
        wait_for(f"{end!r} at the end of the output", lambda: self.output.endswith(end))

    def type(self, keys: bytes) -> None:
        os.write(self.ours, keys)

    def end(self) -> None:
        """Reads the rest, and closes the terminal; does nothing when called again."""
        if self._has_ended:
            return  # its descriptors may be in use elsewhere by now
        self._has_ended = True
        os.close(self.theirs)
        self._reader.join(10)
        os.close(self.ours)


class Screens:
    """Starts jobs on terminals."""

    def __init__(self, launch: Launcher) -> None:
        self._launch = launch
        self._started: list[tuple[Job, Screen]] = []

    def __call__(
        self,
        worker: str,
        *options: str,
        columns: int = 80,
        rows: int = 24,
        env: dict[str, str] | None = None,
        streams: tuple[str, ...] = ("stdin", "stdout", "stderr"),
        shell: str = "",
        wrapper: str = "",
        **more: Any,
    ) -> tuple[Job, Screen]:
        """Starts a job.

        Args:
            shell: a bash script between the terminal and the command, which it gets as arguments.
            wrapper: as in `Launcher.command`.
        """
        screen = Screen(columns, rows)
        job = self._launch(
            worker,
            *options,
            env={"TERM": "xterm", "CI": "", "NO_COLOR": "", "JPY_PARENT_PID": "", **(env or {})},
            wrapper=_OFTEN + textwrap.dedent(wrapper),
            prefix=(sys.executable, "-c", _TAKE_TERMINAL, *(("bash", "-c", shell, "bash") if shell else ())),
            **{**dict.fromkeys(streams, screen.theirs), **more},
        )
        self._started.append((job, screen))
        return job, screen

    def close(self) -> None:
        for job, screen in self._started:
            job.kill_all()
            screen.end()


def screens_of(launch: Launcher) -> Iterator[Screens]:
    screens = Screens(launch)
    yield screens
    screens.close()
