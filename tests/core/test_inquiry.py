"""An inquiry: who is asked what all workers do, whose answers count, and what all nodes hear."""

from __future__ import annotations

import pytest
from kit.stories.coordinator import begun, failure

from aelastic.agent.inquiry import is_collective_timeout
from aelastic.failures.places import Place
from aelastic.rdzv.coordinator.coordinator_events import Event, Lost, Send
from aelastic.rdzv.coordinator.inquiry import NO_ANSWER
from aelastic.rdzv.protocol import messages as m

WHY = "no output for 60 s"
NODES = "abc"


class Asked:
    """Three nodes that run one rank each, and one that is their spare."""

    def __init__(self) -> None:
        self.core = begun({"nodes": "2:3", "running": NODES}, 100.0)
        self.round = self.core.round

    def handle(self, event: Event) -> list[Send]:
        return [send for send in self.core.handle(event, 200.0) if isinstance(send.message, m.Look | m.Compared)]

    def hangs(self, name: str, round_: int | None = None, *, is_last: bool = False) -> list[Send]:
        return self.handle(m.Hangs(name, self.round if round_ is None else round_, WHY, 60.0, True, is_last))

    def saw(self, name: str, round_: int | None = None, *, reads: bool = False) -> list[Send]:
        place = Place(
            NODES.index(name), "a host of its choice", 7, "train.py:9", "all_reduce (train.py:9)", "all_reduce"
        )
        if reads:
            place = place.replace(at="data.py:3", call="read (data.py:3)", collective="", state="D")
        return self.handle(m.Saw(name, self.round if round_ is None else round_, (place,)))


def text_for(sends: list[Send], *names: str) -> str:
    """What nodes hear, all the same."""
    (told,) = {send.message for send in sends}
    assert isinstance(told, m.Compared) and [send.node_id for send in sends] == list(names)
    return told.text


def test_all_nodes_are_asked_at_once_and_hear_the_same_when_all_have_answered() -> None:
    asked = Asked()
    assert asked.hangs("b") == [Send(name, m.Look(asked.round, WHY)) for name in NODES]
    assert asked.saw("b") == asked.saw("a", reads=True) == []
    sends = asked.saw("c")
    expected = (
        "hang: 2 of 3 ranks wait in all_reduce (train.py:9) for 60 s; rank 0 on host-a does not: read (data.py:3)"
    )
    assert text_for(sends, *NODES) == f"{expected}, waits for a disk (D)"
    assert sends[0].message == m.Compared(asked.round, text_for(sends, *NODES), (0,), True)


def test_who_asks_meanwhile_hears_of_the_inquiry_that_is_under_way_and_a_later_one_begins_anew() -> None:
    asked = Asked()
    asked.hangs("b")
    asked.saw("a")
    assert asked.hangs("c") == []
    asked.saw("b")
    assert text_for(asked.saw("c"), *NODES).startswith("hang for 60 s: cannot tell")
    assert len(asked.hangs("c")) == 3
    assert asked.saw("a") == asked.saw("b") == []


def test_what_came_is_used_once_it_is_waited_for_no_longer() -> None:
    asked = Asked()
    asked.hangs("a")
    asked.saw("a")
    asked.saw("b", reads=True)
    text = text_for(asked.hangs("a", is_last=True), *NODES)
    assert "1 of 3 ranks waits in all_reduce" in text and "rank 1 on host-b does not: read" in text
    assert asked.saw("c") == asked.hangs("a", is_last=True) == []  # too late


def test_a_rank_whose_agent_is_gone_is_unknown_and_never_named() -> None:
    asked = Asked()
    asked.hangs("a")
    assert asked.saw("a") == asked.saw("b") == []
    text = text_for(asked.hangs("a", is_last=True), *NODES)
    assert text.startswith("hang for 60 s: cannot tell") and f"rank 2: unknown ({NO_ANSWER})" in text


@pytest.mark.parametrize("by", [-1, 1])
def test_what_is_said_of_another_round_is_void(by: int) -> None:
    asked = Asked()
    assert asked.hangs("a", asked.round + by) == []
    asked.hangs("a")
    assert (
        asked.saw("a", asked.round + by) == asked.saw("b", asked.round + by) == asked.saw("c", asked.round + by) == []
    )


def test_answers_that_nobody_asked_for_count_for_nothing() -> None:
    asked = Asked()
    assert [asked.saw(name) for name in NODES] == [[], [], []]
    asked.hangs("a")
    assert (
        asked.handle(m.Saw("stranger", asked.round, ()))
        == asked.handle(m.Hangs("stranger", asked.round, WHY, 1.0, True))
        == []
    )
    assert asked.saw("a") == asked.saw("a") == []  # once each
    asked.saw("b")
    assert len(asked.saw("c")) == 3


def test_an_inquiry_ends_with_its_round() -> None:
    asked = Asked()
    asked.hangs("a")
    asked.saw("a")
    asked.handle(m.Failed("b", asked.round, failure("b")))
    assert asked.saw("b") == asked.saw("c") == asked.hangs("a", is_last=True) == []


def test_a_node_that_is_lost_meanwhile_ends_the_round_and_nobody_hears_of_it() -> None:
    asked = Asked()
    asked.hangs("a")
    asked.handle(Lost("b", "connection lost"))
    assert asked.saw("a") == asked.saw("c") == asked.hangs("a", is_last=True) == []


@pytest.mark.parametrize(
    "message, is_one",
    [
        (
            "RuntimeError: [/x/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 3000ms for recv operation",
            True,
        ),
        ("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=24, OpType=ALLREDUCE) ran for", True),
        ("RuntimeError: [Rank 0]: Rank 2 failed to pass monitoredBarrier in 3000 ms", True),
        ("RuntimeError: Rank 1 successfully reached monitoredBarrier, but received errors while waiting", True),
        ("torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//worker_count", True),
        (
            "DistStoreError: Timed out after 301 seconds waiting for clients. 3/4 clients joined.",
            False,
        ),  # nobody to ask
        ("RuntimeError: Connection closed by peer [127.0.0.1]:3545", False),
        ("TimeoutError: the server timed out", False),
        ("ValueError: bad", False),
    ],
)
def test_a_time_out_of_a_collective_is_known_by_its_words(message: str, is_one: bool) -> None:
    assert is_collective_timeout(failure("a", 1, message)) == is_one


@pytest.mark.parametrize(
    "message, names_one",
    [
        ("RuntimeError: Connection closed by peer [127.0.0.1]:3545", True),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", True),
        (
            "RuntimeError: Rank 1 successfully reached monitoredBarrier, but received errors while waiting for send/recv",
            True,
        ),
        ("ValueError: bad", False),
    ],
)
def test_who_died_of_a_peer_says_so(message: str, names_one: bool) -> None:
    assert failure("a", 1, message).names_lost_peer == names_one
