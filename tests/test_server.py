"""The coordinator's server, in this process: what becomes of connections when it ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import anyio
import pytest
import uvloop
from launching import DEADLINE_S, on_both_loops

from aelastic import accepting
from aelastic.policy import RestartPolicy
from aelastic.rdzv import server as servers
from aelastic.rdzv.board import Claim, Reign
from aelastic.rdzv.boards.inprocess import InProcessBoard, SharedWorld
from aelastic.rdzv.chair import Chair
from aelastic.rdzv.coordinator import Coordinator
from aelastic.rdzv.messages import Terms
from aelastic.rdzv.server import CoordinatorServer
from aelastic.rdzv.tenure import Tenure
from aelastic.store import listen

LEASE_S = 0.3


class OthersBoard(InProcessBoard):
    """Says of any reign that another agent has it by now."""

    async def keep(self, reign: Reign) -> bool:
        return False


def coordinator_server() -> tuple[CoordinatorServer, int]:
    """A server whose reign is over as soon as it asks, and its port."""
    listener = listen(0)
    port = listener.getsockname()[1]
    reign = Reign(1, Claim("node", ("127.0.0.1",), port, "token"), 0)
    tenure = Tenure(1, LEASE_S, anyio.current_time())
    chair = Chair(Terms("run", 1, 2, 0, LEASE_S), "token", tenure, Coordinator(1, 2, RestartPolicy(0)))
    return CoordinatorServer(chair, reign, OthersBoard("run", SharedWorld()), listener, lambda: None), port


def run(loop: str, main: Callable[[], Awaitable[None]]) -> None:
    factory: Callable[[], asyncio.AbstractEventLoop] = (
        uvloop.new_event_loop if loop == "uvloop" else asyncio.SelectorEventLoop
    )
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(asyncio.wait_for(main(), DEADLINE_S))


@on_both_loops
@pytest.mark.parametrize("end", ["vacated", "cancelled"])
def test_who_connects_as_the_server_ends_is_hung_up_on(loop: str, end: str) -> None:
    """Nobody is left with a connection at whose other end nobody is: all ends come, while both ends live."""

    async def main() -> None:
        server, port = coordinator_server()
        met = 0
        is_over = False

        async def connect() -> None:
            nonlocal met
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionError:
                return  # refused: nobody is there any more
            met += 1
            try:
                await reader.read()
            except ConnectionError:
                pass  # reset: likewise
            writer.close()

        async def knock(tasks: anyio.abc.TaskGroup) -> None:
            while not is_over:
                for _ in range(5):
                    tasks.start_soon(connect)
                await anyio.sleep(0.001)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(knock, tasks)
            with anyio.move_on_after(None if end == "vacated" else LEASE_S / 6):
                await server.run()
            is_over = True
        assert met

    run(loop, main)


@on_both_loops
def test_more_agents_than_descriptors_come_in_as_soon_as_there_are_some(
    loop: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    take, failures = accepting.next_connection, [OSError(24, "Too many open files")] * 2

    def next_connection(listener: socket.socket) -> socket.socket | None:
        if failures:
            raise failures.pop()
        return take(listener)

    monkeypatch.setattr(servers, "next_connection", next_connection)
    monkeypatch.setattr(servers, "OUT_OF_FILES_PAUSE_S", 0.01)

    async def main() -> None:
        server, port = coordinator_server()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.run)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert b"Refused" in await reader.read()
            writer.close()
            tasks.cancel_scope.cancel()

    run(loop, main)
    assert caplog.text.count("no more agents can connect for now: Too many open files") == 1
