"""The command line: arguments and environment in, exit code out.

`main` reads the arguments, runs the supervisor on a loop of its own, and reports how it ended; the exit codes are in
`docs/reference/exit-codes.md`.  It owns the process: signals, standard streams, logging and the duties of PID 1 are set
up only here.

Imports are late on purpose: a usage error or `--help` does not import asyncio, and nothing here imports torch.
"""

from __future__ import annotations

import atexit
import io
import os
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from aelastic.base.host.shortages import shortage_of
from aelastic.base.machine import CHECK_VARIABLE, check_invariants
from aelastic.cli.arguments import Invocation, parse
from aelastic.cli.manual.topics import with_topic
from aelastic.cli.options import GROUPS
from aelastic.cli.parser import ALIASES, COMMANDS, Groups
from aelastic.cli.process import (
    StderrWriter,
    configure_logging,
    handle_signals,
    handlers_of,
    terminal_handlers,
)
from aelastic.diagnose.failures.failure import ERROR_FILE_VARIABLE
from aelastic.errors import (
    EXIT_FAILURE,
    EXIT_INPUT,
    EXIT_INTERNAL,
    EXIT_TRY_AGAIN,
    AelasticError,
    ChildFailedError,
    HostError,
    InputError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
    exit_code_of,
    get_error_handler,
)

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from aelastic.observe.observer import Observer
    from aelastic.observe.ui.status_line import StatusLine
    from aelastic.result import RunResult

_stderr = StderrWriter()
_write = _stderr.put

# Where all options are explained, with their variables.
_ALL_HELP = "aelastic --help-all"
# A helper of `multiprocessing` ends in milliseconds.
HELPER_TIMEOUT_S = 2.0
# Variables that turn the status line off: CI, no-color.org, and Jupyter, which understands few control sequences;
# with the values that leave it on.
_UNSET = {"CI": {"", "0", "false"}, "NO_COLOR": {""}, "JPY_PARENT_PID": {""}}

# Container objects made, and not yet freed, before the collector looks.
COLLECT_AFTER = (100_000, 20, 100)


class CommandExit(NamedTuple):
    """How the command ended: an exit code, and the signal to die of, if a signal ended it."""

    code: int
    signum: int | None = None

    @classmethod
    def of_signal(cls, signum: int) -> CommandExit:
        return cls(128 + signum, signum)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line, and returns its exit code: 128+n if signal n stopped it."""
    outcome = _run_command(sys.argv[1:] if argv is None else argv, os.environ)
    _stderr.finish()
    return outcome.code


def main_and_exit(groups: Groups = GROUPS) -> NoReturn:
    """Runs the command line as this process (the console script, `python -m aelastic`).

    Args:
        groups: the available options.
    """
    _open_standard_streams()
    collect_rarely()
    # A Ctrl-C before or after the job ends this process as it ends any other, without a traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    outcome = _run_command(sys.argv[1:], os.environ, groups, owns_process=True)
    if _stderr.finish():
        for stream in (sys.stdout, sys.stderr):
            # A closed stream, or a pipe without a reader: the exit code matters more.
            with suppress(AttributeError, OSError, ValueError):
                stream.flush()
    # Exit handlers of libraries, such as that of `multiprocessing` for its temporary folder.
    atexit._run_exitfuncs()  # noqa: SLF001
    _end_multiprocessing()
    if outcome.signum is not None:
        # The parent must see the signal: a shell ends its script on a death by SIGINT, and on no exit code.  For
        # PID 1 the kernel drops signals with the default action (pid_namespaces(7)).
        signal.signal(outcome.signum, signal.SIG_DFL)
        os.kill(os.getpid(), outcome.signum)
    # Finalizing the interpreter takes 10 ms, which the caller would wait for.  Everything has been closed or flushed.
    os._exit(outcome.code)


def _end_multiprocessing() -> None:
    """Ends the helper processes of `multiprocessing`, which would briefly outlive this process."""
    helpers = [("multiprocessing.forkserver", "_forkserver"), ("multiprocessing.resource_tracker", "_resource_tracker")]
    running = [getattr(sys.modules[module], name) for module, name in helpers if module in sys.modules]
    for helper in running:
        # In a thread, and not for long: a process that holds the pipe to the helper keeps it running.
        ending = threading.Thread(target=_end_helper, args=(helper,), daemon=True)
        ending.start()
        ending.join(HELPER_TIMEOUT_S)


def _end_helper(helper: Any) -> None:
    with suppress(OSError):  # it has ended, and the files it removes are gone
        helper._stop()  # noqa: SLF001  there is no other way


def _open_standard_streams() -> None:
    """Opens /dev/null for each closed standard stream: otherwise the next file opened would become one."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _run_command(
    argv: Sequence[str], environ: Mapping[str, str], groups: Groups = GROUPS, *, owns_process: bool = False
) -> CommandExit:
    configure_logging(_stderr, environ.get("LOGLEVEL", ""))
    is_command = bool(argv) and (argv[0] in COMMANDS or argv[0] in ALIASES)  # a script of that name is ./doctor
    try:
        if is_command:
            from aelastic.cli.commands import run_command

            return CommandExit(run_command(argv, environ, groups, _write))
        invocation = parse(argv, environ, groups)
        if owns_process:
            from aelastic.base.host.children import adopt_orphans

            adopt_orphans()
    except InputError as error:
        return _refuse(error, f"aelastic {ALIASES.get(argv[0], argv[0])} --help" if is_command else _ALL_HELP)
    except ModuleNotFoundError as error:
        return _explain(error)
    except SystemExit:  # after `--help` and `--version`
        return CommandExit(0)
    except KeyboardInterrupt:
        return CommandExit.of_signal(signal.SIGINT)
    outcome = _run_job(invocation, owns_process=owns_process)
    if invocation.exit_codes == "torchrun" and outcome.code not in {0, EXIT_INPUT}:
        return CommandExit(EXIT_FAILURE)
    return outcome


