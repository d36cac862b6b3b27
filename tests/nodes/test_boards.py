"""Every board keeps the same promises: `aelastic/rdzv/board.py` says which, `board_kits.py` on which stores."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import anyio
import pytest
from kit.board_kits import KITS, Kit, MakeBoard
from kit.effort import REPETITIONS
from kit.servers.etcd_boards import elected
from kit.servers.etcd_servers import EtcdServers

from aelastic.rdzv.board import Board
from aelastic.rdzv.leader_record import Candidate, LeaderRecord
from aelastic.rdzv.stores import etcd_http


def candidate_of(node: str) -> Candidate:
    return Candidate(
        node_id=node, addresses=(f"10.0.0.{ord(node[-1]) % 250}", "::1"), port=29500, token=f"secret of {node}"
    )


pytestmark = pytest.mark.usefixtures("kind_to_etcd", "warm_stores")

EVERY = [pytest.param(kit, id=kit.name, marks=() if kit.is_quick else pytest.mark.all) for kit in KITS]

A, B, C = candidate_of("a"), candidate_of("b"), candidate_of("c")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine etcd may need more than two seconds."""
    monkeypatch.setattr(etcd_http, "ANSWER_LIMIT_S", 30.0)


@pytest.fixture(params=EVERY)
def kit(request: pytest.FixtureRequest) -> Kit:
    kit: Kit = request.param
    return kit


@pytest.fixture
async def boards(kit: Kit, etcds: EtcdServers) -> AsyncIterator[MakeBoard]:
    async with kit.boards(etcds) as make:
        yield make


async def opened(make: MakeBoard, run_id: str = "job") -> Board:
    board = make(run_id)
    await board.open()
    return board


def same(one: LeaderRecord | None, other: LeaderRecord | None) -> bool:
    """Whether both are of one term, whatever the renewals."""
    return one is other or (
        one is not None and other is not None and (one.epoch, one.candidate) == (other.epoch, other.candidate)
    )


async def test_the_first_candidate_wins_and_all_read_it(boards: MakeBoard) -> None:
    a, b, unopened = await opened(boards), await opened(boards), boards("job")
    assert a.name and a.own_address in {"", "127.0.0.1", "::1"} and a.endpoint_host in {"", "127.0.0.1", "localhost"}
    assert await a.read() is None, "no agent leads at first"

    record = await a.campaign(A, None, 0)

    assert record is not None
    assert (record.candidate, record.verdict) == (A, "")
    assert record.epoch > 0
    await a.open()  # again, which is allowed
    assert await a.read() == await b.read() == record
    assert await b.campaign(B, None, 0) == record, "a later candidate learns which was first"
    assert await a.read() == record
    for _ in range(2):
        await unopened.aclose()


async def test_of_many_concurrent_candidates_one_wins_and_all_learn_which(boards: MakeBoard) -> None:
    candidates = [candidate_of(f"node{n}") for n in range(12)]
    agents = [await opened(boards) for _ in candidates]
    answers: list[LeaderRecord | None] = []

    async def try_it(board: Board, candidate: Candidate) -> None:
        answers.append(await board.campaign(candidate, None, 0))

    async with anyio.create_task_group() as group:
        for board, campaign in zip(agents, candidates, strict=True):
            group.start_soon(try_it, board, campaign)

    assert len(answers) == len(candidates)
    assert len(set(answers)) == 1
    assert answers[0] is not None and answers[0] == await agents[0].read()


async def test_renewals_rise_while_the_leader_renews_and_then_stand_still(boards: MakeBoard) -> None:
    a, b = await opened(boards), await opened(boards)
    record = await elected(a, A)
    counts = []
    for _ in range(5):
        renewed = await a.renew(record)
        seen = await b.read()
        assert renewed == seen, "the count that the coordinator tells its members is the board's"
        assert same(seen, record) and seen is not None and seen.renewals is not None
        counts.append(seen.renewals)
    assert counts == sorted(set(counts))

    seen = await b.read()
    assert seen is not None and seen.renewals == counts[-1]
    assert (await elected(b, B, seen=seen, above=seen.epoch)).epoch > record.epoch


