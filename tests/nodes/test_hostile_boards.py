"""Whatever is on a board: each operation has an answer, or says why it has none; and a job that runs goes on."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.agents import FAIL, c10d, team_of
from kit.board_kits import board_at, settings_at
from kit.effort import HOSTILE_MOMENTS
from kit.hostile_input import GARBAGE, LONG_EXAMPLES, hostile, mutated
from kit.launching import Launcher
from kit.servers.etcd_boards import board_of
from kit.servers.etcd_servers import EtcdServers
from kit.servers.etcd_values import PUT
from kit.servers.stores import external_store

from aelastic.errors import InputError, RendezvousError
from aelastic.rdzv.board import Board
from aelastic.rdzv.leader_record import Candidate, LeaderRecord
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.record_text import MAX_BYTES, record_to_bytes, text_of, text_without_leader
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.rdzv.stores.c10d import C10dStore

pytestmark = [
    pytest.mark.usefixtures("warm_stores"),
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings(LONG_EXAMPLES),
]

SEATS = m.Seats(
    m.fence_of(3, 1), 1, "s3cret", (m.Seat("a", "host-a", "10.0.0.1", 4712), m.Seat("b", "host-b", "", 4713))
)
OWN = LeaderRecord(3, Candidate("me", ("10.0.0.1", "node1"), 4711, "t0k3n"), renewals=7, seats=SEATS)
OTHERS = OWN.replace(candidate=OWN.candidate.replace(node_id="other", token="other"), epoch=4)
RECORDS = [json.loads(record_to_bytes(record)) for record in (OWN, OTHERS, OTHERS.replace(verdict="over"))]
OPERATIONS: tuple[Callable[[Board], Awaitable[object]], ...] = (
    lambda board: board.open(),
    lambda board: board.read(),
    lambda board: board.campaign(OWN.candidate, None, 0),
    lambda board: board.campaign(OWN.candidate, OTHERS, 9),
    lambda board: board.renew(OWN),
    lambda board: board.publish(OWN, "over"),
    lambda board: board.resign(OWN),
)


def as_bytes(said: Any) -> bytes:
    return said if isinstance(said, bytes) else json.dumps(said).encode()


OF_RECORD = st.sampled_from(RECORDS).flatmap(mutated).map(as_bytes) | GARBAGE
COUNTS = st.sampled_from([b"0", b"7", b"-1", b"9" * 19, b"quorum 1", b"", "\N{ARABIC-INDIC DIGIT THREE}".encode()])
OF_STORE = (
    st.tuples(COUNTS, OF_RECORD).map(b"\n".join)
    | st.sampled_from([text_of(OWN), text_of(OTHERS), text_without_leader(OTHERS)])
    | GARBAGE
)


async def try_all(board: Board, order: list[int]) -> None:
    for number in order:
        with suppress(RendezvousError, InputError):  # which say it in one line
            await OPERATIONS[number](board)


ORDERS = st.lists(st.integers(0, len(OPERATIONS) - 1), min_size=1, max_size=3)


def test_a_store_may_hold_anything() -> None:
    with external_store() as endpoint, asyncio.Runner() as runner:
        settings = settings_at("c10d", endpoint)
        board, writer = board_at(settings, "job"), C10dStore(settings, "job", os.environ)

        async def put_and_try(text: bytes, order: list[int]) -> None:
            await writer.compare_set(await writer.get(), text[:MAX_BYTES])  # an agent's client writes no more
            await try_all(board, order)

        @hostile
        @given(OF_STORE, ORDERS)
        def bear(text: bytes, order: list[int]) -> None:
            runner.run(put_and_try(text, order))

        async def close() -> None:
            await board.aclose()
            await writer.aclose()

        try:
            bear()
        finally:
            runner.run(close())


@pytest.mark.parametrize(
    "backend", [pytest.param("etcd-v3", marks=pytest.mark.all), pytest.param("etcd-v2", marks=pytest.mark.all)]
)
def test_an_etcd_may_hold_anything(backend: str, etcds: EtcdServers, kind_to_etcd: None) -> None:
    server, run_id = etcds.of("distro"), f"hostile-{backend}"
    with asyncio.Runner() as runner:

        async def make() -> Board:
            return board_of(backend, server.endpoint, run_id)

        board = runner.run(make())

        @hostile
        @given(OF_STORE | OF_RECORD, ORDERS, st.booleans())
        def bear(text: bytes, order: list[int], has_lease: bool) -> None:
            PUT[backend](server, f"/aelastic/{run_id}/coordinator", text, lease=has_lease)
            runner.run(try_all(board, order))

        try:
            bear()
        finally:
            runner.run(board.aclose())


@pytest.mark.all
def test_a_job_bears_what_stands_where_its_coordinator_should(launch: Launcher) -> None:
    """Each value stays until a coordinator that writes a record at each renewal has failed at one, or more."""
    lease_s = 1.5
    values = [b"", b"hello", b"0\n{}", b"0\n" + b"[" * 50_000, b"x" * 70_000, b"\xff\xfe", b'0\n{"epoch": 1e999}']
    with team_of(launch, c10d(), "2", conf={"lease": lease_s}) as team, asyncio.Runner() as runner:
        agents = team.start_many(2)
        first = team.wait_round(agents)
        settings = RendezvousSettings("c10d", team.meeting.endpoint, config={"is_host": "false"})
        store = C10dStore(settings, team.run_id, os.environ)

        async def stand(text: bytes) -> None:
            loop = asyncio.get_running_loop()
            until = loop.time() + 1.5 * lease_s
            while loop.time() < until:
                await store.compare_set(await store.get(), text)
                await asyncio.sleep(0.05)

        try:
            for moment in range(HOSTILE_MOMENTS):
                runner.run(stand(values[moment % len(values)]))
                assert not [agent for agent in agents if agent.is_over], team.story
                team.assert_untouched(first)
        finally:
            runner.run(store.aclose())
        assert [len(agent.starts) for agent in agents] == [1, 1], team.story
        first.tell(FAIL, 0)
        team.finish(team.wait_round(agents, first))