def collect_rarely() -> None:
    """Makes the garbage collector run rarely: an agent's objects are freed by their reference counts.

    A leader of thousands of nodes makes hundreds of objects for each node in a round; with the usual threshold of 700
    the collector traverses all of them repeatedly, and takes a third of the round.
    """
    import gc

    gc.set_threshold(*COLLECT_AFTER)


def _run_job(invocation: Invocation, *, owns_process: bool) -> CommandExit:
    from aelastic.agent.open_files import check_open_files

    # Also for the last lines: they begin below a line that workers left open.
    with _status_line(invocation) as live:
        stopped_by: list[int] = []
        try:
            check_open_files(invocation.spec)  # also here: without descriptors no event loop can start
            result = _run_on_loop(_run(invocation, live, stopped_by, owns_process=owns_process), invocation.loop)
        except BaseException as error:  # noqa: BLE001  the last line of the CLI: any error gets a report and an exit code
            return _explain(error, invocation.endpoint_note)
        finally:
            if live is not None:
                _write(live.end)
        return _conclude(invocation, result, next(iter(stopped_by), None))


# Run.


async def _run(
    invocation: Invocation, live: StatusLine | None, stopped_by: list[int], *, owns_process: bool
) -> RunResult:
    """One run of a supervisor under the signals of this process.

    Args:
        live: the status line, if there is one.
        stopped_by: receives the signals that asked us to stop.
        owns_process: this process ends with the run.
    """
    import asyncio

    from aelastic.supervisor import Supervisor

    if os.environ.get(CHECK_VARIABLE):  # set by aelastic's own tests
        check_invariants()
    supervisor = Supervisor(invocation.spec, observers=_observers(invocation, live))

    def stop(signum: int) -> None:
        stopped_by.append(signum)
        supervisor.stop(signum)

    loop = asyncio.get_running_loop()
    _stderr.start()  # now: a worker may start threads up to the limit
    of_terminal = {} if live is None else terminal_handlers(loop, live)
    handlers = {**of_terminal, **handlers_of(invocation, supervisor, stop)}  # the user's actions take precedence
    with handle_signals(loop, handlers, is_last=owns_process), _reaping_orphans(loop):
        return await supervisor.run()


@contextmanager
def _status_line(invocation: Invocation) -> Iterator[StatusLine | None]:
    """The status line on our terminal, if it may be drawn; otherwise our lines take turns with those of workers."""
    if not _may_draw(invocation.ui, os.environ):
        with _streams_in_turns():
            yield None
        return
    from aelastic.observe.ui.status_line import status_line

    with status_line(_stderr.put, "view" if invocation.ui == "view" else "line") as live:
        yield live


@contextmanager
def _streams_in_turns() -> Iterator[None]:
    """Our lines and unfinished lines of workers take turns on stderr, and on stdout if both are one terminal."""
    try:
        fd = sys.stderr.fileno() if isinstance(sys.stderr, io.TextIOWrapper) else -1
    except (OSError, ValueError):
        fd = -1
    if fd < 0:
        yield
        return
    from aelastic.logs.terminal import Terminal, streams_in_turns

    with streams_in_turns(Terminal(fd, is_live=False), _stderr.put):
        yield


def _may_draw(ui: str, environ: Mapping[str, str]) -> bool:
    """Returns true on a capable terminal; with `--ui auto`, not in CI, in Jupyter, or with NO_COLOR."""
    is_plain = ui == "auto" and any(environ.get(name, "").lower() not in _UNSET[name] for name in _UNSET)
    if ui == "off" or is_plain or environ.get("TERM", "dumb") in {"", "dumb"}:
        return False
    if not all(stream is None or isinstance(stream, io.TextIOWrapper) for stream in (sys.stdout, sys.stderr)):
        return False  # replaced by the program, which may write elsewhere
    try:
        return os.tcgetpgrp(sys.stderr.fileno()) >= 0  # the terminal of our session
    except (AttributeError, OSError, ValueError):
        return False


