"""Every cell keeps the promises of `endpoint_cell.py` and `stores/store.py`, on each store in `cell_kits.py`."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import anyio
import pytest
from kit.cell_kits import KITS, Kit, MakeCell
from kit.effort import REPETITIONS
from kit.servers.etcd_cells import A, B, payload_with, renew, renewed, resigned, stored_by, written
from kit.servers.etcd_servers import EtcdServers
from kit.shared_cell import InProcessCell, SharedWorld

from aelastic.errors import RendezvousStateError
from aelastic.rdzv.log.entries import Accepted, Entry, Payload, first_entry, next_entry
from aelastic.rdzv.protocol.codec import FRAME_MAX, PAYLOAD_MAX
from aelastic.rdzv.protocol.messages import StoredCell
from aelastic.rdzv.stores import etcd_http
from aelastic.rdzv.stores.endpoint_cell import EndpointCell

pytestmark = pytest.mark.usefixtures("kind_to_etcd", "warm_stores")

EVERY = [pytest.param(kit, id=kit.name, marks=() if kit.is_quick else pytest.mark.all) for kit in KITS]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine etcd may need more than two seconds."""
    monkeypatch.setattr(etcd_http, "ANSWER_LIMIT_S", 30.0)


@pytest.fixture(params=EVERY)
def kit(request: pytest.FixtureRequest) -> Kit:
    kit: Kit = request.param
    return kit


@pytest.fixture
async def cells(kit: Kit, etcds: EtcdServers) -> AsyncIterator[MakeCell]:
    async with kit.cells(etcds) as make:
        yield make


async def opened(make: MakeCell, run_id: str = "job") -> EndpointCell:
    cell = make(run_id)
    await cell.open()
    return cell


def entry_with(payload: Payload, after: Entry | None = None) -> Entry:
    """A round of two nodes, or the verdict after one."""
    if after is None:
        return first_entry(1, ["a", "b"], ["a", "b"], ("1f",), payload)
    return next_entry(after, 2, ["a", "b"], ["a", "b"], ("1f",), is_verdict=True, payload=payload)


async def test_what_the_first_agent_writes_is_read_by_all(cells: MakeCell) -> None:
    a, b, unopened = await opened(cells), await opened(cells), cells("job")
    assert a.name and a.own_address in {"", "127.0.0.1", "::1"} and a.endpoint_host in {"", "127.0.0.1", "localhost"}
    assert await a.read() is None, "nobody leads at first"
    assert await b.read() is None

    await written(a, A)

    await a.open()  # again, which is allowed
    assert await a.read() == A
    assert await b.write(B) == A, "a later agent learns who was first"
    assert await a.read() == await b.read() == A
    for _ in range(2):
        await unopened.aclose()


async def test_of_many_that_write_at_once_one_wins_and_all_learn_which(cells: MakeCell) -> None:
    agents = [await opened(cells) for _ in range(12)]
    answers: list[StoredCell | None] = []

    async def try_it(cell: EndpointCell, stored: StoredCell) -> None:
        answers.append(await cell.write(stored))

    async with anyio.create_task_group() as group:
        for number, cell in enumerate(agents):
            group.start_soon(try_it, cell, stored_by(f"node{number}"))

    assert len(answers) == len(agents)
    assert len(set(answers)) == 1
    assert answers[0] is not None and answers[0] == await agents[0].read()


async def test_each_renewal_is_seen_and_another_agent_that_has_seen_the_last_writes_over_it(cells: MakeCell) -> None:
    a, b = await opened(cells), await opened(cells)
    mine = await written(a, A)
    for count in range(1, 6):
        mine = await renew(a, mine)
        seen = await b.read()
        assert seen == mine and seen.cell.renewals == count

    theirs = await written(b, stored_by("b", term=2))

    assert await a.write(renewed(mine)) == theirs, "the previous leader changes nothing, and learns who leads"
    assert await b.read() == theirs


async def test_an_agent_that_has_missed_a_renewal_changes_nothing_and_learns_of_it(cells: MakeCell) -> None:
    a, b = await opened(cells), await opened(cells)
    first = await written(a, A)
    assert await b.read() == first
    now = await renew(a, first)

    newer = stored_by("b", term=2)
    assert await b.write(newer) == now
    assert await a.read() == now
    await written(b, newer)


async def test_an_agent_knows_what_was_there_last(cells: MakeCell) -> None:
    a, b = agents = await opened(cells), await opened(cells)
    assert [agent.content for agent in agents] == [None, None]
    await written(a, A)
    assert await b.write(B) == A
    assert [agent.content for agent in agents] == [A, A]
    await written(b, B)
    assert [agent.content for agent in agents] == [A, B]
    assert await a.read() == a.content == B


