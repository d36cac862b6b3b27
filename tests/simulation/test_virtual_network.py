"""The simulated world matches the real one where that matters: closed connections, frozen and dead processes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from kit.simulated.process import Clock, SimulatedProcess
from kit.simulated.sockets import SimulatedPort
from kit.simulated.world import FIN, RST, World, address_of

from aelastic.base.loop.sockets import attach, next_connection, wait_readable
from aelastic.rdzv.protocol.stream import LINGER_0

PORT = 7000


class Received(asyncio.Protocol):
    """Records what happens to it."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.lines.append(data.decode())

    def connection_lost(self, error: Exception | None) -> None:
        self.lines.append("closed" if error is None else "reset")


class Two:
    """A server and a client, on two hosts, connected."""

    def __init__(self) -> None:
        self.world = World(0)
        self.here, self.there = (
            SimulatedProcess(self.world, host, Clock(offset_s=99.0)) for host in ("node0", "node1")
        )
        self.server, self.client = Received(), Received()
        self.run(self.there, self._serve)
        self.run(self.here, self._connect)
        self.pass_time()

    def run(self, process: SimulatedProcess, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        def over(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self.world.fail(error)

        process.post(self, lambda: process.loop.start(main(), over))

    async def _serve(self) -> None:
        port = SimulatedPort(PORT)
        port.listen_at([])
        listener: Any = port.listeners[0]
        await wait_readable(listener)
        conn = next_connection(listener)
        assert conn is not None
        await attach([conn], lambda: self.server)
        await anyio.sleep_forever()

    async def _connect(self) -> None:
        await asyncio.get_running_loop().create_connection(lambda: self.client, address_of("node1"), PORT)
        await anyio.sleep_forever()

    def pass_time(self, seconds: float = 1.0) -> None:
        self.world.run(lambda: False, self.world.now + seconds)


def test_bytes_arrive_in_order_and_each_end_knows_the_other() -> None:
    two = Two()
    for word in ("a", "b", "c"):
        two.here.post(two, lambda word=word: two.client.transport.write(word.encode()))  # type: ignore[misc]
    two.pass_time()
    assert two.server.lines == ["a", "b", "c"]
    assert two.server.transport.get_extra_info("peername")[0] == address_of("node0")
    assert two.client.transport.get_extra_info("peername") == (address_of("node1"), PORT)


def test_an_end_that_is_closed_with_something_unread_resets_the_other() -> None:
    two = Two()
    two.there.post(two, two.server.transport.pause_reading)
    two.here.post(two, lambda: two.client.transport.write(b"unread"))
    two.pass_time()
    two.there.post(two, two.server.transport.close)
    two.pass_time()
    assert (two.client.lines, two.server.lines) == (["reset"], ["closed"])


def test_an_end_that_sends_no_more_still_receives_from_the_other() -> None:
    two = Two()

    def hang_up() -> None:
        two.client.transport.write(b"bye")
        two.client.transport.write_eof()

    two.there.post(two, lambda: two.server.transport.write(b"last word"))
    two.here.post(two, hang_up)
    two.pass_time()
    assert two.client.lines == ["last word", "closed"] and two.server.lines == ["bye", "closed"]


def test_an_aborted_connection_that_lingers_for_no_time_is_reset() -> None:
    two = Two()

    def abort() -> None:
        conn = two.client.transport.get_extra_info("socket")
        conn.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_0)
        two.client.transport.abort()

    two.here.post(two, abort)
    two.pass_time()
    assert two.server.lines == ["reset"]


@pytest.mark.parametrize("how, received", [(FIN, ["closed"]), (RST, ["reset"]), ("dark", [])])
def test_a_process_that_ends_does_nothing_more_and_its_kernel_tells_the_other_end(
    how: str, received: list[str]
) -> None:
    two, after = Two(), list[str]()

    async def work() -> None:
        try:
            await anyio.sleep(0.5)
            after.append("it lives")
        finally:
            two.client.transport.write(b"from beyond")

    two.run(two.here, work)
    two.world.after(0.1, lambda: two.here.end(how))
    two.world.dark |= {"node0"} if how == "dark" else set()
    two.pass_time()
    assert two.server.lines == received and after == []


def test_a_frozen_process_receives_all_when_it_continues_and_its_timers_are_late() -> None:
    two, woken = Two(), list[float]()

    async def sleep() -> None:
        await anyio.sleep(1.0)
        woken.append(two.world.now)

    two.run(two.there, sleep)
    two.pass_time(0.1)
    two.there.freeze()
    two.here.post(two, lambda: two.client.transport.write(b"meanwhile"))
    two.here.post(two, two.client.transport.close)
    two.pass_time(10)
    assert two.server.lines == [] and woken == []
    two.there.thaw()
    two.pass_time(0.1)
    assert two.server.lines == ["meanwhile", "closed"]
    assert woken and woken[0] > 10


def test_what_a_cut_holds_back_comes_when_it_is_over() -> None:
    two = Two()
    two.world.cut.add(("node0", "node1"))
    two.here.post(two, lambda: two.client.transport.write(b"late"))
    two.pass_time(30)
    assert two.server.lines == [] and two.client.transport.get_write_buffer_size() == 0, "it is in the kernel"
    two.world.heal("node0", "node1")
    two.pass_time(5)
    assert two.server.lines == ["late"]


def test_a_timer_goes_off_by_the_clock_of_its_machine() -> None:
    two, woken = Two(), list[float]()

    async def sleep() -> None:
        await anyio.sleep(10.0)
        woken.append(two.world.now)

    two.run(two.here, sleep)
    began = two.world.now
    two.pass_time(1)
    two.here.jump(8.0)
    two.pass_time(5)
    assert woken and 1.9 < woken[0] - began < 2.1


def test_a_process_that_runs_on_and_on_is_found() -> None:
    two = Two()

    async def spin() -> None:
        while True:
            await anyio.lowlevel.checkpoint()

    two.run(two.here, spin)
    with pytest.raises(AssertionError, match="runs on and on"):
        two.pass_time()
