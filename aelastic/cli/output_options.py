"""Log options and variables as fields of a `WorkerSpec`.

A class of a package (`--logs-specs`) is loaded and called here, as torchrun does; if it imports torch, the agent does.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from aelastic.cli.parser import Settings
from aelastic.errors import InputError
from aelastic.settings import Std, Streams

# The entry point group in which packages list `LogsSpecs` classes, for torchrun and for us.
_LOGS_SPECS = "torchrun.logs_specs"
# torch lists its own class under this name, ours takes its place.
_DEFAULT = "default"


def output_fields(chosen: Settings) -> dict[str, Any]:
    """Folder, prefix and the package's class; the other log options are fields as they are.

    Raises:
        InputError: the folder cannot be written, or the class of `--logs-specs` is missing or raises.
    """
    if chosen["log_dir"] not in {"", None, os.devnull}:  # /dev/null keeps nothing
        _check_can_write(Path(chosen["log_dir"]), chosen.source("log_dir"))
    return {
        "log_dir": Path(chosen["log_dir"]) if chosen["log_dir"] else None,
        "log_line_prefix_template": chosen["log_line_prefix_template"] or None,
        "logs_specs": logs_specs_of(chosen),
    }


def _check_can_write(folder: Path, source: str) -> None:
    """Makes and removes a folder in the nearest one there is: permission bits alone do not tell (root, read-only)."""
    try:
        nearest = folder.absolute()
        while not os.path.lexists(nearest):
            nearest = nearest.parent
        probe = nearest / f".aelastic-probe-{os.urandom(8).hex()}"
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise InputError(f"{source}: cannot write there ({error.strerror}): choose another folder") from None


def ui_of(chosen: Settings) -> Any:
    """What a terminal shows while the job runs.

    Raises:
        InputError: what that needs is not installed.
    """
    if chosen["ui"] == "view":
        from importlib.util import find_spec

        if find_spec("rich") is None:
            raise InputError(f"{chosen.source('ui')}: rich is not installed: pip install aelastic[ui], or use line")
    return chosen["ui"]


def logs_specs_of(chosen: Settings) -> Any:
    """An object of the class that a package lists under the name given; `None` for our own.

    Raises:
        InputError: the class is missing, or raises.
    """
    name = chosen["logs_specs"]
    if name in {None, _DEFAULT}:
        return None
    from importlib.metadata import entry_points

    source = chosen.source("logs_specs")
    listed = entry_points(group=_LOGS_SPECS)
    if name not in listed.names:
        known = ", ".join(sorted({_DEFAULT, *listed.names}))
        raise InputError(
            f"{source}: no installed package has it (entry point group {_LOGS_SPECS}): use one of {known}, "
            "or install the package"
        )
    try:
        logs_specs_class = listed[name].load()
        return logs_specs_class(
            log_dir=chosen["log_dir"],
            redirects=_as_torchs(chosen["redirects"]),
            tee=_as_torchs(chosen["tee"]),
            local_ranks_filter=None if chosen["local_ranks_filter"] is None else set(chosen["local_ranks_filter"]),
        )
    except Exception as error:  # the package's own code: whatever it raises is said in one line
        raise InputError(f"{source}: {type(error).__name__}: {error}") from error


def _as_torchs(streams: Streams) -> Any:
    """The choice in torch's own words, which a class derived from torch's compares by type."""
    torchs = getattr(sys.modules.get("torch.distributed.elastic.multiprocessing"), "Std", Std)
    if isinstance(streams, Std):
        return torchs(int(streams))
    return {local_rank: torchs(int(choice)) for local_rank, choice in streams.items()}
