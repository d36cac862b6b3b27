"""Lets the agent take the stacks of this worker, before it kills it or on request: opt in by importing this module.

    import aelastic.stack_hook

Needed only where the agent cannot look by itself (no py-spy, or no right to ask for it) and the script does not run
under torch's `worker_main`.  A signal without a handler makes the interpreter write the stacks of all threads to a file
of the agent's (`faulthandler.register`), also while Python runs nothing else.  Without such an agent this does nothing.

The agent sends the signal only to a process that has registered itself in that file.
"""

from __future__ import annotations

import faulthandler
import os
import signal

# The agent names the worker's socket in its own folder; the file lies beside it.
_SOCKET_VARIABLE = "TORCH_WORKER_SERVER_SOCKET"
_NAME = "control_"  # how the agent calls a socket
SUFFIX = ".stacks"
# Signals without a meaning.  glibc keeps the lowest two or three for itself, and programs that use some count from
# either end.
_CANDIDATES = range(signal.SIGRTMIN + 10, signal.SIGRTMAX - 5)


def register(signum: int | None = None) -> bool:
    """Prepares this process; once is enough.  Gives whether it is prepared.

    Args:
        signum: the signal; `None` is a real-time signal that has no handler.
    """
    path = _path()
    if signum is None:
        signum = next((each for each in _CANDIDATES if signal.getsignal(each) == signal.SIG_DFL), None)
    if not path or signum is None:
        return False
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return False  # the agent is gone, or is on another machine
    # The descriptor stays open: a handler cannot open files.
    faulthandler.register(signum, file=file, all_threads=True, chain=False)
    os.write(file, f"pid {os.getpid()} signal {int(signum)}\n".encode())
    return True


def _path() -> str:
    socket = os.environ.get(_SOCKET_VARIABLE, "")
    return socket + SUFFIX if os.path.basename(socket).startswith(_NAME) else ""


register()
