"""Limits of the host and of this process: what is short when the kernel refuses something, and how to get more."""

from __future__ import annotations

import errno
from traceback import walk_tb

_WORDS = {
    errno.EMFILE: "this process may open no more files: raise the limit (ulimit -n)",
    errno.ENFILE: "this host can open no more files: raise fs.file-max",
    errno.ENOMEM: "this host has no memory left",
    errno.EAGAIN: "no more processes can be started on this host: raise the limit (ulimit -u, pids.max)",
}
# The places of the standard library that fork.
_FORKING = ("subprocess.py", "popen_fork.py", "popen_spawn_posix.py", "popen_forkserver.py", "util.py", "forkserver.py")


def shortage_of(error: BaseException) -> str:
    """What the host is short of and what to do, where an error says that; else ""."""
    if is_refused_thread(error):
        return "no more threads can be started on this host: raise the limit (ulimit -u, pids.max)"
    if isinstance(error, MemoryError):
        return _WORDS[errno.ENOMEM]
    places = (frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__))
    # Elsewhere EAGAIN is no limit but a call that would have to wait.
    if isinstance(error, OSError) and (error.errno != errno.EAGAIN or any(each.endswith(_FORKING) for each in places)):
        return _WORDS.get(error.errno or 0, "")
    return ""


def is_refused_thread(error: BaseException) -> bool:
    """Whether the host has refused a thread: CPython has no class of its own for that (`_threadmodule.c`)."""
    return type(error) is RuntimeError and str(error) == "can't start new thread"
