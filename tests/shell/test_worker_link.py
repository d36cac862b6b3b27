"""A worker's connection to its agent: when the worker learns that a round has ended."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from kit.waiting import wait_for

from aelastic.training import link as links
from aelastic.training.link import Link, RoundOver
from aelastic.training.messages import encode
from aelastic.training.sockets import GroupSockets

ROUND = 3


class Agent:
    """The agent's end of a worker's connection."""

    def __init__(self) -> None:
        ours, self._socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.cuts: list[int] = []
        self.link = Link(ours, GroupSockets(), lambda: self.cuts.append(ROUND))

    def end_round(self) -> None:
        self._socket.send(encode("over", round=ROUND, why="rank 2 was lost"))
        wait_for("it has been read", lambda: self.link._ending == ROUND)

    def hold(self) -> None:
        self._socket.send(encode("held", round=ROUND))
        wait_for("it has been read", lambda: self.link._held == ROUND)

    def close(self) -> None:
        self._socket.send(encode("end"))  # otherwise the end of the connection would end this process
        wait_for("it has been read", lambda: self.link.is_ended)
        self._socket.close()


@contextmanager
def agent_of_worker() -> Iterator[Agent]:
    agent = Agent()
    yield agent
    agent.close()


@pytest.fixture
def has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets an update take as long as it likes."""
    monkeypatch.setattr(links, "_UPDATE_S", 1000.0)


def test_a_round_that_ends_is_over_at_once() -> None:
    with agent_of_worker() as agent:
        assert not agent.link.wait_for_over(ROUND, 0)
        agent.end_round()
        assert agent.link.wait_for_over(ROUND, 0) and not agent.link.wait_for_over(ROUND + 1, 0)
        with pytest.raises(RoundOver):
            agent.link.check(ROUND)
        wait_for("its sockets are cut", lambda: agent.cuts == [ROUND])


@pytest.mark.usefixtures("has_time")
def test_a_round_that_ends_during_an_update_is_over_after_it() -> None:
    with agent_of_worker() as agent:
        assert not agent.link.begin_update(ROUND)
        agent.end_round()
        agent.link.check(ROUND)
        assert not agent.link.begin_update(ROUND), "another optimizer's"
        assert agent.cuts == []
        agent.link.end_update()
        assert agent.link.is_over(ROUND)
        wait_for("its sockets are cut", lambda: agent.cuts == [ROUND])


def test_an_update_that_takes_too_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rank may be in a collective with a lost rank."""
    monkeypatch.setattr(links, "_UPDATE_S", 0.01)
    with agent_of_worker() as agent:
        agent.link.begin_update(ROUND)
        agent.end_round()
        wait_for("its sockets are cut", lambda: agent.cuts == [ROUND])
        assert agent.link.is_over(ROUND)


@pytest.mark.usefixtures("has_time")
def test_an_error_ends_an_update() -> None:
    with agent_of_worker() as agent:
        agent.link.begin_update(ROUND)
        agent.end_round()
        assert agent.link.wait_for_over(ROUND, 0)


@pytest.mark.usefixtures("has_time")
def test_a_peer_that_hangs_up_does_not_end_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that is being drained closes its connections soon after its round has ended."""
    with agent_of_worker() as agent:
        monkeypatch.setattr(agent.link.sockets, "is_cut_by_peer", lambda: True)
        agent.link.begin_update(ROUND)
        agent.end_round()
        agent.link.check(ROUND)
        agent.link.end_update()
        with pytest.raises(RoundOver):
            agent.link.check(ROUND)


def test_a_worker_waits_without_limit_for_the_end_of_a_round_that_is_held() -> None:
    with agent_of_worker() as agent, ThreadPoolExecutor() as threads:
        agent.hold()
        is_over = threads.submit(agent.link.wait_for_over, ROUND, 0)
        assert not agent.link.wait_for_over(ROUND + 1, 0), "another round is not held"
        agent.end_round()
        assert is_over.result()


def test_an_update_after_the_end_of_the_round_is_refused() -> None:
    with agent_of_worker() as agent:
        agent.end_round()
        assert agent.link.begin_update(ROUND) and not agent.link.begin_update(ROUND + 1)
