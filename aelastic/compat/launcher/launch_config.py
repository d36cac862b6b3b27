"""torch's `LaunchConfig`, and the `WorkerSpec` made from it.

`LaunchConfig` has torch's fields, order and defaults; `worker_spec` takes it, or torch's own object, and refuses a
value that cannot work before anything is started.  The environment given is read, not changed.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from multiprocessing.process import current_process
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any

from aelastic.base.setting import INT, MAPPING, REAL, SECONDS, STR, TEXTS, Rule, in_words, optional, settings_of
from aelastic.base.texts import read_signals
from aelastic.cli.several_nodes import check_backend
from aelastic.cli.spec_fields import PRIVATE_ENDPOINTS
from aelastic.errors import InputError
from aelastic.logs_specs import UnaskedLogsSpecs
from aelastic.rdzv import registry
from aelastic.rdzv.settings import BACKENDS, C10D_PORT, ETCD_PORT, RendezvousSettings, split_endpoint
from aelastic.settings import SHUTDOWN_TIMEOUT_S, Preload, Recovery, RestartGrace
from aelastic.spec import WorkerSpec

_log = logging.getLogger(__name__)

SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
SHUTDOWN_TIMEOUT_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
# torch's default.
RDZV_TIMEOUT_S = 900
# The endpoints of torch's back ends if a config names none.
_LOCAL_ENDPOINTS = {
    "c10d": f"localhost:{C10D_PORT}",
    **dict.fromkeys(("etcd", "etcd-v2", "etcd-v3"), f"localhost:{ETCD_PORT}"),
}


@dataclass
class LaunchConfig:
    """How to launch (torch: `torch.distributed.launcher.api.LaunchConfig`, with its fields, order and defaults).

    The fields from `cache_dir` on are aelastic's own, with the same meaning as in `WorkerSpec`.

    Args:
        min_nodes: number of nodes that the job waits for.
        max_nodes: number of nodes that the job uses at most.
        nproc_per_node: number of workers on this node.
        logs_specs: a `LogsSpecs`, aelastic's or torch's, that decides where the workers' output goes; `None`: a
            `DefaultLogsSpecs`, as in torch, which creates its folder only when needed.
        run_id: the job's name, the same on all nodes; empty or `None` picks a random name, as in torch, so no other
            node can join.
        role: role name of the workers.
        rdzv_endpoint: the rendezvous endpoint; empty or `None`: the back end's default port on `localhost`, as in
            torch.
        rdzv_backend: same as `--rdzv-backend`.
        rdzv_configs: same as `--rdzv-conf`; for `static`, the key `rank` is the node rank.
        rdzv_timeout: seconds; same as `timeout` in `rdzv_configs`.
        max_restarts: how often all workers may be restarted after a failure.  The default is torch's for a config; the
            command line's is 0, as with torchrun.
        monitor_interval: seconds between two checks of a worker if the kernel cannot report its exit.
        start_method: how `multiprocessing` starts a function.
        log_line_prefix_template: prefix of teed lines, which may contain `${role_name}`, `${rank}`, `${local_rank}`,
            `${hostname}` and `${pid}`.
        metrics_cfg: accepted but not used, as in torch.
        local_addr: address where other nodes reach this one.
        event_log_handler: name of the handler of torchelastic's events.
        numa_options: torch's `NumaOptions`, or the name of a mode, for the CPUs of each worker.
        signals_to_handle: names of the signals that stop the job, separated by commas.
        duplicate_stdout_filters: lines of kept stdout that contain one of these texts are also written to a separate
            file.
        duplicate_stderr_filters: the same for stderr.
        virtual_local_rank: each worker sees only its own device, and `LOCAL_RANK` 0.
        shutdown_timeout: seconds from the request to stop until workers are killed; `None`:
            `TORCH_ELASTIC_SHUTDOWN_TIMEOUT`, or 30.
        cache_dir: folder on this node where workers keep compiled code; `None`: none.
        preload: modules that a template process imports once, so that workers start with them imported, or `"auto"`.
        restart_grace: seconds that workers get to end before a restart, or `"shutdown-timeout"`; `None`: while waiting
            can help.
        recovery: `"in-place"`: when a worker is lost, the others keep their processes, if every worker has opted in
            with `aelastic.in_place`; `"restart"`: all workers start again.
        progress: regular expression that finds progress in the workers' output, same as `--progress`.

    Raises:
        InputError: a field has the wrong type, or `shutdown_timeout` or its variable is not a number of seconds.
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    logs_specs: Any = None
    run_id: str | None = ""
    role: str = "default_role"
    rdzv_endpoint: str | None = ""
    rdzv_backend: str = "etcd"
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    rdzv_timeout: int = -1
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: int | None = None
    cache_dir: Path | None = None
    preload: Preload = ()
    restart_grace: RestartGrace = None
    recovery: Recovery = "in-place"
    progress: str | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.rdzv_timeout != -1:
            self.rdzv_configs["timeout"] = self.rdzv_timeout
        else:
            self.rdzv_configs.setdefault("timeout", RDZV_TIMEOUT_S)
        if self.shutdown_timeout is None:
            self.shutdown_timeout = _shutdown_timeout(os.environ)
        if self.logs_specs is None:
            self.logs_specs = UnaskedLogsSpecs()


