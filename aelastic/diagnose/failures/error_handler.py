"""How `record` handles an exception: it writes the error file of this process in torch's format.

Workers import this module, so modules that only a failure needs are imported when there is one.
"""

# Imports only where a failure needs them, and no pathlib: every worker pays for the start-up time.

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from aelastic.diagnose.failures.failure import (
    ERROR_FILE_VARIABLE,
    Json,
    ProcessFailure,
    log,
    parse_record,
    read_error_file,
    record_of,
    with_error_code,
)

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import TracebackType


class ErrorHandler:
    """Writes the exception of this process to the file in `TORCHELASTIC_ERROR_FILE` (torch: `ErrorHandler`).

    Without that variable, it logs the exception instead.  It never raises if the file cannot be written, because the
    original exception matters more.  You can override `initialize`, `record_exception` and, as in torch 2.14 and 2.15,
    `record_success`, `set_entrypoint_fn_name` and `maybe_enrich_signal_failure_message`.
    """

    _fn_name: str | None = None

    def set_entrypoint_fn_name(self, fn_name: str | None) -> None:
        """Called by `record` before `initialize`, with the qualified name of the decorated function, if any."""
        self._fn_name = fn_name

    def initialize(self) -> None:
        """Called before the decorated function; enables `faulthandler`, so that fatal signals print stacks."""
        import faulthandler

        try:
            faulthandler.enable(all_threads=True)
        except (OSError, ValueError, RuntimeError, AttributeError) as error:  # stderr is closed, or not a file
            log().warning("faulthandler cannot be enabled: %s", error)

    def record_exception(self, e: BaseException) -> None:
        """Writes an exception with its traceback and the time."""
        import traceback

        if self._fn_name:
            log().debug("%s raised %s", self._fn_name, type(e).__name__)
        # The frames of `record` are not part of a user's error.
        frames = without_frames_of({"aelastic.errors"}, e.__traceback__) or e.__traceback__
        lines = traceback.format_exception(type(e), e, frames)
        self._write(record_of(f"{type(e).__name__}: {_text_of(e)}", "".join(lines), int(time.time())))

    def record_success(self) -> None:
        """Called by `record` after its function has returned.  If it raises, the worker fails, as with torch."""
        if self._fn_name:
            log().debug("%s returned", self._fn_name)

    def maybe_enrich_signal_failure_message(self, message: str, error_file: str) -> str:
        """Returns the message that the report shows for a worker ended by a signal.

        Override it to add lines, such as a driver's log messages about the device.

        Args:
            message: the message so far.
            error_file: the worker's error file, or `<N/A>`; its logs are next to it.
        """
        del error_file
        return message

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        """Copies a child's record to this process's error file, and adds the child's exit code.

        A child that a signal ended cannot record its own exit code.  The record notes a damaged file.
        """
        data = read_error_file(rootcause_error_file)
        if data is None:
            data = record_of(f"the error file {rootcause_error_file} cannot be read", "", int(time.time()))
        self._write(with_error_code(data, error_code))

    def write_failure(self, failure: ProcessFailure) -> None:
        """Writes a child's failure to this process's error file, even if the child recorded nothing."""
        data = failure.error_file_data
        if not parse_record(data)[0]:
            message = failure.message
            if failure.oom and failure.oom not in message:
                message = f"{message}; {failure.oom}"
            data = record_of(message, failure.traceback, failure.timestamp)
        self._write(with_error_code(data, failure.exitcode))

    def _get_error_file_path(self) -> str | None:
        """Returns the path to write, `None` to log only; read each time, because launchers change the variable."""
        return os.environ.get(ERROR_FILE_VARIABLE) or None

    def _write(self, data: Json) -> None:
        import json

        from aelastic.base.host.files import replace_file

        text = json.dumps(data)
        path = self._get_error_file_path()
        if path is None:
            log().error("no error file is set (%s); it would hold: %s", ERROR_FILE_VARIABLE, text)
            return
        try:
            replace_file(path, text.encode())
        except (OSError, ValueError) as error:  # ValueError: a path that no file system accepts
            log().warning("error file %s cannot be written: %s; it would hold: %s", path, error, text)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as other:  # noqa: BLE001  (a user's `__str__`)
        return f"<no text: str() raised {type(other).__name__}>"


def without_frames_of(modules: Collection[str], frames: TracebackType | None) -> TracebackType | None:
    """Returns the traceback from the first frame outside these modules, or `None`."""
    while frames is not None and frames.tb_frame.f_globals.get("__name__") in modules:
        frames = frames.tb_next
    return frames
