"""From the command line and the environment to an `Invocation`: what to run, and how.

An `Invocation` can be started: the script, program, module and log folder have been found, and devices counted.  The
checks leave nothing behind.  They start at most one process: for `auto`, `gpu` and `xpu`, a short-lived Python that
imports torch, which the agent itself never does.  The environment is read, and not changed.  Modules that few command
lines need are imported where they are used, to keep the start fast.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from aelastic.base.record import Record
from aelastic.cli.options import GROUPS, OnSignal
from aelastic.cli.parser import COMMANDS, Groups, Settings, read_options
from aelastic.cli.spec_fields import (
    check_effects,
    did_you_mean,
    hang_fields,
    output_fields,
    rendezvous_fields,
    ui_of,
)
from aelastic.diagnose.failures.failure import printable
from aelastic.errors import InputError
from aelastic.spec import WorkerSpec

_log = logging.getLogger(__name__)

# `import torch` takes seconds, and a minute from a cold network file system.
_COUNT_TIMEOUT_S = 300.0

_COUNT_DEVICES = """\
import sys, torch
kind = sys.argv[1]
if kind == "auto" and not hasattr(torch, "accelerator"):  # before torch 2.6
    kind = "gpu"
devices = {"auto": "accelerator", "gpu": "cuda", "xpu": "xpu"}[kind]
devices = getattr(torch, devices)
print(devices.device_count() if devices.is_available() else 0)
"""


class Invocation(Record):
    """One call of the command line, complete and checked.

    Args:
        name: the script, module or program, as the user wrote it.
        spec: the workers.
        loop: the event loop to run on.
        exit_codes: `cause` is the code of the worker that failed first, `torchrun` is 1 for every failure.
        signals: the signals that stop the job.
        ui: what a terminal shows while the job runs.
        on_signal: what to do on other signals.
    """

    name: str
    spec: WorkerSpec
    loop: Literal["uvloop", "asyncio"]
    exit_codes: Literal["cause", "torchrun"]
    signals: tuple[signal.Signals, ...]
    ui: Literal["auto", "line", "view", "off"] = "auto"
    on_signal: tuple[OnSignal, ...] = ()

    @property
    def endpoint_note(self) -> str:
        """A note for the end of a message: the variable that holds the rendezvous endpoint; empty if none does."""
        note = "" if self.spec.rdzv is None else self.spec.rdzv.endpoint_note
        return note and f"; {note}"


def parse(argv: Sequence[str], environ: Mapping[str, str], groups: Groups = GROUPS) -> Invocation:
    """Reads and checks the command line.

    Args:
        groups: the options there are.

    Raises:
        InputError: the job cannot be started with these options; the message has the reason and the remedy.
        SystemExit: after `--help` and `--version`.
    """
    chosen = read_options(argv, environ, groups)
    entrypoint, args = command_of(chosen, environ)
    is_script = not chosen["module"] and not chosen["no_python"]
    if is_script and argv and argv[0] == chosen.script:
        check_word(chosen.script)
    check_command(chosen, environ)
    grace, limit_s = chosen["restart_grace"], chosen["shutdown_timeout"]
    if isinstance(grace, float) and grace > limit_s:
        raise InputError(f"{chosen.source('restart_grace')}: use at most --shutdown-timeout, which is {limit_s:g}")
    of_hangs = hang_fields(chosen)  # before workers are counted, which may take a while
    local_world_size = count_workers(chosen["nproc_per_node"], environ, chosen.source("nproc_per_node"))
    # Workers inherit the agent's environment, with the variables that torchrun adds to it.
    inherited = {**environ, "TORCHELASTIC_SIGNALS_TO_HANDLE": chosen.by_dest["signals_to_handle"].text or ""}
    if local_world_size > 1 and "OMP_NUM_THREADS" not in environ:
        inherited["OMP_NUM_THREADS"] = "1"
        _log.info("OMP_NUM_THREADS=1 for each of %d workers; set it to choose another number", local_world_size)
    fields = {
        **chosen.fields_of(WorkerSpec),
        "preload_from": chosen.by_dest["preload"].variable or "--preload",
        **of_hangs,
        "local_world_size": local_world_size,
        "env": inherited,
        **output_fields(chosen),
        **rendezvous_fields(chosen, environ),
    }
    spec = WorkerSpec(entrypoint=entrypoint, args=args, **fields)
    check_effects(chosen, local_world_size)  # last: a refusal is one line, without a warning above it
    return Invocation(
        name=chosen.script,
        spec=spec,
        loop=chosen["loop"],
        exit_codes=chosen["exit_codes"],
        signals=chosen["signals_to_handle"],
        ui=ui_of(chosen),
        on_signal=chosen["on_signal"],
    )


# What to run.


def command_of(chosen: Settings, environ: Mapping[str, str]) -> tuple[str | Callable[..., Any], tuple[str, ...]]:
    """Returns entrypoint and arguments, as in torchrun; `--run-path` takes precedence over `-m` and `--no-python`.

    Raises:
        InputError: options that exclude each other.
    """
    script, args = chosen.script, chosen.script_args
    if script.startswith("-") and not chosen["module"] and Path(script).is_file():
        script = f"./{script}"  # otherwise python reads it as an option
    if "use_env" in chosen.by_dest and not chosen["use_env"]:
        if chosen["no_python"]:
            raise InputError("--no-python without --use-env: a program reads LOCAL_RANK, add --use-env")
        args = ("--local-rank=${local_rank}", *args)
    if chosen["run_path"]:
        from aelastic.workers.functions import run_script_path

        return run_script_path, (script, *args)
    if chosen["no_python"]:
        if chosen["module"]:
            raise InputError("--no-python and --module exclude each other: a module needs python")
        return script, args
    return _python(environ), ("-u", *(["-m"] if chosen["module"] else []), script, *args)


def _python(environ: Mapping[str, str]) -> str:
    return environ.get("PYTHON_EXEC", sys.executable)


def check_word(word: str) -> None:
    """Checks the first word of the command line, if that is the script: it may be a misspelled command.

    Raises:
        InputError: there is no such script, and a command has a similar name.
    """
    if "." in word or os.sep in word or _exists(word):
        return
    known = [f"{word}.py"] if _exists(f"{word}.py") else COMMANDS
    if meant := did_you_mean(word, known):
        raise InputError(f"there is no script or command {word}{meant}")


def check_command(chosen: Settings, environ: Mapping[str, str]) -> None:
    """Checks that the script, the program or the module exists.

    Raises:
        InputError: it does not.
    """
    from aelastic.workers.requirements import check_module, check_script

    script, python = chosen.script, _python(environ)
    if chosen["run_path"]:
        check_script(script)
        return
    if chosen["no_python"]:
        _check_program(script, environ, f"program {script}")
        return
    if python != sys.executable:
        _check_program(python, environ, f"PYTHON_EXEC={python}")
    if not chosen["module"]:
        if not script.startswith("-"):  # `-` and, after `--`, `-c` are for python itself
            check_script(script)
            _check_is_python(script)
    elif python == sys.executable:  # another Python may see other modules
        if script.startswith(".") or os.sep in script:
            raise InputError(f"{script} is not a module name: use package.module, or leave out -m for a path")
        check_module(script, environ)


def _check_is_python(script: str) -> None:
    """Refuses a compiled program and a shell script, for which Python would report a syntax error."""
    if not os.path.isfile(script):
        return  # a folder, or a pipe that can be read once
    with open(script, "rb") as file:
        begin = file.read(4)
        source = begin + file.read() if begin.startswith(b"#!") else b""
    first = printable(source.partition(b"\n")[0].decode(errors="replace"))
    if begin == b"\x7fELF":
        first = "ELF"
    elif not source or "python" in first or _compiles(source):
        return
    program = script if os.sep in script else f"./{script}"
    raise InputError(
        f"script {script} is not a Python file (it begins with {first}): run it with --no-python {program}"
    )


def _compiles(source: bytes) -> bool:
    try:
        compile(source, "script", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def _check_program(program: str, environ: Mapping[str, str], source: str) -> None:
    import shutil

    if shutil.which(program, path=environ.get("PATH", os.defpath)) is not None:
        return
    if os.sep not in program:
        raise InputError(f"{source} not found on PATH: install it, or give its path")
    if not _exists(program):
        raise InputError(f"{source} not found: check the path")
    raise InputError(f"{source} is not an executable file: use chmod +x, or leave out --no-python for a Python script")


def _exists(path: str) -> bool:
    return os.path.exists(path)  # `Path.exists` raises for a path in a closed folder


# How many.


def count_workers(workers: int | str, environ: Mapping[str, str], source: str) -> int:
    """Returns the number of workers: as given, or counted for a word such as `gpu`.

    Args:
        source: its name in messages.

    Raises:
        InputError: there is no such device, or it cannot be counted.
    """
    if isinstance(workers, int):
        return workers
    count = 0 if workers == "cpu" else _count_devices(workers, environ, source)
    if not count and workers in {"gpu", "xpu"}:
        raise InputError(f"{source}: torch sees no such device here: check the driver, or use cpu, auto or a number")
    count = count or len(os.sched_getaffinity(0))
    _log.info("%s: %d workers", source, count)
    return count


def _count_devices(kind: str, environ: Mapping[str, str], source: str) -> int:
    """Counts devices with torch in another process: importing it takes a second and 200 MiB."""
    import subprocess

    # -P: not a torch.py or random.py next to the script.
    command = [sys.executable, "-P", "-c", _COUNT_DEVICES, kind]
    try:
        asked = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=_COUNT_TIMEOUT_S, check=False
        )
        return int(asked.stdout.split()[-1])
    except subprocess.TimeoutExpired:
        raise InputError(f"{source}: torch did not answer in {_COUNT_TIMEOUT_S:g} s: give a number") from None
    except (IndexError, ValueError):
        reason = asked.stderr.split("\n") if asked.stderr else [f"exit code {asked.returncode}"]
        last = next((line for line in reversed(reason) if line.strip()), "no reason given")
        raise InputError(f"{source}: torch cannot count devices ({last.strip()}): give a number") from None