# The fields of a `WorkerSpec` that a config has under the same name.
_OF_SPEC = settings_of(WorkerSpec)
_AS_THEY_ARE = (_OF_SPEC.keys() - {"logs_specs"}) & {each.name for each in fields(LaunchConfig)}
_FILTERS = ("duplicate_stdout_filters", "duplicate_stderr_filters")  # torch uses `None` for no filter
_RULES: Mapping[str, Rule] = {
    **{name: _OF_SPEC[name].rule for name in sorted(_AS_THEY_ARE)},
    **dict.fromkeys(("min_nodes", "max_nodes", "nproc_per_node"), INT),
    "rdzv_timeout": REAL,
    "shutdown_timeout": optional(SECONDS),
    **dict.fromkeys(("rdzv_backend", "signals_to_handle"), STR),
    **dict.fromkeys(("rdzv_endpoint", "local_addr"), optional(STR)),
    "rdzv_configs": MAPPING,
    **dict.fromkeys(_FILTERS, optional(TEXTS)),
}


def completed(config: Any) -> Any:
    """Returns the config; one of an older torch gets defaults for the fields that it lacks."""
    if isinstance(config, LaunchConfig) or not all(hasattr(config, each) for each in ("max_nodes", "nproc_per_node")):
        return config
    lacking = {each.name: each for each in fields(LaunchConfig) if not hasattr(config, each.name)}
    if not lacking:
        return config
    return SimpleNamespace(**{name: each.default for name, each in lacking.items()}, **vars(config))


def check_types(config: object) -> None:
    """Refuses values of a wrong type.

    Raises:
        InputError: a value has the wrong type; the message names the right one.  Or `config` is not a config.
    """
    for name, rule in _RULES.items():
        try:
            value = getattr(config, name)
        except AttributeError:
            raise InputError(f"config is {config!r}: pass a LaunchConfig, ours or torch's") from None
        if remedy := rule(value):
            raise InputError(f"{name} is {in_words(value)}: {remedy}")


def _shutdown_timeout(environ: Mapping[str, str]) -> int:
    text = environ.get(SHUTDOWN_TIMEOUT_VARIABLE, "") or f"{SHUTDOWN_TIMEOUT_S:g}"
    if not (text.isascii() and text.isdecimal()):
        raise InputError(f"{SHUTDOWN_TIMEOUT_VARIABLE}={text}: use whole seconds, 0 or more")
    return int(text)


def worker_spec(
    config: LaunchConfig, entrypoint: str | Callable[..., Any] | None, args: list[Any], environ: Mapping[str, str]
) -> WorkerSpec:
    """Returns the `WorkerSpec` of a config, ours or torch's.

    Args:
        entrypoint: a function, or a program; a program's arguments become text, as torch makes them.
        environ: the environment that the workers inherit.

    Raises:
        InputError: a value cannot work.
    """
    check_types(config)
    check_entrypoint(entrypoint, config.start_method)
    _check_nodes(config)
    logs = config.logs_specs
    return WorkerSpec(
        **{
            **{name: getattr(config, name) for name in _AS_THEY_ARE},
            **{name: tuple(getattr(config, name) or ()) for name in _FILTERS},
            **numa_fields(config.numa_options),
            **_rendezvous_fields(config),
        },
        entrypoint=entrypoint or "",
        args=tuple(args if callable(entrypoint) else map(as_text, args)),
        local_world_size=config.nproc_per_node,
        # Specs without any request are dropped: the workers' files are then removed with the run.
        logs_specs=None if isinstance(logs, UnaskedLogsSpecs) and not logs.has_folder else logs,
        shutdown_timeout_s=_shutdown_timeout(environ) if config.shutdown_timeout is None else config.shutdown_timeout,
        env={**environ, SIGNALS_VARIABLE: config.signals_to_handle},
    )


def signals_in(names: str) -> tuple[int, ...]:
    """Returns signals from their names, which commas separate.

    Raises:
        InputError: a name is not that of a signal that can be handled.
    """
    try:
        return read_signals(names)
    except ValueError as reason:
        raise InputError(f"signals_to_handle is {names!r}: {reason}") from None


# What runs.


