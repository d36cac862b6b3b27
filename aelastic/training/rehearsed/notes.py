"""The notes of a rehearsed worker: a file of JSON lines for each process, in the folder that the environment names."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import time
from pathlib import Path
from types import FrameType
from typing import Any

FOLDER_VARIABLE = "AELASTIC_REHEARSAL"

# Kinds of notes.  Each has `round` (the value of `AELASTIC_ROUND`), `rank`, and `at` (the monotonic clock).
BEGAN = "began"  # the decorated function is called; `in_place`: whether the agent can recover this worker in place
SHARED = "shared"  # `Round.share` has returned `step`
STEP = "step"  # `step` is committed; `parameters`: some of them, on rank 0; `random`: checksums, by generator
HABIT = "habit"  # the script does something that breaks recovery in place; `habit`, `where` ("train.py:12") and `what`

# Habits: what a script does against the contract of `in_place`.
GROUP_OUTSIDE = "group outside"  # a process group is made outside of the function
NO_GROUP = "no group"  # `share` is called in a round without one
WRAPPED_FIRST = "wrapped first"  # the model is wrapped before `share`; `what`: by which class
COLLECTIVE_AFTER_UPDATE = "collective after update"  # `what`: the function of torch.distributed
NO_COMMIT = "no commit"  # an optimizer makes updates, and no step is committed
COMMIT_WITHOUT_UPDATE = "commit without update"  # steps are committed whose gradients are not applied yet
STILL_REFERENCED = "still referenced"  # `what` of an earlier round is
RANDOM = "random"  # found by the rehearsal, as parameters differ; `what`: generators that do, separated by commas
READ_OUTSIDE = "read outside"  # the variable `what` is read before the function is called

_EXACT_BITS = 6
_PACKAGE = f"{Path(__file__).parents[2]}/"
# Frames that are passed over: of this folder, the standard library, and modules frozen into Python.
_NEUTRAL = (f"{Path(__file__).parent}/", f"{sysconfig.get_path('stdlib')}/", "<")


def is_noted(step: int) -> bool:
    """Whether the parameters are noted at this step: the same ones in each run, and few of them, however long it is.

    These are all steps below 64, and then those with at most six significant bits: 64, 66, …, 128, 132, …
    """
    shift = max(0, step.bit_length() - _EXACT_BITS)
    return step >> shift << shift == step


def note(kind: str, **fields: Any) -> None:
    """Appends a note; no-op if there is no folder for it, or its disk is full."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return
    line = json.dumps({"kind": kind, "pid": os.getpid(), "at": time.monotonic(), **fields})
    try:
        with Path(folder, f"{os.getpid()}.jsonl").open("a") as file:
            file.write(f"{line}\n")
    except OSError:
        pass


def place_in_script() -> tuple[str, bool]:
    """Returns where in the script the caller was called, as `train.py:12`, and whether no library is in between.

    The standard library is not one.  Without code of the script, the place is that in a library other than
    torch and this package.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  as `inspect` does
    library, is_direct = "", True
    while frame is not None:
        path = frame.f_code.co_filename
        where = f"{_short(path)}:{frame.f_lineno}"
        if _is_ours_or_torch(path):
            is_direct = is_direct and path.startswith(_NEUTRAL)
        elif "/site-packages/" in path or "/dist-packages/" in path:
            library, is_direct = library or where, False
        elif not path.startswith(_NEUTRAL):
            return where, is_direct
        frame = frame.f_back
    return library, False


def _is_ours_or_torch(path: str) -> bool:
    torch = sys.modules.get("torch")
    return path.startswith((_PACKAGE, f"{torch.__path__[0]}/" if torch else _PACKAGE))


def _short(path: str) -> str:
    for folder in (os.getcwd(), *sys.path):
        if folder and path.startswith(f"{folder}/"):
            return path[len(folder) + 1 :]
    return path
