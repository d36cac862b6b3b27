"""A function as a worker: runs in a child process of `multiprocessing`.

The return value goes through a file, not a pipe: it may be of any size, and nothing has to read
it while the worker ends.
"""

from __future__ import annotations

import os
import pickle
import runpy
import signal
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

from aelastic.diagnose.failures.error_handler import without_frames_of
from aelastic.diagnose.failures.failure import FINAL_KEY, Json
from aelastic.errors import ErrorHandler, record
from aelastic.workers.backend import WorkerStart


class SentFunction:
    """A function and its arguments on the way to a child that is not forked.

    They are pickled separately: a child that cannot read them is already a worker, and fails like one.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._content = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing.reduction import ForkingPickler

        return ReceivedFunction, (bytes(ForkingPickler.dumps(self._content)),)

    def __call__(self) -> None:
        raise AssertionError("the child has another")


class ReceivedFunction(NamedTuple):
    """The same, as the child receives it."""

    pickled: bytes

    def open(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Returns the function and its arguments.

        Raises:
            Exception: whatever unpickling raises.
        """
        import multiprocessing

        process: Any = multiprocessing.current_process()
        process._inheriting = True  # noqa: SLF001  as in `multiprocessing.spawn`: proxies of managers check it
        try:
            content: tuple[Callable[..., Any], tuple[Any, ...]] = pickle.loads(self.pickled)  # noqa: S301  our own agent's
        except (AttributeError, ModuleNotFoundError) as error:
            # Modules and search path are the same at each start.
            advice = "define it in a module that workers can import, or use start_method='fork'"
            kind = AttributeError if isinstance(error, AttributeError) else ModuleNotFoundError
            final = kind(f"{error}: {advice}")
            setattr(final, _IS_FINAL, True)
            raise final from None
        finally:
            del process._inheriting  # noqa: SLF001
        return content


# An attribute of an exception that each restart would raise again.
_IS_FINAL = "_aelastic_is_final"


def run(start: WorkerStart, held_off: Collection[int] | None = None, working_folder: str = "") -> None:
    """Runs the function of one worker, in its own session, environment and streams.

    An exception goes to the error file and, without our frames, to stderr; the exit code is 1.

    Args:
        held_off: if all signals were blocked for the fork, those that must stay blocked.
        working_folder: the first folder to search for modules, if the agent has removed it from its own path.
    """
    if working_folder:
        sys.path[:] = [working_folder, *(path for path in sys.path if path != working_folder)]
    _become_a_worker(start)
    if held_off is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, held_off)
    try:
        record(_call, _Handler())(start)
    except Exception as error:  # noqa: BLE001  a user's function may raise anything; its traceback goes to stderr
        import traceback

        traceback.print_exception(error.with_traceback(without_frames_of(_OURS, error.__traceback__)))
        raise SystemExit(1) from None
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _call(start: WorkerStart) -> None:
    assert not isinstance(start.entrypoint, str)
    if start.cpus is not None:
        from aelastic.workers.affinity import bind_process

        bind_process(start.cpus)
    function: Any = start.entrypoint
    args = start.args
    if isinstance(function, ReceivedFunction):
        function, args = function.open()
    try:
        value = function(*args)
    except SystemExit as error:
        if error.code not in {None, 0}:
            raise
        value = None
    assert start.return_file is not None
    _keep(value, start.return_file)


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
    if os.getsid(0) != os.getpid():  # a forked interpreter is already a session leader
        os.setsid()
    os.environ.clear()
    os.environ.update(start.env)
    for name, usual, path in (("stdout", 1, start.stdout), ("stderr", 2, start.stderr)):
        if path is not None:
            _redirect(name, usual, path)


def _redirect(name: str, usual: int, path: Path) -> None:
    """Redirects a standard stream to a file, for Python and for programs that it starts."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(fd, usual)
    os.close(fd)
    stream = getattr(sys, name)
    try:
        has_usual = stream.fileno() == usual
    except (AttributeError, OSError, ValueError):
        has_usual = False
    if not has_usual:  # a program around the agent had replaced it, and we were forked
        setattr(sys, name, open(usual, "w", buffering=1, closefd=False))  # noqa: SIM115  for the rest of our life


def _keep(value: Any, path: Path) -> None:
    with path.open("wb") as file:
        try:
            pickle.dump(value, file, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # noqa: BLE001  pickling runs the user's code
            raise TypeError(f"the return value cannot be pickled: {type(error).__name__}: {error}") from None


async def read_return_value(path: Path) -> Any:
    """Returns the value that a function returned, written by our own child on this machine; removes the file.

    If cancelled, it abandons the thread that reads: a disk may hang.
    """
    from concurrent.futures import ThreadPoolExecutor

    import aiofiles

    from aelastic.base.loop.threads import run_sync

    # Not the loop's own executor: closing the loop would wait for a thread that hangs.
    executor = ThreadPoolExecutor(1, "return value")
    try:
        async with aiofiles.open(path, "rb", executor=executor) as file:
            pickled = await file.read()
    finally:
        executor.shutdown(wait=False)
    await run_sync(path.unlink, abandon_on_cancel=True)
    return await run_sync(pickle.loads, pickled, abandon_on_cancel=True)


class _Handler(ErrorHandler):
    _is_final = False

    def record_exception(self, e: BaseException) -> None:
        self._is_final = getattr(e, _IS_FINAL, False)
        super().record_exception(e.with_traceback(without_frames_of(_OURS, e.__traceback__)))

    def _write(self, data: Json) -> None:
        super()._write({**data, FINAL_KEY: True} if self._is_final else data)


_OURS = {__name__, "aelastic.workers.affinity", "aelastic.errors", "runpy"}
