"""Whatever comes from the port that the board names: the agent goes on, and greets the next coordinator."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import decided
from kit.hostile_input import GARBAGE, LONG_EXAMPLES, frames, hostile
from kit.shared_board import InProcessStore, SharedWorld
from kit.stories.member import NODE, assigned, interrupted
from kit.waiting import DEADLINE_S

from aelastic.errors import InputError, RendezvousError
from aelastic.rdzv.agent_link import AgentLink
from aelastic.rdzv.board import Board
from aelastic.rdzv.coordinator.plans import changed
from aelastic.rdzv.leader_record import Candidate, LeaderRecord
from aelastic.rdzv.member import leader_watch, search
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.protocol.codec import UPWARD, Decoder, encode
from aelastic.rdzv.restart_policy import RestartPolicy
from aelastic.rdzv.settings import RendezvousSettings

pytestmark = [pytest.mark.timeout(3600), pytest.mark.filterwarnings(LONG_EXAMPLES)]

LEASE_S = 60.0
WELCOME = m.Plan(4, LEASE_S)
SEATS = m.Seats(m.fence_of(4, 1), 1, "t0k3n", (m.Seat("me", "h", "a..b", 1), m.Seat("b", "h", "127.0.0.1", 2)))
NOTICE = r.Notice(1, 1, r.Stage.FREEZE, 0, False, 5.0, decided.drain("n1", 60.0, ""))
DECISIONS: list[Any] = [
    assigned(1), assigned(2, 1), interrupted(1), m.Waiting("for others"), m.Look(1, "a hang", 1),
    m.StartAhead(), m.Compared(1, "rank 1", (1,), False, number=1), NOTICE, NOTICE.replace(stage=r.Stage.SAVE, save_at=3),
    r.Benched("broken", 60.0, 1), r.Answer("me-1", True, "done", ("me",)),
]  # fmt: skip
RUNS = changed(WELCOME, assigned(1))
DOWN: list[Any] = [
    WELCOME, m.Refused("not now", False), m.Heartbeat(1, True), m.Probe(), m.Goodbye("bye", False), SEATS, m.GivenUp(), m.Departed(1, 0),
    *(changed(plan, each) for each in DECISIONS for plan in (WELCOME, RUNS)),
    r.Answer("me-1", True, "done", ("me",)), r.Show(r.Fetch("b", "b-1", r.What.STATUS)),
    r.Shown(r.Fetched("b", "me", "me-1", "0", "text", False)),
]  # fmt: skip


class FixedBoard(Board):
    """Names one port, of a new coordinator each time that the last one was heard."""

    def __init__(self) -> None:
        super().__init__(InProcessStore("job", SharedWorld()), None, LEASE_S)
        self.port, self.term = 0, 4

    async def read(self) -> LeaderRecord | None:
        candidate = Candidate("boss", ("a..b", "127.0.0.1"), self.port, f"t{self.term}")
        return LeaderRecord(self.term, candidate, renewals=0)

    async def campaign(self, candidate: Candidate, seen: LeaderRecord | None, above: int) -> LeaderRecord | None:
        self.term += 1
        return await self.read()

    async def renew(self, record: LeaderRecord) -> LeaderRecord | None:
        return None

    async def publish(self, record: LeaderRecord, verdict: str) -> bool:
        return False


class Scene:
    """An agent's link, and the port at which it is told what a test wants, and later how things are."""

    def __init__(self) -> None:
        self.board, self.said, self.count = FixedBoard(), b"", 0
        self.has_greeted = asyncio.Event()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.board.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.count += 1
        decoder = Decoder(UPWARD)
        try:
            if self.count == 1:
                writer.write(self.said)
                writer.write_eof()
                while await reader.read(1 << 16):
                    pass
                self.board.term += 1
                return
            while data := await reader.read(1 << 16):
                if any(isinstance(message, m.Hello) for message in decoder.feed(data)):
                    self.has_greeted.set()
        except OSError:
            self.board.term += 1
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()  # before the loop is

    async def bear(self, data: bytes) -> None:
        self.said, self.count = data, 0
        self.has_greeted.clear()
        settings = RendezvousSettings("c10d", "127.0.0.1:1", 1, 3, config={"lease": str(LEASE_S)})
        link, told = AgentLink(self.board, settings, "job", "me", RestartPolicy(3)), list[Any]()
        is_over = asyncio.Event()

        def deliver(message: Any) -> None:
            told.append(message)
            if isinstance(message, m.Ended):
                is_over.set()

        link.tell(m.Ready(NODE))
        running = asyncio.create_task(link.run(deliver))
        waits = [asyncio.create_task(event.wait()) for event in (self.has_greeted, is_over)]
        try:
            with anyio.fail_after(DEADLINE_S):
                await asyncio.wait([running, *waits], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                with suppress(InputError, RendezvousError):  # it was refused for good
                    raise first_of(running)
        finally:
            for task in (running, *waits):
                task.cancel()
            await asyncio.gather(running, *waits, return_exceptions=True)


def first_of(task: asyncio.Task[None]) -> BaseException:
    error = task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert error is not None
    return error


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked at again is so at once."""
    for module in (leader_watch, search):
        monkeypatch.setattr(module, "READ_AGAIN_S", 0.001)


@pytest.mark.usefixtures("hasty")
def test_an_agent_bears_what_a_coordinator_says(caplog: pytest.LogCaptureFixture) -> None:
    with asyncio.Runner() as runner:
        scene: Scene = runner.run(make())

        @hostile
        @given(frames(DOWN, [WELCOME]) | GARBAGE | st.just(b""))
        def say(data: bytes) -> None:
            caplog.clear()
            runner.run(scene.bear(data))
            assert not [message for message in caplog.messages if message.startswith("aborted")]

        try:
            say()
        finally:
            runner.run(scene.close())


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("address", ["a..b", "node.invalid", "192.0.2.1", "fe80::1%9", "::ffff:1"])
def test_an_agent_whose_seat_has_an_address_that_is_not_its_own_goes_on(address: str) -> None:
    seats = SEATS.replace(seats=(m.Seat("me", "h", address, 1), SEATS.seats[1]))
    with asyncio.Runner() as runner:
        scene: Scene = runner.run(make())
        runner.run(scene.bear(encode(WELCOME) + encode(RUNS) + encode(seats)))
        assert scene.has_greeted.is_set()
        runner.run(scene.close())


async def make() -> Scene:
    scene = Scene()
    await scene.open()
    return scene
