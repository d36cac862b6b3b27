"""What can go wrong, whose fault it is, and what to do; also `record`, which writes error files.

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
    └── InternalError               agent failure    70          us: report it, with its trace

"Its own" is the root cause's exit code, or 128+n for signal n (`exit_code_of`).  A worker's failure is data, a
`ProcessFailure`; these exceptions are for the program that runs the agent.  The error files are torch's, read and
written (torch: `torch.distributed.elastic.multiprocessing.errors`), so `record` of either works under either agent.
Importing this module is cheap, because workers do it: modules that only a failure needs are imported when there is one.
"""

# Imports only where a failure needs them, and no pathlib: every worker pays for the start-up time.

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from aelastic.base.errors import EXIT_FAILURE as EXIT_FAILURE  # noqa: PLC0414  this is its documented place
from aelastic.base.errors import EXIT_INPUT as EXIT_INPUT  # noqa: PLC0414  as above
from aelastic.base.errors import EXIT_INTERNAL as EXIT_INTERNAL  # noqa: PLC0414  as above
from aelastic.base.errors import EXIT_TRY_AGAIN as EXIT_TRY_AGAIN  # noqa: PLC0414  as above
from aelastic.base.errors import AelasticError as AelasticError  # noqa: PLC0414  as above
from aelastic.base.errors import ErrorCategory as ErrorCategory  # noqa: PLC0414  as above
from aelastic.base.errors import InternalError as InternalError  # noqa: PLC0414  as above
from aelastic.diagnose.failures.error_handler import ErrorHandler as ErrorHandler  # noqa: PLC0414  this is its documented place
from aelastic.diagnose.failures.failure import ProcessFailure as ProcessFailure  # noqa: PLC0414  this is its documented place
from aelastic.diagnose.failures.failure import log

P = ParamSpec("P")
R = TypeVar("R")


class InputError(AelasticError, ValueError):
    """An invalid value.

    You need to fix it, and retrying does not help.  The message tells what to use instead.
    """

    category = ErrorCategory.INPUT
    exit_code = EXIT_INPUT


class RendezvousError(AelasticError):
    """The agents did not agree on which nodes take part.

    Look at the logs of the other agents first, then at the network.
    """

    category = ErrorCategory.INFRA


class RendezvousTimeoutError(RendezvousError):
    """Too few agents joined in time.

    You can retry.  Check which nodes are missing, and why they did not start.
    """

    exit_code = EXIT_TRY_AGAIN
    topic = "too-few-nodes-joined"


class RendezvousClosedError(RendezvousError):
    """The job had already ended when this agent joined.

    Do not retry with the same run id.  Check how the job ended.
    """


class RendezvousConnectionError(RendezvousError):
    """The rendezvous endpoint does not answer.

    You can retry.  Check its host name, port, firewall and server.

    Args:
        reason: why, for a text that names the endpoint itself; the message, if there is nothing shorter.
    """

    topic = "no-answer-from-the-endpoint"

    def __init__(self, *args: object, reason: str = "", topic: str | None = None) -> None:
        super().__init__(*args, topic=topic)
        self.reason = reason or str(self)


class RendezvousStateError(RendezvousError):
    """The endpoint holds data that no agent has written.

    Do not retry.  Check whether another program uses the endpoint, or another job the same run id.
    """

    topic = "the-record-at-the-endpoint-is-not-ours"


class RequestError(AelasticError):
    """A request to a running job was not carried out; the message tells why.

    The job continues unchanged.
    """


class HostError(AelasticError):
    """The host refused something that a running job needs: disk space, a file descriptor, a process.

    The host is at fault: check its disks and limits.  Retry when it has room, or on another host.
    """

    category = ErrorCategory.INFRA

    @staticmethod
    def no_answer_from_disk(place: object, *, within_s: float) -> HostError:
        """Returns the error for a file or folder that could be neither read nor written in this time."""
        return HostError(
            f"no answer from the disk that holds {place} within {within_s:g} s: look at its file server",
            topic="the-disk-does-not-answer",
        )


