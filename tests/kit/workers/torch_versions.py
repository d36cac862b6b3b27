"""The installed torch, and the features that older versions lack: tests compare with the installed one."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping
from importlib.metadata import version

TORCH = tuple(int(part) for part in version("torch").split("+")[0].split(".")[:2])

# Options of torchrun that 2.8 lacks, with the first version that has them, among those checked (2.8, 2.13, 2.14, 2.15).
SINCE: Mapping[str, tuple[int, int]] = {
    "duplicate_stdout_filters": (2, 13),
    "duplicate_stderr_filters": (2, 13),
    "numa_binding": (2, 13),
    "signals_to_handle": (2, 13),
    "shutdown_timeout": (2, 13),
    "virtual_local_rank": (2, 13),
    "log_line_prefix_template": (2, 14),
    "print_completion": (2, 14),
}
LOOKED_AT = {(2, 8), (2, 13), (2, 14), (2, 15)}


def options_of(parser: ArgumentParser) -> set[str]:
    """The options of torch's parser, by attribute name."""
    return {action.dest for action in parser._actions if action.option_strings} - {"help"}


def picks_a_free_port(parser: ArgumentParser) -> bool:
    """Whether a single node without an address picks a port and a run id; an older torchrun uses 29500 and "none"."""
    return parser.get_default("master_port") is None