async def test_a_leader_that_leaves_leaves_what_was_agreed_on(cells: MakeCell) -> None:
    a, b = await opened(cells), await opened(cells)
    agreed = entry_with(payload_with(1))
    led = A.replace(cell=A.cell.replace(committed=agreed, accepted=Accepted(entry_with(payload_with(2), agreed), 2)))
    await written(a, led)

    await written(a, resigned(led))

    seen = await b.read()
    assert seen is not None and seen.leader is None
    assert (seen.cell.committed, seen.cell.accepted) == (led.cell.committed, led.cell.accepted)


LARGEST = 17_000  # nodes


async def test_the_largest_cell_of_a_job_is_kept(cells: MakeCell) -> None:
    """A round with thousands of nodes, and the next round."""
    a, b = await opened(cells), await opened(cells)
    rounds = [payload_with(number, LARGEST) for number in (1, 2)]
    assert all(0.9 * PAYLOAD_MAX < len(each) <= PAYLOAD_MAX for each in rounds)
    agreed = entry_with(rounds[0])
    large = A.replace(cell=A.cell.replace(committed=agreed, accepted=Accepted(entry_with(rounds[1], agreed), 2)))

    await written(a, large)
    larger = await renew(a, large)

    assert await b.read() == larger
    await written(b, stored_by("b", term=3))


async def test_a_cell_that_does_not_fit_is_refused_and_what_was_there_stays() -> None:
    cell = InProcessCell("job", SharedWorld())
    await written(cell, A)

    with pytest.raises(RendezvousStateError):
        await cell.write(A.replace(cell=A.cell.replace(committed=entry_with(Payload("x" * FRAME_MAX)))))

    assert await cell.read() == A
    await renew(cell, A)


STRANGE = (
    "", ".", "..", "/", "a/b", "a", "a/../a", "/a/", "%2F", "a b", "a+b", "_hidden", "+epoch", "?q=1&x#f",
    "coordinator", "größe", "\udcff", "日本\N{PILE OF POO}", "nul\0 and\nline", "x" * 1000, "'\"\\",
)  # fmt: skip


async def test_strange_run_ids_are_run_ids_like_others(kit: Kit, cells: MakeCell) -> None:
    if kit.is_of_one_job:
        pytest.skip("other run ids are refused")
    agents = [await opened(cells, run_id) for run_id in STRANGE]
    for number, cell in enumerate(agents):
        assert await cell.read() is None, STRANGE[number]
        await written(cell, stored_by(f"node{number}"))

    for number, cell in enumerate(agents):
        assert await cell.read() == stored_by(f"node{number}")


async def test_a_cancelled_operation_leaves_the_cell_usable(cells: MakeCell) -> None:
    """A write that is cancelled at any point either takes effect or not, but never after a later write."""
    a, b = await opened(cells), await opened(cells)
    choice = random.Random(7)
    tried: list[StoredCell | None] = [None]
    newest = 0  # the latest of `tried` that was seen
    for step in range(25):
        new = stored_by("a", term=step)
        with anyio.move_on_after(choice.choice((0, 0.001, 0.002, 0.005, 0.02))):
            if choice.randrange(4):
                tried.append(new)
                await a.write(new)
            else:
                await a.read()
        now = tried.index(await a.read())
        assert now >= newest, f"step {step}"
        newest = now
    assert tried.index(await b.read()) >= newest
    assert await b.write(B) == await a.read()


@pytest.mark.parametrize("seed", range(min(REPETITIONS, 4)))
async def test_random_histories_fit_a_model_of_a_few_lines(cells: MakeCell, seed: int) -> None:
    """Three agents read and write in random order: a stale view changes nothing, and is brought up to date."""
    choice = random.Random(seed)
    agents = {name: await opened(cells) for name in "abc"}
    views: dict[str, StoredCell | None] = dict.fromkeys(agents)  # the model: what each agent saw last
    now: StoredCell | None = None  # the model: the current content
    for step in range(60):
        where, name = f"seed {seed}, step {step}", choice.choice("abc")
        cell = agents[name]
        if choice.randrange(3):
            agreed = entry_with(payload_with(step, choice.choice((2, 200))))
            accepted = choice.choice((None, Accepted(entry_with(payload_with(step + 1), agreed), step)))
            new = stored_by(f"{name}{step}", term=step)
            new = new.replace(cell=new.cell.replace(committed=agreed, accepted=accepted))
            now = new if views[name] == now else now
            answer = await cell.write(new)
        else:
            answer = await cell.read()
        assert answer == now, where
        views[name] = now
        seen = await agents[other := choice.choice("abc")].read()
        assert seen == now, where
        views[other] = now
        if now is not None and now.cell.committed is not None:
            assert seen is not None and seen.cell.committed is not None
            assert seen.cell.committed.payload == now.cell.committed.payload, where
