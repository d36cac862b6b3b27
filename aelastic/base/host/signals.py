"""Signals: their names; and ignoring those that are sent to a whole process tree, for an agent's helpers.

A scheduler that ends a job signals every process of it (Slurm's `scancel`, systemd's `KillMode=control-group`).  The
workers then save their state, and need the helpers for it; helpers end with their agent.

This module imports nothing of aelastic: its text is part of programs that run without the package.
"""

import signal


def ignore_signals() -> None:
    """Ignores each signal that can be ignored, in this process, and unblocks those that were blocked for its start.

    A fault of the process itself still ends it (`signal(7)`: the kernel does not let it ignore those, and `abort(3)`
    restores its signal).
    """
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def signal_name(number: int) -> str:
    """Returns `SIGKILL` for 9; "" for a number without a named signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""
