"""Helper processes of the agent: no signal to the agent's group or process tree ends them."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from typing import Any

from aelastic.host import proc_table
from aelastic.host.reaping import helpers, taken_status, waited_for


def start_helper(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Starts a program that calls `signals.ignore_signals` first; it is in `waited_for` until its caller takes it out.

    Args:
        options: of `subprocess.Popen`.

    Raises:
        OSError: it cannot be started.
    """
    # The child has our mask: a signal that comes before it ignores signals waits until then, and is dropped.
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        popen = subprocess.Popen(command, start_new_session=True, **options)  # a Ctrl-C at the terminal is not for it
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, usual)
    waited_for.add(popen.pid)
    helpers.add(popen.pid)
    return popen


class ForkedHelper:
    """A helper that another process has forked as a child of this one (`subprocess.Popen` where it is exec'd)."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        waited_for.add(pid)
        helpers.add(pid)

    def kill(self) -> None:
        proc_table.kill(self.pid)

    def poll(self) -> int | None:
        return taken_status(self.pid)
