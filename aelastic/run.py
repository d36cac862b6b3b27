"""The names that other tools import from `torch.distributed.run`, and `python -m aelastic.run`."""

from __future__ import annotations

from aelastic.compat.launcher.elastic_launch import elastic_launch
from aelastic.compat.launcher.launch_config import LaunchConfig
from aelastic.compat.launcher.run import (
    config_from_args,
    determine_local_world_size,
    get_args_parser,
    get_rdzv_endpoint,
    get_use_env,
    main,
    parse_args,
    parse_min_max_nnodes,
    run,
)
from aelastic.errors import record
from aelastic.logs_specs import DefaultLogsSpecs, LogsSpecs, Std
from aelastic.workers.functions import run_script_path

__all__ = [
    "DefaultLogsSpecs", "LaunchConfig", "LogsSpecs", "Std", "config_from_args", "determine_local_world_size",
    "elastic_launch", "get_args_parser", "get_rdzv_endpoint", "get_use_env", "main", "parse_args",
    "parse_min_max_nnodes", "record", "run", "run_script_path",
]  # fmt: skip

if __name__ == "__main__":
    from aelastic.cli.main import main_and_exit

    main_and_exit()
