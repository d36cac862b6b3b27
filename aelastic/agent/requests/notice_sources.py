"""Sources of notices that this node will be shut down: a file that somebody writes, or a program that watches for them.

Each is off by default.  A line of either is `drain 110 spot` (within 110 s, because of `spot`) or `cancel`.  An empty
file, or one with only a number, is also a notice; removing the file cancels it.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import anyio

from aelastic.agent.resources import DrainRequest
from aelastic.base.host.children import wait_ended
from aelastic.base.host.programs import ProgramError, program
from aelastic.base.loop import clock
from aelastic.base.loop.sockets import wait_readable
from aelastic.spec import WorkerSpec

_log = logging.getLogger(__name__)

# The shortest notice that clouds give: Google 30 s; AWS 120 s, Azure 30 s.
DEADLINE_S = 30.0
FILE_INTERVAL_S = 1.0
WRITTEN_S = 0.1  # an empty file is read again this much later
TEXT_BYTES_MAX = 4096
# A program that ends is restarted after a pause, which grows until the program has run for the longest pause.
PAUSE_MIN_S, PAUSE_MAX_S = 1.0, 60.0


def notice_of(line: str) -> DrainRequest | None:
    """Parses `drain SECONDS [REASON]`, `SECONDS [REASON]` or `cancel`; returns `None` for any other line."""
    if line.strip() == "cancel":
        return DrainRequest(None)
    found = re.fullmatch(r"(?:drain\s+)?(\d{1,6}(?:\.\d+)?)(?:\s*s)?(|\s.*)", line.strip(), re.DOTALL)
    return None if found is None else DrainRequest(float(found[1]), " ".join(found[2].split())[:200])


class NoticeSources:
    """The notice sources of one agent.

    Args:
        spec: names the sources.
        env: the environment of the program.
        ask: receives the notices.
    """

    def __init__(self, spec: WorkerSpec, env: Mapping[str, str], ask: Callable[[DrainRequest], None]) -> None:
        self._spec, self._env, self._ask = spec, env, ask

    async def run(self) -> None:
        """Watches the sources.  Runs until cancelled, then ends the program."""
        async with anyio.create_task_group() as tasks:
            if (path := self._spec.notice_file) is not None:
                tasks.start_soon(self._watch, path, name="notice file")
            if self._spec.notice_command is not None:
                tasks.start_soon(self._follow, self._spec.notice_command, name="notice command")

    def _on_notice(self, request: DrainRequest, by: str) -> None:
        self._ask(
            request
            if request.deadline_s is None
            else request.replace(reason=f"{request.reason}, {by}".removeprefix(", "))
        )

    async def _watch(self, path: Path) -> None:
        before: str | None = None
        while True:
            text = _read(path)
            if text == "" != before:
                await anyio.sleep(WRITTEN_S)  # its creator may be about to write to it
                text = _read(path)
            if text != before:
                request = DrainRequest(None) if text is None else notice_of(text) or DrainRequest(DEADLINE_S)
                if text is not None and text.strip() and notice_of(text) is None:
                    _log.warning(
                        "notice file %s: %.80r is not a notice; draining within %g s",
                        path,
                        text,
                        DEADLINE_S,
                        extra={"topic": "a-drain-notice-cannot-be-read"},
                    )
                self._on_notice(request, "by the notice file")
                before = text
            await anyio.sleep(FILE_INTERVAL_S)

    async def _follow(self, command: str) -> None:
        pause_s, has_warned = PAUSE_MIN_S, False
        while True:
            began = clock.now()
            how = await self._listen(command)
            if not has_warned:
                _log.warning("notice command %r %s; restarting it", command, how)
                has_warned = True
            pause_s = PAUSE_MIN_S if clock.now() - began >= PAUSE_MAX_S else min(2 * pause_s, PAUSE_MAX_S)
            await anyio.sleep(pause_s)

    async def _listen(self, command: str) -> str:
        """Runs the program once and handles its lines; returns how it ended."""
        try:
            async with program(command, self._env) as popen:
                assert popen.stdout is not None
                await self._read_lines(popen.stdout.fileno())
                await wait_ended(popen.pid)
        except ProgramError as error:
            return str(error)
        return f"ended (exit code {popen.returncode})"

    async def _read_lines(self, fd: int) -> None:
        rest, has_warned = b"", False
        os.set_blocking(fd, False)
        while True:
            await wait_readable(fd)
            if not (data := os.read(fd, TEXT_BYTES_MAX)):
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                text = line.decode(errors="replace")
                if (request := notice_of(text)) is not None and len(line) <= TEXT_BYTES_MAX:
                    self._on_notice(request, "by the notice command")
                elif text.strip() and not has_warned:
                    has_warned = True
                    _log.warning(
                        "notice command: %.80r is not a notice: print 'drain SECONDS REASON' or 'cancel'",
                        text,
                        extra={"topic": "a-drain-notice-cannot-be-read"},
                    )
            rest = rest[:TEXT_BYTES_MAX]  # a flood without a newline


def _read(path: Path) -> str | None:
    """Returns the contents of the file; `None` if it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return (file.read(TEXT_BYTES_MAX) or b"").decode(errors="replace")
    except OSError:
        return None
