"""What can go wrong, whose fault it is, what to do; failures of workers as values, and their error files.

    AelasticError                   category         exit code   whose fault
    ├── InputError                  input error      2           you: fix the value
    ├── RendezvousError             infra failure    1           the other agents, or the network between
    │   ├── RendezvousTimeoutError  infra failure    75          too few agents came in time: retry
    │   ├── RendezvousClosedError   infra failure    1           the job is over: do not retry under this run id
    │   ├── RendezvousConnectionError  infra failure 1           no answer from the endpoint: retry
    │   └── RendezvousStateError    infra failure    1           something else writes at the endpoint
    ├── ChildFailedError            worker failure   its own     the job: read the report
    ├── HostError                   infra failure    1           the host: a disk is full, descriptors ran out
    ├── UnkillableWorkerError       infra failure    70          the host: look at it, reboot it
    └── InternalError               agent failure    70          us: report it, with its story

"Its own" is the root cause's exit code, or 128+n for signal n (`exit_code_of`).  A worker's failure is data, a
`ProcessFailure`; these exceptions are for the program that runs the agent.  The error files are torch's, read and
written (torch: `torch.distributed.elastic.multiprocessing.errors`), so `record` of either works under either agent.
Importing this module is cheap, since workers do: what only a failure needs is imported when there is one.
"""

# Imports where a failure needs them, and no pathlib: every worker pays for the start-up time.

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import wraps
from typing import Any, ClassVar, ParamSpec, TypeVar

from aelastic.failures.error_handler import ErrorHandler as ErrorHandler  # noqa: PLC0414  this is its documented place
from aelastic.failures.failure import ProcessFailure as ProcessFailure  # noqa: PLC0414  this is its documented place
from aelastic.failures.failure import log

P = ParamSpec("P")
R = TypeVar("R")

EXIT_FAILURE = 1
EXIT_INPUT = 2
EXIT_INTERNAL = 70  # EX_SOFTWARE of sysexits.h
EXIT_TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h


class ErrorCategory(Enum):
    """Whose fault an error is, in the words of torchelastic's documentation."""

    INPUT = "input error"  # a user error: an invalid input to the agent
    WORKER = "worker failure"  # a user error: a worker process failed
    AGENT = "agent failure"  # a platform error: the agent failed
    INFRA = "infra failure"  # neither the agent nor the workers: hosts and networks


class AelasticError(Exception):
    """Anything the agent raises on purpose; `category` and `exit_code` say whose fault it is."""

    category: ClassVar[ErrorCategory] = ErrorCategory.AGENT
    exit_code: ClassVar[int] = EXIT_FAILURE


class InputError(AelasticError, ValueError):
    """A value that cannot work.  Your fault; retrying does not help; the message says what to use instead."""

    category = ErrorCategory.INPUT
    exit_code = EXIT_INPUT


class RendezvousError(AelasticError):
    """The agents did not agree on which nodes take part.  Look at the other agents' logs first, then at the network."""

    category = ErrorCategory.INFRA


class RendezvousTimeoutError(RendezvousError):
    """Too few agents joined in time.  Retry; look at which nodes are missing, and why they did not start."""

    exit_code = EXIT_TRY_AGAIN


class RendezvousClosedError(RendezvousError):
    """The job is over, and this agent came late.  Do not retry under the same run id; look at how the job ended."""


class RendezvousConnectionError(RendezvousError):
    """The rendezvous endpoint does not answer.  Retry; look at its host name, port, firewall and server."""


class RendezvousStateError(RendezvousError):
    """The endpoint holds what no agent wrote.  Do not retry; look for another program, or another job's run id."""


class RequestError(AelasticError):
    """What was asked of a job that runs is not done; says why.  The job is undisturbed."""


class HostError(AelasticError):
    """The host refused what a running job needs: room on a disk, a descriptor, a process.

    The host's fault: look at its disks and limits.  Retry once it has room, or on another.
    """

    category = ErrorCategory.INFRA

    @staticmethod
    def no_answer_from_disk(place: object, *, within_s: float) -> HostError:
        """A file or folder that could be neither read nor written in this time."""
        return HostError(f"no answer from the disk that holds {place} within {within_s:g} s: look at its file server")


class UnkillableWorkerError(AelasticError):
    """Processes that ignore SIGKILL.

    The host's fault: the kernel holds them, mostly in a driver or a dead network file system.  Retry on another
    host; look at this one's kernel log, and reboot it.

    Args:
        processes: a description of each.
    """

    category = ErrorCategory.INFRA
    exit_code = EXIT_INTERNAL

    def __init__(self, processes: Sequence[str]) -> None:
        self.processes = tuple(processes)
        super().__init__(self.processes)

    def __str__(self) -> str:
        return (
            f"{len(self.processes)} worker process(es) survived SIGKILL: {'; '.join(self.processes)}. "
            "The kernel holds them, mostly in a driver or a dead network file system: see its log, and reboot the host"
        )


class InternalError(AelasticError):
    """The agent did what it must never do.

    Our fault.  Retrying may help; please report it, with the story.

    Args:
        what: what happened.
        story: the last events before it, oldest first.
    """

    exit_code = EXIT_INTERNAL

    def __init__(self, what: str, story: Iterable[str] = ()) -> None:
        self.what, self.story = what, tuple(story)
        super().__init__(self.what, self.story)

    def __str__(self) -> str:
        return "\n  ".join([f"{self.what} (a bug in aelastic: please report it)", *self.story])


