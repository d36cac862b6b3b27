"""Interpreters that have already imported torch: workers, torchrun's agents and stores of tests start in 50 ms.

`Warm.python` is a program that replaces `sys.executable`.  Each call becomes a fork of a server that has imported torch
once.  Only the pid, the parent, and what /proc shows about the start (command line, environment) differ; tests about
these start interpreters as a user does, and so does every test under `TEST_EFFORT=soak`.

The server ends with the process that started it, however that ends: it reads a pipe from it, and asks the kernel for a
signal (`PR_SET_PDEATHSIG`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from kit.effort import IS_COLD
from kit.servers.programs import running

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[2]


class Warm:
    """A fork server, started on first use.

    Args:
        what: what it has imported: `torch`, or `store` for the agents' stores.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._server: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._ending = ExitStack()

    @property
    def python(self) -> str:
        """The program to start instead of an interpreter."""
        if IS_COLD:
            return sys.executable
        if self._folder is None:
            self._folder = self._start()
        return str(self._folder / "python")

    @property
    def env(self) -> dict[str, str]:
        """Variables that make either launcher start its workers this way."""
        return {} if IS_COLD else {"PYTHON_EXEC": self.python}

    def _start(self) -> Path:
        folder = Path(
            self._ending.enter_context(tempfile.TemporaryDirectory(prefix="warm", ignore_cleanup_errors=True))
        )
        stub = (_HERE / "stub.py").read_text()
        stub = stub.replace('SERVER = ""', f"SERVER = {str(folder / 'socket')!r}").replace(
            'PYTHON = ""', f"PYTHON = {sys.executable!r}"
        )
        path = folder / "python"
        path.write_text(f"#!{sys.executable} -IS\n{stub}")
        path.chmod(0o700)
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)} if self._what == "store" else {"OMP_NUM_THREADS": "1"}
        command = (sys.executable, "-m", "kit.warm.server", str(folder / "socket"), self._what)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        popen = {**pipes, "env": env, "cwd": _HERE.parents[1], "start_new_session": True}
        self._server = self._ending.enter_context(running(*command, **popen))
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == b"ready\n"
        self._server.stdout.close()
        return folder

    def close(self) -> None:
        self._ending.close()
