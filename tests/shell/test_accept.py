"""The coordinator's server, in this process: what becomes of connections when it ends."""

from __future__ import annotations

import asyncio
import socket

import anyio
import pytest
from anyio.abc import TaskGroup
from kit.launching import DEADLINE_S, on_both_loops, run
from kit.shared_board import InProcessBoard, SharedWorld

from aelastic.aio import accept as accepting
from aelastic.host.listeners import HeldPort
from aelastic.rdzv.board import Candidate, LeaderRecord
from aelastic.rdzv.coordinator.coordinator import Coordinator
from aelastic.rdzv.coordinator.roster import RoundRules
from aelastic.rdzv.coordinator_server import CoordinatorServer
from aelastic.rdzv.policy.restart_policy import RestartPolicy
from aelastic.rdzv.protocol.messages import Terms
from aelastic.rdzv.term import begin_term
from aelastic.rdzv.wire import strangers
from aelastic.rdzv.wire.proofs import Proofs
from aelastic.rdzv.wire.strangers import Strangers

LEASE_S = 0.3
ENOUGH = 5


class OthersBoard(InProcessBoard):
    """Answers each renewal, as soon as it may, that another agent leads."""

    def __init__(self, may_say: anyio.Event) -> None:
        super().__init__("run", SharedWorld())
        self._may_say = may_say

    async def renew(self, record: LeaderRecord) -> None:
        await self._may_say.wait()


def coordinator_server(lease_s: float, is_over: anyio.Event) -> tuple[CoordinatorServer, int]:
    """A server that another agent has displaced, which it hears when it asks once that is so; and its port."""
    port = HeldPort()
    port.listen_at(["127.0.0.1"])
    record = LeaderRecord(1, Candidate("node", ("127.0.0.1",), port.number, "token"), 0)
    core, terms = Coordinator(RoundRules(1, 2), RestartPolicy(0)), Terms("run", 1, 2, 0, lease_s)
    leader = begin_term(core, terms, record, anyio.current_time())
    return CoordinatorServer(
        leader, record, OthersBoard(is_over), anyio.Lock(), port, lambda: None, Strangers(2), Proofs(None)
    ), port.number


class Crowd:
    """Clients that connect all the time, and wait until the other end hangs up."""

    def __init__(self) -> None:
        self.is_met = anyio.Event()  # some have been connected
        self.is_over = False
        self._met = 0
        self._connecting = 0

    async def knock(self, port: int, tasks: TaskGroup) -> None:
        while not self.is_over:
            # No more than are answered: on a busy machine they would leave the server no time.
            for _ in range(ENOUGH - self._connecting):
                self._connecting += 1
                tasks.start_soon(self._connect, port)
            await anyio.sleep(0.001)

    async def _connect(self, port: int) -> None:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionError:
            return  # refused: the server is gone
        finally:
            self._connecting -= 1
        self._met += 1
        if self._met == ENOUGH:
            self.is_met.set()
        try:
            await reader.read()
        except ConnectionError:
            pass  # reset: the same
        writer.close()


@on_both_loops
@pytest.mark.parametrize("end", ["displaced", "cancelled"])
def test_a_client_that_connects_as_the_server_ends_is_disconnected(loop: str, end: str) -> None:
    """No client is left with a connection without a server: all ends come, while both ends live."""

    async def main() -> None:
        crowd = Crowd()
        server, port = coordinator_server(LEASE_S if end == "displaced" else DEADLINE_S, crowd.is_met)

        async def cancel_in_time(scope: anyio.CancelScope) -> None:
            await crowd.is_met.wait()
            scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(crowd.knock, port, tasks)
            with anyio.CancelScope() as scope:
                if end == "cancelled":
                    tasks.start_soon(cancel_in_time, scope)
                await server.run()
            crowd.is_over = True

    run(loop, asyncio.wait_for(main(), DEADLINE_S))


@on_both_loops
def test_more_agents_than_descriptors_come_in_as_soon_as_there_are_some(
    loop: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    take, failures = accepting.next_connection, [OSError(24, "Too many open files")] * 2

    def next_connection(listener: socket.socket) -> socket.socket | None:
        if failures:
            raise failures.pop()
        return take(listener)

    monkeypatch.setattr(strangers, "next_connection", next_connection)
    monkeypatch.setattr(strangers, "OUT_OF_FILES_PAUSE_S", 0.01)

    async def main() -> None:
        server, port = coordinator_server(DEADLINE_S, anyio.Event())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.run)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert b"Refused" in await reader.read()
            writer.close()
            tasks.cancel_scope.cancel()

    run(loop, asyncio.wait_for(main(), DEADLINE_S))
    assert caplog.text.count("cannot accept connections: Too many open files") == 1
