"""The guard: a small process that outlives its agent only to leave nothing behind.

Two halves.  The functions read `/proc` and are used by `procs` as well.  The program, started by
`procs` from this very file, waits until its agent is gone, by whatever death, and then kills every
process that belongs to it.  It never acts while the agent lives.

What belongs to an agent:

- whoever is in the session of a worker (the agent tells which: lines `+PID` and `-PID` on a pipe);
- whoever carries the agent's mark in its environment: `TORCH_WORKER_SERVER_SOCKET` inside the agent's
  own scratch folder, whose name is random.  Daemons that left the session still carry it (but for those that a
  function worker forks and that never exec: theirs is the environment the agent was started with);
- whoever descends from one of these.  A nested agent, its guard and its workers, say.

Nothing else is ever signalled.  The program imports the standard library's cheapest modules only, and
is fed to the interpreter as its standard input, so that `pkill -f aelastic` does not find it.
"""

from __future__ import annotations

import os
import select
import signal
import sys

# Processes fork while they are being killed, so we look again until nothing is found.  This many looks
# that each still find something mean that a process survives SIGKILL (uninterruptible sleep).
LOOKS_MAX = 200
LOOK_AGAIN_MS = 25
# The guard of an agent within our agent knows of daemons that we can't find: it is left alone for so many looks.
LOOKS_FOR_GUARDS = 100
# Of a line in the process table we need the beginning; the name in it has 64 bytes at most.
STAT_BYTES = 1024
# How a guard is told from other processes, by its command line.
NAME = "guards-the-workers-of"


class Process:
    """One line of the process table: `proc(5)`, `/proc/PID/stat`."""

    __slots__ = ("parent", "pid", "session", "state")

    def __init__(self, pid: int, state: str, parent: int, session: int) -> None:
        self.pid, self.state, self.parent, self.session = pid, state, parent, session


def process(pid: int | str) -> Process | None:
    """The process, or `None` when there is none (any more)."""
    fields = stat_fields(pid)
    return None if fields is None else Process(int(pid), fields[0].decode(), int(fields[1]), int(fields[3]))


def stat_fields(pid: int | str) -> list[bytes] | None:
    """What proc(5) has of a process in `stat`, from its state (field 3) on; `None` when there is none (any more)."""
    try:  # `os` instead of `open`: half the time, for what is done once per process of the machine
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    except OSError:
        return None
    try:
        stat = os.read(fd, STAT_BYTES)
    except OSError:
        return None
    finally:
        os.close(fd)
    # The name is in parentheses and may hold spaces and parentheses itself: count from the last one.
    return stat[stat.rindex(b")") + 2 :].split()


