"""A worker's page: 64 bytes of memory that it shares with its agent, and how it uses them.

Eight words of eight bytes; each has one writer.  The worker counts its calls of `due`, holds when the
agent requests it, and waits once it has saved.  The agent's end is in `agent/channels.py`.  Training scripts pay for
what is imported here: nothing but `mmap`.
"""

from __future__ import annotations

import mmap
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PAGE_VARIABLE = "AELASTIC_NOTICE_PAGE"
BYTES = 64

# Words that the agent writes: the page's format, the phase, and the call at which each rank must save.
FORM, PHASE, SAVE_AT = 0, 2, 3
# Words that the worker writes: calls of `due`, the call whose save it has acknowledged, 1 while it waits, the process
# that counts, and the newest step that `Round.commit` was called with (0: none).
CALLS, SAVED_AT, WAITS, PID, STEP = 1, 4, 5, 6, 7

FORM_1 = 0x61656C61_00000001
# Phases: nothing; all ranks are paused; the call is named.
NONE, FROZEN, SAVE = 0, 1, 2

# A rank that is paused continues within some 30 ms; one that has saved may wait for minutes.
_HELD_S, _WAIT_S = 0.0005, 0.01

_page: memoryview | None = None
_is_open = _closes_in_child = False
_calls = 0


def due() -> bool:
    """Whether this rank must save now, because the job is about to be interrupted.

    Call it once in each step, on every rank, where the rank could save: it counts its own calls, and all ranks
    get True at the same one.  Takes less than a microsecond, except for some 30 ms while the call is agreed.  In a
    forked process, such as a data loader's worker, it returns False and counts nothing.
    """
    global _calls  # noqa: PLW0603  one page a process, and less than a microsecond
    if not _is_open:
        _open()
    if _page is None:
        return False
    _calls += 1
    _page[CALLS] = _calls
    return _page[PHASE] != NONE and _is_due(_page)


def saved() -> None:
    """Reports that this rank has saved, and waits for the interruption; returns only if that is called off.

    Saves in threads or other processes must be complete before.  SIGTERM ends the wait, and the process:
    handlers of the script, which might save once more, are not called meanwhile.
    """
    if _page is None:
        return
    _page[SAVED_AT], _page[WAITS] = _calls, 1
    handler = _set_sigterm(None)
    while _page[PHASE] == FROZEN or (_page[PHASE] == SAVE and _page[SAVE_AT] == _calls):
        time.sleep(_WAIT_S)
    _set_sigterm(handler)
    _page[WAITS] = 0


def commit(step: int) -> None:
    """Notes the step of this process's state."""
    if not _is_open:
        _open()
    if _page is not None:
        _page[STEP] = step


def renew() -> None:
    """Called as a round begins in a process that has been in others: calls count from 0, as in a new process."""
    global _calls  # noqa: PLW0603  as above
    _open()
    _calls = 0
    if _page is not None:
        _page[CALLS], _page[SAVED_AT], _page[WAITS] = 0, 0, 0


def _set_sigterm(handler: Any) -> Any:
    """Sets SIGTERM's handler (`None`: the default); returns the old one, or `None` outside the main thread."""
    import signal

    try:
        return signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)
    except ValueError:
        return None


def _is_due(page: memoryview) -> bool:
    while page[PHASE] == FROZEN:
        time.sleep(_HELD_S)
    if page[PHASE] != SAVE:
        return False
    if _calls > page[SAVE_AT]:  # the script has continued: it has saved, or never will
        page[SAVED_AT] = page[SAVE_AT]
    return _calls == page[SAVE_AT]


def _open() -> None:
    """Finds the page of this process, unless no agent gave it one, or another process has it."""
    global _page, _is_open, _calls, _closes_in_child  # noqa: PLW0603  as above
    path = os.environ.get(PAGE_VARIABLE)
    _page = None if path is None else attach(path)
    _calls = 0 if _page is None else _page[CALLS]
    if _page is not None and not _closes_in_child:
        os.register_at_fork(after_in_child=_close)
        _closes_in_child = True
    _is_open = True


def _close() -> None:
    """A process that is forked from a worker is not a worker."""
    global _page  # noqa: PLW0603  as above
    _page = None


def attach(path: str) -> memoryview | None:
    """Returns the worker's end; None if there is no page of this format, or another process counts."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            words = memoryview(mmap.mmap(fd, BYTES)).cast("q")
        finally:
            os.close(fd)
    except (OSError, ValueError):
        return None  # it was removed, or cut short
    if words[FORM] != FORM_1 or words[PID] not in {0, os.getpid()}:
        return None
    words[PID] = os.getpid()
    return words
