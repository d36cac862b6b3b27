"""One line on a terminal that shows a command's progress.  It is rewritten in place, and erased at the end."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import Self, TextIO

from aelastic.diagnose.failures.failure import printable
from aelastic.observe.ui.commands import is_capable

# A command that ends sooner shows no line.
PATIENCE_S = 0.5
INTERVAL_S = 0.1
_ERASE = "\r\033[K"


class ProgressLine:
    """The line on stderr; nothing is written unless stderr is a terminal that can rewrite a line.

    A context manager: the line is gone when it ends.
    """

    def __init__(self) -> None:
        self._stream: TextIO | None = sys.stderr if is_capable(sys.stderr) else None
        self._due = time.monotonic() + PATIENCE_S
        self._is_drawn = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def show(self, text: str, *, at_once: bool = False) -> None:
        """Draws the line, unless it was drawn a moment ago.

        Args:
            text: cut to the width of the terminal.
            at_once: draw it in any case: the next step may take long.
        """
        if self._stream is None or (not at_once and time.monotonic() < self._due):
            return
        self._due = time.monotonic() + INTERVAL_S
        self._is_drawn = True
        self._write(f"\r{printable(text)[: self._width()]}\033[K")

    def clear(self) -> None:
        """Erases the line, before something else is printed."""
        if self._is_drawn:
            self._is_drawn = False
            self._write(_ERASE)

    def _width(self) -> int:
        with suppress(OSError, ValueError):
            if self._stream is not None:
                return max(os.get_terminal_size(self._stream.fileno()).columns, 2) - 1
        return 79

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # the terminal is gone
            if self._stream is not None:
                self._stream.write(text)
                self._stream.flush()
