"""torchrun's parser and namespace, and a launch from them (torch: `torch.distributed.run`).

Parser and namespace are torchrun's, attribute by attribute; `run` takes such a namespace, ours or torch's, with the
caller's changes, and does not modify it.  Options and their readers are those of our own command line.
"""

from __future__ import annotations

import logging
import os
import sys
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import fields
from typing import Any

from aelastic.base.setting import Option
from aelastic.base.texts import read_flag
from aelastic.cli.arguments import check_command, command_of, count_workers
from aelastic.cli.options import LAUNCH_GROUPS, OPTIONS, OWN
from aelastic.cli.parser import PURPOSE, Settings, read_setting
from aelastic.cli.several_nodes import static_endpoint
from aelastic.cli.spec_fields import logs_specs_of
from aelastic.compat.launcher.elastic_launch import launch
from aelastic.compat.launcher.launch_config import LaunchConfig
from aelastic.errors import InputError, record
from aelastic.rdzv.settings import BACKENDS
from aelastic.settings import read_filters, read_workers
from aelastic.workers.functions import run_script_path as run_script_path  # noqa: PLC0414  torch also has it here

_log = logging.getLogger(__name__)

_TORCHRUNS = tuple(option for option in OPTIONS if option.dest not in OWN)
_USE_ENV = LAUNCH_GROUPS["torch.distributed.launch"][0]
_PREFIX_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"


# The parser, with the types of torchrun's own; our readers come later, for all callers.
_TYPES: Mapping[str, Callable[[str], Any]] = {
    "max_restarts": int,
    "node_rank": int,
    "master_port": int,
    "shutdown_timeout": int,
    "monitor_interval": float,
    "duplicate_stdout_filters": lambda text: list(read_filters(text)),
    "duplicate_stderr_filters": lambda text: list(read_filters(text)),
}
_CHOSEN = {"start_method", "numa_binding", "print_completion"}  # elsewhere torchrun's parser takes any text


class _PrintCompletion(Action):
    """Prints a completion script for the parser's options, including those of a tool."""

    def __call__(self, parser: ArgumentParser, _: object, shell: Any, __: str | None = None) -> None:
        from aelastic.cli.shells.completion import completion_of

        try:
            with suppress(OSError):  # stdout is closed
                print(completion_of(parser, shell), flush=True)  # noqa: T201
        except InputError as error:
            parser.error(str(error))
        parser.exit()


def get_args_parser() -> ArgumentParser:
    """Returns a parser of torchrun's options, for tools that add their own (torch: `get_args_parser`)."""
    parser = ArgumentParser(prog="aelastic", description=PURPOSE)
    for option in _TORCHRUNS:
        _add(parser, option)
    parser.add_argument("training_script", help="what to run, followed by its arguments")
    parser.add_argument("training_script_args", nargs="...", help="the arguments of the script")
    return parser


def _add(parser: ArgumentParser, option: Option) -> None:
    inherited = next((os.environ[name] for name in option.variables[:1] if os.environ.get(name)), None)
    words = option.text.replace("%", "%%")
    if not option.metavar:
        default = False if inherited is None else read_flag(inherited)
        parser.add_argument(*option.spellings, dest=option.dest, action="store_true", default=default, help=words)
        return
    read = _TYPES.get(option.dest, str)
    parser.add_argument(
        *option.spellings,
        action=_PrintCompletion if option.dest == "print_completion" else "store",
        dest=option.dest,
        default=_default(option) if inherited is None else inherited,
        type=read,
        choices=option.choices if option.dest in _CHOSEN else None,
        metavar=option.metavar,
        help=words,
    )


def _default(option: Option) -> Any:
    """Returns torchrun's default; a list or a number as such."""
    if option.default is None or option.dest == "shutdown_timeout":  # it may come from another variable later
        return None
    return _TYPES.get(option.dest, str)(option.default)


def parse_args(args: Sequence[str] | None) -> Namespace:
    """Returns the namespace of torchrun's command line (torch: `parse_args`).  A usage error exits with 2."""
    return get_args_parser().parse_args(args)


# Values.


