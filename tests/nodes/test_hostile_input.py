"""Any input at the sockets of a job's agents: the agents survive, and the job is undisturbed."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from kit.agents import FAIL, Agent, Round, Team, c10d, team_of
from kit.hostile_input import GARBAGE, LONG_EXAMPLES, VALUES, Sent, frames, hostile, mutated, talk
from kit.launching import Launcher
from kit.servers.etcd_cells import payload_with
from kit.waiting import DEADLINE_S, wait_for

from aelastic.agent.requests.commands import VERBS, CommandError, command_of
from aelastic.base.host import control_sockets
from aelastic.diagnose.failures.failure import ProcessFailure
from aelastic.diagnose.failures.places import Place
from aelastic.rdzv.ledger import Reached
from aelastic.rdzv.log import node as log
from aelastic.rdzv.log.entries import Accepted, EntryId, Payload, first_entry
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.protocol.codec import PROTOCOL, encode
from aelastic.rdzv.protocol.sense import TERM_MAX

pytestmark = [
    pytest.mark.usefixtures("warm_stores"),
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings(LONG_EXAMPLES),
]

# In an agent: it tells the test what its leader told the others in the cell, and its port for votes.
WRITES = """
import json, os
from aelastic.rdzv import campaigns, leader_server

init, open_campaigns = leader_server.LeaderServer.__init__, campaigns.Campaigns.__init__


def write(name, said):
    with open(f"{name}.new", "w") as file:
        json.dump(said, file)
    os.rename(f"{name}.new", name)


def tell(self, leader, cell, turn, port, *others):
    init(self, leader, cell, turn, port, *others)
    said = {"port": port.number, "token": leader.at.token, "term": leader.term, "terms": leader.connections.terms.__dict__}
    write("coordinates", said)


def tell_campaigns(self, port, *others):
    open_campaigns(self, port, *others)
    write("votes", port.number)


leader_server.LeaderServer.__init__ = tell
campaigns.Campaigns.__init__ = tell_campaigns
"""
STRANGER = m.LeaderAt("stranger", "stranger", ("10.0.0.1", "node1"), 4711, "t0k3n")
STRANGERS_NODE = m.Node("stranger", "host-x", "default", 1, "203.0.113.66", 6666)


def campaigns(term: int) -> list[Any]:
    """A stranger's requests and answers to a node, in a term that the job does not use."""
    agreed = EntryId(term, 1, "1f", "d19e57")
    return [
        m.Campaign(0, None, STRANGER), m.Campaign(0, agreed, STRANGER), m.Campaign(1, None, STRANGER),
        m.Campaign(term, agreed, STRANGER), m.Declined(term, "it follows another leader", STRANGER),
        m.Declined(1, "it follows another leader"),
    ]  # fmt: skip


@pytest.fixture
def team(launch: Launcher) -> Iterator[Team]:
    with team_of(launch, c10d(), "2", wrapper=WRITES, conf={"lease": 60}) as team:
        yield team


class Watched:
    """A job that should not notice anything: its agents, and its workers' round."""

    def __init__(self, team: Team) -> None:
        self.team, self.agents = team, team.start_many(2)
        self.round: Round = team.wait_round(self.agents)
        self.sent = Sent(self.check)
        self.coordinates: dict[str, Any] = self.written(self.leader, "coordinates")

    def written(self, agent: Agent, name: str) -> Any:
        """A value that an agent has written (see `WRITES`)."""
        path = agent.folder / name
        return wait_for(f"{agent} tells of its {name}", lambda: path.exists() and json.loads(path.read_text()))

    @property
    def leader(self) -> Agent:
        return self.team.coordinator

    def check(self) -> None:
        for agent in self.agents:
            assert not agent.is_over, self.team.story

    def assert_undisturbed(self) -> None:
        """Checks that it is in the same round and logs no bug, then that it restarts on a failure and succeeds."""
        self.check()
        self.team.assert_untouched(self.round)
        for agent in self.agents:
            assert len(agent.starts) == 1 and "aborted" not in agent.stderr, self.team.story
        self.round.send_signal(FAIL, 0)
        after = self.team.wait_round(self.agents, self.round)
        assert after.restart == 1, self.team.story
        self.team.finish(after)


