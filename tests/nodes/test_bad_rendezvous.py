"""Invalid endpoints, strange programs, agents of other jobs: each gets a clear error, and the job is unharmed."""

from __future__ import annotations

import json
import os
import re
import socket
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from kit.agents import FAIL, Agent, Meeting, Team, c10d, team_of
from kit.launching import Launcher
from kit.ports import quiet_port
from kit.servers.other_programs import answering, http_server
from kit.waiting import DEADLINE_S

from aelastic.errors import EXIT_FAILURE, EXIT_INPUT, EXIT_TRY_AGAIN
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.codec import DOWNWARD, FRAME_MAX, PROTOCOL, Decoder, encode
from aelastic.rdzv.protocol.messages import Downward, Refused

pytestmark = pytest.mark.usefixtures("warm_stores")


def error_of(agent: Agent) -> str:
    """The line with which an agent reports why it did not take part."""
    (line,) = [line for line in agent.stderr.splitlines() if line.startswith("aelastic: error: ")]
    assert "Traceback" not in agent.stderr
    return line


# Timeouts.


# Two agents must meet within this time, which is longer on slow machines, where deadlines are longer.
JOIN_TIMEOUT_S = DEADLINE_S / 6
# In an agent: it names what it is waiting for well before it gives up.
NOTES_OFTEN = """
from aelastic.rdzv.leader import leader
from aelastic.rdzv.member import search

leader.WAITING_TEXT_INTERVAL_S = search.NOTE_INTERVAL_S = 1.0
"""


@pytest.mark.all
@pytest.mark.ci
def test_what_agents_wait_for_in_vain_is_named_while_they_wait_and_in_the_end(launch: Launcher) -> None:
    """No server at the endpoint, another kind of server, missing nodes: in parallel, as most time out late."""
    nonsense, other_http = answering(os.urandom(4096)), http_server(404)
    more: dict[str, Any] = {"wrapper": NOTES_OFTEN}
    with nonsense as nonsense_port, other_http as http_port, ExitStack() as teams:
        too_few = teams.enter_context(team_of(launch, c10d(), "3", conf={"join_timeout": JOIN_TIMEOUT_S}, **more))
        too_few.start_many(2)
        agents = dict[tuple[str, int], Agent]()
        for backend, port in (
            ("c10d", quiet_port()),
            ("etcd-v3", quiet_port()),
            ("c10d", nonsense_port),
            ("etcd", http_port),
        ):
            conf = {"join_timeout": JOIN_TIMEOUT_S, **({"is_host": "false"} if backend == "c10d" else {})}
            meeting = Meeting(backend, f"127.0.0.1:{port}")
            agents[backend, port] = teams.enter_context(team_of(launch, meeting, "2", conf=conf, **more)).start()
        for (_, port), agent in agents.items():
            assert agent.wait() == EXIT_FAILURE
            assert f"127.0.0.1:{port}" in error_of(agent)
            if port not in {nonsense_port, http_port}:
                assert agent.has_logged(rf"looking for the leader \(\d+ s\): .*:{port}.*refused"), agent.story
                assert re.search(r"no leader for \d+ s: ", error_of(agent))
        host = socket.gethostname()
        for agent in too_few.agents:
            assert agent.wait() == EXIT_TRY_AGAIN
            assert f"2 of at least 3 nodes joined within {JOIN_TIMEOUT_S:g} s: {host}, {host}" in error_of(agent)
            assert agent.has_logged(rf"2 of 3 nodes joined after \d+ s \({host}, {host}\); waiting for 1 more")
            assert not agent.starts


# Bad input to the leader's port.


def frame(word: str, fields: object) -> bytes:
    body = json.dumps([word, fields]).encode()
    return len(body).to_bytes(4, "big") + body


NODE = m.Node("stranger", "h", "r", 1, "", 1)
STATUS = m.Status(NODE, m.Past(m.NodePhase.READY))
OLD_HELLO = frame("Hello", {"protocol": 0, "whatever": ["it", "said", "then"]})


def hello(team: Team) -> bytes:
    terms = m.Terms(team.run_id, 2, 3, 3, 5.0)
    return encode(m.Hello(PROTOCOL, terms, "guessed", "stranger", STATUS))


