"""The launcher as a library, and `python -m aelastic.launch`.

    values = elastic_launch(LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2), train)(0.1, 20)

The names and guarantees are those of `torch.distributed.launcher.api` and of `torch.distributed.launch`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from aelastic.cli.options import LAUNCH_GROUPS
from aelastic.compat.launcher.elastic_launch import elastic_launch, entrypoint_name, launch_agent
from aelastic.compat.launcher.errors import SignalException
from aelastic.compat.launcher.launch_config import LaunchConfig
from aelastic.compat.launcher.run import get_args_parser, run
from aelastic.logs_specs import DefaultLogsSpecs, LogsSpecs

__all__ = [
    "DefaultLogsSpecs", "LaunchConfig", "LogsSpecs", "SignalException", "elastic_launch", "entrypoint_name",
    "get_args_parser", "launch", "launch_agent", "main", "parse_args", "run",
]  # fmt: skip

_get_entrypoint_name = entrypoint_name  # torch's name for it, which dlrover imports

# The rest of `torch.distributed.launch`, beyond the names above.


def parse_args(args: Sequence[str] | None) -> Namespace:
    """Reads the command line of `torch.distributed.launch`: torchrun's, and `--use-env`."""
    parser = get_args_parser()
    (use_env,) = LAUNCH_GROUPS["torch.distributed.launch"]
    parser.add_argument(*use_env.spellings, action="store_true", help=use_env.text)
    return parser.parse_args(args)


def launch(args: Namespace) -> None:
    """Runs the job described by a namespace of `parse_args` to its end (torch: `launch` there); raises like `main`."""
    run(args)


def main(args: Sequence[str] | None = None) -> None:
    """Runs a script that takes `--local-rank`, as `torch.distributed.launch` does (torch: `main` there).

    Raises:
        ChildFailedError: workers failed.
        InputError: a value that cannot work.
        SystemExit: the arguments cannot be parsed; argparse has printed why.
    """
    _warn(stacklevel=3)
    launch(parse_args(args))


def _warn(stacklevel: int) -> None:
    import warnings

    warnings.warn(
        "aelastic.launch passes --local-rank to the script, as the deprecated torch.distributed.launch does: "
        "read os.environ['LOCAL_RANK'] in the script, and use python -m aelastic",
        FutureWarning,
        stacklevel=stacklevel,
    )


if __name__ == "__main__":
    from aelastic.cli.main import main_and_exit

    _warn(stacklevel=2)
    main_and_exit(LAUNCH_GROUPS)