COMMANDS = st.fixed_dictionaries(
    {"verb": st.sampled_from([*VERBS, "x"])},
    optional={
        "node": st.sampled_from(["nowhere", "x" * 255, "\x1b[2J", "é" * 200]) | VALUES,
        "reason": VALUES,
        "deadline_s": VALUES,
        "at_save": VALUES,
        "wait": VALUES,
        "rank": st.integers(-2, 3) | VALUES,
        "stderr": VALUES,
        "follow": VALUES,
    },
)


def would_disturb(line: bytes) -> bool:
    """Whether the job would act on the line, or take seconds to process it."""
    try:
        command = command_of(line)
    except CommandError:
        return False
    is_of_a_node = command.verb in {r.Verb.DRAIN, r.Verb.CORDON, r.Verb.UNCORDON, r.Verb.CANCEL}
    return command.verb in {r.Verb.STOP, r.Verb.KILL, r.Verb.RESTART, "stacks"} or (is_of_a_node and not command.node)


def test_a_job_bears_whatever_comes_in_at_its_control_sockets(team: Team) -> None:
    job = Watched(team)
    sockets = []
    for agent in job.agents:
        folder = control_sockets.folder_of({"XDG_RUNTIME_DIR": str(agent.folder)})
        sockets.append((folder, control_sockets.names_in(folder)[0]))

    @hostile
    @given(st.sampled_from(sockets), GARBAGE | COMMANDS.flatmap(mutated), st.booleans(), st.booleans())
    def send(place: tuple[Path, str], content: Any, has_end: bool, half_closes: bool) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        assume(not would_disturb(data))
        data += b"\n" if has_end else b""
        conn = control_sockets.connect(place[0], place[1], DEADLINE_S)
        assert conn is not None, team.story
        job.sent.add(data)
        talk(conn, data, half_closes=half_closes or not has_end)

    send()
    job.assert_undisturbed()


def upward(hello: m.Hello, term: int) -> list[Any]:
    """Messages from a node that belongs to nobody and is not in the round."""
    reached = Reached(7, 3, 1.5)
    place = Place(0, "host", 1, "f (a.py:1)", "", "all_reduce", "S", 3)
    ask = r.Ask("stranger", "stranger-1", r.Verb.UNCORDON, "nowhere", 30.0, "spot")
    ready, busy = hello.status, m.Past(m.NodePhase.BUSY, 1, term=1)
    failure = ProcessFailure.from_elsewhere("host-x", 0, 0, 77, -11, "Signal 11 (SIGSEGV)", "", 1000)
    failed = busy.replace(phase=m.NodePhase.FAILED, failure=failure, reached=reached)
    wishes = (
        ask,
        ask.replace(verb=r.Verb.CANCEL),
        ask.replace(verb=r.Verb.CORDON),
        ask.replace(verb=r.Verb.DRAIN, deadline_s=0.5),
    )
    other = first_entry(term, ["stranger"], ["stranger"], ("1f",), payload_with(1))
    unreadable = first_entry(term, ["stranger"], ["stranger"], ("1f",), Payload("a round"))
    knows = log.Status(term, other.id, None, (), (), ())
    accepted = knows.replace(committed=other, accepted=Accepted(other, term), replaces=("nobody",), failures=("a", "b"))
    ended = knows.replace(ended=(log.EndedLeader("nobody", None),), committed=unreadable)
    return [
        hello, hello.replace(status=ready.replace(past=busy)), hello.replace(name="another"), m.Alive(), m.HungUp(),
        *(ready.replace(log=each) for each in (knows, accepted, ended)),
        ready, ready.replace(past=ready.past.replace(reached=reached), ready_count=2), ready.replace(past=failed),
        ready.replace(past=busy.replace(phase=m.NodePhase.FINISHED)), ready.replace(left=m.Left("stranger", "bye")),
        ready.replace(node=ready.node.replace(starts=m.Starts.WARM), prepared_count=1),
        ready.replace(past=busy, question=m.Hangs("stranger", 1, "rank 0 hangs", 1.0, True, number=1)),
        ready.replace(past=busy, places=m.Saw("stranger", 1, (place,), 1)), *(ready.replace(asks=(each,)) for each in wishes),
        ready.replace(frozen=r.Frozen("stranger", 1, 2, 1, 0)), ready.replace(saved=r.Saved("stranger", 1)),
        ready.replace(asks=wishes[:1], frozen=r.Frozen("stranger", 1, 2, 1, 0), saved=r.Saved("stranger", 1)),
        r.Fetch("stranger", "stranger-2", r.What.STATUS),
        r.Fetch("stranger", "stranger-3", r.What.WHY), r.Fetch("stranger", "stranger-4", r.What.LOG, "", 0, True, 4),
        r.Fetched("stranger", "stranger", "stranger-2", "0", "text", False),
    ]  # fmt: skip


