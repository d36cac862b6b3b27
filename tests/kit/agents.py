"""Jobs of several agents on one machine: each agent is a `Job` of its own, with its own folder and mark.

Signals control the workers, so that nothing here waits for durations: SIGUSR1 makes a worker fail, with an exception
and exit code of its own, and SIGUSR2 makes it succeed.  Until then it talks to the others of its round, and fails when
one of them ends (`kit.faults.star`).
"""

from __future__ import annotations

import os
import re
import signal
import socket
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kit.faults.star import STAR
from kit.launching import LOOPS, PREAMBLE, Job, Launcher, alive, stand_still
from kit.ports import listening, quiet_port
from kit.waiting import DEADLINE_S, wait_for

FAIL, FINISH = signal.SIGUSR1, signal.SIGUSR2
FAIL_CODE = 7

# The environment variables that a worker reports.
REPORTED = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "AELASTIC_ROUND",
)  # fmt: skip

WORKER = f"""{STAR}

def fail(*_):
    try:
        raise RuntimeError(f"rank {{rank}} fell")
    except RuntimeError:
        traceback.print_exc()
    os._exit({FAIL_CODE})


def finish(*_):
    say_farewell()
    say("end", rank)
    os._exit(0)


signal.signal(signal.SIGUSR1, fail)
signal.signal(signal.SIGUSR2, finish)
numbers = [os.environ[name] for name in {REPORTED!r}]
say("start", os.getpid(), *numbers, os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], os.environ["ROLE_NAME"])
begin_talk()
rest()
"""

# An agent that is about to join, and does so on `Job.go`.
LATE = """
import os

import anyio

from aelastic.rdzv.agent_link import AgentLink

connect = AgentLink._connect


async def connect_late(self, conn, record):
    open("late", "w").close()
    while not os.path.exists("go"):
        await anyio.sleep(0.01)
    await connect(self, conn, record)


AgentLink._connect = connect_late
"""

# Agents whose newcomers do not wait for long, for tests in which nodes come and go all the time.
HASTY = """
from aelastic.rdzv.leader import forming

forming.YOUNG_S = 1.0
"""

# Longer than any test, so that a step that must not wait for a lease hangs if it does.
LONG_LEASE_S = 60.0
# Longer than a busy machine delays an agent, but shorter than a test waits: if the leader dies with its store or is known
# by an older secret, a node may have to wait for a lease.
TEAM_LEASE_S = 10.0

COORDINATES = r"this agent leads the job now \("
IS_SPARE = "this node is a spare"
# Texts that an agent logs only if it has a bug, and that must not be mistaken for the end of a job.
NEVER_LOGGED = re.compile(
    r"bug in aelastic|RendezvousClosed|never retrieved|never awaited|Exception (ignored|in callback)|Unhandled exception"
)


@dataclass(frozen=True)
class Start:
    """One start of a worker, as the worker reported it."""

    pid: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group_rank: int
    group_world_size: int
    role_rank: int
    role_world_size: int
    restart: int
    round: int
    master_addr: str
    master_port: int
    role: str

    @classmethod
    def of(cls, line: str) -> Start:
        _, *numbers, master_addr, master_port, role = line.split()
        fields: list[Any] = [*map(int, numbers), master_addr, int(master_port), role]
        return cls(*fields)


@dataclass(frozen=True)
class Round:
    """Workers of several agents that form one world, in the order of their ranks."""

    starts: tuple[Start, ...]

    @property
    def pids(self) -> set[int]:
        return {start.pid for start in self.starts}

    @property
    def restart(self) -> int:
        return self.starts[0].restart

    @property
    def number(self) -> int:
        """The round's number from the workers' environment; it rises."""
        return self.starts[0].round

    def send_signal(self, signum: int, *ranks: int) -> None:
        """Signals the workers of these ranks; all workers, if no ranks are given."""
        for start in self.starts:
            if not ranks or start.rank in ranks:
                os.kill(start.pid, signum)


