"""A worker's failure: one value, from the end of the process to the report on every node; and its error file.

An error file contains the exception of one process, for its agent.  The format is torch's
(`torch.distributed.elastic.multiprocessing.errors`): JSON, the message and its traceback inside "message".  A file
may be missing, damaged or of another shape.
"""

# Imports only where a failure needs them, and no pathlib: every worker that uses `record` pays for the start-up time.

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING, Any, TypeAlias

from aelastic.base.record import Record

if TYPE_CHECKING:
    import logging

Json: TypeAlias = dict[str, Any]

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
# A traceback has a few KiB; a larger file is not an error file.
ERROR_FILE_BYTES_MAX = 1024 * 1024
# In an error file: each restart would raise the exception again.
FINAL_KEY = "aelastic_is_final"
# torch's texts, which log scrapers and callers compare with.
NO_MESSAGE, NOT_AVAILABLE = "<NONE>", "<N/A>"
NO_DATA: Json = {"message": NO_MESSAGE}

# How much of a failure other nodes receive, in characters; the node where it happened keeps all of it.  In JSON a
# character may take twelve bytes, and all together must fit in a message (`rdzv.protocol.codec.FRAME_MAX`).
MESSAGE_CHARS_MAX = 8 << 10
TRACEBACK_CHARS_MAX = 32 << 10
STACK_CHARS_MAX = 8 << 10
SENTENCE_CHARS_MAX = 1 << 10
CHARS_MAX = {
    "host": 255,  # the limit for a DNS name (RFC 1035)
    "stack": STACK_CHARS_MAX,
    **dict.fromkeys(("oom", "note", "log_file", "found_by"), SENTENCE_CHARS_MAX),
}

# A worker that dies because another one died, in the words of gloo, NCCL, the kernel and a barrier with a timeout.
_LOST_PEER = re.compile(
    r"connection (was )?(reset|closed|aborted|lost)|broken pipe|reset by peer|closed by (the )?(remote |)peer"
    r"|remote (process|peer|end)|peer (is |was )?(gone|closed|left|lost)|socket (was )?closed|nccl remote error"
    r"|errors while waiting for send/recv",
    re.IGNORECASE,
)
_OUT_OF_MEMORY = re.compile(r"^(?:\w+\.)*(?:\w*OutOfMemoryError|MemoryError)\b")

# The message of argparse, and similar parsers, about invalid options, before they exit with 2.
_USAGE_EXIT = 2
_USAGE = re.compile(r"^usage: .*?^(?P<error>\S+: error: [^\n]+)", re.MULTILINE | re.DOTALL)
# The log line of torch's nccl2, the default for NCCL since torch 2.15, before it calls `abort`.
_ABORTING = re.compile(r"Aborting process on rank [0-9]{1,9} due to [^\n]{1,300}")

# Signals that native code raises in its own process; a Python interrupt ends with SIGINT.
_SIGNALS_OF_ITS_OWN = {"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGSYS", "SIGTRAP"}

# C0 without tab and newline, DEL and C1; then the characters that set text direction, and end lines, in Unicode.
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(0x7F, 0xA0)], "?")
_CONTROLS |= dict.fromkeys([0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)], "?")