class UnkillableWorkerError(AelasticError):
    """Worker processes survived SIGKILL.

    The host is at fault: the kernel holds these processes, usually in a driver or in a dead network file system.  Retry
    on another host.  Check the kernel log of this one and reboot it.

    Args:
        processes: a description of each process.
    """

    category = ErrorCategory.INFRA
    exit_code = EXIT_INTERNAL
    topic = "a-process-survived-sigkill"

    def __init__(self, processes: Sequence[str]) -> None:
        self.processes = tuple(processes)
        super().__init__(self.processes)

    def __str__(self) -> str:
        return (
            f"{len(self.processes)} worker process(es) survived SIGKILL: {'; '.join(self.processes)}. The kernel holds "
            "them, mostly in a driver or a dead network file system: read dmesg, then reboot the host"
        )


class ChildFailedError(AelasticError):
    """Workers failed, and the job has ended; `str()` of it is the report (torch: `ChildFailedError`).

    The job is at fault: the report shows the first failure with its traceback.  Retry only if the cause is outside your
    code.

    Args:
        name: name of the program or function.
        failures: by global rank, in the order in which the agent saw them.
        victims: global ranks that the agent stopped because of the failures.
        stacks: by global rank, the stacks of victims that had to be killed.
        cause: global rank of the failure that ended the job; `None`: the earliest timestamp, as in torch, or the first
            of equal ones.
        raised: by global rank, failures of workers that had raised their own exception before the agent stopped them.

    Raises:
        InputError: `failures` is empty.
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
            raise InputError(f"cause is rank {cause}, which did not fail: use one of {sorted(failures)}")
        self.name, self.failures, self.victims = name, dict(failures), tuple(victims)
        self.stacks, self.cause, self.raised = dict(stacks or {}), cause, dict(raised or {})
        super().__init__(self.name, self.failures, self.victims, self.stacks, self.cause, self.raised)

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """Returns the global rank and the failure of the root cause (torch: `get_first_failure`)."""
        if self.cause is not None:
            return self.cause, self.failures[self.cause]
        return min(self.failures.items(), key=lambda item: item[1].timestamp)

    def __str__(self) -> str:
        return self.format_msg()

    def format_msg(self, boarder_delim: str = "=", section_delim: str = "-") -> str:
        """Returns the report, in torch's layout (torch: `format_msg`, with the same parameters)."""
        from aelastic.diagnose.failures.report import report

        job = self.name, self.failures, self.get_first_failure(), self.victims
        enrich = get_error_handler().maybe_enrich_signal_failure_message
        return report(*job, boarder_delim, section_delim, self.stacks, self.raised, enrich=enrich)


def exit_code_of(error: BaseException | ProcessFailure) -> int:
    """Returns the agent's exit code: the root cause's, 128+n for signal n; for other errors that in the table above."""
    if isinstance(error, ProcessFailure):
        if error.is_signal:
            return 128 - error.exitcode
        # The kernel keeps 8 bits (`exit(3)`); a failure must not become a success because the others are lost.
        return error.exitcode & 0xFF or EXIT_FAILURE
    if _is_child_failed_error(error):
        return exit_code_of(_first_failure(error))
    return error.exit_code if isinstance(error, AelasticError) else EXIT_FAILURE


def get_error_handler() -> ErrorHandler:
    """Returns the default handler of `record` and of reports about failed workers (torch: `get_error_handler`)."""
    return ErrorHandler()


def record(fn: Callable[P, R], error_handler: ErrorHandler | None = None) -> Callable[P, R | None]:
    """Decorates the main function of a process, so that the agent learns of its exception (torch: `record`).

    The decorated function records an exception and raises it again.  For a `ChildFailedError`, torch's or aelastic's,
    it passes on the root cause, so that a scheduler above the agent gets what the worker recorded.  As with torch,
    `sys.exit(0)` returns `None`, and other exits are not recorded.

    Args:
        fn: the function to decorate, called once per process.
        error_handler: records the exception; `None`: `get_error_handler()`.
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
    """Whether it is ours, or torch's: recognized by its name, because importing torch takes a second."""
    return isinstance(error, ChildFailedError) or any(
        cls.__name__ == "ChildFailedError" and cls.__module__.startswith("torch.") for cls in type(error).__mro__
    )


def _first_failure(error: Any) -> ProcessFailure:
    failure = error.get_first_failure()[1]
    if isinstance(failure, ProcessFailure):
        return failure
    return ProcessFailure(failure.local_rank, failure.pid, failure.exitcode, failure.error_file)
