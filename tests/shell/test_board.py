"""The election policy of a board, on a store in memory: who may write over what."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kit.board_kits import secret_of
from kit.shared_board import InProcessStore, SharedWorld

from aelastic import aio
from aelastic.errors import RendezvousConnectionError, RendezvousStateError
from aelastic.rdzv.board import TRIES_MAX, Board
from aelastic.rdzv.leader_record import Candidate, LeaderRecord
from aelastic.rdzv.record_text import MAX_BYTES, state_of, text_of
from aelastic.rdzv.secret.secret_file import SecretFile
from aelastic.rdzv.stores.store import NoStoreForJob
from aelastic.rdzv.writing import NotTrustedError

A, B = (Candidate(name, (f"host-{name}",), 4000, f"token-{name}") for name in "ab")
LEASE_S = 5.0
KEY = "job"


class GoneError(NoStoreForJob, RendezvousConnectionError):
    """The process that served the store has ended."""


class Scripted(InProcessStore):
    """A store whose next writes go as a test says: each function is called before one, or raises after one."""

    def __init__(self, world: SharedWorld) -> None:
        super().__init__(KEY, world)
        self.before: list[Callable[[], None]] = []
        self.losses = 0  # answers that are lost

    async def compare_set(self, expected: bytes, new: bytes) -> bytes:
        if self.before:
            self.before.pop(0)()
        text = await super().compare_set(expected, new)
        if self.losses:
            self.losses -= 1
            raise RendezvousConnectionError("the answer was lost")
        return text


class Scene:
    """Two agents of a job, and what a test does to the cell by itself."""

    def __init__(self) -> None:
        self.world = SharedWorld()
        self.store = Scripted(self.world)
        self.a = Board(self.store, None, LEASE_S)
        self.b = Board(InProcessStore(KEY, self.world), None, LEASE_S)

    @property
    def text(self) -> bytes:
        return self.world.texts.get(KEY, b"")

    def put(self, text: bytes) -> None:
        self.world.texts[KEY] = text

    async def elect(self, board: Board, candidate: Candidate, above: int = 0) -> LeaderRecord:
        record = await board.campaign(candidate, await board.read(), above)
        assert record is not None and record.candidate == candidate
        return record


async def test_a_candidate_that_missed_a_renewal_changes_nothing() -> None:
    scene = Scene()
    seen = await scene.elect(scene.a, A)
    renewed = await scene.a.renew(seen)
    assert await scene.b.campaign(B, seen, 0) == renewed
    assert await scene.b.campaign(B, renewed, 0) == await scene.a.read() != renewed


async def test_a_leader_that_was_replaced_neither_renews_nor_publishes_nor_resigns() -> None:
    scene = Scene()
    old = await scene.elect(scene.a, A)
    new = await scene.elect(scene.b, B)
    assert new.epoch > old.epoch
    assert await scene.a.renew(old) is None
    assert not await scene.a.publish(old, "over")
    await scene.a.resign(old)
    assert await scene.a.read() == new


async def test_epochs_rise_after_a_resignation_and_above_what_the_agent_knows() -> None:
    scene = Scene()
    first = await scene.elect(scene.a, A)
    await scene.a.resign(first)
    assert await scene.b.read() is None
    second = await scene.elect(scene.b, B)
    assert second.epoch == first.epoch + 1
    assert (await scene.elect(scene.a, A, above=1000)).epoch == 1001


async def test_a_renewal_whose_answer_was_lost_is_not_counted_for_the_next() -> None:
    scene = Scene()
    record = await scene.elect(scene.a, A)
    scene.store.losses = 1
    with pytest.raises(RendezvousConnectionError):
        await scene.a.renew(record)
    renewed = await scene.a.renew(record)
    assert renewed is not None and renewed.renewals == 2


async def test_a_verdict_whose_answer_was_lost_is_published_once_more() -> None:
    scene = Scene()
    record = await scene.elect(scene.a, A)
    scene.store.losses = 1
    with pytest.raises(RendezvousConnectionError):
        await scene.a.publish(record, "over")
    assert await scene.a.publish(record, "over")
    found = await scene.b.read()
    assert found is not None and found.verdict == "over"


async def test_a_leader_registers_again_in_a_store_that_was_restarted(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    record = await scene.elect(scene.a, A)
    scene.put(b"")
    renewed = await scene.a.renew(record)
    assert record.is_same_term(renewed) and await scene.b.read() == renewed
    assert caplog.messages == ["a store in this process was restarted and is empty: the leader registers again"]


async def test_a_leader_goes_on_while_no_agent_can_use_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    record = await scene.elect(scene.a, A)

    async def gone(*_: bytes) -> bytes:
        raise GoneError

    monkeypatch.setattr(scene.store, "get", gone)
    assert await scene.a.renew(record) == record.replace(renewals=1)
    assert await scene.a.renew(record.replace(renewals=1)) == record.replace(renewals=2)
    with pytest.raises(GoneError):
        await scene.a.publish(record, "over")


async def test_a_leader_elected_by_nodes_takes_the_place_of_what_the_store_knew_before() -> None:
    scene = Scene()
    known = await scene.elect(scene.b, B)
    elected = LeaderRecord(known.epoch + 5, A, is_by_nodes=True)
    claimed = await scene.a.renew(elected)
    assert claimed == elected.replace(renewals=0) == await scene.b.read()
    assert await scene.b.renew(known) is None


async def test_a_leader_elected_by_nodes_hears_of_a_new_job_that_knows_nothing_of_it() -> None:
    scene = Scene()
    elected = LeaderRecord(7, A, is_by_nodes=True)
    new = await scene.elect(scene.b, B.replace(made_ms=1000))
    assert new.is_first
    assert await scene.a.renew(elected) == new


async def test_two_that_write_all_the_time_are_told_from_a_store_that_is_slow() -> None:
    scene = Scene()
    record = await scene.elect(scene.a, A)
    counts = iter(range(1, 2 * TRIES_MAX))
    scene.store.before = [lambda: scene.put(text_of(record.replace(renewals=next(counts)))) for _ in range(TRIES_MAX)]
    with pytest.raises(RendezvousConnectionError, match="too many conflicting writes to the record at a store"):
        await scene.a.publish(record, "over")


async def test_what_does_not_fit_is_refused_and_what_was_there_stays() -> None:
    scene = Scene()
    record = await scene.elect(scene.a, A)
    before = scene.text
    with pytest.raises(RendezvousStateError, match="the leader record cannot be written"):
        await scene.a.publish(record, "x" * MAX_BYTES)
    assert scene.text == before


async def test_a_text_without_our_proof_is_left_alone_for_a_lease_and_overwritten_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene, now = Scene(), 100.0
    monkeypatch.setattr(aio, "now", lambda: now)
    await scene.elect(scene.b, B)
    ours = Board(InProcessStore(KEY, scene.world), secret_of(KEY), LEASE_S)
    with pytest.raises(NotTrustedError, match="was not written with this agent's secret") as caught:
        await ours.read()
    assert caught.value.candidate == B
    with pytest.raises(NotTrustedError):
        await ours.campaign(A, None, 0)
    now += LEASE_S
    record = await scene.elect(ours, A)
    scene.put(text_of(record.replace(renewals=99)))
    renewed = await ours.renew(record)
    assert renewed is not None and renewed.renewals == 1, "a leader overwrites it at once"


async def test_a_store_that_lets_this_agent_write_nothing_makes_it_no_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    """As node 0's store of a `static` job does with the other nodes."""
    scene = Scene()
    monkeypatch.setattr(scene.store, "compare_set", lambda *_: scene.store.get())
    assert await scene.a.campaign(A, None, 0) is None
    record = await scene.elect(scene.b, B)
    assert await scene.a.campaign(A, record, 0) == record
    assert state_of(scene.text).record == record


@pytest.mark.parametrize("secret", [None, secret_of(KEY)], ids=["no secret", "secret"])
async def test_an_earlier_record_that_was_put_back_is_overwritten_only_where_a_secret_shows_who_wrote_it(
    secret: SecretFile | None,
) -> None:
    scene = Scene()
    a, b = (Board(InProcessStore(KEY, scene.world), secret, LEASE_S) for _ in range(2))
    earlier = await scene.elect(b, B)
    text = scene.text
    await b.resign(earlier)
    record = await scene.elect(a, A)
    scene.put(text)
    renewed = await a.renew(record)
    assert renewed == (record.replace(renewals=1) if secret is not None else None)
