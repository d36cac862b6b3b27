"""Signals of a terminal, for the rows that are drawn there: another size, Ctrl-Z."""

from __future__ import annotations

import os
import signal
from asyncio import AbstractEventLoop
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aelastic.ui.status_line import StatusLine


@contextmanager
def terminal_signals(loop: AbstractEventLoop, line: StatusLine) -> Iterator[None]:
    """Draws again when the terminal has another size, and takes the rows away while a shell has the terminal.

    A signal that is ignored, or is another's, stays so.
    """

    def suspend() -> None:
        line.suspend()
        loop.remove_signal_handler(
            signal.SIGTSTP
        )  # the default now: the kernel stops us, or knows why not (setpgid(2))
        os.kill(os.getpid(), signal.SIGTSTP)
        loop.add_signal_handler(signal.SIGTSTP, suspend)  # continued
        line.resume()

    wanted = {signal.SIGWINCH: line.redraw, signal.SIGTSTP: suspend}
    handled = [signum for signum in wanted if signal.getsignal(signum) is signal.SIG_DFL]
    for signum in handled:
        loop.add_signal_handler(signum, wanted[signum])
    try:
        yield
    finally:
        for signum in handled:
            loop.remove_signal_handler(signum)
