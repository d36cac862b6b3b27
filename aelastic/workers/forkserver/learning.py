"""Learns what the first workers import: each writes the names of modules to a pipe as it imports them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import anyio

from aelastic.base.host.files import write_beside
from aelastic.base.loop.sockets import wait_readable
from aelastic.workers.forkserver.command import PythonCommand

# By then a script has imported what it needs to train, if it has not shown so earlier (`init_process_group`).
LEARN_TIMEOUT_S = 30.0
END = "."  # a worker has initialized its process group


class Imports:
    """The pipe, and the names that came through it."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self.are_whole = False  # whether a worker was about to train
        self._waiting: anyio.CancelScope | None = None

    async def gather(self) -> tuple[str, ...]:
        """Waits until a worker is about to train; returns the names in the order in which they were first imported."""
        names: dict[str, None] = {}
        rest = ""
        with anyio.move_on_after(LEARN_TIMEOUT_S) as self._waiting:
            while END not in names:
                await wait_readable(self._reader)
                *lines, rest = (rest + os.read(self._reader, 65536).decode(errors="replace")).split("\n")
                names.update(dict.fromkeys(lines))
        self.are_whole |= END in names
        names.pop(END, None)
        return tuple(names)

    def end(self) -> None:
        """A worker was seen to join its process group, which it only reports itself with the next audit event."""
        self.are_whole = True
        if self._waiting is not None:
            self._waiting.cancel()

    def close(self) -> None:
        if self._reader >= 0:
            os.close(self._reader)
            os.close(self.writer)
            self._reader = self.writer = -1


class KeptImports:
    """The modules that workers of an earlier agent have imported, in one file, for the last command that was learned.

    Valid for the same command and the same script: importing what another one needs may have side effects.

    Args:
        folder: the user's own; `None`: nothing is kept.
    """

    def __init__(self, folder: Path | None, command: PythonCommand) -> None:
        self._path: Path | None = None
        if folder is None or command.kind != "script":
            return
        with suppress(OSError):  # no such script: the worker will report it
            script = os.stat(command.target)
            words = (command.command, os.getcwd(), script.st_mtime_ns, script.st_size)
            self._command = hashlib.sha256(repr(words).encode()).hexdigest()
            self._path = folder / "imports.json"

    def read(self) -> tuple[str, ...]:
        if self._path is None:
            return ()
        try:
            kept = json.loads(self._path.read_bytes())
            return tuple(map(str, kept["modules"])) if kept["command"] == self._command else ()
        except (OSError, ValueError, KeyError, TypeError):  # none, or damaged
            return ()

    def write(self, modules: Sequence[str]) -> None:
        if self._path is None:
            return
        with suppress(OSError):  # a full disk, for example: it is learned again
            write_beside(str(self._path), json.dumps({"command": self._command, "modules": modules}).encode())
