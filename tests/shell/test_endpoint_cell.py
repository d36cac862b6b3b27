"""The endpoint's cell on an in-memory store: who may overwrite what, and which content is ignored."""

from __future__ import annotations

import pytest
from kit.cell_kits import secret_of
from kit.servers.etcd_cells import A, B, renewed, resigned, stored_by
from kit.shared_cell import InProcessStore, SharedWorld

from aelastic.base.loop import clock as loop_clock
from aelastic.errors import InputError, RendezvousConnectionError, RendezvousError, RendezvousStateError
from aelastic.rdzv.log.cell import Cell
from aelastic.rdzv.log.entries import Accepted, Entry, Payload, first_entry
from aelastic.rdzv.protocol.codec import FRAME_MAX, PROTOCOL, to_text
from aelastic.rdzv.protocol.messages import StoredCell
from aelastic.rdzv.protocol.secret_file import SecretFile
from aelastic.rdzv.protocol.sense import TERM_MAX
from aelastic.rdzv.protocol.writing import NotTrustedError
from aelastic.rdzv.stores.endpoint_cell import EndpointCell

LEASE_S = 5.0
KEY = "job"
SECRET = secret_of(KEY)
FIRST = first_entry(1, "a", "a", ("w",))


class Scripted(InProcessStore):
    """A store that loses answers, or refuses writes."""

    def __init__(self, world: SharedWorld) -> None:
        super().__init__(KEY, world)
        self.losses = 0  # answers to lose
        self.is_read_only = False

    async def compare_set(self, expected: bytes, new: bytes) -> bytes:
        text = await (self.get() if self.is_read_only else super().compare_set(expected, new))
        if self.losses:
            self.losses -= 1
            raise RendezvousConnectionError("the answer was lost")
        return text


class Scene:
    """Two agents of a job, and the test's own access to the cell."""

    def __init__(self, secret: SecretFile | None = None) -> None:
        self.world = SharedWorld()
        self.store = Scripted(self.world)
        self.a = EndpointCell(self.store, secret, LEASE_S)
        self.b = self.of_another(secret)

    def of_another(self, secret: SecretFile | None) -> EndpointCell:
        return EndpointCell(InProcessStore(KEY, self.world), secret, LEASE_S)

    @property
    def text(self) -> bytes:
        return self.world.texts.get(KEY, b"")

    def put(self, text: bytes | StoredCell) -> None:
        self.world.texts[KEY] = text if isinstance(text, bytes) else to_text(text).encode()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, as the only item of a list."""
    now = [100.0]
    monkeypatch.setattr(loop_clock, "now", lambda: now[0])
    return now


@pytest.mark.parametrize("secret", [None, SECRET], ids=["no secret", "secret"])
async def test_an_agent_writes_over_what_it_has_seen_and_over_nothing_else(secret: SecretFile | None) -> None:
    scene = Scene(secret)
    assert await scene.a.read() is None
    assert await scene.a.write(A) == A
    assert await scene.b.write(B) == A == await scene.a.read(), "it has not seen that"
    assert await scene.a.write(renewed(A)) == renewed(A)
    assert await scene.b.write(B) == renewed(A), "it has missed a renewal"
    assert await scene.b.write(B) == B
    assert await scene.a.write(renewed(renewed(A))) == B, "a leader that was replaced changes nothing"
    assert await scene.a.read() == B


async def test_a_leader_that_resigned_may_be_followed_by_any_other() -> None:
    scene = Scene()
    await scene.a.write(A)
    await scene.a.write(resigned(A))
    found = await scene.b.read()
    assert found is not None and (found.leader, found.cell.leader, found.cell.term) == (None, "", A.cell.term)
    assert await scene.b.write(B) == B


async def test_a_write_whose_answer_was_lost_shows_when_the_cell_is_read() -> None:
    scene = Scene()
    await scene.a.write(A)
    scene.store.losses = 1
    with pytest.raises(RendezvousConnectionError):
        await scene.a.write(renewed(A))
    assert await scene.a.write(renewed(A)) == renewed(A), "it had not seen its own write"
    assert await scene.a.write(renewed(renewed(A))) == renewed(renewed(A))


async def test_a_store_that_does_not_answer_reports_it() -> None:
    scene = Scene()
    scene.world.is_down = True
    with pytest.raises(RendezvousConnectionError, match="is down"):
        await scene.a.read()
    with pytest.raises(RendezvousConnectionError, match="is down"):
        await scene.a.write(A)


async def test_a_store_that_was_restarted_is_empty_and_may_be_written() -> None:
    scene = Scene()
    await scene.a.write(A)
    scene.put(b"")
    assert await scene.a.write(renewed(A)) is None, "so its leader learns that the store has lost its data"
    assert await scene.a.write(renewed(A)) == renewed(A) == await scene.b.read()


async def test_a_store_that_lets_this_agent_write_nothing_shows_what_is_there() -> None:
    """Like node 0's store of a `static` job, for the other nodes."""
    scene = Scene()
    scene.store.is_read_only = True
    assert await scene.a.write(A) is None
    await scene.b.write(B)
    assert await scene.a.write(A) == B


async def test_what_does_not_fit_is_refused_and_what_was_there_stays() -> None:
    scene = Scene()
    await scene.a.write(A)
    entry = first_entry(1, ["a"], ["a"], ("1f",), Payload("x" * FRAME_MAX))
    with pytest.raises(RendezvousError, match="bytes"):
        await scene.a.write(A.replace(cell=A.cell.replace(committed=entry)))
    assert await scene.b.read() == A


