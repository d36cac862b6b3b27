"""Lowers the fork server's CPU priority during imports, and restores it before forks.

Part of the fork server's program: imports nothing of the package.
"""

import os

_LOWEST = 19


def lower() -> None:
    """Leaves the CPU to any other process that needs it; `restore` undoes this.

    Without privileges a process cannot leave `SCHED_IDLE` (`sched(7)`).  Then this process, a session leader, lowers
    its session (autogroup), which has an effect if its control group is the root.
    """
    if os.sched_getscheduler(0) == os.SCHED_OTHER and _may_come_back():
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        _set_autogroup(os.getpid(), _LOWEST)


def restore(pid: int, usual: int) -> None:
    """Undoes `lower` for a process.

    Args:
        usual: its previous policy.

    Raises:
        OSError: it has ended.
    """
    if os.sched_getscheduler(pid) != usual:
        os.sched_setscheduler(pid, usual, os.sched_param(0))
    else:
        _set_autogroup(pid, 0)


def _may_come_back() -> bool:
    if (pid := os.fork()) == 0:
        try:
            for policy in (os.SCHED_IDLE, os.SCHED_OTHER):
                os.sched_setscheduler(0, policy, os.sched_param(0))
        finally:
            os._exit(os.sched_getscheduler(0) != os.SCHED_OTHER)
    return os.waitpid(pid, 0)[1] == 0


def _set_autogroup(pid: int, nice: int) -> None:
    try:
        with open(f"/proc/{pid}/autogroup", "w") as file:
            file.write(str(nice))
    except OSError:
        pass  # a kernel without autogroups