class ProcessFailure(Record):
    """The failure of one worker, with everything known about it (torch: `ProcessFailure`).

    Reads the error file once, on creation.  If that file is missing or damaged, the message comes from the end of
    stderr, or from the exit code.

    Args:
        local_rank: the worker's local rank.
        pid: its process id, or -1 if it did not start.
        exitcode: its exit code; `-n` for signal n.
        error_file: path of the file where it may have recorded an exception; becomes `<N/A>` if there is no such file.
        rank: its global rank, or -1 if unknown.
        host: the host it ran on; empty for this host.
        stderr_tail: the last part of its stderr.
        oom: a sentence about an out-of-memory kill, if the agent saw one.
        note: what the agent knows beyond the exit code, such as "could not be started: no such file".
        unhealthy: why the agent stopped it, such as "timer 'step' expired"; empty if it ended by itself.
        stack: its stack at that time and the source of the stack, in lines; or why there is no stack.
        is_final: the worker cannot be restarted; `why_final` gives the reason.
        world_size: number of workers in the job, or 0 if unknown.
        log_file: the file on its host that holds its stderr after the run; empty without such a file.
        found_by: the watch that had it stopped, such as "hang"; empty if it ended by itself.
        error_file_data: content of the error file, if already known; the file is not read then.
    """

    host: str
    rank: int
    local_rank: int
    pid: int
    exitcode: int
    message: str  # one sentence or headline, never empty
    traceback: str = ""  # empty if none is known
    timestamp: int = 0  # of the recorded exception, otherwise now; seconds since the epoch, on the clock of its host
    is_final: bool = False
    stack: str = ""
    oom: str = ""
    note: str = ""
    world_size: int = 0
    log_file: str = ""
    found_by: str = ""
    matched_rules: tuple[int, ...] = ()  # of `--restart-policy`, from 0, whose `error` pattern matches it
    is_usage_error: bool = False  # it rejected its command line, as argparse does
    # Useful on its own host only.
    error_file: str = NOT_AVAILABLE
    error_file_data: Json = NO_DATA
    stderr_tail: str = ""

    def __init__(
        self,
        local_rank: int,
        pid: int,
        exitcode: int,
        error_file: str,
        *,
        rank: int = -1,
        host: str = "",
        stderr_tail: str = "",
        oom: str = "",
        note: str = "",
        unhealthy: str = "",
        stack: str = "",
        is_final: bool = False,
        world_size: int = 0,
        log_file: str = "",
        found_by: str = "",
        error_file_data: Json | None = None,
    ) -> None:
        data = read_error_file(error_file) if error_file_data is None else error_file_data
        if data is None and not os.path.isfile(error_file):
            error_file = NOT_AVAILABLE
        message, traceback, timestamp = parse_record(data or {})
        is_final = is_final or (data or {}).get(FINAL_KEY) is True
        if unhealthy:
            message = f"{unhealthy}; last output: {message}" if message else unhealthy
        is_usage_error = False
        if not message:
            message, traceback, is_usage_error = _explain(exitcode, stderr_tail, oom, note)
        message, traceback = printable(message), printable(traceback)
        known = (host, rank, local_rank, pid, exitcode, message, traceback, timestamp or int(time.time()), is_final)
        more = (stack, oom, note, world_size, log_file, found_by)
        super().__init__(*known, *more, (), is_usage_error, error_file, data or NO_DATA, stderr_tail)

    @classmethod
    def from_elsewhere(cls, *args: Any, **fields: Any) -> ProcessFailure:
        """Creates the failure of a worker on another host, from that host's report.

        Arguments are the fields in `SHARED_FIELDS`; the error file is not available here.
        """
        received = cls.__new__(cls)
        Record.__init__(received, *args, **fields)
        # Stripped after it is cut: reading the message that it becomes must give the same text again.
        headline = printable(received.message.strip())[:MESSAGE_CHARS_MAX].strip()
        if not headline:
            reason = _explain(received.exitcode, "", received.oom.strip(), received.note.strip())[0]
            headline = printable(reason)[:MESSAGE_CHARS_MAX].strip()
        cut = {name: printable(getattr(received, name))[:limit] for name, limit in CHARS_MAX.items()}
        traceback = printable(received.traceback)[-TRACEBACK_CHARS_MAX:]
        return received.replace(**cut, message=headline, traceback=traceback, timestamp=epoch_s(received.timestamp))

    def __hash__(self) -> int:
        return hash((self.host, self.rank, self.pid, self.exitcode, self.message))

    @property
    def short_message(self) -> str:
        """The message, shortened to fit into a log line, an event or a message to other nodes (8 Ki characters)."""
        return self.message[:MESSAGE_CHARS_MAX]

    @property
    def names_lost_peer(self) -> bool:
        """Whether the message blames a lost peer."""
        return bool(_LOST_PEER.search(self.message))

    @property
    def runs_out_of_memory(self) -> bool:
        """Whether the worker was killed for lack of memory, or reported it, on the host or on a device."""
        return bool(self.oom) or bool(_OUT_OF_MEMORY.search(self.message))

    @property
    def shared(self) -> dict[str, Any]:
        """The fields that other nodes receive."""
        return {name: getattr(self, name) for name in SHARED_FIELDS}

    def for_others(self) -> ProcessFailure:
        """Returns the failure as other nodes see it."""
        return self.from_elsewhere(**self.shared)

    @property
    def is_signal(self) -> bool:
        """Whether a signal ended the worker."""
        return self.exitcode < 0

    @property
    def headline(self) -> str:
        """One line with the location, if known, such as `ValueError: batch is empty at train.py:12`."""
        from aelastic.diagnose.failures.exit_reason import last_exception

        line = self.message.strip().partition("\n")[0].strip()
        cause = last_exception(self.traceback) if self.traceback else None
        return f"{line} at {cause.file}:{cause.line}" if cause and cause.file else line

    @property
    def why_final(self) -> str:
        """Why the worker cannot be restarted; empty if it can."""
        if not self.is_final:
            return ""
        if self.is_signal:
            return "the worker cannot be killed and still holds its device"
        return self.note or "each restart would fail in the same way"

    def signal_name(self) -> str:
        """Returns the name of the signal, such as `SIGKILL`, or `<N/A>` (torch: `signal_name`)."""
        from aelastic.base.host.signals import signal_name

        return signal_name(-self.exitcode) or NOT_AVAILABLE

    def timestamp_isoformat(self) -> str:
        """Returns the local time, such as `2026-10-17_12:00:00`, or `<N/A>` (torch: `timestamp_isoformat`)."""
        if not self.timestamp:
            return NOT_AVAILABLE
        return time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(self.timestamp))