class Agent(Job):
    """One agent.

    Args:
        name: the name of its folder.
        nproc: how many workers it starts.
    """

    def __init__(
        self, name: str, nproc: int, folder: Path, command: Sequence[str], env: dict[str, str], *, is_cold: bool
    ) -> None:
        self.name, self.nproc = name, nproc
        super().__init__(folder, command, env, is_cold=is_cold)

    def __repr__(self) -> str:
        return self.name

    @property
    def starts(self) -> list[Start]:
        """Every start of a worker, oldest first."""
        return [Start.of(line) for line in self.lines if line.startswith("start ")]

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None

    def has_logged(self, pattern: str, count: int = 1) -> bool:
        """Whether its own output, not its workers', matches."""
        return len(re.findall(pattern, self.stderr)) >= count

    def wait_logged(self, pattern: str, limit_s: float = DEADLINE_S) -> None:
        def is_there() -> bool:
            if self.has_logged(pattern):
                return True
            if self.is_over and not self.has_logged(pattern):
                pytest.fail(f"{self} ended (code {self.process.returncode}) without {pattern!r}:\n{self.story}")
            return False

        wait_for(f"{self} says {pattern!r}", is_there, limit_s)

    def crash(self) -> None:
        """Sends SIGKILL to the agent alone."""
        self.signal(signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL

    def stop(self) -> None:
        """Sends SIGSTOP to the agent alone, like a machine that hangs; returns once it has stopped."""
        stand_still(self.pid)

    def ports(self) -> set[int]:
        """The ports at which the agent itself listens."""
        return listening_ports(self.pid)


@dataclass(frozen=True)
class Meeting:
    """Where the agents of a job meet: backend and endpoint."""

    backend: str
    endpoint: str


@dataclass
class Team:
    """The agents of one job.

    Args:
        launcher: ends what is left of them.
        meeting: where they meet.
        nnodes: the value of `--nnodes`.
        conf: the rendezvous configuration; by default, the lease is `TEAM_LEASE_S`.
        options: further options for each agent.
        worker: Python code of the workers.
        nproc: how many workers each agent starts.
        run_id: by default, a new one.
        name: prefix of the agents' folders; by default, the run id.
        env: environment of the agents, and so of the workers.
        wrapper: Python code that runs in each agent before its command line does.
    """

    launcher: Launcher
    meeting: Meeting
    nnodes: str
    conf: Mapping[str, Any] = field(default_factory=dict[str, Any])
    options: Sequence[str] = ("--max-restarts", "3")
    worker: str = WORKER
    nproc: int = 1
    run_id: str = field(default_factory=lambda: f"job-{uuid.uuid4().hex[:8]}")
    name: str = ""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    wrapper: str = ""
    agents: list[Agent] = field(default_factory=list[Agent])

    def start(self, *options: str, nproc: int = 0, wrapper: str = "", prefix: Sequence[str] = ()) -> Agent:
        """Starts one more agent.

        Args:
            options: added after the team's, which they override.
            nproc: how many workers it starts; by default, as many as the team.
            wrapper: instead of the team's.
            prefix: a command that starts it.
        """
        name = f"{self.name or self.run_id}-{len(self.agents)}"
        script = self.launcher.write(f"{name}/worker.py", self.worker, preamble=PREAMBLE)
        settings = {"lease": TEAM_LEASE_S, **self.conf}
        conf = ",".join(f"{key}={value}" for key, value in settings.items())
        program = self.launcher.agent_program(name, wrapper or self.wrapper)
        command = [
            *prefix, self.launcher.python, *program,
            "--loop", LOOPS[len(self.agents) % 2],
            "--nnodes", self.nnodes,
            "--nproc-per-node", str(nproc or self.nproc),
            "--rdzv-backend", self.meeting.backend,
            "--rdzv-endpoint", self.meeting.endpoint,
            "--rdzv-id", self.run_id,
            "--rdzv-conf", conf,
            *self.options,
            *options,
            str(script),
        ]  # fmt: skip
        folder = self.launcher.folder / name
        star = self.launcher.folder / "star"
        star.mkdir(exist_ok=True)
        env = {"LOGLEVEL": "INFO", "STAR": str(star), **self.env}
        is_cold = self.launcher.starts_cold(prefix)
        agent = Agent(name, nproc or self.nproc, folder, command, env, is_cold=is_cold)
        self.launcher.jobs.append(agent)
        self.agents.append(agent)
        return agent

    def start_many(self, count: int) -> list[Agent]:
        return [self.start() for _ in range(count)]

    # Looks.

    @property
    def live(self) -> list[Agent]:
        return [agent for agent in self.agents if not agent.is_over]

    @property
    def coordinator(self) -> Agent:
        """The live agent that was the last to log that it leads."""
        term = rf"{COORDINATES}.*term (\d+)\)"

        def found() -> Agent | None:
            here = [agent for agent in self.live if agent.has_logged(COORDINATES)]
            return max(here, key=lambda agent: int(re.findall(term, agent.stderr)[-1]), default=None)

        agent: Agent = wait_for("a coordinator", found)
        return agent

    @property
    def story(self) -> str:
        return "\n\n".join(f"===== {agent} (code {agent.process.poll()})\n{agent.story}" for agent in self.agents)

    def wait_round(self, agents: Sequence[Agent], after: Round | None = None, *, limit_s: float = DEADLINE_S) -> Round:
        """Waits until the workers of exactly these agents form one world, newer than `after`."""
        found: list[Round] = []

        def is_there() -> bool:
            round_ = self._round_of(agents)
            if round_ is not None and (after is None or round_.number > after.number):
                found.append(round_)
            return bool(found)

        wait_for(f"{list(agents)} are one world", is_there, limit_s)
        return found[0]

    def _round_of(self, agents: Sequence[Agent]) -> Round | None:
        starts: list[Start] = []
        for agent in agents:
            if agent.is_over:
                pytest.fail(f"{agent} is over\n{self.story}")
            last = agent.starts[-agent.nproc :]
            if len(last) < agent.nproc:
                return None
            starts += last
        starts.sort(key=lambda start: start.rank)
        same = {(s.round, s.world_size, s.group_world_size, s.restart, s.master_addr, s.master_port) for s in starts}
        is_one = len(same) == 1 and [s.rank for s in starts] == list(range(starts[0].world_size))
        return Round(tuple(starts)) if is_one else None

    # Ends.

    def assert_untouched(self, round_: Round) -> None:
        """Fails unless all workers of a round are alive and no agent has started others."""
        dead = [start for start in round_.starts if not alive(start.pid)]
        assert not dead, f"{dead}\n{self.story}"
        last = {start.pid for agent in self.live for start in agent.starts[-agent.nproc :]}
        assert round_.pids <= last, self.story

    def finish(self, round_: Round) -> None:
        """Makes all workers succeed, and expects every live agent to succeed."""
        live = self.live
        round_.send_signal(FINISH)
        for agent in live:
            assert agent.wait() == 0, self.story

    def close(self) -> None:
        """Stops all agents that run, and checks that nothing is left."""
        for agent in self.live:
            agent.signal(signal.SIGCONT)
            agent.signal(signal.SIGTERM)
        for agent in self.agents:
            agent.wait()
            agent.wait_nothing_left()
        bugs = {agent: NEVER_LOGGED.search(agent.stderr) for agent in self.agents}
        assert not any(bugs.values()), f"{bugs}\n{self.story}"


@contextmanager
def team_of(launcher: Launcher, meeting: Meeting, nnodes: str, **others: Any) -> Iterator[Team]:
    """A job that ends with the block and leaves nothing behind."""
    team = Team(launcher, meeting, nnodes, **others)
    try:
        yield team
        team.close()
    except BaseException:
        print(team.story)  # noqa: T201
        raise


def c10d() -> Meeting:
    """An endpoint on this machine that is not served yet."""
    return Meeting("c10d", f"127.0.0.1:{quiet_port()}")


def unread_bytes(pid: int, address: str) -> int:
    """How many bytes from an IPv4 address are unread in the network namespace of a process (proc(5))."""
    there = socket.inet_aton(address)[::-1].hex().upper()
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return sum(int(row[4].partition(":")[2], 16) for row in rows if row[2].startswith(f"{there}:"))


def listening_ports(pid: int) -> set[int]:
    """The TCP ports at which a process listens."""
    return set(listening([pid]))
