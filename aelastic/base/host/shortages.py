"""What the kernel refuses, which shortage that is, and what to do."""

from __future__ import annotations

import errno
from traceback import walk_tb

# The shortage behind a refusal of the kernel, and what to do.
_SHORT = {
    errno.EMFILE: "this process cannot open more files: raise the limit (ulimit -n)",
    errno.ENFILE: "this host cannot open more files: raise fs.file-max",
    errno.ENOMEM: "this host has no memory left",
    errno.EAGAIN: "this host cannot start more processes: raise the limit (ulimit -u, pids.max)",
}
# The modules of the standard library that fork.
_FORKING = ("subprocess.py", "popen_fork.py", "popen_spawn_posix.py", "popen_forkserver.py", "util.py", "forkserver.py")


def shortage_of(error: BaseException) -> str:
    """Returns what the host is short of and what to do, if an error shows that; otherwise ""."""
    if is_refused_thread(error):
        return "this host cannot start more threads: raise the limit (ulimit -u, pids.max)"
    if isinstance(error, MemoryError):
        return _SHORT[errno.ENOMEM]
    places = (frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__))
    # Elsewhere EAGAIN is not a limit but a call that would have to wait.
    if isinstance(error, OSError) and (error.errno != errno.EAGAIN or any(each.endswith(_FORKING) for each in places)):
        return _SHORT.get(error.errno or 0, "")
    return ""


def is_refused_thread(error: BaseException) -> bool:
    """Whether the host has refused a thread: CPython has no exception class for that (`_threadmodule.c`)."""
    return type(error) is RuntimeError and str(error) == "can't start new thread"
