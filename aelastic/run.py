"""The names that other tools import from `torch.distributed.run`, and `python -m aelastic.run`."""

from __future__ import annotations

from aelastic.launcher.run import (
    config_from_args,
    determine_local_world_size,
    get_args_parser,
    get_use_env,
    main,
    parse_args,
    parse_min_max_nnodes,
    run,
)
from aelastic.workers.functions import run_script_path

__all__ = [
    "config_from_args",
    "determine_local_world_size",
    "get_args_parser",
    "get_use_env",
    "main",
    "parse_args",
    "parse_min_max_nnodes",
    "run",
    "run_script_path",
]

if __name__ == "__main__":
    from aelastic.cli.main import main_and_exit

    main_and_exit()