# The fields that other nodes receive; the rest is useful on its own host only.
SHARED_FIELDS = ProcessFailure.__match_args__[:-3]


def _explain(exitcode: int, stderr_tail: str, oom: str, note: str) -> tuple[str, str, bool]:
    """Returns the message and traceback of a worker that recorded neither, and whether it rejected its command line."""
    from aelastic.base.host.signals import signal_name
    from aelastic.diagnose.failures.exit_reason import describe_exit, how_it_ended, last_exception, may_be_uncaught

    words = describe_exit(exitcode)
    name = signal_name(-exitcode)
    if oom and name == "SIGKILL":
        words = f"{how_it_ended(exitcode)}: {oom}"
    usage = [match["error"] for match in _USAGE.finditer(stderr_tail)] if exitcode == _USAGE_EXIT else []
    is_usage_error = bool(usage) and not note
    words = f"usage error: {usage[-1]}" if is_usage_error else note or words
    ended_by = name or signal_name(exitcode - 128)  # a shell passes its child's signal on as a code
    aborting = _ABORTING.findall(stderr_tail) if ended_by == "SIGABRT" else []
    if aborting:  # even if it printed exceptions before
        return f"{words}; last output: {aborting[-1]}", "", False
    # A worker that was killed from outside, or exited with its own code, did not die of an exception that it printed
    # before.
    is_own_doing = ended_by in _SIGNALS_OF_ITS_OWN
    is_explained = stderr_tail and (is_own_doing or may_be_uncaught(exitcode))
    cause = last_exception(stderr_tail) if is_explained else None
    if cause is None:
        return words, "", is_usage_error
    # If a process aborts while its interpreter is ending, the exception that ends it is the cause.
    if name == "SIGABRT" and cause.is_uncaught and not note:
        return f"{cause.headline} (the process then aborted: SIGABRT)", cause.traceback, False
    if note or is_own_doing:
        return f"{words}; last output: {cause.headline}", cause.traceback, False
    return cause.headline, cause.traceback, False


# Error files.


def read_error_file(path: str) -> Json | None:
    """Returns the content of an error file; `None` if it is missing, damaged or too long, or something else."""
    # Opening a FIFO would wait forever for a writer.
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


def parse_record(data: Json) -> tuple[str, str, int]:
    """Returns the message, traceback and time in an error file; empty if missing, or in an unknown shape.

    torch writes a dict under "message"; if there is a sentence instead, its time is beside it.
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
    # `traceback.format_exc` returns "NoneType: None" without an exception.
    if not isinstance(callstack, str) or callstack.startswith("NoneType: None"):
        callstack = ""
    text = text.strip() or callstack.strip().rpartition("\n")[2]
    return printable(text), printable(callstack), epoch_s(at)


def epoch_s(value: object) -> int:
    """Returns a point in time between 1970 and 9999, or 0."""
    try:
        seconds = int(float(value)) if isinstance(value, (str, int, float)) else 0
    except (ValueError, OverflowError):
        return 0
    return seconds if 0 < seconds < 253_402_300_800 else 0


def printable(text: str) -> str:
    """Makes a text safe for a terminal: nothing in it moves the cursor, rings, hides, or changes the direction.

    Removes colours; replaces other control characters, and lone surrogates, which JSON may contain.
    """
    if "\x1b" in text:
        from aelastic.diagnose.failures.exit_reason import ESCAPES

        text = ESCAPES.sub("", text)
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.translate(_CONTROLS).encode("utf-8", "replace").decode()


def record_of(message: str, callstack: str, timestamp: int) -> Json:
    """Returns a record in torch's shape: the time is a string."""
    extra = {"py_callstack": callstack, "timestamp": str(timestamp)}
    return {"message": {"message": message, "extraInfo": extra}}


def with_error_code(data: Json, error_code: int) -> Json:
    """Adds the code where torch puts it; leaves a record whose message is a sentence unchanged."""
    message = data.get("message")
    if not error_code or not isinstance(message, dict):
        return data
    return {**data, "message": {**message, "errorCode": error_code}}


def log() -> logging.Logger:
    """Returns the logger for error files; imports `logging` only when there is something to log."""
    import logging

    return logging.getLogger("aelastic.errors")
