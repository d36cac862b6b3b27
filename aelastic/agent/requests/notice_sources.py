"""Where notices come from that this node is about to go: a file that somebody writes, a program that watches for them.

Each is off unless it is asked for.  A line of either says `drain 110 spot`: within 110 s, for this reason; or `cancel`.
A file that says nothing, or a number only, is a notice, too; that it is removed calls it off.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import anyio

from aelastic import aio
from aelastic.agent.resources import Asked
from aelastic.host.children import wait_ended
from aelastic.host.programs import ProgramError, program
from aelastic.spec import WorkerSpec

_log = logging.getLogger(__name__)

# What the clouds give at the least: Google 30 s; AWS 120 s, Azure 30 s.
DEADLINE_S = 30.0
FILE_INTERVAL_S = 1.0
WRITTEN_S = 0.1  # a file that is empty is read again so much later
TEXT_BYTES_MAX = 4096
# A program that ends is started again, later each time, until it has run for as long.
PAUSE_MIN_S, PAUSE_MAX_S = 1.0, 60.0


def said_by(line: str) -> Asked | None:
    """What a line says: `drain SECONDS [REASON]`, `SECONDS [REASON]`, or `cancel`; `None` if it is none of that."""
    if line.strip() == "cancel":
        return Asked(None)
    found = re.fullmatch(r"(?:drain\s+)?(\d{1,6}(?:\.\d+)?)(?:\s*s)?(|\s.*)", line.strip(), re.DOTALL)
    return None if found is None else Asked(float(found[1]), " ".join(found[2].split())[:200])


class NoticeSources:
    """Sources of one agent.

    Args:
        spec: which.
        env: that the program starts with.
        ask: takes what they say.
    """

    def __init__(self, spec: WorkerSpec, env: Mapping[str, str], ask: Callable[[Asked], None]) -> None:
        self._spec, self._env, self._ask = spec, env, ask

    async def run(self) -> None:
        """Looks and listens.  Runs until cancelled, and ends the program then."""
        async with anyio.create_task_group() as tasks:
            if (path := self._spec.notice_file) is not None:
                tasks.start_soon(self._watch, path, name="notice file")
            if self._spec.notice_command is not None:
                tasks.start_soon(self._follow, self._spec.notice_command, name="notice command")

    def _on_said(self, said: Asked, by: str) -> None:
        self._ask(said if said.deadline_s is None else said.replace(reason=f"{said.reason}, {by}".removeprefix(", ")))

    async def _watch(self, path: Path) -> None:
        before: str | None = None
        while True:
            text = _read(path)
            if text == "" != before:
                await anyio.sleep(WRITTEN_S)  # who makes it may be about to write it
                text = _read(path)
            if text != before:
                said = Asked(None) if text is None else said_by(text) or Asked(DEADLINE_S)
                if text is not None and text.strip() and said_by(text) is None:
                    _log.warning(
                        "notice file %s: %.80r is not a notice; draining within %g s",
                        path,
                        text,
                        DEADLINE_S,
                        extra={"topic": "a-drain-notice-cannot-be-read"},
                    )
                self._on_said(said, "by the notice file")
                before = text
            await anyio.sleep(FILE_INTERVAL_S)

    async def _follow(self, command: str) -> None:
        pause_s, has_warned = PAUSE_MIN_S, False
        while True:
            began = aio.now()
            how = await self._listen(command)
            if not has_warned:
                _log.warning("notice command %r %s; restarting it", command, how)
                has_warned = True
            pause_s = PAUSE_MIN_S if aio.now() - began >= PAUSE_MAX_S else min(2 * pause_s, PAUSE_MAX_S)
            await anyio.sleep(pause_s)

    async def _listen(self, command: str) -> str:
        """Runs the program once, and hears its lines; gives how it ended."""
        try:
            async with program(command, self._env) as popen:
                assert popen.stdout is not None
                await self._hear(popen.stdout.fileno())
                await wait_ended(popen.pid)
        except ProgramError as error:
            return str(error)
        return f"ended (exit code {popen.returncode})"

    async def _hear(self, fd: int) -> None:
        rest, has_warned = b"", False
        os.set_blocking(fd, False)
        while True:
            await aio.wait_readable(fd)
            if not (data := os.read(fd, TEXT_BYTES_MAX)):
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                text = line.decode(errors="replace")
                if (said := said_by(text)) is not None and len(line) <= TEXT_BYTES_MAX:
                    self._on_said(said, "by the notice command")
                elif text.strip() and not has_warned:
                    has_warned = True
                    _log.warning(
                        "notice command: %.80r is not a notice: print 'drain SECONDS REASON' or 'cancel'",
                        text,
                        extra={"topic": "a-drain-notice-cannot-be-read"},
                    )
            rest = rest[:TEXT_BYTES_MAX]  # a flood without a line's end


def _read(path: Path) -> str | None:
    """What the file says; `None` if it is not there."""
    try:
        with open(path, "rb", buffering=0) as file:
            return (file.read(TEXT_BYTES_MAX) or b"").decode(errors="replace")
    except OSError:
        return None
