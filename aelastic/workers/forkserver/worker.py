"""Turns a forked process into a worker: it waits at a gate, receives its task, and runs the user's program.

This sets up everything that a cold start would: session, streams, environment, command line, `sys`, `__main__`.
`docs/how-to/preload.md` lists the remaining differences, and a test compares both item by item.

Part of the fork server's program: imports nothing of the package.
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from types import CodeType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from aelastic.workers.forkserver import checks, clone
else:
    from _forkserver import checks, clone

_FDS_MAX = 64
_LENGTH_MAX = 4096
# The interpreter, the loader and the libraries read these without Python's `os.environ`.
_READ_EARLY = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_")


class Template:
    """The facts of the fork server that each process forked from it needs.

    Args:
        handlers: the signal handlers, before the fork server ignored signals.
        baseline: names of the modules that any interpreter has loaded before it runs a program.
        env: the environment it was started with.
    """

    def __init__(self, handlers: Mapping[Any, Any], baseline: frozenset[str], env: dict[str, str]) -> None:
        self.handlers, self.baseline, self._env = handlers, baseline, env
        self._read: set[str] = set()
        self._changes: dict[str, str | None] = {}

    def imported(self, read: set[str], env: dict[str, str]) -> None:
        """All imports are done.

        Args:
            read: names of the variables that were read meanwhile.
            env: the environment after that.
        """
        self._read = read
        names = self._env.keys() | env.keys()
        self._changes = {name: env.get(name) for name in names if self._env.get(name) != env.get(name)}

    def env_of(self, asked: dict[str, str]) -> dict[str, str]:
        """Returns a worker's environment: the requested one, with the changes that imports would have made to it.

        Raises:
            Refused: an import has seen another value than this worker has.
        """
        for name in sorted(self._env.keys() | asked.keys()):
            if self._env.get(name) != asked.get(name) and (name in self._read or name.startswith(_READ_EARLY)):
                raise Refused(f"{name} was read during the imports, and differs for this worker")
        changes = {name: value for name, value in self._changes.items() if self._env.get(name) == asked.get(name)}
        return {name: value for name, value in {**asked, **changes}.items() if value is not None}


class Refused(Exception):
    """This process cannot be the requested worker; the message gives the reason."""


def wait_and_run(gate: socket.socket, template: Template) -> None:
    """Waits for its task, then runs it.  Ends without an agent."""
    request, _ = _received(gate)
    try:
        _prepare(request, template)
    except Exception as error:  # noqa: BLE001  whatever it is, the agent starts another process
        gate.send(json.dumps({"refused": str(error) if isinstance(error, Refused) else repr(error)}).encode())
        os._exit(0)
    gate.send(b'{"ready": true}')
    word, fds = _received(gate)  # from here on no other process is started for it, whatever happens to this one
    gate.close()  # its number may be needed for a descriptor of the worker
    request |= word
    for pipe in _become(request, fds):
        report_imports(pipe)
    for name in [name for name in sys.modules if name.partition(".")[0] == "_forkserver"]:
        del sys.modules[name]
    _run(request)


def _received(gate: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Returns the next request, and the descriptors that came with it."""
    message, fds, *_ = socket.recv_fds(gate, _LENGTH_MAX, _FDS_MAX)
    if not message:
        os._exit(0)
    return read_json(fds[0]), fds[1:]


def read_json(fd: int) -> dict[str, Any]:
    """Reads and closes a file that the agent has written and sent."""
    with open(fd, "rb") as file:
        file.seek(0)
        found: dict[str, Any] = json.load(file)
    return found


def _prepare(request: dict[str, Any], template: Template) -> None:
    """Does everything that can fail, or be refused."""
    os.umask(request["umask"])
    if request["cwd"]:
        os.chdir(request["cwd"])
    env = template.env_of(request["env"])
    checks.unwatch_environ()
    os.environ.clear()
    os.environ.update(env)
    if not sys.flags.safe_path and not request["is_helper"]:
        folder = _first_on_path(request)
        _check_shadows(folder, template.baseline)
        sys.path.insert(0, folder)
    sys.path_importer_cache.clear()
    if not request["is_helper"]:  # a helper ignores signals to the whole process tree
        _restore_handlers(template)


def _restore_handlers(template: Template) -> None:
    """Restores the signal handlers: the template ignores signals, and a worker may get one once it is launched."""
    for number, handler in template.handlers.items():
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)


def _become(request: dict[str, Any], fds: list[int]) -> list[int]:
    """Becomes a worker, or a helper; returns the descriptor for the names of imported modules, if there is one."""
    os.setsid()
    others = _put_in_place(fds, request["fds"])
    clone.rename(request["command"], request["env"])
    _set_up_interpreter(request)
    return others


def _put_in_place(fds: list[int], numbers: list[int]) -> list[int]:
    """Moves descriptors to the worker's numbers; returns the others, which an exec does not pass on."""
    import fcntl

    above = max(numbers) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(moved, numbers, strict=False):
        os.dup2(fd, number)
        os.close(fd)
    return moved[len(numbers) :]


def _set_up_interpreter(request: dict[str, Any]) -> None:
    sys.argv = list(request["argv"])
    sys.orig_argv = list(request["command"])
    if not sys.stdout.write_through:  # type: ignore[union-attr]
        sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    # Python's own generator reseeds itself; those of torch's devices are seeded when they are first used.
    if numbers := sys.modules.get("numpy.random"):
        numbers.seed()
    if numbers := getattr(sys.modules.get("torch"), "default_generator", None):
        numbers.seed()
    if threads := sys.modules.get("threading"):
        threads.main_thread()._set_native_id()  # noqa: SLF001  a fork changes it, and Python does not update it
    if processes := sys.modules.get("multiprocessing.process"):
        processes.current_process().authkey = os.urandom(32)


