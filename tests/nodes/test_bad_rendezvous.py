"""Endpoints that are none, programs that are no agents, agents of another job: a clear error there, and no harm here."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from kit.agents import FAIL, Agent, Meeting, Round, Team, c10d, external_store, team_of
from kit.launching import DEADLINE_S, Launcher
from kit.ports import quiet_port
from kit.servers.etcd_servers import EtcdServers

from aelastic.errors import EXIT_FAILURE, EXIT_INPUT
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.codec import DOWNWARD, FRAME_MAX, PROTOCOL, Decoder, encode
from aelastic.rdzv.protocol.messages import Downward, Refused

pytestmark = pytest.mark.usefixtures("warm_stores")

LEASE_S = 2.0


@pytest.fixture(params=["c10d", pytest.param("etcd-v3", marks=pytest.mark.all)])
def meeting(request: pytest.FixtureRequest, etcds: EtcdServers) -> Meeting:
    return c10d() if request.param == "c10d" else Meeting(request.param, etcds.of("distro").endpoint)


def error_of(agent: Agent) -> str:
    """The one line that says why an agent did not take part."""
    (line,) = [line for line in agent.stderr.splitlines() if line.startswith("aelastic: error: ")]
    assert "Traceback" not in agent.stderr
    return line


# Endpoints.


def test_an_endpoint_without_a_server_is_named_while_we_wait_and_in_the_end(launch: Launcher) -> None:
    nowhere = f"127.0.0.1:{quiet_port()}"
    with (
        team_of(launch, Meeting("c10d", nowhere), "2", conf={"join_timeout": 11, "is_host": "false"}) as one,
        team_of(launch, Meeting("etcd-v3", nowhere), "2", conf={"join_timeout": 11}) as other,
    ):
        agents = [one.start(), other.start()]
        for agent in agents:
            assert agent.wait() == EXIT_FAILURE
            # A busy machine may be half a second late.
            assert agent.has_said(rf"looking for the coordinator \(1[01] s\): .*{nowhere}.*refused"), agent.story
            assert re.search(r"no coordinator for 1\d s: ", error_of(agent))
            assert nowhere in error_of(agent)


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(404)

    do_POST = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None: ...


@contextmanager
def http_server() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Page) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def garbage_server() -> Iterator[int]:
    """Answers whatever comes with noise."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return  # closed
                with connection, suppress(OSError):
                    connection.settimeout(5)
                    connection.recv(4096)
                    connection.sendall(os.urandom(4096))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize("server", [http_server, garbage_server])
@pytest.mark.parametrize("backend", ["c10d", "etcd-v3", "etcd"])
def test_a_server_of_another_kind_is_called_one(
    launch: Launcher, backend: str, server: Callable[[], AbstractContextManager[int]]
) -> None:
    with server() as port, team_of(launch, Meeting(backend, f"127.0.0.1:{port}"), "2") as team:
        agent = team.start()
        assert agent.wait() == EXIT_FAILURE
        assert f"127.0.0.1:{port}" in error_of(agent)


# Agents that were told otherwise.


@pytest.fixture
def running(launch: Launcher, meeting: Meeting) -> Iterator[tuple[Team, Round]]:
    """A job that is not to be disturbed; in the end it shows that it was not."""
    with team_of(launch, meeting, "2:3", conf={"lease": LEASE_S, "last_call_timeout": 0.1}) as team:
        agents = team.start_many(2)
        round_ = team.wait_round(agents)
        yield team, round_
        team.assert_untouched(round_)
        assert [len(agent.starts) for agent in agents] == [1, 1]
        round_.tell(FAIL, 0)
        team.finish(team.wait_round(agents, after=round_))


@pytest.mark.parametrize(
    "options, complaint",
    [
        (("--nnodes", "2:4"), "--nnodes is 2:4 here and 2:3 in the job that runs: give all nodes the same"),
        (("--max-restarts", "5"), "--max-restarts is 5 here and 3 in the job that runs: give all nodes the same"),
    ],
)
def test_an_agent_with_other_terms_is_told_which(
    running: tuple[Team, Round], options: tuple[str, ...], complaint: str
) -> None:
    team, _ = running
    agent = team.start(*options)
    assert agent.wait() == EXIT_INPUT
    assert complaint in error_of(agent)
    assert not agent.starts


def test_the_endpoint_that_an_agent_serves_is_for_one_run_id(launch: Launcher) -> None:
    with team_of(launch, c10d(), "2") as team:
        agents = team.start_many(2)
        round_ = team.wait_round(agents)
        with team_of(launch, team.meeting, "2") as other:
            agent = other.start()
            assert agent.wait() == EXIT_INPUT
            assert f"serves run {team.run_id}, not {other.run_id}: use --rdzv-id {team.run_id}" in error_of(agent)
        team.assert_untouched(round_)
        team.finish(round_)


def test_a_run_id_can_be_used_again_as_soon_as_its_job_is_over(launch: Launcher, etcds: EtcdServers) -> None:
    with external_store() as store:
        for meeting in (store, Meeting("etcd-v3", etcds.of("distro").endpoint)):
            run_id = f"again-{meeting.backend}"
            for number in range(3):
                with team_of(
                    launch, meeting, "2", conf={"lease": LEASE_S}, run_id=run_id, name=f"{run_id}-{number}"
                ) as team:
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


def test_an_agent_of_another_version_is_told_so(running: tuple[Team, Round]) -> None:
    team, _ = running
    (refused,) = answer_to(stream_port(team.coordinator), OLD_HELLO)
    assert isinstance(refused, Refused)
    assert refused.is_final
    assert f"speaks protocol 0 and the job speaks {PROTOCOL}: install the same version" in refused.reason


def test_nonsense_on_the_stream_is_refused_and_its_connection_closed(running: tuple[Team, Round]) -> None:
    team, _ = running
    port = stream_port(team.coordinator)
    for nonsense in (
        os.urandom(1000),
        b"GET / HTTP/1.0\r\n\r\n",
        (FRAME_MAX + 1).to_bytes(4, "big") + bytes(1000),
        bytes(10 << 20),
        (10 << 20).to_bytes(4, "big") + os.urandom(10 << 20),
        frame("Alive", {}),
        encode(m.Ready(NODE)),
        frame("Hello", {"protocol": PROTOCOL}),
        frame("Hello", None),
        frame("Left", {"node_id": "x", "reason": 1}),
        b"\0\0\0\x05[[[[[",
        frame("Hello", [[[]]] * 1000),
    ):
        said = answer_to(port, nonsense)
        # One that throws megabytes may have its connection reset before it has read why.
        assert len(said) <= 1, (nonsense[:80], said)
        assert all(isinstance(word, Refused) for word in said), (nonsense[:80], said)
    (refused,) = answer_to(port, hello(team))
    assert refused == Refused("this agent read an outdated coordinator entry; retrying", is_final=False)


def test_a_connection_that_says_nothing_is_dropped_after_the_lease(running: tuple[Team, Round]) -> None:
    team, _ = running
    port = stream_port(team.coordinator)
    began = time.monotonic()
    silent = [socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) for _ in range(100)]
    for number, connection in enumerate(silent):
        if number % 2:
            connection.sendall(hello(team)[:20])  # and no more
    for connection in silent:
        with connection, suppress(ConnectionResetError):
            while connection.recv(4096):
                pass
    assert time.monotonic() - began >= LEASE_S / 2
