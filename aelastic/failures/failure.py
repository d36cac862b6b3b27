"""A worker's failure as a value: what is known of it, from its error file, its stderr and its exit code."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from aelastic.failures.error_file import NO_MESSAGE, Json, epoch_s, parse_record, printable, read_error_file

# torch's word, which log scrapers and callers compare with.
NOT_AVAILABLE = "<N/A>"
# A traceback that another host tells is cut to this.
TRACEBACK_CHARS_MAX = 32 * 1024


@dataclass(frozen=True, slots=True)
class ProcessFailure:
    """How a worker failed, as far as anybody can tell (torch: `ProcessFailure`).

    Complete from the moment it exists: the error file is read here, once.  A missing or damaged one is no error;
    the tail of stderr speaks then, or else the exit code.

    Args:
        local_rank: the worker's.
        pid: its process id, or -1 where none was started.
        exitcode: what it exited with; `-n` for signal n.
        error_file: where it may have recorded its exception; becomes `<N/A>` where there is no such file.
        stderr_tail: the end of what it printed.
        host: where it ran; "" is here.
        oom: a sentence, where an out-of-memory kill was seen.
        note: what the agent knows better than the exit code, as in "could not be started: no such file".
        unhealthy: what the agent stopped it for, as in "timer 'step' expired"; "" for who ended by itself.
        stack: where it stood then, in lines, and who says so; or why that is not known.
    """

    local_rank: int
    pid: int
    exitcode: int
    error_file: str
    stderr_tail: str = field(default="", repr=False, kw_only=True)
    host: str = field(default="", kw_only=True)
    oom: str = field(default="", kw_only=True)
    note: str = field(default="", kw_only=True)
    unhealthy: str = field(default="", kw_only=True)
    stack: str = field(default="", repr=False, kw_only=True)
    error_file_data: Json = field(init=False, repr=False, hash=False)
    message: str = field(init=False)  # one sentence or headline, never empty
    traceback: str = field(init=False, repr=False)  # "" where none is known
    timestamp: int = field(init=False)  # of the recorded exception, else of now; seconds since the epoch

    def __post_init__(self) -> None:
        data = read_error_file(self.error_file)
        if data is None and not os.path.isfile(self.error_file):
            self._set("error_file", NOT_AVAILABLE)
        message, traceback, timestamp = parse_record(data or {})
        self._set("error_file_data", data or {"message": NO_MESSAGE})
        self._set("timestamp", timestamp or int(time.time()))
        if self.unhealthy:
            message = f"{self.unhealthy}; its last words: {message}" if message else self.unhealthy
        if not message:
            message, traceback = self._explain_from_stderr()
        self._set("message", message)
        self._set("traceback", traceback)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _explain_from_stderr(self) -> tuple[str, str]:
        from aelastic.failures.exit_reason import describe_exit, last_exception

        words = describe_exit(self.exitcode)
        if self.oom and self.signal_name() == "SIGKILL":
            words = f"{words.partition(':')[0]}: {self.oom}"
        words = self.note or words
        # Whoever was killed from outside did not die of an exception it had printed before.
        is_own_doing = not self.is_signal or self.signal_name() in _SIGNALS_OF_ITS_OWN
        cause = last_exception(self.stderr_tail) if self.stderr_tail and is_own_doing else None
        if cause is None:
            return words, ""
        if self.note or self.is_signal:
            return f"{words}; its last words: {cause.headline}", cause.traceback
        return cause.headline, cause.traceback

    @property
    def is_signal(self) -> bool:
        """Whether a signal ended it."""
        return self.exitcode < 0

    @property
    def headline(self) -> str:
        """One line with the place, where known, as in `ValueError: batch is empty at train.py:12`."""
        from aelastic.failures.exit_reason import last_exception

        line = self.message.strip().partition("\n")[0].strip()
        cause = last_exception(self.traceback) if self.traceback else None
        return f"{line} at {cause.file}:{cause.line}" if cause and cause.file else line

    def signal_name(self) -> str:
        """`SIGKILL`, or `<N/A>` where no signal ended it or the number has no name."""
        from aelastic.failures.exit_reason import signal_name

        return (signal_name(-self.exitcode) if self.is_signal else "") or NOT_AVAILABLE

    def timestamp_isoformat(self) -> str:
        """Local time, as in `2026-10-17_12:00:00`."""
        return time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(self.timestamp))

    @classmethod
    def from_elsewhere(
        cls,
        local_rank: int,
        pid: int,
        exitcode: int,
        *,
        host: str,
        message: str,
        traceback: str = "",
        timestamp: int = 0,
        oom: str = "",
        stack: str = "",
    ) -> ProcessFailure:
        """The failure of a worker of another host, as that one tells it; its error file is not here."""
        failure = cls(local_rank, pid, exitcode, NOT_AVAILABLE, host=host, oom=oom, stack=printable(stack))
        failure._set("timestamp", epoch_s(timestamp) or failure.timestamp)
        failure._set("message", printable(message.strip()) or failure.message)
        failure._set("traceback", printable(traceback[-TRACEBACK_CHARS_MAX:]))
        return failure


# Native code raises these in its own process; a Python interrupt ends with SIGINT.
_SIGNALS_OF_ITS_OWN = {"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGSYS", "SIGTRAP"}