def _first_on_path(request: dict[str, Any]) -> str:
    """Returns what `python` puts first in `sys.path` (its documentation, "sys.path")."""
    kind, target = str(request["kind"]), str(request["target"])
    if kind == "script":
        return os.path.abspath(target) if _is_bundle(target) else os.path.dirname(os.path.realpath(target))
    return os.getcwd() if kind == "module" else ""


def _is_bundle(path: str) -> bool:
    """Whether a script is a folder or an archive with a `__main__` in it."""
    if os.path.isdir(path):
        return True
    import zipfile

    return not path.endswith((".py", ".pyw")) and zipfile.is_zipfile(path)


def _check_shadows(folder: str, baseline: frozenset[str]) -> None:
    """Rejects a user's module with the name of a preloaded one, because it would have been imported instead.

    A folder without an `__init__.py`, such as a data folder, would not.

    Raises:
        Refused: there is such a module.
    """
    from importlib.machinery import PathFinder

    try:
        names = {name.partition(".")[0] for name in os.listdir(folder or ".")}
    except OSError:
        return
    for name in sorted(names & sys.modules.keys() - baseline):
        found = PathFinder.find_spec(name, [folder])
        if found is not None and found.origin is not None:
            raise Refused(f"{found.origin} shadows the preloaded module {name}")


def report_imports(pipe: int) -> None:
    """Writes the names of imported modules, packages before their modules, until the process group is initialized.

    They are written at the next `import` statement: `importlib.import_module` raises no audit event.
    """
    reported, place = 0, os.fstat(pipe)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:  # noqa: ARG001
        nonlocal reported
        if reported < 0:
            return
        try:
            if not os.path.samestat(os.fstat(pipe), place):  # the program has closed inherited descriptors
                reported = -1
                return
            torch = sys.modules.get("torch.distributed.distributed_c10d")
            is_over = torch is not None and getattr(torch, "is_initialized", bool)()
            if event == "import" or is_over:
                names = [*sys.modules]
                for name in names[reported:]:
                    os.write(pipe, f"{name}\n".encode())
                reported = len(names)
            if is_over:
                os.write(pipe, b".\n")
                os.close(pipe)
                reported = -1
        except (OSError, AttributeError):  # the agent no longer reads, or the module is half imported
            reported = -1

    sys.addaudithook(hook)


def _run(request: dict[str, Any]) -> NoReturn:
    """Runs the program as `__main__`, and ends as an interpreter would."""
    main = ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=sys.modules["builtins"])
    sys.modules["__main__"] = main
    failure: BaseException | None = None
    try:
        _execute(request["kind"], request["target"], main)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  as the interpreter does
        failure = error
    if failure is None:
        raise SystemExit(0)
    _report(failure)  # outside the handler: an exception in a hook has no context
    if isinstance(failure, KeyboardInterrupt):
        _die_of_sigint()
    raise SystemExit(1)


def _execute(kind: str, target: str, main: ModuleType) -> None:
    if kind == "module" or (kind == "script" and _is_bundle(target)):
        import runpy

        runpy._run_module_as_main(target if kind == "module" else "__main__", kind == "module")  # type: ignore[attr-defined]  # noqa: SLF001  what `python -m` runs
        return
    if kind == "code":
        from importlib.machinery import BuiltinImporter

        main.__loader__ = BuiltinImporter
        code = compile(target, "<string>", "exec", dont_inherit=True)
        if sys.version_info >= (3, 13):
            _register_source(code, target)
        exec(code, main.__dict__)  # noqa: S102
        return
    from importlib.machinery import SourceFileLoader

    path = os.path.abspath(target)
    main.__file__, main.__loader__ = path, SourceFileLoader("__main__", path)
    main.__dict__["__cached__"] = None
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:  # with the interpreter's message
        sys.stderr.write(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n")
        raise SystemExit(2) from None
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)  # noqa: S102


def _register_source(code: CodeType, source: str) -> None:
    """Makes tracebacks show lines of the code after `-c`, as the interpreter does since 3.13."""
    import linecache

    # The first releases of 3.13 register it by its file name.
    key = code if hasattr(linecache, "_interactive_cache") else code.co_filename
    linecache._register_code(key, source, code.co_filename)  # type: ignore[attr-defined]  # noqa: SLF001


def _report(error: BaseException) -> None:
    """Prints an exception without the frames of this file."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, _without_ours(error.__traceback__)
    failure = _of_hook(error.with_traceback(sys.last_traceback))
    if failure is not None:
        sys.stderr.write("Error in sys.excepthook:\n")
        failure = failure.with_traceback(_without_ours(failure.__traceback__))
        sys.__excepthook__(type(failure), failure, failure.__traceback__)
        sys.stderr.write("\nOriginal exception was:\n")
        sys.__excepthook__(type(error), error, error.__traceback__)


def _of_hook(error: BaseException) -> BaseException | None:
    """Calls the user's hook; returns the exception that it raises, if any."""
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception as failure:  # noqa: BLE001  anything
        return failure
    return None


def _without_ours(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


def _die_of_sigint() -> NoReturn:
    """Ends like an interpreter after a KeyboardInterrupt: cleans up, then dies of the signal."""
    import atexit
    import threading

    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
    atexit._run_exitfuncs()  # noqa: SLF001
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    raise SystemExit(1)
