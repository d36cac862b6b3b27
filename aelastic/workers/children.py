"""Workers as children of this process: a command, or a function of `multiprocessing`."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from aelastic import working_folder
from aelastic.base.host.files import opened_to_append
from aelastic.errors import InputError
from aelastic.workers.backend import WorkerStart


class Child(Protocol):
    """The common part of `subprocess.Popen` and `multiprocessing.Process`, more or less."""

    pid: int

    def reap(self) -> int | None:
        """Returns the exit code if there is one, and reaps the process.  Never blocks."""
        ...

    def wait_status(self) -> int | None:
        """Like `reap`, for a thread: waits for a second if a fork server has yet to report how the process ended."""
        ...


class Program:
    """A command, started as the leader of a new session."""

    def __init__(self, start: WorkerStart) -> None:
        assert isinstance(start.entrypoint, str)
        with opened_to_append(start.stdout) as out, opened_to_append(start.stderr) as err, _running_on(start.cpus):
            self._popen = subprocess.Popen(
                [*start.wrap, start.entrypoint, *start.args],
                env=start.env,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.pid = self._popen.pid

    def reap(self) -> int | None:
        return self._popen.poll()

    def wait_status(self) -> int | None:
        return self.reap()


class Function:
    """A function in a child of `multiprocessing`; `functions.run` makes it the leader of a new session.

    Args:
        start: what to start.
        method: as in `multiprocessing`.
        context: a context of `multiprocessing`, if not the usual one of that method.
    """

    def __init__(self, start: WorkerStart, method: str, context: Any = None) -> None:
        import multiprocessing
        import pickle

        from aelastic.workers import functions

        context = context or multiprocessing.get_context(method)
        if method == "forkserver":
            _preload_fork_server(context)
        name = f"worker {start.local_rank}"
        try:
            with _holding_signals_over_fork(method) as usual:
                sent = start
                if method != "fork":
                    assert not isinstance(start.entrypoint, str)
                    sent = start.replace(entrypoint=functions.SentFunction(start.entrypoint, start.args), args=())
                args = (sent, usual, working_folder)
                self._process = context.Process(target=functions.run, args=args, name=name)
                self._process.start()
        except (AttributeError, TypeError, ValueError, RuntimeError, pickle.PicklingError) as error:
            what = getattr(start.entrypoint, "__qualname__", repr(start.entrypoint))
            raise InputError(
                f"{what} or its arguments cannot be sent to a worker ({error}): define it at the top of a module, "
                f"and make queues, locks and events with multiprocessing.get_context({method!r})",
                topic="a-function-cannot-be-sent-to-workers",
            ) from None
        self.pid = self._process.pid

    def reap(self) -> int | None:
        exitcode: int | None = self._process.exitcode
        if exitcode is not None:
            self._process.join()  # at once: `multiprocessing` forgets it
        return exitcode

    def wait_status(self) -> int | None:
        self._process.join(timeout=1.0)
        return self.reap()


def _preload_fork_server(context: Any) -> None:
    """Makes the fork server ignore signals, unless it runs already; keeps the modules that the program preloads."""
    from multiprocessing import forkserver

    ours = "aelastic.workers.mp_fork_server"
    # They cannot be read in public ways; the default is the documented one.
    theirs = getattr(forkserver._forkserver, "_preload_modules", ["__main__"])  # noqa: SLF001
    if ours not in theirs:
        context.set_forkserver_preload([*theirs, ours])


@contextmanager
def _holding_signals_over_fork(method: str) -> Iterator[Collection[int] | None]:
    """Blocks all signals while a child is forked; yields this thread's usual mask, or `None` for other methods.

    Until `functions.run` has removed our handlers from the forked child, a signal would reach one of them and be lost.
    """
    if method != "fork":  # a child that is not forked has no handlers, and would keep the mask
        yield None
        return
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield usual
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, usual)


def _running_on(cpus: frozenset[int] | None) -> AbstractContextManager[None]:
    """Sets the CPUs of a child that is started meanwhile."""
    if cpus is None:
        return nullcontext()
    from aelastic.workers.affinity import bound_to

    return bound_to(cpus)
