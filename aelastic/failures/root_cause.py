"""The root of a failure: what tells it from another, and whether the same one twice proves that a restart is of no use.

A stop on a wrong proof costs without bound, a restart too many costs little: what may heal by itself is no proof, and
what is doubtful neither.
"""

from __future__ import annotations

import re
from functools import lru_cache

from aelastic.failures.failure import ProcessFailure

USAGE_ERROR = "usage error"
# These do not heal by themselves (builtin exceptions; by name, since the worker's classes are not here).
CERTAIN = frozenset({
    "NameError", "UnboundLocalError", "SyntaxError", "IndentationError", "TabError", "TypeError", "AttributeError",
    "IndexError", "KeyError", USAGE_ERROR,
})  # fmt: skip
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
_NAMED = re.compile(r"^[\s|+-]*(?:[A-Za-z_]\w*\.)*(?P<name>[A-Za-z_]\w*)(?::|$)", re.MULTILINE)
_NOT_THE_USERS = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python3[^/\\]*[/\\]|^<frozen ")
# What the world may do to a script.  Of the builtin exceptions: OSError and all below it, ImportError, MemoryError.
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
    """The type of its exception, and the innermost line that is the user's, as in `KeyError at train.py:40`.

    Empty where there is no exception, or one that is no proof of anything, however often it comes.
    """
    name = name_of(failure)
    is_agents_doing = failure.exitcode < 0 or failure.found_by or failure.oom or failure.note
    # What an exception follows from is printed before it.
    names = {match["name"] for match in _NAMED.finditer(failure.traceback)} | {name}
    if not name or is_agents_doing or any(map(_WORLD.match, names)) or _DEVICES.search(failure.message):
        return ""
    place = place_of(failure)
    return f"{name} at {place}" if place else name


def place_of(failure: ProcessFailure) -> str:
    """The innermost line that is the user's, as in `train.py:40`; empty where there is no traceback."""
    frames = [(match["file"], match["line"]) for match in _FRAME.finditer(failure.traceback)]
    own = [frame for frame in frames if not _NOT_THE_USERS.search(frame[0])] or frames
    return "{}:{}".format(*own[-1]) if own else ""


def is_certain(failure: ProcessFailure) -> bool:
    """Whether it cannot heal by itself."""
    return name_of(failure) in CERTAIN


def name_of(failure: ProcessFailure) -> str:
    """The type of its exception, without the module; empty if it has none."""
    if failure.is_usage_error:
        return USAGE_ERROR
    match = _NAMED.match(failure.message.strip()) if failure.traceback else None
    return match["name"] if match else ""
