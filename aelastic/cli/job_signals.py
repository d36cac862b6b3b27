"""Signals of this process while a job runs, those of a terminal (another size, Ctrl-Z) among them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from aelastic.cli.arguments import Invocation
from aelastic.cli.converters import OnSignal

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from aelastic.supervisor import Supervisor
    from aelastic.ui.status_line import StatusLine

Handlers: TypeAlias = Mapping[int, Callable[[], None]]

# What a person at the terminal asks for is obeyed at any time.
OF_KEYBOARD = frozenset({signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP})


def handlers_of(invocation: Invocation, supervisor: Supervisor, stop: Callable[[int], None]) -> Handlers:
    """What signals are for: one that has a meaning of its own (`--on-signal`) does not stop the job."""
    handlers: dict[int, Callable[[], None]] = {signum: partial(stop, signum) for signum in invocation.signals}
    return {**handlers, **{on.signum: partial(_act, supervisor, on) for on in invocation.on_signal}}


def _act(supervisor: Supervisor, on: OnSignal) -> None:
    if on.drain_s is None:
        supervisor.send_signal(on.signum)
    else:
        supervisor.drain(on.drain_s, f"by {on.signum.name}")


@contextmanager
def handle_signals(loop: AbstractEventLoop, handlers: Handlers, *, is_last: bool) -> Iterator[None]:
    """Has the loop call what each signal is for.

    A signal that was ignored at the start (nohup, a shell's background job) stays ignored.

    Args:
        is_last: this process ends with the job; what comes then, such as the SIGTERM after a `preStop`, is too late to
            change how it ends.
    """
    before = {signum: signal.getsignal(signum) for signum in handlers}
    handled = [signum for signum in before if before[signum] != signal.SIG_IGN]
    for signum in handled:
        loop.add_signal_handler(signum, handlers[signum])
    try:
        yield
    finally:
        for signum in handled:
            loop.remove_signal_handler(signum)
            signal.signal(signum, signal.SIG_IGN if is_last and signum not in OF_KEYBOARD else before[signum])


def terminal_handlers(loop: AbstractEventLoop, line: StatusLine) -> Handlers:
    """Draws again when the terminal has another size, and takes the rows away while a shell has the terminal.

    A signal that is ignored, or is another's, is left out.
    """

    def suspend() -> None:
        line.suspend()
        # The default now: the kernel stops us, or knows why not (setpgid(2)).
        loop.remove_signal_handler(signal.SIGTSTP)
        os.kill(os.getpid(), signal.SIGTSTP)
        loop.add_signal_handler(signal.SIGTSTP, suspend)  # continued
        line.resume()

    wanted = {signal.SIGWINCH: line.redraw, signal.SIGTSTP: suspend}
    return {signum: wanted[signum] for signum in wanted if signal.getsignal(signum) is signal.SIG_DFL}