def _observers(invocation: Invocation, live: StatusLine | None) -> list[Observer]:
    """Returns the status line, and the observers that the environment of this process enables."""
    observers: list[Observer] = [] if live is None else [live]
    if os.environ.get("NOTIFY_SOCKET"):
        from aelastic.observe.export.systemd import SdNotify

        observers.append(SdNotify(os.environ, invocation.spec.shutdown_timeout_s))
    return observers


@contextmanager
def _reaping_orphans(loop: AbstractEventLoop) -> Iterator[None]:
    """Reaps orphans where this process adopts them, or inherits them as PID 1, the first process of a container."""
    from aelastic.base.host.children import is_adopting, reap_orphans

    if not is_adopting():
        yield
        return

    # Not `loop.add_signal_handler`: uvloop keeps SIGCHLD for itself and refuses.
    before = signal.signal(signal.SIGCHLD, lambda *_: loop.call_soon_threadsafe(reap_orphans))
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def _run_on_loop(job: Coroutine[Any, Any, RunResult], name: str) -> RunResult:
    """Runs on a loop of our own, and leaves the policy and the thread's current loop alone."""
    import asyncio

    from aelastic.base.loop.factory import loop_factory

    with asyncio.Runner(loop_factory=loop_factory(name)) as runner:
        return runner.run(job)


# Report how it ended.


def _conclude(invocation: Invocation, result: RunResult, stopped_by: int | None) -> CommandExit:
    if result.is_failed() and result.failures:
        from aelastic.result import failed_error

        return _report(failed_error(invocation.name, result))
    if stopped_by is not None and result.state.name == "STOPPED" and not result.is_drained:
        how, raised = "all workers have ended", len(result.raised)
        if raised:
            how = f"{raised} of {raised + len(result.victims)} workers failed while they were stopping"
        _write(f"aelastic: stopped by {signal.Signals(stopped_by).name}; {how}{_details(result)}")
        return CommandExit.of_signal(stopped_by)
    if result.state.name == "SUCCEEDED":
        return CommandExit(0)
    if result.is_drained:
        resume = "all workers have ended; run the same command again to resume"
        _write(f"aelastic: {result.reason}; {resume}{_details(result)}")
        return CommandExit(EXIT_TRY_AGAIN)
    if result.is_stopped:
        _write(f"aelastic: {result.reason}; all workers have ended{_details(result)}")
        return CommandExit.of_signal(signal.SIGTERM)
    _write(f"aelastic: {invocation.name} {result.state.name}: {result.reason or 'unknown reason'}{_details(result)}")
    return CommandExit(EXIT_FAILURE)


def _details(result: RunResult) -> str:
    """Lines about workers that failed while stopping, and the stacks of those that had to be killed."""
    if not result.raised and not result.stacks:
        return ""
    from aelastic.diagnose.failures.report import killed, raised_meanwhile

    return "".join(f"\naelastic: {line}" for line in [*raised_meanwhile(result.raised), *killed(result.stacks)])


def _report(failed: ChildFailedError) -> CommandExit:
    """Reports the workers that failed, and writes the cause for the agent's caller (a scheduler, another agent)."""
    _write(str(failed))
    _, cause = failed.get_first_failure()
    if _has_error_file():
        get_error_handler().write_failure(cause)
    return CommandExit(exit_code_of(cause))


def _explain(error: BaseException, endpoint_note: str = "") -> CommandExit:
    match error:
        case KeyboardInterrupt():  # SIGINT, where it is not among the signals to handle
            return CommandExit.of_signal(signal.SIGINT)
        case InputError():
            return _refuse(error)
        case ChildFailedError():
            return _report(error)
        case RendezvousTimeoutError() | RendezvousConnectionError():
            _write(with_topic(f"aelastic: error: {error}{endpoint_note}", error.topic))
        case AelasticError():  # an `InternalError` brings its trace
            _write(with_topic(f"aelastic: error: {error}", error.topic))
        case ModuleNotFoundError(name=str(name)) if not name.startswith("aelastic"):
            package = name.partition(".")[0]
            text = f"{package} is not installed for {sys.executable}: pip install {package}"
            return _refuse(InputError(text, topic="a-package-is-not-installed"))
        case _ if shortage := shortage_of(error):
            _write(f"aelastic: error: the agent cannot continue: {shortage}")
            error = HostError(shortage)
        case _:
            import traceback

            trace = "".join(traceback.format_exception(error))
            _write(f"{trace}aelastic: error: {error!r} (a bug in aelastic: please report it, with the lines above)")
    if _has_error_file():
        get_error_handler().record_exception(error)
    return CommandExit(exit_code_of(error) if isinstance(error, AelasticError) else EXIT_INTERNAL)


def _has_error_file() -> bool:
    return bool(os.environ.get(ERROR_FILE_VARIABLE))


def _refuse(error: InputError, see: str = _ALL_HELP) -> CommandExit:
    """Ends with the message, and with where help on it is: its topic, or else `see`."""
    text = f"aelastic: error: {' '.join(str(error).split())}"
    _write(f"{text} (see {see})" if error.topic is None else with_topic(text, error.topic))
    return CommandExit(EXIT_INPUT)
