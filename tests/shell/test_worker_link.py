"""A worker's connection to its agent: how long it waits for the end of a round."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

from kit.waiting import wait_for

from aelastic.training.link import Link
from aelastic.training.messages import encode
from aelastic.training.sockets import GroupSockets


def test_a_worker_waits_without_limit_for_the_end_of_a_round_that_is_held() -> None:
    ours, agents = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = Link(ours, GroupSockets(), lambda: None)
    assert not link.wait_for_over(3, 0)
    agents.send(encode("held", round=3))
    wait_for("it has been read", lambda: link._held == 3)
    with ThreadPoolExecutor() as threads:
        is_over = threads.submit(link.wait_for_over, 3, 0)
        assert not link.wait_for_over(4, 0), "another round is not held"
        agents.send(encode("over", round=3, why="somebody has looked"))
        assert is_over.result()
    agents.send(encode("end"))  # else the end of the connection would end this process
    wait_for("it has been read", lambda: link.is_ended)
    agents.close()
