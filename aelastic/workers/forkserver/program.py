"""The fork server: a process that has imported the modules that workers need, and forks workers on request.

A separate program, started with the interpreter, the options and the common environment of the workers, and run by
path: `python OPTIONS program.py CONTROL SETTINGS`.  It has one thread, uses one socket, and ends when that is closed.

    to the agent    {"importing": NAME}, {"printed": NAME}, {"left_out": NAME, "why": TEXT}, {"refused": TEXT},
                    {"again": true} (modules have spoilt it, it cannot be used), {"generators": NAMES, "count": N},
                    {"ready": true}
    to it           any message with one descriptor: a gate, at which another process will wait (`worker`)
    at the gate     {"parked": PID}, the pid of that process
"""

import sys

BASELINE = frozenset(sys.modules)  # before anything else is imported

import gc  # noqa: E402
import importlib.util  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
from types import ModuleType  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

_package = ModuleType("_forkserver")  # the files beside this one, without the package around them
_package.__path__ = [os.path.dirname(os.path.abspath(__file__))]
sys.modules["_forkserver"] = _package

if TYPE_CHECKING:
    from aelastic.workers.forkserver import checks, clone, priority, worker
else:
    from _forkserver import checks, clone, priority, worker

ERROR_CHARS_MAX = 300
GENERATORS_MAX = 3


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    settings = worker.read_json(int(sys.argv[2]))
    if not sys.flags.safe_path:
        del sys.path[0]  # the folder of this file
    sys.argv = [""]
    template = _template(settings)
    read = checks.watch_environ()
    usual = os.sched_getscheduler(0)
    if settings["is_beside_workers"]:
        priority.lower()
    if not _import_all(control, settings, read):
        _send(control, again=True)
        return
    priority.restore(os.getpid(), usual)
    template.imported(read, dict(os.environ))
    gc.collect()
    gc.freeze()
    if names := _generators(set() if settings["is_learned"] else set(settings["modules"])):
        _send(control, generators=names[:GENERATORS_MAX], count=len(names))
    _send(control, ready=True)
    while True:
        message, fds, *_ = socket.recv_fds(control, 64, 1)
        if not message:
            return
        gate = socket.socket(fileno=fds[0])
        if (pid := _clone(control)) == 0:
            control.close()
            worker.wait_and_run(gate, template)
        if pid > 0:
            _announce(gate, pid)
        gate.close()


def _template(settings: dict[str, Any]) -> worker.Template:
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        if handlers[number] is not None:  # `faulthandler` may have handlers of its own
            signal.signal(number, signal.SIG_IGN)  # it ends with the agent, not by a signal to the whole process tree
    signal.pthread_sigmask(signal.SIG_SETMASK, settings["mask"])
    return worker.Template(handlers, BASELINE, dict(os.environ))


def _import_all(control: socket.socket, settings: dict[str, Any], read: set[str]) -> bool:
    """Imports what it can; returns whether workers may be forked from here.

    Args:
        read: the variables that have been read so far.
    """
    is_clean = True
    differing = frozenset(settings["differing"])  # from worker to worker
    for name in settings["modules"]:
        if settings["is_learned"] and (name in sys.modules or not _is_installed(name)):
            continue
        _send(control, importing=name)
        before, loaded = checks.ProcessState(), len(sys.modules)
        printed = _printed_bytes()
        error = _import(name)
        why = _words(error) if error is not None else "; ".join(checks.ProcessState().reasons_against(before))
        if _printed_bytes() > printed:
            _send(control, printed=name)
        if not why and (own := sorted(read & differing)):
            why = f"reads {own[0]}, which differs from worker to worker"
        read -= differing
        if settings["is_learned"] and isinstance(error, ImportError):
            continue  # a worker tried to import it, and continued without it
        if not why:
            continue
        _send(control, left_out=name, why=why[:ERROR_CHARS_MAX])
        is_clean = is_clean and len(sys.modules) == loaded
    return is_clean


def _generators(named: set[str]) -> list[str]:
    """Returns generators of the user's own modules and of named packages; other libraries must care for their own."""
    own = {name.partition(".")[0] for name in named}
    found = checks.kept_generators()
    return [f"{place}.{name}" for place, name in found if place.partition(".")[0] in own or not _is_installed(place)]


def _is_installed(name: str) -> bool:
    """Whether a module belongs to Python or to an installed package, and is not the user's own.

    Packages come before their modules: looking for a module would import a package that was left out.
    """
    if (package := name.rpartition(".")[0]) and package not in sys.modules:
        return False
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError, ValueError):
        return False
    if spec is None or spec.origin in {None, "built-in", "frozen"}:
        return spec is not None
    import sysconfig

    # Those of this environment, of the one below it, of the distribution, and of the user.
    packages = [folder for folder in sys.path if os.path.basename(folder) in {"site-packages", "dist-packages"}]
    library = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    folders = [os.path.realpath(folder) for folder in (*library, *packages)]
    return os.path.realpath(str(spec.origin)).startswith(tuple(folder + os.sep for folder in folders))


def _printed_bytes() -> int:
    """Returns how much modules have printed; both streams are one file."""
    for stream in (sys.__stdout__, sys.__stderr__):  # a module may have replaced `sys.stdout` and `sys.stderr`
        assert stream is not None
        stream.flush()
    return os.fstat(1).st_size


def _import(name: str) -> BaseException | None:
    """Imports a module; returns the exception that it raised."""
    try:
        importlib.import_module(name)
    except BaseException as error:  # noqa: BLE001  a module may raise anything
        return error
    return None


def _words(error: BaseException) -> str:
    """Describes why an import failed, in one line."""
    match error:
        case ModuleNotFoundError():
            why = f"is not installed: {error}"
        case ImportError():
            why = f"cannot be imported: {error}"
        case SystemExit():
            why = f"calls sys.exit({error.code!r})"
        case _:
            why = f"fails: {type(error).__name__}" + (f": {error}" if str(error) else "")
    return " ".join(why.split())


def _clone(control: socket.socket) -> int:
    """Forks; returns 0 in the new process.  If that fails, the agent is notified, and the gate closes."""
    try:
        return clone.sibling()
    except (clone.CannotClone, OSError) as error:
        _send(control, refused=str(error))
        return -1


def _announce(gate: socket.socket, pid: int) -> None:
    """Tells the agent which process waits at the gate: it may be stopped, or killed, before it can do so itself."""
    try:
        gate.send(json.dumps({"parked": pid}).encode())
    except BrokenPipeError:
        pass  # it is no longer wanted


def _send(control: socket.socket, **words: Any) -> None:
    try:
        control.send(json.dumps(words).encode())
    except BrokenPipeError:
        os._exit(0)  # the agent is gone


if __name__ == "__main__":
    main()
