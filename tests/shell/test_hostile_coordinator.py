"""Any input from the port that the cell names: the agent continues, and greets the next leader."""

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
from kit.shared_cell import InProcessStore, SharedWorld
from kit.stories.member import FIRST, NODE, TERM, VOTERS, after, assigned, interrupted, of_log
from kit.waiting import DEADLINE_S

from aelastic.errors import InputError, RendezvousError
from aelastic.rdzv.agent_link import AgentLink
from aelastic.rdzv.leader.job_state import JobState, Participant, Round, payload_of
from aelastic.rdzv.leader.plans import changed
from aelastic.rdzv.log.cell import Cell
from aelastic.rdzv.log.entries import Accepted, Entry, Payload
from aelastic.rdzv.log.node import Plan
from aelastic.rdzv.member import member, search
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.protocol.codec import UPWARD, Decoder, encode
from aelastic.rdzv.restart_policy import RestartPolicy
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.rdzv.stores.endpoint_cell import EndpointCell

pytestmark = [pytest.mark.timeout(3600), pytest.mark.filterwarnings(LONG_EXAMPLES)]

LEASE_S = 60.0


def entry(address: str = "127.0.0.1") -> Entry:
    """A round in which this agent votes, and is reached at that address."""
    nodes = tuple(Participant(name, name, "h", "", 2, address if name == "me" else "127.0.0.1", 1) for name in VOTERS)
    return after(FIRST, *VOTERS, payload=payload_of(JobState(Round(1, TERM, nodes, "127.0.0.1", 29500))))


WELCOME = m.Plan(TERM, LEASE_S, of_log(committed=None))
LOGS: list[Plan] = [
    of_log(), of_log(committed=entry()), of_log(committed=entry().id), of_log(proposal=entry()), of_log(is_leading=False),
    of_log(committed=after(FIRST, *VOTERS, payload=Payload("no content"))),
    Plan(TERM, True, entry(), after(entry(), "me"), Accepted(entry(), TERM)),
]  # fmt: skip
NOTICE = r.Notice(1, 1, r.Stage.FREEZE, 0, False, 5.0, decided.drain("n1", 60.0, ""))
DECISIONS: list[Any] = [
    assigned(1), assigned(2, 1), interrupted(1), m.Waiting("for others"), m.Look(1, "a hang", 1),
    m.StartAhead(), m.Compared(1, "rank 1", (1,), False, number=1), NOTICE, NOTICE.replace(stage=r.Stage.SAVE, save_at=3),
    r.Cordoned("broken", 60.0, 1), r.Answer("me-1", True, "done", ("me",)),
]  # fmt: skip
RUNS = changed(WELCOME, assigned(1)).replace(log=of_log())
DOWN: list[Any] = [
    WELCOME, m.Refused("not now", False), m.Heartbeat(True), m.Probe(), m.Goodbye("bye", False), m.Goodbye("bye", True), m.GivenUp(),
    *(RUNS.replace(log=each) for each in LOGS),
    *(changed(plan, each) for each in DECISIONS for plan in (WELCOME, RUNS)),
    r.Answer("me-1", True, "done", ("me",)), r.Show(r.Fetch("b", "b-1", r.What.STATUS)),
    r.Shown(r.Fetched("b", "me", "me-1", "0", "text", False)),
]  # fmt: skip


class FixedCell(EndpointCell):
    """Names one port, of a new leader each time the last one has sent something, or this agent writes."""

    def __init__(self) -> None:
        super().__init__(InProcessStore("job", SharedWorld()), None, LEASE_S)
        self.port, self.term = 0, TERM

    async def read(self) -> m.StoredCell | None:
        token = f"t{self.term}"
        leader = m.LeaderAt("boss", "boss", ("a..b", "127.0.0.1"), self.port, token)
        return m.StoredCell(Cell("1f", FIRST.log, self.term, token), leader)

    async def write(self, stored: m.StoredCell) -> m.StoredCell | None:
        self.term += 1
        return await self.read()


class Scene:
    """An agent's link, and a port that sends it a test's bytes once, and then awaits its greeting."""

    def __init__(self) -> None:
        self.cell, self.data, self.count = FixedCell(), b"", 0
        self.has_greeted = asyncio.Event()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.cell.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.count += 1
        decoder = Decoder(UPWARD)
        try:
            if self.count == 1:
                writer.write(self.data)
                writer.write_eof()
                while await reader.read(1 << 16):
                    pass
                self.cell.term += 1
                return
            while data := await reader.read(1 << 16):
                if any(isinstance(message, m.Hello) for message in decoder.feed(data)):
                    self.has_greeted.set()
        except OSError:
            self.cell.term += 1
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()  # before the loop closes

    async def bear(self, data: bytes) -> None:
        self.data, self.count = data, 0
        self.has_greeted.clear()
        settings = RendezvousSettings("c10d", "127.0.0.1:1", 1, 3, config={"lease": str(LEASE_S)})
        link, delivered = AgentLink(self.cell, settings, "job", "me", RestartPolicy(3)), list[Any]()
        is_over = asyncio.Event()

        def deliver(message: Any) -> None:
            delivered.append(message)
            if isinstance(message, m.Ended):
                is_over.set()

        link.send(m.Ready(NODE))
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
    """Makes repeated reads immediate."""
    monkeypatch.setattr(search, "READ_AGAIN_S", 0.001)
    for name in ("PAUSE_S", "STAGGER_S"):
        monkeypatch.setattr(member, name, 0.001)


@pytest.mark.usefixtures("hasty")
def test_an_agent_bears_what_a_leader_says(caplog: pytest.LogCaptureFixture) -> None:
    with asyncio.Runner() as runner:
        scene: Scene = runner.run(make())

        @hostile
        @given(frames(DOWN, [WELCOME]) | GARBAGE | st.just(b""))
        def send(data: bytes) -> None:
            caplog.clear()
            runner.run(scene.bear(data))
            assert not [message for message in caplog.messages if message.startswith("aborted")]

        try:
            send()
        finally:
            runner.run(scene.close())


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("address", ["a..b", "node.invalid", "192.0.2.1", "fe80::1%9", "::ffff:1"])
def test_an_agent_that_is_asked_to_vote_at_an_address_that_is_not_its_own_continues(address: str) -> None:
    with asyncio.Runner() as runner:
        scene: Scene = runner.run(make())
        runner.run(scene.bear(encode(WELCOME) + encode(RUNS.replace(log=of_log(committed=entry(address))))))
        assert scene.has_greeted.is_set()
        runner.run(scene.close())


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("text", ["no content", "", "x", "c$}b*0RR91"])
def test_an_agent_that_is_sent_an_entry_whose_content_no_leader_wrote_continues(text: str) -> None:
    with asyncio.Runner() as runner:
        scene: Scene = runner.run(make())
        odd = after(FIRST, *VOTERS, payload=Payload(text))
        runner.run(scene.bear(encode(WELCOME) + encode(RUNS.replace(log=of_log(committed=odd)))))
        assert scene.has_greeted.is_set()
        runner.run(scene.close())


async def make() -> Scene:
    scene = Scene()
    await scene.open()
    return scene
