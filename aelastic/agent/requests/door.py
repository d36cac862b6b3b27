"""The door of an agent: a UNIX socket by which this user speaks to the job (`aelastic status`, and the like)."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio

from aelastic.host import doors

_log = logging.getLogger(__name__)

PAUSE_S = 0.1


class Door:
    """Listens from the beginning of a run to its end, and leaves what it was to be read.

    Args:
        folder: where; made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._name = f"{os.getpid()}-{os.urandom(4).hex()}"
        self._listener: socket.socket | None = None

    def open(self) -> None:
        """Where there is no place for it, the job goes on without."""
        try:
            self._listener = doors.listen(self._folder, self._name)
        except OSError as error:
            _log.warning("this job cannot be spoken to (aelastic status, …): %s: %s", self._folder, error)

    async def run(self, serve: Callable[[socket.socket], Coroutine[Any, Any, None]]) -> None:
        """Serves those that come.  Runs until cancelled."""
        if self._listener is None:
            return
        async with anyio.create_task_group() as tasks:
            while True:
                await anyio.wait_readable(self._listener)
                try:
                    conn, _ = self._listener.accept()
                except OSError:  # who came is gone; or there are no descriptors left, and it waits still
                    await anyio.sleep(PAUSE_S)
                    continue
                if doors.user_of(conn) in {0, os.getuid()}:
                    tasks.start_soon(serve, conn, name="a request")
                else:
                    conn.close()

    def close(self, said: dict[str, Any] | None) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            doors.leave(self._folder, self._name, said)
