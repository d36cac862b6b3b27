"""Paths of the workers' control sockets (torch: `torch.distributed.elastic.control_plane`).

Under `worker_main`, a worker serves HTTP on the Unix socket that `TORCH_WORKER_SERVER_SOCKET` names.  Each worker of
each attempt has a path of its own in the run's scratch folder: torch refuses one that exists, and leaves its own there.

The variable is the agent's mark, too: every process that a worker starts inherits it, and the scratch folder's name is
random.

A path of more than 107 bytes cannot be bound.  If the temporary folder is that deep, the path goes through a descriptor
of the agent's.  It leads to the same folder, so there is nothing more to remove.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from aelastic.group.worker_env import CONTROL_SOCKET_VARIABLE

PATH_BYTES_MAX = 107  # `sun_path` in unix(7), without the zero that ends it
NAME_BYTES_MAX = 32  # for ten digits of the attempt and as many of the rank


class ControlSockets:
    """The sockets' paths.  Makes none: that is for the workers that serve one.

    Args:
        scratch: the folder they lie in; it need not exist yet.
    """

    def __init__(self, scratch: Path) -> None:
        self._folder: int | None = None
        self._prefix = str(scratch)
        if len(os.fsencode(scratch)) + NAME_BYTES_MAX >= PATH_BYTES_MAX:
            with contextlib.suppress(OSError):  # making the scratch folder fails with the reason
                scratch.parent.mkdir(parents=True, exist_ok=True)
                self._folder = os.open(scratch.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                self._prefix = f"/proc/{os.getpid()}/fd/{self._folder}/{scratch.name}"

    @property
    def mark(self) -> str:
        """What the environment of every process of this run contains, and no other."""
        return f"{CONTROL_SOCKET_VARIABLE}={self._prefix}/"

    def path(self, attempt: int, local_rank: int) -> str:
        return f"{self._prefix}/control_{attempt}_{local_rank}"

    def mark_env(self, env: dict[str, str]) -> dict[str, str]:
        """The environment of a process of this run that is no worker."""
        return {**env, CONTROL_SOCKET_VARIABLE: f"{self._prefix}/none"}

    def close(self) -> None:
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None