def test_a_job_bears_whatever_comes_in_at_the_port_of_its_leader(team: Team) -> None:
    job = Watched(team)
    terms, token = m.Terms(**job.coordinates["terms"]), job.coordinates["token"]
    status = m.Status(STRANGERS_NODE, m.Past(m.NodePhase.READY))
    hello = m.Hello(PROTOCOL, terms, token, "stranger", status)

    @hostile
    @given(frames(upward(hello, job.coordinates["term"]), [hello]))
    def send(data: bytes) -> None:
        conn = socket.create_connection(("127.0.0.1", job.coordinates["port"]), timeout=DEADLINE_S)
        job.sent.add(data)
        talk(conn, data)

    send()
    # A node that announces its disconnection is alive: the job waits up to a lease for it to learn the verdict.
    farewell = socket.create_connection(("127.0.0.1", job.coordinates["port"]), timeout=DEADLINE_S)
    talk(farewell, encode(hello) + encode(status.replace(left=m.Left("stranger", "bye"))))
    job.assert_undisturbed()


def test_a_job_bears_whatever_comes_in_where_it_votes(team: Team) -> None:
    job = Watched(team)
    # Each asks for its leader's place, and gets the current leader.
    ports = [job.written(agent, "votes") for agent in job.agents]

    @hostile
    @given(st.sampled_from(ports), frames(campaigns(job.coordinates["term"] + 1)))
    def send(port: int, data: bytes) -> None:
        conn = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
        job.sent.add(data)
        talk(conn, data)

    send()
    job.assert_undisturbed()


def test_a_job_bears_a_stranger_that_speaks_of_the_last_term_there_is(team: Team) -> None:
    """A term above it would not be valid in the protocol."""
    job = Watched(team)
    for agent in job.agents:
        asks = socket.create_connection(("127.0.0.1", job.written(agent, "votes")), timeout=DEADLINE_S)
        talk(asks, encode(m.Campaign(TERM_MAX, None, STRANGER)))
    job.check()

    knows = m.Status(STRANGERS_NODE, m.Past(m.NodePhase.READY), log=log.Status(TERM_MAX, None, None, (), (), ()))
    terms, token = m.Terms(**job.coordinates["terms"]), job.coordinates["token"]
    joins = socket.create_connection(("127.0.0.1", job.coordinates["port"]), timeout=DEADLINE_S)
    gone = knows.replace(left=m.Left("stranger", "bye"))
    talk(joins, encode(m.Hello(PROTOCOL, terms, token, "stranger", knows)) + encode(gone))
    job.assert_undisturbed()
