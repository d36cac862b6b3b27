"""What others write on a board of agents that have a secret: agents ignore it and continue."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress

import pytest
from kit import decided
from kit.agents import LONG_LEASE_S
from kit.board_kits import board_at, secret_of, settings_at
from kit.servers.etcd_boards import elected, until_answered
from kit.servers.etcd_servers import EtcdServers

from aelastic.errors import InputError
from aelastic.rdzv.board import Board
from aelastic.rdzv.leader_record import Candidate, LeaderRecord
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.codec import to_text
from aelastic.rdzv.secret.seals import claimed
from aelastic.rdzv.secret.secret_file import SecretFile
from aelastic.rdzv.writing import NotTrustedError

A, B = (Candidate(name, (f"host-{name}",), 4000, f"token-{name}") for name in "ab")
OTHER_WORDS = b"another secret of the tests"

MakeBoard = Callable[[SecretFile | None], Board]
pytestmark = pytest.mark.usefixtures("warm_stores")


@pytest.fixture
def lease_s() -> float:
    return LONG_LEASE_S


@pytest.fixture(params=["c10d", pytest.param("etcd-v3", marks=pytest.mark.all)])
async def make(request: pytest.FixtureRequest, etcds: EtcdServers, lease_s: float) -> AsyncIterator[MakeBoard]:
    """Makes boards of one world."""
    settings = settings_at(request.param, "" if request.param == "c10d" else etcds.of("distro").endpoint, lease_s)
    async with AsyncExitStack() as stack:

        def make_one(secret: SecretFile | None) -> Board:
            board = board_at(settings, "job", secret)
            stack.push_async_callback(board.aclose)
            return board

        yield make_one


async def look(board: Board) -> LeaderRecord | None:
    await board.open()
    return await board.read()


async def campaign(board: Board, candidate: Candidate) -> LeaderRecord:
    """Its election, once what is there has stood for a lease."""

    async def elect() -> LeaderRecord:
        return await elected(board, candidate, await look(board))

    return await until_answered(elect, NotTrustedError)


@pytest.mark.parametrize("lease_s", [2.0])
async def test_a_stranger_s_record_is_written_over_once_it_stands_still(make: MakeBoard) -> None:
    stranger = make(secret_of("job", OTHER_WORDS))
    await campaign(stranger, B)
    ours = make(secret_of("job"))
    with pytest.raises(NotTrustedError, match="was not written with this agent's secret") as caught:
        await look(ours)
    assert caught.value.candidate == B, "so that both ends can say what differs"
    record = await campaign(ours, A)
    assert record.candidate == A
    assert await ours.read() == record
    assert (await ours.renew(record)) is not None


@pytest.mark.parametrize("words", [OTHER_WORDS, None])
async def test_a_coordinator_takes_back_what_a_stranger_has_written_over(
    make: MakeBoard, words: bytes | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours, stranger = make(secret_of("job")), make(secret_of("job", words) if words else None)
    mine = await campaign(ours, A)
    # It forges: what it has not written itself is nothing to it, and it waits for nobody.
    monkeypatch.setattr(stranger._writing, "verify", lambda text, _: None)
    monkeypatch.setattr(stranger._writing, "has_stood_still", lambda _: True)
    with suppress(NotTrustedError):  # it does not believe itself either
        await stranger.campaign(B, None, mine.epoch + 5)
    renewed = await ours.renew(mine)
    assert renewed is not None and renewed.is_same_term(mine)
    assert await ours.read() == renewed
    assert [line for line in caplog.messages if "is --secret-file the same" in line]


async def test_a_coordinator_takes_back_what_was_written_over_with_words_of_an_earlier_one(make: MakeBoard) -> None:
    ours, stranger = make(secret_of("job")), make(None)._store
    earlier = await campaign(ours, B)
    words = await ours._store.get()
    await ours.resign(earlier)
    mine = await campaign(ours, A)
    assert await stranger.compare_set(await stranger.get(), words) == words
    assert (found := await ours.read()) is not None and found.candidate == B, "it was proved once"
    renewed = await ours.renew(mine)
    assert renewed is not None and renewed.is_same_term(mine) and await ours.read() == renewed


async def test_a_verdict_is_believed_of_agents_of_the_job_alone(
    make: MakeBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, stranger = make(secret_of("job")), make(None)
    mine = await campaign(ours, A)
    verdict = to_text(m.Ended(m.Outcome.SUCCEEDED, decided.SUCCEEDED))
    monkeypatch.setattr(stranger._writing, "verify", lambda text, _: claimed(text))
    await stranger.open()
    assert await stranger.publish(mine, verdict), "it has read our record, and writes it back with a verdict"
    newcomer = make(secret_of("job"))
    with pytest.raises(NotTrustedError):
        await look(newcomer)
    renewed = await ours.renew(mine)
    assert renewed is not None and not renewed.verdict
    assert await ours.publish(renewed, verdict)
    found = await newcomer.read()
    assert found is not None and found.verdict == verdict


async def test_an_agent_without_the_secret_is_told_to_use_it(make: MakeBoard) -> None:
    await campaign(make(secret_of("job")), A)
    newcomer = make(None)
    with pytest.raises(
        InputError, match="its agents have a secret and this one has none: use the same --secret-file on every node"
    ):
        await look(newcomer)
