"""The root of a failure: what distinguishes it from others, and whether its repetition proves that no restart can help.

Wrongly stopping a job is very expensive; one restart too many is cheap.  So transient errors are never proof, and
neither is anything doubtful.
"""

from __future__ import annotations

import re
from functools import lru_cache

from aelastic.diagnose.failures.failure import ProcessFailure

USAGE_ERROR = "usage error"
# These are not transient (builtin exceptions; by name, because the worker's classes are not available here).
CERTAIN = frozenset({
    "NameError", "UnboundLocalError", "SyntaxError", "IndentationError", "TabError", "TypeError", "AttributeError",
    "IndexError", "KeyError", USAGE_ERROR,
})  # fmt: skip
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
_NAMED = re.compile(r"^[\s|+-]*(?:[A-Za-z_]\w*\.)*(?P<name>[A-Za-z_]\w*)(?::|$)", re.MULTILINE)
_NOT_THE_USERS = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python3[^/\\]*[/\\]|^<frozen ")
# Errors from outside the script.  Among the builtin exceptions: OSError and its subclasses, ImportError, MemoryError.
_WORLD = re.compile(
    r"^(?:OSError|IOError|EnvironmentError|BlockingIOError|ChildProcessError|BrokenPipeError|ConnectionAbortedError"
    r"|ConnectionRefusedError|ConnectionResetError|FileExistsError|FileNotFoundError|InterruptedError|IsADirectoryError"
    r"|NotADirectoryError|PermissionError|ProcessLookupError|ImportError|ModuleNotFoundError|MemoryError|EOFError"
    r"|KeyboardInterrupt|Dist\w*Error|\w*OutOfMemoryError|\w*(?:Connection|Timeout|HTTP|URL|SSL|Socket|Proxy)Error"
    r"|timeout|gaierror|herror|\w*Timeout)$"
)
_DEVICES = re.compile(
    r"cuda|cublas|cudnn|nccl|rccl|gloo|\bhip\b|\bxid\b|out of memory|cannot allocate|no space left", re.IGNORECASE
)


@lru_cache(maxsize=8)
def root_of(failure: ProcessFailure) -> str:
    """Returns the type of its exception, and the innermost line of user code, as in `KeyError at train.py:40`.

    Empty if there is no exception, or one that proves nothing, however often it comes.
    """
    name = name_of(failure)
    is_agents_doing = failure.exitcode < 0 or failure.found_by or failure.oom or failure.note
    # The exceptions that led to one are printed before it.
    names = {match["name"] for match in _NAMED.finditer(failure.traceback)} | {name}
    if not name or is_agents_doing or any(map(_WORLD.match, names)) or _DEVICES.search(failure.message):
        return ""
    place = place_of(failure)
    return f"{name} at {place}" if place else name


def place_of(failure: ProcessFailure) -> str:
    """Returns the innermost line of user code, as in `train.py:40`; empty if there is no traceback."""
    frames = [(match["file"], match["line"]) for match in _FRAME.finditer(failure.traceback)]
    own = [frame for frame in frames if not _NOT_THE_USERS.search(frame[0])] or frames
    return "{}:{}".format(*own[-1]) if own else ""


def is_certain(failure: ProcessFailure) -> bool:
    """Whether the failure is not transient."""
    return name_of(failure) in CERTAIN


def name_of(failure: ProcessFailure) -> str:
    """Returns the type of its exception, without the module; empty if it has none."""
    if failure.is_usage_error:
        return USAGE_ERROR
    match = _NAMED.match(failure.message.strip()) if failure.traceback else None
    return match["name"] if match else ""