# Content that no agent of this job wrote.

ELSEWHERE = [b"x", b"{}", b"\xff\xfe", b'["Alive",{}]', b'{"epoch": 1}', b'["StoredCell",{"cell":1}]']


@pytest.mark.parametrize("text", ELSEWHERE)
async def test_an_agent_that_finds_something_else_there_gets_advice(text: bytes) -> None:
    scene = Scene()
    scene.put(text)
    expected = (
        r"a store in this process.* was not written by an aelastic agent of this version \(.*\): choose another run id"
    )
    for ask in (scene.a.read, lambda: scene.a.write(A)):
        with pytest.raises(RendezvousStateError, match=expected):
            await ask()
    assert scene.text == text


OLDER = b'4\n{"epoch":7,"candidate":{"node_id":"n0","address":"n0","port":29400}}'


@pytest.mark.parametrize(
    "text, theirs", [(OLDER, "17 or an older one"), (A.replace(protocol=PROTOCOL + 1), PROTOCOL + 1)]
)
async def test_an_agent_of_another_version_than_the_jobs_gets_both(text: bytes | StoredCell, theirs: object) -> None:
    scene = Scene()
    scene.put(text)
    expected = (
        f"the job speaks protocol {theirs} and this agent speaks {PROTOCOL}: install the same version of aelastic"
    )
    with pytest.raises(InputError, match=expected):
        await scene.a.read()


@pytest.mark.parametrize("late", [False, True], ids=["committed", "accepted"])
@pytest.mark.parametrize(
    "entry",
    [first_entry(1, "a", "a", ("w",), payload=Payload("no state")), first_entry(TERM_MAX, "a", "a", ("w",))],
    ids=["payload", "term"],
)
async def test_what_no_leader_can_have_written_is_none_of_ours(entry: Entry, late: bool) -> None:
    scene = Scene()
    cell = A.cell.replace(accepted=Accepted(entry, 1)) if late else A.cell.replace(committed=entry)
    scene.put(A.replace(cell=cell))
    with pytest.raises(RendezvousStateError, match="was not written by an aelastic agent of this version"):
        await scene.a.read()


@pytest.mark.parametrize("cell", [A.cell.replace(term=TERM_MAX), A.cell.replace(accepted=Accepted(FIRST, TERM_MAX))])
async def test_a_term_that_no_log_has_counted_to_is_none_of_ours(cell: Cell) -> None:
    scene = Scene()
    scene.put(A.replace(cell=cell))
    with pytest.raises(RendezvousStateError, match="is none that a log has counted to"):
        await scene.a.read()


async def test_an_agent_that_leads_no_longer_writes_over_nothing_that_is_not_ours() -> None:
    scene = Scene()
    await scene.a.write(A)
    await scene.a.write(resigned(A))
    scene.put(b"x")
    with pytest.raises(RendezvousStateError):
        await scene.a.read()


@pytest.mark.parametrize("text", ELSEWHERE)
async def test_a_leader_writes_over_what_another_program_has_written_over_its_own(
    text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene()
    await scene.a.write(A)
    scene.put(text)
    assert await scene.a.write(renewed(A)) is None
    assert await scene.a.write(renewed(A)) == renewed(A) == await scene.b.read()
    (message,) = caplog.messages
    assert message.endswith("another program wrote over the record of this leader: registering it again")


async def test_a_text_without_our_proof_is_left_alone_for_a_lease_and_is_ignored_then(
    clock: list[float],
) -> None:
    scene = Scene(SECRET)
    scene.put(B)
    with pytest.raises(NotTrustedError, match="was not written with this agent's secret") as caught:
        await scene.a.read()
    assert caught.value.leader == B.leader
    clock[0] += LEASE_S - 0.01
    with pytest.raises(NotTrustedError):
        await scene.a.write(A)
    scene.put(renewed(B))  # its leader is alive
    clock[0] += LEASE_S
    with pytest.raises(NotTrustedError):
        await scene.a.read()
    clock[0] += LEASE_S
    assert await scene.a.read() is None
    assert await scene.a.write(A) == A


async def test_a_leader_writes_at_once_over_a_text_without_its_proof(clock: list[float]) -> None:
    scene = Scene(SECRET)
    await scene.a.write(A)
    scene.put(renewed(A))
    assert await scene.a.write(renewed(A)) is None
    assert await scene.a.write(renewed(A)) == renewed(A) == await scene.b.read()
    assert clock == [100.0]


async def test_another_secret_differs_from_none(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(SECRET)
    await scene.a.write(A)
    with pytest.raises(NotTrustedError):
        await scene.of_another(secret_of(KEY, b"another secret of the tests")).read()
    assert "it was written with another secret" in caplog.text
    with pytest.raises(InputError, match="its agents have a secret and this one has none"):
        await scene.of_another(None).read()


async def test_what_was_altered_has_no_proof() -> None:
    scene = Scene(SECRET)
    await scene.a.write(A)
    assert b'"term":1' in scene.text
    scene.put(scene.text.replace(b'"term":1', b'"term":9'))
    with pytest.raises(NotTrustedError):
        await scene.b.read()


async def test_a_cell_of_an_earlier_term_that_was_put_back_shows_it_by_its_term() -> None:
    scene = Scene(SECRET)
    await scene.b.write(B)
    earlier = scene.text
    await scene.a.read()
    later = stored_by("a", 2)
    await scene.a.write(later)
    scene.put(earlier)
    assert await scene.a.write(renewed(later)) == B, "it is not mistaken for this agent's write"
    assert await scene.a.write(renewed(later)) == renewed(later)
