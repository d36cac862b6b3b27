"""Turns a fork of `server.py` or `keeper.py` into the requested program.

It differs from an interpreter started for the program only in its pid, its parent, and what /proc shows about its start.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import importlib
import io
import marshal
import os
import runpy
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
# A program's descriptors move above this number until all others are closed.
_ABOVE_ALL = 600


def die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def read_request(connection: socket.socket) -> dict[str, Any] | None:
    """The program to become, with its descriptors; `None` if the sender was killed before it had sent everything."""
    try:
        head, received, _, _ = socket.recv_fds(connection, 4, 253)
        body = b""
        while len(head) == 4 and len(body) < int.from_bytes(head, "big") and (more := connection.recv(1 << 20)):
            body += more
        return {**marshal.loads(body), "received": received}
    except (OSError, EOFError, ValueError):
        return None


def become(request: dict[str, Any]) -> None:
    """Replaces the requesting program, except for its pid, its parent and what /proc shows about its start."""
    if request["session"]:
        os.setsid()
    elif request["group"]:
        os.setpgid(0, 0)
    targets = request["descriptors"]
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, _ABOVE_ALL) for fd in request["received"]]
    os.closerange(0, _ABOVE_ALL)
    for fd, target in zip(moved, targets, strict=True):
        os.dup2(fd, target, inheritable=True)
        os.close(fd)
    for signum in request["ignored"]:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    os.sched_setaffinity(0, request["cpus"])
    os.umask(request["umask"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environb.update(request["env"])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def open_streams(is_unbuffered: bool) -> None:
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            raw: Any = io.FileIO(fd, "rb" if fd == 0 else "wb", closefd=False)
        except OSError:
            setattr(sys, name, None)
            continue
        if fd == 0:
            raw = io.BufferedReader(raw)
        elif not is_unbuffered:
            raw = io.BufferedWriter(raw)
        errors = "backslashreplace" if fd == 2 else "strict"
        is_line_buffered = fd == 2 or os.isatty(fd)
        stream = io.TextIOWrapper(
            raw, "utf-8", errors, line_buffering=is_line_buffered, write_through=is_unbuffered and fd > 0
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def program(argv: list[str]) -> Callable[[], Any]:
    """Prepares what an interpreter would run."""
    is_unbuffered, is_safe = bool(os.environ.get("PYTHONUNBUFFERED")), bool(os.environ.get("PYTHONSAFEPATH"))
    while argv[0] in {"-u", "-P"}:
        is_unbuffered, is_safe = is_unbuffered or argv[0] == "-u", is_safe or argv[0] == "-P"
        argv = argv[1:]
    open_streams(is_unbuffered)
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    added = [os.path.abspath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    first = os.getcwd() if argv[0] == "-m" else "" if argv[0] == "-c" else os.path.dirname(os.path.abspath(argv[0]))
    sys.path[:0] = [*([] if is_safe else [first]), *added]
    importlib.invalidate_caches()
    for name in ("sitecustomize", "usercustomize"):
        if any(os.path.exists(os.path.join(folder, f"{name}.py")) for folder in added):
            sys.modules.pop(name, None)
            importlib.import_module(name)
    if os.environ.get("PYTHONFAULTHANDLER"):
        import faulthandler

        faulthandler.enable()
    if argv[0] == "-m":
        sys.argv = [argv[1], *argv[2:]]
        return lambda: runpy._run_module_as_main(argv[1])  # type: ignore[attr-defined]
    if argv[0] == "-c":
        sys.argv = ["-c", *argv[2:]]
        code = compile(argv[1], "<string>", "exec")
        if sys.version_info >= (3, 13):
            _register_source(code, argv[1])
        return lambda: exec(code, main.__dict__)
    sys.argv = argv
    return lambda: _run_script(argv[0], main)


def _register_source(code: types.CodeType, source: str) -> None:
    """Makes tracebacks show lines of the code, as the interpreter has done since 3.13."""
    import linecache

    key = code if hasattr(linecache, "_interactive_cache") else code.co_filename
    linecache._register_code(key, source, code.co_filename)  # type: ignore[attr-defined]


def _run_script(path: str, main: types.ModuleType) -> None:
    from importlib.machinery import SourceFileLoader

    main.__file__, main.__loader__ = path, SourceFileLoader("__main__", path)
    main.__dict__["__cached__"] = None
    with open(path, "rb") as file:
        source = file.read()
    exec(compile(source, path, "exec"), main.__dict__)


def without_us(error: BaseException) -> BaseException:
    """The error with the traceback that it would have without this file and `runpy`."""
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename in {__file__, runpy.__file__, "<frozen runpy>"}:
        tb = tb.tb_next
    return error.with_traceback(tb)


def exit_code(run: Callable[[], Any]) -> int:
    """Runs it; returns the exit code that the interpreter would have."""
    try:
        run()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        sys.stderr.write(f"{error.code}\n")
        return 1
    except BaseException as error:  # noqa: BLE001  as the interpreter does
        without_us(error)
        # As the interpreter does.  Otherwise a process group of gloo may be freed here with the frames: it joins its threads
        # while holding the GIL, and one of them waits for the GIL to drop a tensor (torch 2.13).
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def run_and_exit(argv: list[str]) -> NoReturn:
    """Runs an interpreter's command line in this fork, and exits as the interpreter would."""
    code = exit_code(program(argv))
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            pass  # closed
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)  # tearing down all those modules would take 0.2 s