def check_entrypoint(entrypoint: object, start_method: str) -> None:
    if not entrypoint:
        raise InputError(f"entrypoint is {entrypoint!r}: pass a function, or the name of a program")
    if isinstance(entrypoint, str):
        return  # the supervisor looks for it
    if not callable(entrypoint):
        raise InputError(f"entrypoint is {entrypoint!r}: pass a function, or the name of a program as a string")
    if start_method != "fork" and getattr(current_process(), "_inheriting", False):
        # The child imports the main script again, to find the function; a launch there would launch again without end.
        raise InputError(
            "launch was called while the main script is still being imported: "
            'put the call under `if __name__ == "__main__":`, or use start_method "fork"',
            topic="a-function-cannot-be-sent-to-workers",
        )
    if start_method != "fork" and _is_out_of_reach(entrypoint):
        raise InputError(
            f"{getattr(entrypoint, '__qualname__', entrypoint)} cannot be found by a worker: the main module here "
            'is not a file (a session, python -c, stdin): put it in a module, or use start_method "fork"',
            topic="a-function-cannot-be-sent-to-workers",
        )
    if current_process().daemon:
        raise InputError(
            "functions cannot be launched from a daemonic process of multiprocessing (as those of a Pool): "
            "it may not have children; launch from another process, or launch a program",
            topic="a-function-cannot-be-sent-to-workers",
        )


def _is_out_of_reach(function: Callable[..., Any]) -> bool:
    """Whether a child, which imports the main script first, could not find the function."""
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is not None:  # `python -m`
        return False
    path = getattr(main, "__file__", None)
    if path is None:  # a child leaves it out
        return getattr(function, "__module__", "") == "__main__"
    return not os.path.exists(path)


def as_text(arg: Any) -> Any:
    return arg if isinstance(arg, str | bytes | PurePath) else str(arg)


def numa_fields(options: Any) -> dict[str, Any]:
    """Returns the fields of a `WorkerSpec`; the options are torch's, whose mode is an enum, or the name of the mode."""
    mode = getattr(options, "affinity_mode", options)
    return {
        "numa_binding": getattr(mode, "value", mode),
        "numa_fall_back": bool(getattr(options, "should_fall_back_if_binding_fails", False)),
    }


# Rendezvous.


def _check_nodes(config: LaunchConfig) -> None:
    if not 1 <= config.min_nodes <= config.max_nodes:
        raise InputError(
            f"min_nodes is {config.min_nodes} and max_nodes {config.max_nodes}: "
            "at least 1 node is needed, and the smaller number goes first"
        )
    if config.nproc_per_node < 1:
        raise InputError(f"nproc_per_node is {config.nproc_per_node}: at least 1 worker is needed")


def _rendezvous_fields(config: LaunchConfig) -> dict[str, Any]:
    """Returns back end, address, port and run id; a node that no other node can find is a single node."""
    backend, endpoint = config.rdzv_backend, (config.rdzv_endpoint or "").strip()
    # Handlers that the program has registered with torch, if it has imported torch.
    torchs = sys.modules.get("torch.distributed.elastic.rendezvous.api")
    registered = getattr(getattr(torchs, "rendezvous_handler_registry", None), "_registry", ())
    if backend not in {*registry.names(), *registered}:
        check_backend(backend, f"rdzv_backend is {backend!r}")
    run_id = config.run_id or None
    if run_id is None and config.max_nodes > 1:
        run_id = str(int.from_bytes(os.urandom(16)))
        _log.warning(
            "config has no run_id, and no other node can join under the random one, %s: set run_id",
            run_id,
            extra={"topic": "the-config-has-no-run-id"},
        )
    if backend == "c10d" and config.max_nodes == 1 and endpoint in PRIVATE_ENDPOINTS:
        return {"master_addr": config.local_addr or "localhost", "run_id": run_id}
    more = {name: value for name, value in config.rdzv_configs.items() if value is not None}
    host = port = rank = None
    if backend.removeprefix("torch:") == "static":
        rank = _node_rank(more.pop("rank", None))
        host, port = (None, None) if "," in endpoint else split_endpoint(endpoint)
    elif backend in BACKENDS and "rank" in more:
        rank = _node_rank(more.pop("rank"))
    if not endpoint:
        endpoint = _LOCAL_ENDPOINTS.get(backend, "")
    if backend == "static" and config.max_nodes == 1 and rank == 0:
        return {"master_addr": host, "master_port": port, "run_id": run_id}
    settings = RendezvousSettings(
        backend=backend,
        endpoint=endpoint,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        node_rank=rank,
        local_addr=config.local_addr,
        # A handler of torch's kind may take objects; our back ends read text.
        config={name: str(value) for name, value in more.items()} if backend in BACKENDS else more,
    )
    return {"rdzv": settings, "master_addr": host, "master_port": port, "run_id": run_id}


def _node_rank(rank: Any) -> int:
    try:
        return int(rank)
    except (TypeError, ValueError):
        raise InputError(
            f"rank is {rank!r} in rdzv_configs: rendezvous static needs this node's rank, counted from 0 (--node-rank)",
            topic="node-ranks-do-not-fit-together",
        ) from None
