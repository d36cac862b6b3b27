"""Whether this node is fit to take part in the next round, judged by the user's program and by the state of the host.

The gate fails open: a broken check keeps no node out.  Elsewhere, a health check once removed whole racks because its
output on stderr was read as a verdict.
"""

from __future__ import annotations

import logging
import os
import random
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio

from aelastic.base.host import proc_table
from aelastic.base.host.children import helpers
from aelastic.base.host.files import text_of
from aelastic.base.host.programs import ProgramError, output_of
from aelastic.base.host.usage import descriptors
from aelastic.base.loop import clock
from aelastic.base.loop.threads import in_thread, run_sync

_log = logging.getLogger(__name__)

BUILT_IN = "builtin"  # instead of a program: only the state of the host
FIT, UNFIT = 0, 2
LIMIT_S = 30.0
OUTPUT_BYTES_MAX = 64 << 10
# A fault of the host counts if it is seen twice, and not while the machine still boots.
LOOK_AGAIN_S = 5.0
BOOTED_S = 120.0
# An unfit node is checked again, at growing intervals, and not at the same moment as others.
AGAIN_MIN_S, AGAIN_MAX_S = 30.0, 600.0
# Drivers release memory some time after a process has ended.
HELD_S, HELD_LOOK_S = 50.0, 0.5
LOG_BYTES_MIN, SHM_BYTES_MIN = 256 << 20, 64 << 20
DEVICES = ("/dev/nvidia", "/dev/kfd")
# NVIDIA's catalogue: after these a device must be reset or replaced.
_FATAL_XIDS = {48, 64, 74, 79, 95, 119, 120, 140, 143, 154}
_XID = re.compile(r"NVRM: Xid \(([^)]*)\): (\d+)|SXid \(([^)]*)\): (\d+), Fatal")


class HealthGate:
    """The gate of one node.

    Args:
        command: a shell command; exit code 2: unfit, with the reason on the first line of its stdout; 0: fit; others:
              undecided.
        env: the environment of the command.
        mark: a string that the environment of each process of this run contains.
        folder: the folder of the workers' logs.
    """

    def __init__(self, command: str, env: Mapping[str, str], mark: str, folder: Path) -> None:
        self._command, self._env, self._mark, self._folder = command, env, mark.encode(), folder
        self._warned: set[str] = set()
        self._again_s = AGAIN_MIN_S
        self._kernel: int | None = None  # the kernel log, from now on
        with suppress(OSError):
            self._kernel = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._kernel, 0, os.SEEK_END)
        self._xid = ""  # a fatal device error since this agent started

    async def look(self, workers: Collection[int] = ()) -> str:
        """Returns why this node is unfit; "" if it is fit, or the check is undecided.

        Args:
            workers: pids of the workers that wait for the next round, and keep their devices.
        """
        reason = await self._asked() if self._command != BUILT_IN else ""
        if not reason and _uptime_s() >= BOOTED_S and (reason := await self._host()):
            await anyio.sleep(LOOK_AGAIN_S)
            reason = await self._host()
        reason = reason or await self._held(workers)
        if not reason:
            self._again_s = AGAIN_MIN_S
        return reason

    def pause_s(self) -> float:
        """Returns how long to wait before an unfit node is checked again."""
        pause_s = self._again_s * random.uniform(0.8, 1.2)  # noqa: S311  no secret
        self._again_s = min(2 * self._again_s, AGAIN_MAX_S)
        return pause_s

    def close(self) -> None:
        if self._kernel is not None:
            os.close(self._kernel)

    # The program.

    async def _asked(self) -> str:
        code, out, trouble = None, "", f"took more than {LIMIT_S:g} s"
        try:
            with anyio.move_on_after(LIMIT_S):
                code, out, err = await output_of(self._command, self._env, bytes_max=OUTPUT_BYTES_MAX)
                last = err.strip().rpartition("\n")[2][:200]
                trouble = "" if code in {FIT, UNFIT} else f"exit code {code}: {last or 'it printed nothing'}"
        except ProgramError as error:
            trouble = str(error)
        if trouble and trouble not in self._warned:
            self._warned.add(trouble)
            _log.warning(
                "the health check failed to decide, so this node is treated as fit: %s",
                trouble,
                extra={"topic": "the-node-is-unfit"},
            )
        if code == UNFIT:
            return out.strip().partition("\n")[0][:200] or f"the health check exited with {UNFIT}"
        return ""

    # The host.

    async def _host(self) -> str:
        """Returns the fault of the host, or "", or a disk does not answer."""
        with suppress(TimeoutError):
            return await in_thread(self._fault_of_host, within_s=LIMIT_S)
        return ""

    def _fault_of_host(self) -> str:
        for path, least in ((self._folder, LOG_BYTES_MIN), (Path("/dev/shm"), SHM_BYTES_MIN)):  # noqa: S108
            with suppress(OSError):
                room = os.statvfs(path)
                free = room.f_bavail * room.f_frsize
                if free < min(least, room.f_blocks * room.f_frsize // 2):  # some file systems are that small
                    return f"{free >> 20} MiB are left in {path}"
        with suppress(OSError):  # everything has been read, or reading is not permitted
            while self._kernel is not None and (line := os.read(self._kernel, 8192)):
                self._xid = fatal_xid(line.decode(errors="replace")) or self._xid
        return self._xid

    async def _held(self, workers: Collection[int]) -> str:
        """Waits for processes of this run that still hold a device: the next workers would find no memory."""
        until = clock.now() + HELD_S
        look = partial(holder, self._mark, workers)
        while (held := await run_sync(look, abandon_on_cancel=True)) and clock.now() < until:  # noqa: ASYNC110  /proc
            await anyio.sleep(HELD_LOOK_S)
        return held


def fatal_xid(line: str) -> str:
    """Returns the fatal device error in a line of the kernel log, or ""."""
    if (match := _XID.search(line)) is None:
        return ""
    device, xid, switch, sxid = match.groups()
    if sxid is not None:
        return f"SXid {sxid} of {switch}"
    return f"Xid {xid} of {device}" if int(xid) in _FATAL_XIDS else ""


def holder(mark: bytes, workers: Collection[int] = (), devices: tuple[str, ...] = DEVICES) -> str:
    """Describes a process of an earlier generation that holds a device; "" if none does.

    Args:
        mark: a string that the environment of each process of this run contains.
        workers: pids of the current generation's workers, which lead their sessions.
        devices: prefixes of the paths of devices.
    """
    for entry in proc_table.processes():
        is_ours = entry.pid in helpers or entry.pid == os.getpid() or entry.session in workers
        if is_ours or not proc_table.carries(entry.pid, mark):
            continue
        for path in descriptors(entry.pid).values():
            if path.startswith(devices):
                return f"process {entry.pid} of an earlier generation holds {path}"
    return ""


def _uptime_s() -> float:
    return float(text_of("/proc/uptime").partition(" ")[0] or BOOTED_S)
