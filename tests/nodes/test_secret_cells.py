"""Data from others in the cell of agents with a secret: agents ignore it and continue."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest
from kit.agents import LONG_LEASE_S
from kit.cell_kits import cell_at, secret_of, settings_at
from kit.servers.etcd_cells import A, B, renew, renewed, resigned, stored_by, until_answered, written
from kit.servers.etcd_servers import EtcdServers

from aelastic.base.loop import clock
from aelastic.errors import InputError
from aelastic.rdzv.log.entries import first_entry
from aelastic.rdzv.protocol.codec import to_text
from aelastic.rdzv.protocol.messages import StoredCell
from aelastic.rdzv.protocol.seals import claimed
from aelastic.rdzv.protocol.secret_file import SecretFile
from aelastic.rdzv.protocol.writing import NotTrustedError
from aelastic.rdzv.stores.endpoint_cell import EndpointCell

OTHER_WORDS = b"another secret of the tests"

MakeCell = Callable[[SecretFile | None], EndpointCell]
pytestmark = pytest.mark.usefixtures("warm_stores")


@pytest.fixture
def lease_s() -> float:
    return LONG_LEASE_S


@pytest.fixture(params=["c10d", pytest.param("etcd-v3", marks=pytest.mark.all)])
async def make(request: pytest.FixtureRequest, etcds: EtcdServers, lease_s: float) -> AsyncIterator[MakeCell]:
    """Makes cells that share a store."""
    settings = settings_at(request.param, "" if request.param == "c10d" else etcds.of("distro").endpoint, lease_s)
    async with AsyncExitStack() as stack:

        def make_one(secret: SecretFile | None) -> EndpointCell:
            cell = cell_at(settings, "job", secret)
            stack.push_async_callback(cell.aclose)
            return cell

        yield make_one


async def look(cell: EndpointCell) -> StoredCell | None:
    await cell.open()
    return await cell.read()


async def lead(cell: EndpointCell, stored: StoredCell) -> StoredCell:
    """Writes as soon as the content may be overwritten."""
    await until_answered(lambda: look(cell), NotTrustedError)
    return await written(cell, stored)


async def put(cell: EndpointCell, text: bytes) -> None:
    """Writes any text, like a program that can reach the store."""
    await cell.open()
    assert await cell._store.compare_set(await cell._store.get(), text) == text


@pytest.mark.parametrize("lease_s", [2.0])
async def test_a_stranger_s_cell_is_written_over_once_it_stands_still(make: MakeCell) -> None:
    await lead(make(secret_of("job", OTHER_WORDS)), B)
    ours = make(secret_of("job"))
    with pytest.raises(NotTrustedError, match="was not written with this agent's secret") as caught:
        await look(ours)
    assert caught.value.leader == B.leader, "so that both ends can report what differs"
    mine = await lead(ours, A)
    assert await ours.read() == mine
    await renew(ours, mine)


async def test_a_stranger_that_renews_is_left_alone(make: MakeCell, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger, ours, late_s, now = make(secret_of("job", OTHER_WORDS)), make(secret_of("job")), 0.0, clock.now
    monkeypatch.setattr(clock, "now", lambda: now() + late_s)
    theirs = await lead(stranger, B)
    for _ in range(4):
        with pytest.raises(NotTrustedError):
            await look(ours)
        late_s += 2 * LONG_LEASE_S
        theirs = await renew(stranger, theirs)
    with pytest.raises(NotTrustedError):
        await look(ours)
    late_s += 2 * LONG_LEASE_S
    assert await look(ours) is None


@pytest.mark.parametrize("words", [OTHER_WORDS, None])
async def test_a_leader_takes_back_at_once_what_a_stranger_has_written_over(
    make: MakeCell, words: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    ours, stranger = make(secret_of("job")), make(None)
    mine = await lead(ours, A)
    signed_with = make(secret_of("job", words) if words else None)._writing
    await put(stranger, signed_with.sign(to_text(stored_by("b", term=9)).encode()))
    assert await ours.write(renewed(mine)) is None, "it is ignored"
    mine = await written(ours, renewed(mine))
    assert await ours.read() == mine
    assert [line for line in caplog.messages if "is --secret-file the same" in line]


async def test_a_leader_takes_back_what_was_written_over_with_words_of_an_earlier_one(make: MakeCell) -> None:
    ours, stranger = make(secret_of("job")), make(None)
    earlier = await lead(ours, B)
    words = await ours._store.get()
    await written(ours, resigned(earlier))
    mine = await written(ours, stored_by("a", term=2))
    await put(stranger, words)
    assert await ours.write(renewed(mine)) == earlier, "it was proved once"
    mine = await written(ours, renewed(mine))
    assert await ours.read() == mine


async def test_the_end_of_a_job_is_believed_of_its_agents_alone(make: MakeCell) -> None:
    ours, stranger, newcomer = make(secret_of("job")), make(None), make(secret_of("job"))
    mine = await lead(ours, A)
    over = mine.replace(cell=mine.cell.replace(committed=first_entry(1, ["a"], ["a"], ("1f",))))
    await stranger.open()
    assert claimed(await ours._store.get()) == to_text(mine).encode(), "anyone can read it"
    proof = (await ours._store.get()).removeprefix(to_text(mine).encode().removesuffix(b"]"))
    await put(stranger, to_text(over).encode().removesuffix(b"]") + proof)
    with pytest.raises(NotTrustedError):
        await look(newcomer)
    assert await ours.write(renewed(mine)) is None
    await written(ours, renewed(over))
    assert await newcomer.read() == renewed(over)


async def test_an_agent_without_the_secret_is_asked_to_use_it(make: MakeCell) -> None:
    await lead(make(secret_of("job")), A)
    newcomer = make(None)
    with pytest.raises(
        InputError, match="its agents have a secret and this one has none: use the same --secret-file on every node"
    ):
        await look(newcomer)
