"""64 bytes of memory that a worker shares with its agent: how often it has asked for a notice, and where it is to save.

Eight words of eight bytes; each has one writer.  The agent's end is in `agent_pages.py`.  Training scripts pay
for what is imported here: nothing but `mmap`.
"""

from __future__ import annotations

import mmap
import os

PAGE_VARIABLE = "AELASTIC_NOTICE_PAGE"
BYTES = 64

# The words.  Of the agent: the page's form, what is going on, and the call at which each rank is to save.
FORM, PHASE, SAVE_AT = 0, 2, 3
# Of the worker: calls of `due`, the call whose save it has acknowledged, 1 while it waits, the process that counts.
CALLS, SAVED_AT, WAITS, PID = 1, 4, 5, 6

FORM_1 = 0x61656C61_00000001
# Phases: nothing; no rank goes on; the call is named.
NONE, FROZEN, SAVE = 0, 1, 2


def attach(path: str) -> memoryview | None:
    """The worker's end; none if there is no page of this form, or another process counts."""
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
