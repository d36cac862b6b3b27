"""Agents of one job on this machine, each with a host name of its own, so that a picture tells them apart."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from demo_elastic import NODES, WORKERS, Nodes, free_port

TIME_LIMIT_S = 400.0

AGENT = """\
import runpy, socket, sys
name = sys.argv.pop(1)
socket.gethostname = lambda: name
runpy.run_module("aelastic", run_name="__main__", alter_sys=True)
"""


class NamedNodes(Nodes):
    """Agents that have names, and keep event logs in folders of these names.

    Args:
        folder: for the logs.
        script: what they run, with its arguments.
        options: further ones of the agents.
    """

    def __init__(self, folder: Path, script: Sequence[str], *, options: Sequence[str] = ()) -> None:
        self._script, self._options = script, options
        self._endpoint, self._folder = f"127.0.0.1:{free_port()}", folder
        super().__init__([], [], str(folder))

    def start(self, name: str) -> None:
        options = ["--nnodes", "{}:{}".format(*NODES), "--nproc-per-node", str(WORKERS), "--max-restarts", "3"]
        options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", self._endpoint]
        options += ["--rdzv-id", Path(self._script[0]).stem, "--log-dir", str(self._folder / name), *self._options]
        self._command = [sys.executable, "-c", AGENT, name, *options, *self._script]
        super().start(name)