class ChildFailedError(AelasticError):
    """Workers failed; `str()` of it is the report (torch: `ChildFailedError`).

    The job's fault: the report names the first failure, with its traceback.  The restart budget is used up; retry
    if the cause is not in the code.

    Args:
        name: what they ran.
        failures: by global rank, in the order they were observed.
        victims: global ranks that the agent stopped because of the failures.
        stacks: by global rank, of those that had to be killed for it: where they were.
        cause: the global rank of the failure that ended the job; `None` is the smallest timestamp, and of equal ones
            the first observed, as torch has it.
        raised: by global rank, of workers that raised an exception of their own before the agent stopped them.

    Raises:
        InputError: there are no failures.
    """

    category = ErrorCategory.WORKER

    def __init__(
        self,
        name: str,
        failures: Mapping[int, ProcessFailure],
        victims: Iterable[int] = (),
        stacks: Mapping[int, str] | None = None,
        cause: int | None = None,
        raised: Mapping[int, ProcessFailure] | None = None,
    ) -> None:
        if not failures:
            raise InputError("failures is empty: raise ChildFailedError for at least one failed worker")
        if cause is not None and cause not in failures:
            raise InputError(f"cause is rank {cause}, of which there is no failure: use one of {sorted(failures)}")
        self.name, self.failures, self.victims = name, dict(failures), tuple(victims)
        self.stacks, self.cause, self.raised = dict(stacks or {}), cause, dict(raised or {})
        super().__init__(self.name, self.failures, self.victims, self.stacks, self.cause, self.raised)

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """The root cause and its global rank."""
        if self.cause is not None:
            return self.cause, self.failures[self.cause]
        return min(self.failures.items(), key=lambda item: item[1].timestamp)

    def __str__(self) -> str:
        return self.format_msg()

    def format_msg(self, boarder_delim: str = "=", section_delim: str = "-") -> str:
        """The report, in torch's layout; the parameters keep torch's names."""
        from aelastic.failures.report import report

        job = self.name, self.failures, self.get_first_failure(), self.victims
        enrich = get_error_handler().maybe_enrich_signal_failure_message
        return report(*job, boarder_delim, section_delim, self.stacks, self.raised, enrich=enrich)


def exit_code_of(error: BaseException | ProcessFailure) -> int:
    """What the agent exits with: the root cause's code, 128+n for signal n; the table above for other errors."""
    if isinstance(error, ProcessFailure):
        if error.is_signal:
            return 128 - error.exitcode
        # The kernel keeps 8 bits (`exit(3)`); a failure must not become a success by losing the others.
        return error.exitcode & 0xFF or EXIT_FAILURE
    if _is_child_failed_error(error):
        return exit_code_of(_first_failure(error))
    return error.exit_code if isinstance(error, AelasticError) else EXIT_FAILURE


def get_error_handler() -> ErrorHandler:
    """The handler that `record` uses where none is given, and the report on failed workers."""
    return ErrorHandler()


def record(fn: Callable[P, R], error_handler: ErrorHandler | None = None) -> Callable[P, R | None]:
    """Decorates the main function of a process, so that its uncaught exception reaches the agent (torch: `record`).

    An exception is recorded, and raised again.  A `ChildFailedError`, ours or torch's, passes its root cause on as
    it is, so that the scheduler above an agent reads what the worker recorded.  `sys.exit(0)` returns `None`, other
    exits pass unrecorded, as with torch.

    Args:
        fn: called once per process, at the top.
        error_handler: what records; `None` is `get_error_handler()`.
    """
    handler = error_handler or get_error_handler()

    @wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
        # A `functools.partial` has no name.  torch's own handler has the two new hooks since 2.15.
        _call(handler, "set_entrypoint_fn_name", getattr(fn, "__qualname__", None))
        handler.initialize()
        try:
            result = fn(*args, **kwargs)
        except SystemExit as error:
            if error.code == 0:
                return None
            raise
        except Exception as error:
            try:
                _record(handler, error)
            # A user's handler: it must not hide the exception it was called for.
            except Exception:  # noqa: BLE001
                log().warning("error handler %s failed", type(handler).__name__, exc_info=True)
            raise
        _call(handler, "record_success")
        return result

    return wrapper


def _call(handler: Any, hook: str, *args: object) -> None:
    getattr(handler, hook, lambda *_: None)(*args)


def _record(handler: ErrorHandler, error: Exception) -> None:
    if not _is_child_failed_error(error):
        handler.record_exception(error)
        return
    failure = _first_failure(error)
    if os.path.isfile(failure.error_file):
        handler.dump_error_file(failure.error_file, failure.exitcode)
    elif isinstance(handler, ErrorHandler):
        handler.write_failure(failure)


def _is_child_failed_error(error: BaseException) -> bool:
    """Whether it is ours, or torch's: known by its name, since importing torch takes a second."""
    return isinstance(error, ChildFailedError) or any(
        cls.__name__ == "ChildFailedError" and cls.__module__.startswith("torch.") for cls in type(error).__mro__
    )


def _first_failure(error: Any) -> ProcessFailure:
    failure = error.get_first_failure()[1]
    if isinstance(failure, ProcessFailure):
        return failure
    return ProcessFailure(failure.local_rank, failure.pid, failure.exitcode, failure.error_file)
