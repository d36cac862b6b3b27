"""Errors of a launch, as programs written for torch's launcher catch them."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import weakref
from contextlib import suppress
from typing import Any

from aelastic.diagnose.failures.failure import ERROR_FILE_VARIABLE
from aelastic.errors import ChildFailedError, ErrorHandler

_log = logging.getLogger(__name__)

# A file of some hundred bytes is written at once, or the disk hangs.
KEEP_TIMEOUT_S = 1.0


class SignalException(Exception):
    """A signal stopped the job; all workers have ended (torch: `SignalException`).

    Args:
        msg: the message.
        sigval: the signal.
    """

    def __init__(self, msg: str, sigval: signal.Signals) -> None:
        super().__init__(msg)
        self.sigval = sigval

    def __reduce__(self) -> tuple[Any, ...]:
        return SignalException, (*self.args, self.sigval)


# Programs may catch torch's classes, and torch's `record` does.
_TORCHS: dict[type[Exception], str] = {
    ChildFailedError: "torch.distributed.elastic.multiprocessing.errors",
    SignalException: "torch.distributed.elastic.multiprocessing.api",
}


def catchable_as_torchs(error: Exception) -> Exception:
    """Returns the error; if the program has imported torch's class of that name, an error of both classes."""
    ours = type(error)
    torchs: type[Exception] | None = getattr(sys.modules.get(_TORCHS[ours]), ours.__name__, None)
    if torchs is None:
        return error
    both: type[Exception] = type(
        ours.__name__,
        (ours, torchs),
        {
            "__module__": ours.__module__,
            "__qualname__": ours.__qualname__,
            "__reduce__": lambda _: (catchable_as_torchs, (error,)),  # pickle finds no class of this name
        },
    )
    twin = both.__new__(both, *error.args)  # without `__init__`: the two do not call each other
    vars(twin).update(vars(error))
    if isinstance(twin, ChildFailedError) and os.environ.get(ERROR_FILE_VARIABLE):
        _keep_cause(twin)
    return twin


def _keep_cause(failed: ChildFailedError) -> None:
    """Writes the cause to a file that lives as long as the error, where torch's `record` reads it.

    Does not wait for a disk that does not answer: the error itself matters more.
    """
    writing = threading.Thread(target=_write_cause, args=[failed], name="the cause", daemon=True)
    try:
        writing.start()
    except RuntimeError:
        return  # the host allows no more threads
    writing.join(KEEP_TIMEOUT_S)
    if writing.is_alive():
        _log.warning(
            "the cause is not written for torch's record, since the disk of the temporary folder does not answer"
        )


def _write_cause(failed: ChildFailedError) -> None:
    rank, cause = failed.get_first_failure()
    if os.path.isfile(cause.error_file):
        return
    import tempfile

    try:
        fd, path = tempfile.mkstemp(prefix="aelastic_", suffix=".json")
    except OSError:
        return  # no room on the disk
    os.close(fd)
    weakref.finalize(failed, _remove, path)
    _Copy(path).write_failure(cause)
    failed.failures[rank] = cause.replace(error_file=path)


def _remove(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)


class _Copy(ErrorHandler):
    def __init__(self, path: str) -> None:
        self._path = path

    def _get_error_file_path(self) -> str:
        return self._path
