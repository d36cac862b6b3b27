"""A function as a worker: what runs in the child process of `multiprocessing`.

The return value goes through a file, not a pipe: it may be of any size, and nobody has to read
it while the worker ends.
"""

from __future__ import annotations

import os
import pickle
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

from aelastic.errors import record
from aelastic.workers import WorkerStart


def return_file_of(error_file: Path) -> Path:
    """Where a worker's return value is kept until the agent has read it."""
    return error_file.with_name("return_value.pickle")


def run(start: WorkerStart) -> None:
    """Runs the function of one worker, in its own session, environment and streams.

    An exception goes to the error file and, without frames of ours, to stderr; the exit code is 1.
    """
    _become_a_worker(start)
    assert not isinstance(start.entrypoint, str)
    try:
        value = record(start.entrypoint)(*start.args)
        _keep(value, return_file_of(start.error_file))
    except Exception as error:  # noqa: BLE001  a user's function may raise anything; its traceback goes to stderr
        _print_traceback(error)
        raise SystemExit(1) from None
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def run_script_path(path: str, *args: str) -> None:
    """Runs a script as `__main__` in this process (torchrun: `--run-path`)."""
    sys.argv = [path, *args]
    runpy.run_path(path, run_name="__main__")


def _become_a_worker(start: WorkerStart) -> None:
    # A forked child shares the loop's wake-up socket: a signal here would wake the agent.
    signal.set_wakeup_fd(-1)
    for signum in signal.valid_signals():
        if callable(signal.getsignal(signum)):
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    os.setsid()
    os.environ.clear()
    os.environ.update(start.env)
    for stream, path in ((sys.stdout, start.stdout), (sys.stderr, start.stderr)):
        if path is not None:
            stream.flush()
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.dup2(fd, stream.fileno())
            os.close(fd)


def _keep(value: Any, path: Path) -> None:
    with path.open("wb") as file:
        pickle.dump(value, file, protocol=pickle.HIGHEST_PROTOCOL)


def read_return_value(path: Path) -> Any:
    """The value a function returned, written by our own child on this machine; the file is removed."""
    with path.open("rb") as file:
        value = pickle.load(file)  # noqa: S301
    path.unlink()
    return value


def _print_traceback(error: BaseException) -> None:
    import traceback

    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__") in _OURS:
        frames = frames.tb_next
    traceback.print_exception(error.with_traceback(frames))


_OURS = {__name__, "aelastic.errors"}