def parse_min_max_nnodes(nnodes: str) -> tuple[int, int]:
    """Reads `2` or `1:4` (torch: `parse_min_max_nnodes`, which leaves numbers that cannot work to `config_from_args`).

    Raises:
        InputError: it is neither; if torch raises a `RuntimeError`, it is also one.
    """
    kind = InputError if nnodes.count(":") < 2 else _TooManyPartsError
    try:
        fewest, *rest = (int(part) for part in nnodes.split(":"))
        (most,) = rest or [fewest]
    except ValueError:
        raise kind(f"nnodes is {nnodes!r}: use a number of nodes, or a range MIN:MAX") from None
    return fewest, most


class _TooManyPartsError(InputError, RuntimeError):
    """`1:2:3` for a number of nodes."""


def determine_local_world_size(nproc_per_node: str) -> int:
    """Returns the number of workers that a number or a word means here (torch: `determine_local_world_size`).

    Raises:
        InputError: there is no such word, or no such device.
    """
    source = f"nproc_per_node is {nproc_per_node!r}"
    torch: Any = sys.modules.get("torch")
    devices = None
    if torch is not None:  # no need to start a Python to import it
        # torch's module for devices of a kind, including that of a vendor's package.
        names = {"auto": "accelerator", "gpu": "cuda", "xpu": "xpu"}
        vendors = torch._C._get_privateuse1_backend_name()  # noqa: SLF001  the only way to find out
        names.setdefault(vendors, vendors)
        devices = getattr(torch, names.get(nproc_per_node, ""), None)
    if devices is not None:
        if devices.is_available():
            return int(devices.device_count())
        if nproc_per_node != "auto":
            raise InputError(f"{source}: torch sees no such device here: check the driver, or give a number")
        nproc_per_node = "cpu"
    try:
        workers = read_workers(nproc_per_node)
    except ValueError as reason:
        raise InputError(f"{source}: {reason}") from None
    return count_workers(workers, os.environ, source)


def get_rdzv_endpoint(args: Any) -> str:
    """Returns the rendezvous endpoint of torchrun's namespace (torch: `get_rdzv_endpoint`)."""
    if args.rdzv_backend == "static" and not args.rdzv_endpoint:
        return f"{args.master_addr}:{args.master_port}"
    return str(args.rdzv_endpoint)


def get_use_env(args: Any) -> bool:
    """Whether the script reads `LOCAL_RANK` rather than `--local-rank` (torch: `get_use_env`)."""
    return bool(getattr(args, "use_env", True))


def config_from_args(args: Any) -> tuple[LaunchConfig, str | Callable[..., Any], list[str]]:
    """Returns config, entrypoint and arguments of torchrun's namespace (torch: `config_from_args`).

    Does not check that files exist.  As torch does, it sets `OMP_NUM_THREADS` to 1 in this process, which the workers
    inherit, if it is not set and there are several workers.

    Raises:
        InputError: a value that cannot work.
    """
    chosen = _settings(args)
    entrypoint, entrypoint_args = command_of(chosen, os.environ)
    config = _config(chosen)
    os.environ.update(_threads_of(config))
    return config, entrypoint, list(entrypoint_args)


def run(args: Any) -> None:
    """Runs the job of torchrun's namespace to its end (torch: `run`).

    Raises:
        ChildFailedError: workers failed.
        SignalException: one of `signals_to_handle` stopped the job.
        InputError: a value that cannot work; nothing was started.
    """
    chosen = _settings(_with_single_node(args))
    entrypoint, entrypoint_args = command_of(chosen, os.environ)
    check_command(chosen, os.environ)
    config, most = _config(chosen), chosen["nnodes"][1]
    if not config.rdzv_endpoint and config.rdzv_backend in BACKENDS and (most > 1 or config.rdzv_backend != "c10d"):
        raise InputError(f"rendezvous {config.rdzv_backend} needs --rdzv-endpoint HOST:PORT: the same on every node")
    if chosen["node_rank"] and config.rdzv_backend in BACKENDS:
        config.rdzv_configs.setdefault("rank", chosen["node_rank"])  # a preference for our back ends
    launch(config, entrypoint, list(entrypoint_args), {**os.environ, **_threads_of(config)})


