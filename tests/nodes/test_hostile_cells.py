"""Any content in a cell: each operation returns or reports why it cannot, and a running job continues."""

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
from kit.cell_kits import cell_at, settings_at
from kit.effort import HOSTILE_MOMENTS
from kit.hostile_input import GARBAGE, LONG_EXAMPLES, hostile, mutated
from kit.launching import Launcher
from kit.servers.etcd_cells import cell_of, payload_with, renewed, resigned, stored_by
from kit.servers.etcd_servers import EtcdServers
from kit.servers.etcd_values import PUT
from kit.servers.stores import external_store

from aelastic.errors import InputError, RendezvousError
from aelastic.rdzv.log.entries import Accepted, first_entry, next_entry
from aelastic.rdzv.protocol.codec import to_text
from aelastic.rdzv.protocol.messages import StoredCell
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.rdzv.stores.c10d import C10dStore
from aelastic.rdzv.stores.endpoint_cell import EndpointCell

pytestmark = [
    pytest.mark.usefixtures("warm_stores"),
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings(LONG_EXAMPLES),
]

# An agent's child process accepts no longer texts from it.
WRITTEN_MAX = 64 * 1024
ROUND = first_entry(3, ["me", "other"], ["me", "other"], ("1f",), payload_with(1))
OVER = next_entry(ROUND, 3, ["me", "other"], ["me", "other"], ("1f",), is_verdict=True, payload=payload_with(2))
OWN, OTHERS = (
    stored.replace(cell=stored.cell.replace(log="1f", committed=ROUND, accepted=Accepted(OVER, 4)))
    for stored in (stored_by("me", term=3), stored_by("other", term=4))
)
STORED = (OWN, OTHERS, OTHERS.replace(cell=OTHERS.cell.replace(committed=OVER, accepted=None)), resigned(OTHERS))
OPERATIONS: tuple[Callable[[EndpointCell], Awaitable[object]], ...] = (
    lambda cell: cell.open(),
    lambda cell: cell.read(),
    lambda cell: cell.write(OWN),
    lambda cell: cell.write(renewed(OWN)),
    lambda cell: cell.write(resigned(OWN)),
)


def as_bytes(content: Any) -> bytes:
    return content if isinstance(content, bytes) else json.dumps(content).encode()


OF_STORE = (
    st.sampled_from([json.loads(to_text(stored)) for stored in STORED]).flatmap(mutated).map(as_bytes)
    | st.sampled_from([to_text(stored).encode() for stored in STORED])
    | GARBAGE
)


async def try_all(leader: EndpointCell, order: list[int], newcomer: EndpointCell) -> None:
    """The leader performs all operations, and an agent that has never written reads."""
    for number in order:
        with suppress(RendezvousError, InputError):  # both have one-line messages
            answer = await OPERATIONS[number](leader)
            assert answer is None or isinstance(answer, StoredCell)
    with suppress(RendezvousError, InputError):
        seen = await newcomer.read()
        assert seen is None or isinstance(seen, StoredCell)


ORDERS = st.lists(st.integers(0, len(OPERATIONS) - 1), min_size=1, max_size=3)


def test_a_store_may_hold_anything() -> None:
    with external_store() as endpoint, asyncio.Runner() as runner:
        settings = settings_at("c10d", endpoint)
        leader, newcomer = cell_at(settings, "job"), cell_at(settings, "job")
        writer = C10dStore(settings, "job", os.environ)

        async def put_and_try(text: bytes, order: list[int]) -> None:
            await writer.compare_set(await writer.get(), text[:WRITTEN_MAX])
            await try_all(leader, order, newcomer)

        @hostile
        @given(OF_STORE, ORDERS)
        def bear(text: bytes, order: list[int]) -> None:
            runner.run(put_and_try(text, order))

        async def close() -> None:
            for each in (leader, newcomer, writer):
                await each.aclose()

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

        async def make() -> EndpointCell:
            return cell_of(backend, server.endpoint, run_id)

        leader, newcomer = runner.run(make()), runner.run(make())

        @hostile
        @given(OF_STORE, ORDERS, st.booleans())
        def bear(text: bytes, order: list[int], has_lease: bool) -> None:
            PUT[backend](server, f"/aelastic/{run_id}/coordinator", text, lease=has_lease)
            runner.run(try_all(leader, order, newcomer))

        try:
            bear()
        finally:
            runner.run(leader.aclose())
            runner.run(newcomer.aclose())


@pytest.mark.all
def test_a_job_bears_what_stands_where_its_leader_should(launch: Launcher) -> None:
    """Each value stays until a leader, which writes the cell at each renewal, has failed to do so at least once."""
    lease_s = 1.5
    values = [
        b"",
        b"hello",
        to_text(stored_by("other", term=4)).encode(),
        to_text(stored_by("other", term=1 << 42)).encode(),  # later than any clock of ours
        to_text(OTHERS).encode(),
        b"0\n{}",
        b"0\n" + b"[" * 50_000,
        b"x" * 70_000,
        b"\xff\xfe",
        b'["StoredCell",{"cell":1e999}]',
    ]
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
        first.send_signal(FAIL, 0)
        team.finish(team.wait_round(agents, first))
