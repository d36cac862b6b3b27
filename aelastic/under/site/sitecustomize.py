"""Replaces torch's launcher with aelastic, in each Python that is started below `python -m aelastic.under`.

Python imports this first of all (`site`), since its folder is in PYTHONPATH, which children inherit.  A process that
*is* the launcher (`torchrun`, `python -m torch.distributed.run`, DeepSpeed's for one node) becomes aelastic's command
line, before torch is imported.  In any other process, `torch.distributed.run`, `torch.distributed.launch` and
`torch.distributed.launcher.api` have aelastic's functions once the program imports them.

Nothing else changes; if this Python has no aelastic, nothing does.  A `sitecustomize` of the user's is imported
after this one.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType
    from typing import Any

# Modules of torch, and ours that replace them.
STANDS_FOR = {
    "torch.distributed.run": "aelastic.run",
    "torch.distributed.launch": "aelastic.launch",
    "torch.distributed.launcher.api": "aelastic.launch",
}
# Programs, as `python -m NAME` or as a script of that name, and our commands that replace them.
COMMANDS = {
    "torch.distributed.run": "aelastic",
    "torchrun": "aelastic",
    "torch.distributed.launch": "aelastic.launch",
    "deepspeed.launcher.launch": "aelastic.under.deepspeed",
}
# `torch.distributed.launcher` has these from its module `api`.
_PACKAGE, _NAMES = "torch.distributed.launcher", ("LaunchConfig", "elastic_launch", "launch_agent")
# Python's own options that take a value; `-c` and `-m` end them.
_WITH_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})
# The program itself, as `PID NAME`; and the abstract unix socket at which it is notified of launchers (`unix(7)`).
_PROGRAM, _LISTENER = "AELASTIC_UNDER_PROGRAM", "AELASTIC_UNDER_SOCKET"


def replace_launcher() -> None:
    """Replaces torch's launcher with aelastic, for later imports of this process.

    A name that a module has imported before (`from torch.distributed.run import main`) stays torch's.
    """
    if not any(isinstance(finder, _Replacement) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Replacement())
    for name in STANDS_FOR:
        if name in sys.modules:
            _fill(sys.modules[name])
    if (package := sys.modules.get(_PACKAGE)) is not None:
        import aelastic.launch

        vars(package).update({name: getattr(aelastic.launch, name) for name in _NAMES})


class _Replacement:
    """Finder and loader of the modules that `STANDS_FOR` names."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:  # noqa: ARG002
        if name not in STANDS_FOR or not _is_there():
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, self)  # type: ignore[arg-type]  # a loader by what it does

    def create_module(self, spec: ModuleSpec) -> None:
        """Lets Python make the usual module."""

    def exec_module(self, module: ModuleType) -> None:
        _fill(module)

    def get_code(self, name: str) -> CodeType:
        """Returns the code that `runpy` runs for `python -m`."""
        _report_program()
        code = f"import runpy; runpy.run_module({STANDS_FOR[name]!r}, run_name='__main__', alter_sys=True)"
        return compile(code, name, "exec")


def _fill(module: ModuleType) -> None:
    """Gives a module our names; others, which few need, are those of torch's own module."""
    from importlib import import_module

    name = module.__name__
    _report_program()
    ours = import_module(STANDS_FOR[name])
    vars(module).update({key: value for key, value in vars(ours).items() if not key.startswith("__")})
    if "__getattr__" not in vars(module):
        originals: list[ModuleType] = []

        def find(key: str) -> Any:
            if key.startswith("__"):
                raise AttributeError(f"module {name!r} has no attribute {key!r}")
            if not originals:
                originals.append(_original(name))
            return getattr(originals[0], key)

        vars(module)["__getattr__"] = find
    _show_messages()


def _original(name: str) -> ModuleType:
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec(name, sys.modules[name.rpartition(".")[0]].__path__)
    if spec is None or spec.loader is None:
        raise AttributeError(f"module {name!r} is aelastic's, and torch's own is not found")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _show_messages() -> None:
    """Shows the agent's messages about failures and restarts, as the command line does, unless the program shows it."""
    import logging

    handlers = [*logging.getLogger("aelastic").handlers, *logging.getLogger().handlers]
    if any(not isinstance(handler, logging.NullHandler) for handler in handlers):
        return
    import atexit

    from aelastic.cli.process import StderrWriter, configure_logging

    writer = StderrWriter()
    configure_logging(writer, os.environ.get("LOGLEVEL", ""))
    atexit.register(writer.finish)


# At the start of a Python.


def command_in_place_of(argv: Sequence[str]) -> list[str] | None:
    """Returns the arguments for Python that run our command instead of torch's; `None` for any other program.

    Args:
        argv: Python's own arguments, as in `sys.orig_argv[1:]`.
    """
    options: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word == "-m" and rest:
            name = rest.pop(0)
            return [*options, "-m", COMMANDS[name], *rest] if name in COMMANDS and "." in name else None
        if not word.startswith("-") or word in {"-", "-c"}:
            name = os.path.basename(word)
            return [*options, "-m", COMMANDS[name], *rest] if name in COMMANDS and "." not in name else None
        options.append(word)
        if word in _WITH_VALUE and rest:
            options.append(rest.pop(0))
    return None


def _start() -> None:
    command = command_in_place_of(sys.orig_argv[1:])
    if command is not None and _is_there():
        _report_program()
        os.execv(sys.executable, [sys.executable, *command])
    replace_launcher()
    _listen_for_launchers()


def _listen_for_launchers() -> None:
    """Makes the program itself print at its end if nothing has used torch's launcher."""
    pid, _, name = os.environ.pop(_PROGRAM, "").partition(" ")
    if pid != str(os.getpid()):
        return
    import atexit
    import socket

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    os.environ[_LISTENER] = f"aelastic.under {pid} {os.urandom(8).hex()}"
    try:
        listener.bind("\0" + os.environ[_LISTENER])
    except OSError:  # a sandbox without such sockets: no message then
        del os.environ[_LISTENER]
        return

    def warn() -> None:
        if os.getpid() != int(pid):
            return  # a fork of it
        try:
            listener.recv(1)
        except OSError:
            what = f"{name} started no torch launcher on this host, so aelastic did nothing"
            page = "docs/how-to/from-torchrun.md"
            print(f"aelastic.under: {what}: no restarts, no watching; see {page}", file=sys.stderr)

    atexit.register(warn)


def _report_program() -> None:
    """Notifies the program that torch's launcher is used, unless it is this process itself."""
    os.environ.pop(_PROGRAM, None)
    name = os.environ.pop(_LISTENER, "")
    if not name:
        return
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
        try:
            sock.sendto(b"!", "\0" + name)
        except OSError:
            pass  # its queue is full, or it has ended, or is in another container


def _is_there() -> bool:
    """Whether this Python has aelastic: it may be another than that of `python -m aelastic.under`."""
    from importlib.util import find_spec

    return find_spec("aelastic") is not None


def _import_the_users() -> None:
    """Imports a `sitecustomize` that this one hides."""
    here, this = os.path.dirname(os.path.abspath(__file__)), sys.modules[__name__]
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != here]
    del sys.modules[__name__]
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name != __name__:
            raise
    finally:
        sys.modules.setdefault(__name__, this)


if __name__ == "sitecustomize":
    _start()
    _import_the_users()