def _threads_of(config: LaunchConfig) -> Mapping[str, str]:
    """Returns what torchrun adds to the environment, so that workers do not run more threads than there are CPUs."""
    if config.nproc_per_node == 1 or "OMP_NUM_THREADS" in os.environ:
        return {}
    _log.info("OMP_NUM_THREADS=1 for each of %d workers; set it to choose another number", config.nproc_per_node)
    return {"OMP_NUM_THREADS": "1"}


@record
def main(args: Sequence[str] | None = None) -> None:
    """Runs torchrun's command line in this process (torch: `main`); raises as `run` does.

    Raises:
        SystemExit: the arguments cannot be parsed; argparse has printed why.
    """
    run(parse_args(args))


def _with_single_node(args: Any) -> Any:
    """Returns the namespace with torchrun's choice for a single node: a rendezvous that no other node can find."""
    args = copy(args)
    backend, endpoint = getattr(args, "rdzv_backend", "static"), getattr(args, "rdzv_endpoint", "")
    is_standalone = getattr(args, "standalone", False)
    if is_standalone:
        args.nnodes = "1"
    is_free = backend == "static" and not endpoint and getattr(args, "master_port", None) is None
    if is_standalone or (is_free and parse_min_max_nnodes(str(getattr(args, "nnodes", "1")))[1] == 1):
        args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = "c10d", "localhost:0", ""
    return args


def _settings(args: Any) -> Settings:
    """Returns the settings of a namespace, torch's or ours; options that an older torch lacks have their defaults."""
    found = {name: _text(value) for name, value in vars(args).items() if value is not None}
    options = [*_TORCHRUNS, *([_USE_ENV] if hasattr(args, "use_env") else [])]
    by_dest = {option.dest: read_setting(option, found, {}) for option in options}
    return Settings(args.training_script, tuple(args.training_script_args or ()), by_dest)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, list | tuple):
        return ",".join(str(item).replace(",", ",,") for item in value)
    return str(value)


def _config(chosen: Settings) -> LaunchConfig:
    fewest, most = chosen["nnodes"]
    backend, rdzv_configs = chosen["rdzv_backend"], dict(chosen["rdzv_conf"])
    if backend == "static":
        rdzv_configs["rank"] = chosen["node_rank"]
    timeout = chosen.by_dest["shutdown_timeout"]
    as_they_are = {each.name: chosen[each.name] for each in fields(LaunchConfig) if each.name in chosen.by_dest}
    return LaunchConfig(
        **{
            **as_they_are,
            "min_nodes": fewest,
            "max_nodes": most,
            "nproc_per_node": determine_local_world_size(str(chosen["nproc_per_node"])),
            "logs_specs": _logs_specs(chosen),
            "run_id": chosen["rdzv_id"],
            "rdzv_endpoint": static_endpoint(chosen) if backend == "static" else chosen["rdzv_endpoint"],
            "rdzv_configs": rdzv_configs,
            "log_line_prefix_template": chosen["log_line_prefix_template"] or os.environ.get(_PREFIX_VARIABLE),
            "numa_options": chosen["numa_binding"],
            "signals_to_handle": chosen.by_dest["signals_to_handle"].text or "",
            "duplicate_stdout_filters": list(chosen["duplicate_stdout_filters"]),
            "duplicate_stderr_filters": list(chosen["duplicate_stderr_filters"]),
            "shutdown_timeout": None if timeout.is_default else timeout.value,
        }
    )


def _logs_specs(chosen: Settings) -> Any:
    """Returns the `LogsSpecs`; `None` if output goes to the console only."""
    specs = logs_specs_of(chosen)
    if specs is not None or not any(chosen[name] for name in ("log_dir", "redirects", "tee", "local_ranks_filter")):
        return specs
    from aelastic.logs_specs import DefaultLogsSpecs

    ranks = chosen["local_ranks_filter"]
    try:
        return DefaultLogsSpecs(
            chosen["log_dir"], chosen["redirects"], chosen["tee"], None if ranks is None else set(ranks)
        )
    except OSError as error:
        raise InputError(f"log_dir {chosen['log_dir']}: cannot write there ({error.strerror or error})") from None
