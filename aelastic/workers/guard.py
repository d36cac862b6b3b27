"""Clean-up process: kills an agent's workers when the agent dies, or is frozen while others go on without it.

It waits until its agent is gone, by whatever death, and then kills every process that belongs to it.  While the agent
lives, it acts in one case only: an agent that takes part in a job of several nodes gives signs of life, and where these
stop for long enough, the workers' sessions are killed (`Silence`).  Fork servers and stores live on.

What belongs to an agent:

- every process in the session of a worker (the agent tells which: lines `+PID` and `-PID` on a pipe);
- every process that has the agent's mark in its environment: `TORCH_WORKER_SERVER_SOCKET` inside the agent's
  own scratch folder, whose name is random.  Daemons that left the session still carry it (but for those that a
  function worker forks and that never exec: theirs is the environment the agent was started with);
- every descendant of one of these.  A nested agent, its guard and its workers, say.

Nothing else is ever signalled.  The program is the text of `host.proc_table`, of `host.signals` and of this file
(`host.children.start_program`).
"""

import os
import select
import sys

if __name__ != "__main__":  # the program has these in its own text, above
    from aelastic.host.proc_table import Process, carries, kill, kill_group, processes, with_descendants
    from aelastic.host.signals import ignore_signals

# Processes fork while they are being killed, so we look again until nothing is found.  This many looks
# that each still find something mean that a process survives SIGKILL (uninterruptible sleep).
LOOKS_MAX = 200
LOOK_AGAIN_MS = 25
# The guard of an agent within our agent knows of daemons that we cannot find: it is left alone for so many looks.
LOOKS_FOR_GUARDS = 100
# A guard is recognized by this word of its command line.
NAME = "guards-the-workers-of"
# An agent is silent if it was so at as many looks one after the other.  If the whole machine is frozen, the guard is,
# too: that is one look, however long it takes, and then the agent has the time of the others to speak.
SILENT_LOOKS = 4


def belongings(sessions: set[int], mark: bytes, spare: set[int]) -> list[Process]:
    """The processes that belong to an agent, as the module says; `spare` are pids that are never part of it."""
    table = [entry for entry in processes() if entry.pid not in spare]
    found = {
        entry.pid: 0
        for entry in table
        # A function's process is known by its pid before it leads a session.
        if entry.session in sessions or entry.pid in sessions or (mark and carries(entry.pid, mark))
    }
    found = with_descendants(table, found)
    return [entry for entry in table if entry.pid in found]


def is_guard(pid: int) -> bool:
    """Whether a process is a guard, ours or another agent's.  Once its agent is dead, it ends by itself."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return NAME.encode() in file.read().split(b"\0")
    except OSError:
        return False


def sweep(sessions: set[int], mark: bytes) -> list[Process]:
    """Kills what belongs to an agent, without a mark its workers' sessions alone; gives what survives even that."""
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


class Told:
    """What the agent says on the control pipe: the sessions of its workers, and the end of its run."""

    def __init__(self, control: int) -> None:
        self.sessions: set[int] = set()
        self._control, self._rest = control, b""

    def read(self) -> bool:
        """Takes what there is; false at the end."""
        chunk = os.read(self._control, 65536)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if not chunk or b"." in lines:
            return False
        for line in lines:
            (self.sessions.add if line[:1] == b"+" else self.sessions.discard)(int(line[1:]))
        return True


class Silence:
    """Whether the agent gives signs of life.

    Args:
        signs: an eventfd(2) that the agent writes to while it is not frozen; -1: it does not.
        killed: another, that tells it that its workers were killed.
        limit_s: it is frozen if it gives no sign for so long.
    """

    def __init__(self, signs: int = -1, killed: int = -1, limit_s: float = 0.0) -> None:
        self.signs, self._killed, self._limit_s = signs, killed, limit_s
        self._silent_looks = 0

    def look_ms(self) -> float | None:
        """How long to wait for a sign; `None`: without limit, since none comes, or the agent is known to be frozen."""
        is_awaited = self.signs >= 0 and self._silent_looks < SILENT_LOOKS
        return self._limit_s / SILENT_LOOKS * 1000 if is_awaited else None

    def on_sign(self) -> None:
        os.eventfd_read(self.signs)
        self._silent_looks = 0

    def is_frozen(self) -> bool:
        """Another look has seen no sign: is that enough?  True once, until there is one again."""
        self._silent_looks += 1
        return self._silent_looks == SILENT_LOOKS

    def tell(self, agent: int) -> None:
        """Says on the console, and to the agent for when it wakes up, that its workers are killed."""
        silent, why = (
            f"no sign of life for {self._limit_s:g} s",
            "other nodes may have started another round without it",
        )
        os.eventfd_write(self._killed, 1)
        try:
            print(f"aelastic: agent {agent} has given {silent}: its workers are killed, since {why}", file=sys.stderr)
        except OSError:
            pass  # nobody listens


def wait_for_end(agent: int, control: int, told: Told, silence: Silence) -> None:
    """Returns when the agent's run has ended, or the agent has died; kills its workers each time it is frozen."""
    poll = select.poll()
    for fd in (control, silence.signs):
        if fd >= 0:
            poll.register(fd, select.POLLIN)
    try:
        # Not only the pipe: a forked child of the agent may hold the pipe's other end open.
        poll.register(os.pidfd_open(agent), select.POLLIN)
    except (AttributeError, OSError):
        pass  # no pidfds here: the pipe tells
    has_died = os.getppid() != agent  # before we could watch it
    while True:
        ready = dict(poll.poll(0 if has_died else silence.look_ms()))
        if control in ready:
            if not told.read():
                return
        elif silence.signs in ready:
            silence.on_sign()
        elif ready or has_died:
            return
        elif silence.is_frozen() and told.sessions:
            silence.tell(agent)  # first: it is to know of that when it sees its workers end
            left = sweep(told.sessions, b"")
            told.sessions &= {entry.session for entry in left}  # other processes may have these numbers later


def main(agent: int, mark: bytes, scratch: str, control: int, silence: Silence) -> None:
    """Waits for the agent's end, then sweeps.

    Args:
        agent: pid of the agent.
        mark: what its workers' environment holds.
        scratch: a folder to remove after that; empty for none.
        control: a pipe on which the agent tells of sessions; a line `.`, or its end, is the end of the agent's run.
        silence: when the agent is frozen.
    """
    told = Told(control)
    wait_for_end(agent, control, told, silence)
    left = sweep(told.sessions, mark)
    if left:
        pids = ", ".join(f"{entry.pid} (state {entry.state})" for entry in left)
        print(f"aelastic: processes survive SIGKILL: {pids}; you may have to reboot this host", file=sys.stderr)
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
    ignore_signals()
    # In hexadecimal: our own name is part of the paths, and `pkill -f aelastic` is not to find it here.
    agent_pid, mark_hex, scratch_hex, control_fd, *signs = sys.argv[2:]
    silent = Silence(int(signs[0]), int(signs[1]), float(signs[2])) if signs else Silence()
    main(int(agent_pid), bytes.fromhex(mark_hex), os.fsdecode(bytes.fromhex(scratch_hex)), int(control_fd), silent)
