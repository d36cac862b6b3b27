"""Waiting for child processes, and reaping them.

Nothing here waits for "any child": that would take the status from the code that waits for that one.
"""

from __future__ import annotations

import os

import anyio

from aelastic.host import proc_table

# Where the kernel has no pidfds, how often a process is looked at.
LOOK_AGAIN_S = 0.05

# Children that some code of this process waits for.  `reap_orphans` leaves them alone.
waited_for: set[int] = set()


def pidfd_of(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends (`pidfd_open(2)`); `None` where there are none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None  # not Linux, older than 5.3, forbidden; or the process is gone


async def wait_ended(pid: int) -> None:
    """Returns when the process, which need not be our child, has ended (it may be a zombie still)."""
    if (pidfd := pidfd_of(pid)) is not None:
        try:
            await anyio.wait_readable(pidfd)
        finally:
            os.close(pidfd)
        return
    while proc_table.is_alive(pid):  # noqa: ASYNC110  no kernel to tell us
        await anyio.sleep(LOOK_AGAIN_S)


def reap_orphans() -> None:
    """Takes the status of dead children that nothing waits for.

    A process with pid 1 inherits every orphan of its container; as zombies they would fill the
    process table.  Orphans come from workers, and so from other sessions than ours: what is in ours was
    started by this process, by `multiprocessing` say, and is waited for there.
    """
    for name in os.listdir("/proc"):
        entry = proc_table.process(name) if name.isdigit() else None
        if entry is None or entry.state != "Z" or entry.parent != os.getpid() or entry.pid in waited_for:
            continue
        if entry.session != os.getsid(0):
            try:
                os.waitpid(entry.pid, os.WNOHANG)
            except ChildProcessError:
                pass  # other code of this process took it