STRANGE = (
    "", ".", "..", "/", "a/b", "a", "a/../a", "/a/", "%2F", "a b", "a+b", "_hidden", "+epoch", "?q=1&x#f",
    "coordinator", "größe", "\udcff", "日本\N{PILE OF POO}", "nul\0 and\nline", "x" * 1000, "'\"\\",
)  # fmt: skip


async def test_strange_run_ids_are_run_ids_like_others(kit: Kit, boards: MakeBoard) -> None:
    if kit.is_of_one_job:
        pytest.skip("other run ids are refused")
    agents = [await opened(boards, run_id) for run_id in STRANGE]
    for number, board in enumerate(agents):
        assert await board.read() is None, STRANGE[number]
        await elected(board, candidate_of(f"node{number}"))

    for number, board in enumerate(agents):
        seen = await board.read()
        assert seen is not None and seen.candidate.node_id == f"node{number}"


async def test_a_cancelled_operation_leaves_the_board_usable(boards: MakeBoard) -> None:
    """Cancelled at every point of its way, an operation has taken effect or not."""
    a, b = await opened(boards), await opened(boards)
    choice = random.Random(7)
    for _ in range(25):
        seen = await b.read()
        with anyio.move_on_after(choice.choice((0, 0.001, 0.002, 0.005, 0.02))):
            match choice.randrange(4):
                case 0:
                    await a.campaign(A, seen, 0)
                case 1 if seen is not None:
                    await a.renew(seen)
                case 2 if seen is not None:
                    await a.publish(seen, "ended")
                case _ if seen is not None:
                    await a.resign(seen)
        # What it says now, if anything, is whole.
        now = await a.read()
        assert now is None or now.candidate == A
    seen = await b.read()
    assert same(await a.campaign(B, seen, 0), await b.read())


@pytest.mark.parametrize("seed", range(min(REPETITIONS, 4)))
async def test_random_histories_fit_a_model_of_a_few_lines(boards: MakeBoard, seed: int) -> None:
    """Three agents do anything in any order, with what they have seen at some time.

    So epochs rise, also after a resignation, and never fall back; what has a stale view, or is of an earlier term of
    the same agent, changes nothing; a living leader is replaced by an agent that has just seen it, and not by one that
    missed a renewal.
    """
    choice = random.Random(seed)
    agents = [(await opened(boards), candidate) for candidate in (A, B, C)]
    views: list[LeaderRecord | None] = [None]  # what any client ever saw
    now: LeaderRecord | None = None  # the model: the record, without its renewals
    top = 0  # the model: the highest epoch so far
    for step in range(60):
        where = f"seed {seed}, step {step}"
        board, candidate = choice.choice(agents)
        view = choice.choice((views[-1], views[-1], choice.choice(views)))
        match choice.randrange(6):
            case 0 | 1:
                before, above = await board.read(), choice.choice((0, top, top + 10, top + 1_000_000))
                answer = await board.campaign(candidate, view, above)
                if view == before:
                    assert answer is not None and answer.candidate == candidate, where
                    assert answer.epoch > max(top, above), where
                    now, top = answer, answer.epoch
                else:
                    assert same(answer, now), where
                views.append(answer)
            case 2 if view is not None:
                assert (await board.renew(view) is not None) == same(view, now), where
            case 3 if view is not None:
                verdict = f"{step} {STRANGE!r} größe " + "x" * choice.choice((0, 10_000))
                assert await board.publish(view, verdict) == same(view, now), where
                if now is not None and same(view, now):
                    now = LeaderRecord(epoch=now.epoch, candidate=now.candidate, verdict=verdict)
            case 4 if view is not None:
                await board.resign(view)
                now = None if same(view, now) else now
            case _:
                views.append(await board.read())
        seen = await choice.choice(agents)[0].read()
        assert same(seen, now), where
        assert seen is None or now is None or seen.verdict == now.verdict, where
