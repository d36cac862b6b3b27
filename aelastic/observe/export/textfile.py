"""Writes metrics of a run to a file, for node_exporter's textfile collector (`--metrics-textfile`).

The file is written before anything is started, every few seconds, and at the end: the final values stay readable,
however rarely it is read.  A new file replaces the old one each time, so readers always get a whole file.  Every series
carries the run id and the file's name: the collector gives all files of a machine the same `instance`, and accepts no
series twice.

The disk may be slow, or gone: a thread writes, only the newest text, and neither the run nor its end waits for it for
long.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import anyio
import anyio.to_thread

from aelastic.base.host.files import write_beside
from aelastic.errors import InputError
from aelastic.observe.exposition import Exposition
from aelastic.observe.observer import CLOSE_TIMEOUT_S, Observer
from aelastic.observe.run_events import RunEvent

_log = logging.getLogger(__name__)

# node_exporter is usually scraped every 15 s or less often.
WRITE_INTERVAL_S = 15.0


class MetricsTextfile(Observer):
    """The metrics of one run, in a file.

    Args:
        path: the file; its folder must exist.
        run_id: the job's name, a label of every series.
        exposition: the status and metrics of the run.
    """

    def __init__(self, path: Path, run_id: str, exposition: Exposition) -> None:
        self._path = Path(os.path.abspath(path))
        self._common = {"run_id": run_id, "textfile": self._path.name}
        self._exposition = exposition
        self._asked = 0  # number of the newest text
        self._writing = threading.Lock()
        self._has_warned = False

    async def open(self) -> None:
        """Writes the file.

        Raises:
            InputError: it cannot be written.
        """
        try:
            with anyio.fail_after(CLOSE_TIMEOUT_S):
                await self._write()
        except OSError as error:  # a `TimeoutError` is one
            why = error.strerror or f"the disk has not answered for {CLOSE_TIMEOUT_S:g} s"
            raise InputError(f"metrics textfile {self._path} cannot be written ({why}): choose another path") from None

    def tell(self, event: RunEvent, now: float) -> None:
        """Does nothing: the exposition receives the events."""

    async def run(self) -> None:
        while True:
            await anyio.sleep(WRITE_INTERVAL_S)
            await self._try_to_write()

    async def aclose(self) -> None:
        await self._try_to_write()

    async def _try_to_write(self) -> None:
        try:
            await self._write()
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
            if not self._has_warned:
                why = getattr(error, "strerror", None) or error
                _log.warning("metrics textfile %s cannot be written (%s); the job continues", self._path, why)
            self._has_warned = True

    async def _write(self) -> None:
        self._asked += 1
        text = self._exposition.metrics_text(self._common)
        # A disk that hangs blocks the thread, not the run.
        await anyio.to_thread.run_sync(self._replace, self._asked, text.encode(), abandon_on_cancel=True)

    def _replace(self, number: int, text: bytes) -> None:
        """Replaces the file by a new one, in a thread."""
        with self._writing:
            if number != self._asked:
                return  # a newer text waits
            write_beside(str(self._path), text)
