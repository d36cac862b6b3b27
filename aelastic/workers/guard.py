"""Clean-up process: kills an agent's workers when the agent dies, or is frozen while others continue without it.

Waits until its agent is gone, however it ended, and then kills every process that belongs to it.  While the agent is
alive, it acts in one case only: an agent that takes part in a job of several nodes gives signs of life, and if these
stop for long enough, the guard kills the workers' sessions (`Silence`).  Fork servers and stores keep running.

What belongs to an agent:

- every process in the session of a worker (which the agent reports in lines `+PID` and `-PID` on a pipe);
- every process that has the agent's mark in its environment: `TORCH_WORKER_SERVER_SOCKET` inside the agent's
  own scratch folder, whose name is random.  Daemons that left the session still carry it (except those that a
 function worker forks and that never exec: they have the environment that the agent was started with);
- every descendant of one of these, such as a nested agent, its guard and its workers.

Nothing else is ever signalled.  The program consists of the text of `host.proc_table`, of `host.signals` and of this
file (`host.children.start_program`).
"""

import os
import select
import sys

if __name__ != "__main__":  # the program has these in its own text above
    from aelastic.base.host.proc_table import Process, carries, kill, kill_group, processes, with_descendants
    from aelastic.base.host.signals import ignore_signals

# Processes fork while they are being killed, so we look again until nothing is found.  If this many looks
# still find something, a process survives SIGKILL (uninterruptible sleep).
LOOKS_MAX = 200
LOOK_AGAIN_MS = 25
# The guard of an agent within our agent knows daemons that we cannot find: it is left alone for this many looks.
LOOKS_FOR_GUARDS = 100
# A guard is recognized by this word in its command line.
NAME = "guards-the-workers-of"
# An agent is frozen if it was silent at this many looks in a row.  If the whole machine is frozen, so is the guard:
# that is one look, however long it takes, and then the agent has the time of the other looks to give a sign.
SILENT_LOOKS = 4


def belongings(sessions: set[int], mark: bytes, spare: set[int]) -> list[Process]:
    """Returns the processes that belong to an agent, as described above; `spare` are pids that never do."""
    table = [entry for entry in processes() if entry.pid not in spare]
    found = {
        entry.pid: 0
        for entry in table
        # A function's process is known by its pid before it is a session leader.
        if entry.session in sessions or entry.pid in sessions or (mark and carries(entry.pid, mark))
    }
    found = with_descendants(table, found)
    return [entry for entry in table if entry.pid in found]


def is_guard(pid: int) -> bool:
    """Whether a process is a guard, ours or another agent's.  It ends by itself once its agent is dead."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return NAME.encode() in file.read().split(b"\0")
    except OSError:
        return False


def sweep(sessions: set[int], mark: bytes) -> list[Process]:
    """Kills what belongs to an agent (without a mark, only its workers' sessions); returns surviving processes."""
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


class AgentMessages:
    """The agent's messages on the control pipe: the sessions of its workers, and the end of its run."""

    def __init__(self, control: int) -> None:
        self.sessions: set[int] = set()
        self._control, self._rest = control, b""

    def read(self) -> bool:
        """Reads what is available; returns false at the end."""
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
        signs: an eventfd(2) that the agent writes to while it is not frozen; -1: none.
        killed: another one, which notifies the agent that its workers were killed.
        limit_s: the agent is frozen if it gives no sign for this long.
    """

    def __init__(self, signs: int = -1, killed: int = -1, limit_s: float = 0.0) -> None:
        self.signs, self._killed, self._limit_s = signs, killed, limit_s
        self._silent_looks = 0

    def look_ms(self) -> float | None:
        """Returns how long to wait for a sign; `None`: forever, if none comes, or the agent is known to be frozen."""
        is_awaited = self.signs >= 0 and self._silent_looks < SILENT_LOOKS
        return self._limit_s / SILENT_LOOKS * 1000 if is_awaited else None

    def on_sign(self) -> None:
        os.eventfd_read(self.signs)
        self._silent_looks = 0

    def is_frozen(self) -> bool:
        """Counts a look without a sign; returns true once, when there were enough, until there is a sign again."""
        self._silent_looks += 1
        return self._silent_looks == SILENT_LOOKS

    def report(self, agent: int) -> None:
        """Reports on the console, and to the agent for when it wakes up, that its workers are killed."""
        silent, why = (
            f"no sign of life for {self._limit_s:g} s",
            "other nodes may have started another round without it",
        )
        os.eventfd_write(self._killed, 1)
        try:
            print(f"aelastic: agent {agent} has given {silent}: its workers are killed, since {why}", file=sys.stderr)
        except OSError:
            pass  # nobody reads it


def wait_for_end(agent: int, control: int, messages: AgentMessages, silence: Silence) -> None:
    """Returns when the agent's run has ended, or the agent has died; kills its workers each time it is frozen."""
    poll = select.poll()
    for fd in (control, silence.signs):
        if fd >= 0:
            poll.register(fd, select.POLLIN)
    try:
        # Not only the pipe: a forked child of the agent may hold the pipe's other end open.
        poll.register(os.pidfd_open(agent), select.POLLIN)
    except (AttributeError, OSError):
        pass  # no pidfds here: the pipe shows it
    has_died = os.getppid() != agent  # before we could watch it
    while True:
        ready = dict(poll.poll(0 if has_died else silence.look_ms()))
        if control in ready:
            if not messages.read():
                return
        elif silence.signs in ready:
            silence.on_sign()
        elif ready or has_died:
            return
        elif silence.is_frozen() and messages.sessions:
            silence.report(agent)  # first: it must know when it sees its workers end
            left = sweep(messages.sessions, b"")
            messages.sessions &= {entry.session for entry in left}  # other processes may have these pids later


def main(agent: int, mark: bytes, scratch: str, control: int, silence: Silence) -> None:
    """Waits for the agent's end, then sweeps.

    Args:
        agent: pid of the agent.
        mark: a string in its workers' environment.
        scratch: a folder to remove after that; empty for none.
        control: a pipe on which the agent reports sessions; a line `.`, or its end, is the end of the agent's run.
        silence: when the agent is frozen.
    """
    messages = AgentMessages(control)
    wait_for_end(agent, control, messages, silence)
    left = sweep(messages.sessions, mark)
    if left:
        pids = ", ".join(f"{entry.pid} (state {entry.state})" for entry in left)
        print(f"aelastic: processes survive SIGKILL: {pids}; you may have to reboot this host", file=sys.stderr)
    if scratch:
        remove(scratch)


def remove(folder: str) -> None:
    """Removes a folder with its content (`shutil.rmtree` would cost an import of 10 ms)."""
    try:
        for parent, folders, files in os.walk(folder, topdown=False):
            for name in files:
                os.unlink(os.path.join(parent, name))
            for name in folders:
                path = os.path.join(parent, name)
                (os.unlink if os.path.islink(path) else os.rmdir)(path)
        os.rmdir(folder)
    except OSError:
        pass  # already removed by the agent, or never created


if __name__ == "__main__":
    ignore_signals()
    # In hexadecimal: our own name is part of the paths, and `pkill -f aelastic` must not find it here.
    agent_pid, mark_hex, scratch_hex, control_fd, *signs = sys.argv[2:]
    silent = Silence(int(signs[0]), int(signs[1]), float(signs[2])) if signs else Silence()
    main(int(agent_pid), bytes.fromhex(mark_hex), os.fsdecode(bytes.fromhex(scratch_hex)), int(control_fd), silent)
