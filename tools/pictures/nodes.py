"""The demo's agents, each with a host name of its own, so that a picture tells them apart."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from demo_elastic import MIN_ACCURACY, NODES, WORKERS, Nodes, free_port

from pictures.browser import ROOT

TIME_LIMIT_S = 400.0

AGENT = """\
import runpy, socket, sys
name = sys.argv.pop(1)
socket.gethostname = lambda: name
runpy.run_module("aelastic", run_name="__main__", alter_sys=True)
"""


class NamedNodes(Nodes):
    """Agents on this machine that run `train_digits.py`, have names, and keep event logs in folders of these names.

    Args:
        folder: for the logs and the checkpoint.
        epochs: how many they train.
        arguments: further ones of the script.
    """

    def __init__(self, folder: Path, *, epochs: int, arguments: Sequence[str] = ()) -> None:
        script = [str(ROOT / "examples" / "demo" / "train_digits.py"), "--checkpoint", str(folder / "digits.pt")]
        self._script = [*script, "--epochs", str(epochs), "--min-accuracy", str(MIN_ACCURACY), *arguments]
        self._endpoint, self._folder = f"127.0.0.1:{free_port()}", folder
        super().__init__([], [], str(folder))

    def start(self, name: str) -> None:
        options = ["--nnodes", "{}:{}".format(*NODES), "--nproc-per-node", str(WORKERS), "--max-restarts", "3"]
        options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", self._endpoint, "--rdzv-id", "digits"]
        options += ["--log-dir", str(self._folder / name)]
        self._command = [sys.executable, "-c", AGENT, name, *options, *self._script]
        super().start(name)