def answer_to(port: int, data: bytes, limit_s: float = DEADLINE_S) -> list[Downward]:
    """The leader's reply to some bytes, until it closes the connection."""
    decoder = Decoder(DOWNWARD)
    words: list[Downward] = []
    with socket.create_connection(("127.0.0.1", port), timeout=limit_s) as connection, suppress(ConnectionError):
        connection.sendall(data)
        while received := connection.recv(65536):
            words += decoder.feed(received)
    return words


def stream_port(agent: Agent) -> int:
    """The port, among an agent's open ones, on which it leads."""

    def coordinates(port: int) -> bool:
        try:
            return bool(answer_to(port, OLD_HELLO))
        except OSError:
            return False

    # Skip the workers' store, where nobody answers yet.
    (port,) = filter(coordinates, agent.ports() - {agent.starts[-1].master_port})
    return port


def test_other_terms_and_nonsense_are_refused_and_the_job_continues_undisturbed(launch: Launcher) -> None:
    """`test_unauthenticated_peers.py` covers silence and half a message, `test_secret.py` connections without the job's secret."""
    with team_of(launch, c10d(), "2:3", conf={"last_call_timeout": 0.1}) as team:
        agents = team.start_many(2)
        round_ = team.wait_round(agents)
        other = team.start("--nnodes", "2:4")
        assert_refused_as_nonsense(team)
        assert other.wait() == EXIT_INPUT
        assert "--nnodes is 2:4 here and 2:3 in the running job: use the same on every node" in error_of(other)
        assert not other.starts
        team.assert_untouched(round_)
        assert [len(agent.starts) for agent in agents] == [1, 1]
        round_.send_signal(FAIL, 0)
        team.finish(team.wait_round(agents, after=round_))


# An agent of the previous version.
OLDER = """
from aelastic.rdzv.protocol import codec

codec.PROTOCOL -= 1
"""
# The same, but it does not find the version in the cell.
OLDER_AND_BLIND = """
from aelastic.rdzv.member import member

member.PROTOCOL -= 1
"""


@pytest.mark.all
@pytest.mark.ci
@pytest.mark.parametrize(
    "wrapper, expected",
    [
        (OLDER, f"the job speaks protocol {PROTOCOL} and this agent speaks {PROTOCOL - 1}"),
        (OLDER_AND_BLIND, f"this agent speaks protocol {PROTOCOL - 1} and the job speaks {PROTOCOL}"),
    ],
    ids=["by the cell", "by the leader"],
)
def test_an_agent_of_an_older_version_is_refused_with_one_line_that_names_both(
    launch: Launcher, wrapper: str, expected: str
) -> None:
    with team_of(launch, c10d(), "1:2", conf={"last_call_timeout": 0.1}) as team:
        first = team.start()
        round_ = team.wait_round([first])
        older = team.start(wrapper=wrapper)
        assert older.wait() == EXIT_INPUT, team.story
        errors = [line for line in older.stderr.splitlines() if not line.startswith("aelastic: I ")]
        assert len(errors) == 1 and expected in errors[0], errors
        assert not older.starts
        team.assert_untouched(round_)
        team.finish(round_)


def assert_refused_as_nonsense(team: Team) -> None:
    port = stream_port(team.coordinator)
    (refused,) = answer_to(port, OLD_HELLO)
    assert isinstance(refused, Refused)
    assert refused.is_final
    assert f"speaks protocol 0 and the job speaks {PROTOCOL}: install the same version" in refused.reason
    for nonsense in (
        os.urandom(1000),
        b"GET / HTTP/1.0\r\n\r\n",
        (FRAME_MAX + 1).to_bytes(4, "big") + bytes(1000),
        (10 << 20).to_bytes(4, "big") + os.urandom(10 << 20),
        encode(STATUS),
        frame("Hello", {"protocol": PROTOCOL}),
        frame("Hello", [[[]]] * 1000),
    ):
        answers = answer_to(port, nonsense)
        # If it sends megabytes, its connection may be reset before it has read the reason.
        assert len(answers) <= 1, (nonsense[:80], answers)
        assert all(isinstance(word, Refused) for word in answers), (nonsense[:80], answers)
    (refused,) = answer_to(port, hello(team))
    assert refused == Refused("this agent read an outdated record of the leader; retrying", is_final=False)
