"""An asyncio-native elastic agent for distributed PyTorch: a drop-in for `torchrun`.

    python -m aelastic train.py                     # the command line
    result = await Supervisor(spec).run()           # the library, inside your own event loop

Names are imported on first use: a worker that uses `record` does not pay for the agent.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # no stub
import sys

# Before anything else is imported by one of our own commands: the console script, or `python -m`.
_COMMANDS = {
    f"aelastic{name}" for name in ("", ".__main__", ".run", ".launch", ".timeline", ".under", ".under.deepspeed")
}
working_folder = ""  # the folder that was removed: function workers get it back, as in torchrun
_command = sys.argv[0].rpartition("/")[2] if sys.argv else ""
if _command == "-m":  # Python is still looking for the module to run
    _command = sys.orig_argv[-len(sys.argv)]
    _command = _command.partition("m")[2] if _command.startswith("-") else _command
    if _command in _COMMANDS and not sys.flags.safe_path:
        # `python -m` puts the working folder before the standard library, so we would import a queue.py or json.py in
        # it.  The console script does not.
        working_folder = sys.path.pop(0)
        if __path__[0] == f"{working_folder}/aelastic":
            sys.path.append(working_folder)  # this package is in it
if _command in _COMMANDS and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    # A Ctrl-C while the rest is imported ends this process as it ends any other, without a traceback.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

TYPE_CHECKING = False  # without `typing`, which a training script that uses notices does not need
if TYPE_CHECKING:
    from typing import Any

    from aelastic.agent.group.worker_group import WorkerGroup
    from aelastic.compat.launcher.elastic_launch import elastic_launch, launch_agent
    from aelastic.compat.launcher.errors import SignalException
    from aelastic.compat.launcher.launch_config import LaunchConfig
    from aelastic.diagnose.hangs.options import ExpectedOutput
    from aelastic.errors import (
        AelasticError,
        ChildFailedError,
        ErrorHandler,
        HostError,
        InputError,
        InternalError,
        ProcessFailure,
        RendezvousClosedError,
        RendezvousConnectionError,
        RendezvousError,
        RendezvousStateError,
        RendezvousTimeoutError,
        RequestError,
        UnkillableWorkerError,
        get_error_handler,
        record,
    )
    from aelastic.health_check_server import HealthCheckServer
    from aelastic.observe.observer import Observer
    from aelastic.rdzv.settings import RendezvousSettings
    from aelastic.result import RunResult
    from aelastic.settings import Std
    from aelastic.spec import WorkerSpec
    from aelastic.supervisor import Supervisor
    from aelastic.training.decorator import in_place
    from aelastic.workers.backend import WorkerBackend, WorkerExit, WorkerStart
    from aelastic.workers.states import Worker, WorkerState

__all__ = [
    "AelasticError", "ChildFailedError", "ErrorHandler", "ExpectedOutput", "HealthCheckServer", "HostError",
    "InputError",
    "InternalError", "LaunchConfig", "Observer", "ProcessFailure", "RendezvousClosedError",
    "RendezvousConnectionError", "RendezvousError", "RendezvousSettings", "RendezvousStateError",
    "RendezvousTimeoutError", "RequestError", "RunResult", "SignalException", "Std", "Supervisor",
    "UnkillableWorkerError", "Worker", "WorkerBackend", "WorkerExit", "WorkerGroup", "WorkerSpec", "WorkerStart",
    "WorkerState", "elastic_launch", "get_error_handler", "in_place", "launch_agent", "record",
]  # fmt: skip

_HOMES = {
    "errors": (
        "AelasticError", "ChildFailedError", "ErrorHandler", "HostError", "InputError", "InternalError",
        "ProcessFailure", "RendezvousClosedError", "RendezvousConnectionError", "RendezvousError",
        "RendezvousStateError", "RendezvousTimeoutError", "RequestError", "UnkillableWorkerError",
        "get_error_handler", "record",
    ),
    "agent.group.worker_group": ("WorkerGroup",),
    "workers.states": ("Worker", "WorkerState"),
    "health_check_server": ("HealthCheckServer",),
    "compat.launcher.launch_config": ("LaunchConfig",),
    "compat.launcher.elastic_launch": ("elastic_launch", "launch_agent"),
    "compat.launcher.errors": ("SignalException",),
    "rdzv.settings": ("RendezvousSettings",),
    "settings": ("Std",),
    "diagnose.hangs.options": ("ExpectedOutput",),
    "spec": ("WorkerSpec",),
    "result": ("RunResult",),
    "supervisor": ("Supervisor",),
    "observe.observer": ("Observer",),
    "training.decorator": ("in_place",),
    "workers.backend": ("WorkerBackend", "WorkerExit", "WorkerStart"),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version_of("aelastic")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def version_of(package: str) -> str:
    """Returns the version of an installed package, without importing it; empty if it is not installed."""
    from importlib import metadata  # 10 ms, only for callers

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def __dir__() -> list[str]:
    return sorted(__all__)
