"""Endpoints that are none, programs that are no agents, agents of another job: a clear error there, and no harm here."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import pytest
from kit.agents import FAIL, Agent, Meeting, Round, Team, c10d, team_of
from kit.launching import DEADLINE_S, Launcher
from kit.ports import quiet_port
from kit.servers.other_programs import answering, http_server
from kit.servers.stores import external_store

from aelastic.errors import EXIT_FAILURE, EXIT_INPUT
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.codec import DOWNWARD, FRAME_MAX, PROTOCOL, Decoder, encode
from aelastic.rdzv.protocol.messages import Downward, Refused

pytestmark = pytest.mark.usefixtures("warm_stores")

LEASE_S = 2.0


def error_of(agent: Agent) -> str:
    """The one line that says why an agent did not take part."""
    (line,) = [line for line in agent.stderr.splitlines() if line.startswith("aelastic: error: ")]
    assert "Traceback" not in agent.stderr
    return line


# Endpoints.


# In an agent: what is waited for is said well before it is given up.
TELLS_OFTEN = "from aelastic.rdzv.member import search\nsearch.NOTE_INTERVAL_S = 2.0\n"


@contextmanager
def nothing() -> Iterator[int]:
    yield quiet_port()


@pytest.mark.parametrize(
    "backend, server",
    [
        ("c10d", nothing),
        ("etcd-v3", nothing),
        ("c10d", lambda: answering(os.urandom(4096))),
        ("etcd", lambda: http_server(404)),
    ],
    ids=["no store", "no etcd", "no store but nonsense", "no etcd but HTTP"],
)
def test_an_endpoint_without_a_server_or_of_another_kind_is_named_while_we_wait_and_in_the_end(
    launch: Launcher, backend: str, server: Callable[[], AbstractContextManager[int]]
) -> None:
    conf = {"join_timeout": 5, **({"is_host": "false"} if backend == "c10d" else {})}
    with (
        server() as port,
        team_of(launch, Meeting(backend, f"127.0.0.1:{port}"), "2", conf=conf, wrapper=TELLS_OFTEN) as team,
    ):
        agent = team.start()
        assert agent.wait() == EXIT_FAILURE
        assert f"127.0.0.1:{port}" in error_of(agent)
        if server is nothing:
            assert agent.has_said(rf"looking for the coordinator \(\d s\): .*:{port}.*refused"), agent.story
            assert re.search(r"no coordinator for \d s: ", error_of(agent))


# Agents that were told otherwise.


@pytest.fixture
def running(launch: Launcher) -> Iterator[tuple[Team, Round]]:
    """A job that is not to be disturbed; in the end it shows that it was not."""
    with team_of(launch, c10d(), "2:3", conf={"lease": LEASE_S, "last_call_timeout": 0.1}) as team:
        agents = team.start_many(2)
        round_ = team.wait_round(agents)
        yield team, round_
        team.assert_untouched(round_)
        assert [len(agent.starts) for agent in agents] == [1, 1]
        round_.tell(FAIL, 0)
        team.finish(team.wait_round(agents, after=round_))


def test_an_agent_with_other_terms_is_told_which(running: tuple[Team, Round]) -> None:
    team, _ = running
    agent = team.start("--nnodes", "2:4")
    assert agent.wait() == EXIT_INPUT
    assert "--nnodes is 2:4 here and 2:3 in the job that runs: give all nodes the same" in error_of(agent)
    assert not agent.starts


def test_a_run_id_can_be_used_again_as_soon_as_its_job_is_over(launch: Launcher) -> None:
    with external_store() as endpoint:
        for number in range(3):
            more: dict[str, Any] = {"run_id": "again", "name": f"again-{number}"}
            with team_of(launch, Meeting("c10d", endpoint), "2", conf={"lease": LEASE_S}, **more) as team:
                round_ = team.wait_round(team.start_many(2))
                assert round_.restart == 0
                if number == 1:
                    for agent in team.agents:
                        agent.crash()  # without a verdict
                else:
                    team.finish(round_)


# What is thrown at the coordinator.


def frame(word: str, fields: object) -> bytes:
    body = json.dumps([word, fields]).encode()
    return len(body).to_bytes(4, "big") + body


NODE = m.Node("stranger", "h", "r", 1, "", 1)
OLD_HELLO = frame("Hello", {"protocol": 0, "whatever": ["it", "said", "then"]})


def hello(team: Team) -> bytes:
    terms = m.Terms(team.run_id, 2, 3, 3, 5.0)
    return encode(m.Hello(PROTOCOL, terms, "guessed", NODE, m.Past(m.Standing.READY), 0))


def answer_to(port: int, data: bytes, limit_s: float = DEADLINE_S) -> list[Downward]:
    """What the coordinator says to some bytes until it hangs up."""
    decoder = Decoder(DOWNWARD)
    words: list[Downward] = []
    with socket.create_connection(("127.0.0.1", port), timeout=limit_s) as connection, suppress(ConnectionError):
        connection.sendall(data)
        while received := connection.recv(65536):
            words += decoder.feed(received)
    return words


def stream_port(agent: Agent) -> int:
    """Of the ports that an agent has open that at which it coordinates."""

    def coordinates(port: int) -> bool:
        try:
            return bool(answer_to(port, OLD_HELLO))
        except OSError:
            return False

    # The workers' store, where nobody answers yet, is not asked.
    (port,) = filter(coordinates, agent.ports() - {agent.starts[-1].master_port})
    return port


def test_nonsense_on_the_stream_is_refused(running: tuple[Team, Round]) -> None:
    """What says nothing, or half of something: `test_strangers.py`; what has not the job's secret: `test_secret.py`."""
    team, _ = running
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
        encode(m.Ready(NODE)),
        frame("Hello", {"protocol": PROTOCOL}),
        frame("Hello", [[[]]] * 1000),
    ):
        said = answer_to(port, nonsense)
        # One that throws megabytes may have its connection reset before it has read why.
        assert len(said) <= 1, (nonsense[:80], said)
        assert all(isinstance(word, Refused) for word in said), (nonsense[:80], said)
    (refused,) = answer_to(port, hello(team))
    assert refused == Refused("this agent read an outdated coordinator entry; retrying", is_final=False)
