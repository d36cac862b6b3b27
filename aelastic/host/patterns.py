"""Searches for patterns that users give in texts that workers write: bounded, whatever the two are.

Python's own search cannot be interrupted, and holds all threads meanwhile.  So another process searches, and its alarm
ends it.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from functools import lru_cache

_log = logging.getLogger(__name__)

LIMIT_S = 0.05
# Of the whole process, on a machine that is busy.
PROCESS_S = 5.0
_FOUND = 3
_PROGRAM = f"""
import re, signal, sys
signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
pattern = re.compile(sys.argv[1])
signal.setitimer(signal.ITIMER_VIRTUAL, {LIMIT_S})
sys.exit({_FOUND} if pattern.search(sys.argv[2]) else 0)
"""


@lru_cache(maxsize=64)
def is_found(pattern: str, text: str) -> bool:
    """Whether the text has a match; one that takes more than `LIMIT_S` of computing is none, with a warning."""
    command = [sys.executable, "-I", "-S", "-c", _PROGRAM, pattern, text.replace("\0", " ")]
    try:
        ended = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROCESS_S)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        _log.warning("the pattern %r was not searched for, and counts as no match: %s", pattern, error)
        return False
    if ended.returncode not in {0, _FOUND}:
        _log.warning("the pattern %r takes more than %g ms on %r, and counts as no match", pattern, LIMIT_S * 1e3, text)
    return ended.returncode == _FOUND
