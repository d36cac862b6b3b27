"""Error files: one process's last words, for the agent above it.

The format is torch's (`torch.distributed.elastic.multiprocessing.errors`): JSON, the message and its traceback
inside "message".  What is read may be missing, damaged or of another shape; what is written is seen whole, or
not at all.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import logging

Json: TypeAlias = dict[str, Any]

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
# A traceback is some KiB; an error file beyond this is not one.
ERROR_FILE_BYTES_MAX = 1024 * 1024
# In an error file: the exception comes again at each restart.
FINAL_KEY = "aelastic_is_final"
# torch's word, which log scrapers and callers compare with.
NO_MESSAGE = "<NONE>"


def parse_record(data: Json) -> tuple[str, str, int]:
    """The message, traceback and time in an error file; empty where it does not say, or in no shape we know.

    torch writes a dict under "message"; a sentence there has its time beside it.
    """
    message = data.get("message")
    if isinstance(message, dict):
        extra = message.get("extraInfo")
        extra = extra if isinstance(extra, dict) else {}
        text, callstack, at = message.get("message"), extra.get("py_callstack"), extra.get("timestamp")
    else:
        text, callstack, at = message, data.get("callstack"), data.get("timestamp")
    if text == NO_MESSAGE or not isinstance(text, str):
        text = ""
    # "NoneType: None" is what `traceback.format_exc` calls no traceback.
    if not isinstance(callstack, str) or callstack.startswith("NoneType: None"):
        callstack = ""
    text = text.strip() or callstack.strip().rpartition("\n")[2]
    return printable(text), printable(callstack), epoch_s(at)


def epoch_s(value: object) -> int:
    """A point in time between 1970 and 9999, or 0."""
    try:
        seconds = int(float(value)) if isinstance(value, (str, int, float)) else 0
    except (ValueError, OverflowError):
        return 0
    return seconds if 0 < seconds < 253_402_300_800 else 0


def printable(text: str) -> str:
    """The text as a terminal may show it: nothing in it moves the cursor, rings, hides, or changes the direction.

    Colours are removed, other control characters and lone surrogates, which JSON may hold, are replaced.
    """
    if "\x1b" in text:
        from aelastic.failures.exit_reason import ESCAPES

        text = ESCAPES.sub("", text)
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.translate(_CONTROLS).encode("utf-8", "replace").decode()


# C0 without tab and newline, DEL and C1; then what sets the direction of text, and ends lines, in Unicode.
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(0x7F, 0xA0)], "?")
_CONTROLS |= dict.fromkeys([0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)], "?")


def read_error_file(path: str) -> Json | None:
    """What an error file holds; `None` where it is missing, damaged, too long, or something else."""
    # Opening a FIFO would wait for a writer, without end.
    if not os.path.isfile(path):
        return None
    import json

    try:
        with open(path, "rb") as file:
            data = json.loads(file.read(ERROR_FILE_BYTES_MAX))
    except (OSError, ValueError, RecursionError) as error:
        log().warning("error file %s cannot be read: %s: %s", path, type(error).__name__, str(error)[:200])
        return None
    return data if isinstance(data, dict) else None


def record_of(message: str, callstack: str, timestamp: int) -> Json:
    """The shape that torch writes: the time is a string."""
    extra = {"py_callstack": callstack, "timestamp": str(timestamp)}
    return {"message": {"message": message, "extraInfo": extra}}


def with_error_code(data: Json, error_code: int) -> Json:
    """Adds the code where torch puts it; a record whose message is a sentence has no such place."""
    message = data.get("message")
    if not error_code or not isinstance(message, dict):
        return data
    return {**data, "message": {**message, "errorCode": error_code}}


def log() -> logging.Logger:
    """The logger of what reads and writes error files; `logging` is imported when there is something to say."""
    import logging

    return logging.getLogger("aelastic.errors")