def is_alive(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    entry = process(pid)
    return entry is not None and entry.state not in "ZX"


def processes() -> list[Process]:
    """Every process that lives.  Zombies are dead: they hold nothing and can't be killed."""
    table = (process(name) for name in os.listdir("/proc") if name.isdigit())
    return [entry for entry in table if entry is not None and entry.state not in "ZX"]


def session_members(sessions: set[int]) -> list[Process]:
    """Who lives in one of the sessions, leaders included."""
    table = (process(name) for name in os.listdir("/proc") if name.isdigit() and may_be_in(int(name), sessions))
    return [entry for entry in table if entry is not None and entry.session in sessions and entry.state not in "ZX"]


def may_be_in(pid: int, sessions: set[int]) -> bool:
    """Whether a process is in one of the sessions, as far as the kernel tells; to read `stat` takes six times as long.

    A restart looks at all processes of the machine, often thousands, once for each worker.
    """
    try:
        return os.getsid(pid) in sessions
    except ProcessLookupError:
        return False
    except OSError:
        return True  # a security module hides it


def carries(pid: int, mark: bytes) -> bool:
    """Whether the environment a process was started with holds the mark."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read()
    except OSError:
        return False  # gone, or somebody else's


def belongings(sessions: set[int], mark: bytes, spare: set[int]) -> list[Process]:
    """Who belongs to an agent, as the module says; `spare` are pids that are never part of it."""
    table = [entry for entry in processes() if entry.pid not in spare]
    found = {
        entry.pid
        for entry in table
        # A function's process is known by its pid before it leads a session.
        if entry.session in sessions or entry.pid in sessions or (mark and carries(entry.pid, mark))
    }
    grown = True
    while grown:
        children = {entry.pid for entry in table if entry.parent in found} - found
        found |= children
        grown = bool(children)
    return [entry for entry in table if entry.pid in found]


def is_guard(pid: int) -> bool:
    """Whether a process is a guard, ours or another agent's.  Once its agent is dead, it ends by itself."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return NAME.encode() in file.read().split(b"\0")
    except OSError:
        return False


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass  # gone, or not ours to kill


def kill_group(leader: int) -> None:
    """Kills a process group at one stroke: links of a chain that fork and die would slip through a look at each."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except OSError:
        pass  # nobody is left in it, or none is ours to kill


def sweep(sessions: set[int], mark: bytes) -> list[Process]:
    """Kills what belongs to a dead agent; gives what survives even that."""
    spare = {os.getpid()}
    left: list[Process] = []
    for look in range(LOOKS_MAX):
        left = belongings(sessions, mark, spare)
        if not left:
            break
        for session in sessions & {entry.session for entry in left}:
            kill_group(session)
        for entry in left:
            if look >= LOOKS_FOR_GUARDS or not is_guard(entry.pid):
                kill(entry.pid)
        select.select([], [], [], LOOK_AGAIN_MS / 1000)
    return left


def main(agent: int, mark: bytes, scratch: str, control: int) -> None:
    """Waits for the agent's end, then sweeps.

    Args:
        agent: pid of the agent.
        mark: what its workers' environment holds.
        scratch: a folder to remove after that; empty for none.
        control: a pipe on which the agent tells of sessions; a line `.`, or its end, is the end of the agent's run.
    """
    poll = select.poll()
    poll.register(control, select.POLLIN)
    try:
        # Not only the pipe: a forked child of the agent may hold the pipe's other end open.
        poll.register(os.pidfd_open(agent), select.POLLIN)
    except (AttributeError, OSError):
        pass  # no pidfds here: the pipe tells
    timeout = None if os.getppid() == agent else 0  # 0: it died before we could watch it
    sessions: set[int] = set()
    said = b""
    while True:
        ready = dict(poll.poll(timeout))
        chunk = os.read(control, 65536) if control in ready else b""
        if not chunk:
            break
        *lines, said = (said + chunk).split(b"\n")
        if b"." in lines:
            break
        for line in lines:
            (sessions.add if line[:1] == b"+" else sessions.discard)(int(line[1:]))
    left = sweep(sessions, mark)
    if left:
        pids = ", ".join(f"{entry.pid} (state {entry.state})" for entry in left)
        print(f"aelastic: processes survive SIGKILL: {pids}; this host may need a restart", file=sys.stderr)
    if scratch:
        remove(scratch)


def remove(folder: str) -> None:
    """Removes a folder and what is in it (`shutil.rmtree` would cost an import of 10 ms)."""
    try:
        for parent, folders, files in os.walk(folder, topdown=False):
            for name in files:
                os.unlink(os.path.join(parent, name))
            for name in folders:
                path = os.path.join(parent, name)
                (os.unlink if os.path.islink(path) else os.rmdir)(path)
        os.rmdir(folder)
    except OSError:
        pass  # removed by the agent already, or never made


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(ignored, signal.SIG_IGN)
    # In hexadecimal: our own name is part of the paths, and `pkill -f aelastic` is not to find it here.
    agent_pid, mark_hex, scratch_hex, control_fd = sys.argv[2:]
    main(int(agent_pid), bytes.fromhex(mark_hex), os.fsdecode(bytes.fromhex(scratch_hex)), int(control_fd))
