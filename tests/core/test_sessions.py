"""The coordinator's chair: connections, leases and tenure; events in, actions out."""

from __future__ import annotations

import copy
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.effort import examples

from aelastic.errors import ProcessFailure
from aelastic.rdzv.board import Candidate, LeaderRecord
from aelastic.rdzv.boards.record_text import record_to_bytes
from aelastic.rdzv.coordinator import session_events as chair_events
from aelastic.rdzv.coordinator.coordinator import Coordinator, Phase
from aelastic.rdzv.coordinator.forming import RoundRules
from aelastic.rdzv.coordinator.leader_lease import TENURE, Tenure
from aelastic.rdzv.coordinator.restart_policy import RestartPolicy
from aelastic.rdzv.coordinator.session_events import (
    Closed,
    DeadlinePassed,
    Drop,
    Event,
    Garbled,
    Keep,
    KeepFailed,
    Kept,
    Opened,
    Publish,
    Published,
    Received,
    Reclaim,
    Reclaimed,
    Resigned,
    Say,
    Vacate,
)
from aelastic.rdzv.coordinator.sessions import (
    GRACE_S,
    PROBE_TIMEOUT_S,
    PUBLISH_TIMEOUT_S,
    ROLL_CALL_INTERVAL_S,
    Chair,
)
from aelastic.rdzv.protocol.codec import PROTOCOL, encode, from_text
from aelastic.rdzv.protocol.messages import (
    Alive,
    Assigned,
    Beat,
    Ended,
    Failed,
    Goodbye,
    Hello,
    Interrupted,
    Left,
    Node,
    Outcome,
    Past,
    Probe,
    Ready,
    Refused,
    Standing,
    Succeeded,
    Terms,
    Waiting,
    Welcome,
)

LEASE_S = 5.0
TOKEN = "t0k3n"
START = 100.0
KEPT_BY = Candidate("boss", ("10.0.0.1",), 4000, TOKEN)
KEPT = Kept(LeaderRecord(4, KEPT_BY))  # a board that does not count
FAILURE = ProcessFailure.from_elsewhere("host-a", 0, 0, 77, 1, "ValueError: batch is empty", "", 1000)


def node(name: str, rank: int | None = None, *, address: str = "") -> Node:
    return Node(name, f"host-{name}", "default", 1, address, 29500, rank)


def hello(name: str, rank: int | None = None, *, past: Past | None = None, seen_epoch: int = 0, **others: Any) -> Hello:
    terms, token = others.pop("terms", None), others.pop("token", TOKEN)
    given = node(name, rank, **others)
    return Hello(PROTOCOL, terms or Terms("job", 1, 3, 3), token, given, past or Past(Standing.READY), seen_epoch)


class Hall:
    """A chair, the clock it is told, and connections by the names of who came on them last."""

    def __init__(
        self, nodes: tuple[int, int] = (1, 3), *, max_restarts: int = 3, beat: int = 0, epoch: int = 4,
        has_fixed_ranks: bool = False, **timeouts: float,
    ) -> None:  # fmt: skip
        self.coordinator = Coordinator(RoundRules(*nodes, **timeouts), RestartPolicy(max_restarts))  # type: ignore[arg-type]
        self.terms = Terms("job", *nodes, max_restarts)
        tenure = Tenure(epoch, LEASE_S, START, beat)
        self.chair = Chair(self.terms, TOKEN, tenure, self.coordinator, has_fixed_ranks=has_fixed_ranks)
        self.now = START
        self.conns: dict[str, int] = {}
        self.last_conn = 0

    def tell(self, *events: Event) -> list[Any]:
        """What the last of the events is answered with."""
        actions: list[Any] = []
        for event in events:
            actions = self.chair.handle(event, self.now)
        return actions

    def open(self, name: str, peer: str = "") -> int:
        self.last_conn += 1
        self.conns[name] = self.last_conn
        assert self.tell(Opened(self.last_conn, peer or f"10.0.0.{self.last_conn}", "10.0.0.100")) == []
        return self.last_conn

    def come(self, name: str, rank: int | None = None, **others: Any) -> list[Any]:
        """A node connects and says hello."""
        conn = self.open(name)
        return self.tell(Received(conn, hello(name, rank, terms=self.terms, **others)))

    def say(self, name: str, message: Any) -> list[Any]:
        return self.tell(Received(self.conns[name], message))

    def close(self, name: str) -> list[Any]:
        return self.tell(Closed(self.conns[name]))

    def pass_deadline(self) -> list[Any]:
        assert self.chair.deadline is not None
        self.now = max(self.now, self.chair.deadline)
        return self.tell(DeadlinePassed())

    def live_until(self, time: float, *silent: str, is_board_up: bool = True) -> list[Any]:
        """Lets time pass; who is here and not silent says `Alive` whenever something is due.  All that is done."""
        done: list[Any] = []
        while self.chair.deadline is not None and self.chair.deadline <= time:
            before, chair = self.chair.deadline, self.chair
            for name in self.conns.keys() - set(silent):
                done += self.say(name, Alive())
            actions = self.pass_deadline()
            if Keep() in actions:
                actions += self.tell(KEPT if is_board_up else KeepFailed("no answer"))
            done += actions
            assert chair.is_vacated or chair.deadline > before, "time must go on"  # type: ignore[operator]
        self.now = max(self.now, time)
        return done

    def hears(self, actions: list[Any]) -> dict[str, list[Any]]:
        """Who is told what."""
        names = {conn: name for name, conn in self.conns.items()}
        heard: dict[str, list[Any]] = {}
        for action in actions:
            if isinstance(action, Say):
                heard.setdefault(names[action.conn], []).append(action.message)
        return heard


def running(names: str = "ab", **others: Any) -> Hall:
    """A round of these nodes is on."""
    hall = Hall((len(names), 3) if "nodes" not in others else others.pop("nodes"), last_call_timeout_s=0.01, **others)
    for name in names:
        hall.come(name)
    hall.live_until(START + 0.1)
    assert hall.coordinator.phase is Phase.RUNNING and hall.coordinator.round == 1
    return hall


def of_kind(actions: list[Any], kind: type) -> list[Any]:
    """The messages of one kind that are said, or the actions of it."""
    said = [action.message for action in actions if isinstance(action, Say)]
    return [each for each in (*actions, *said) if isinstance(each, kind)]


# Who may speak.


def test_a_node_is_welcome_with_the_right_token_and_terms() -> None:
    hall = Hall()
    assert hall.come("a") == [Say(1, Welcome(4, LEASE_S))]


def test_the_first_word_must_be_hello() -> None:
    for message in (Alive(), Ready(node("a")), Left("a", "x")):
        hall = Hall()
        conn = hall.open("a")
        assert hall.tell(Received(conn, message)) == [Say(1, Refused("the first word must be Hello", True)), Drop(1)]
        assert hall.chair.is_empty


@pytest.mark.parametrize("token", ["", "t0k3", "t0k3n ", "ü", "\ud800", "x" * 100_000])
def test_who_has_not_read_the_board_may_try_again(token: str) -> None:
    hall = Hall()
    assert hall.come("a", token=token) == [Say(1, Refused("this is the token of another reign", False)), Drop(1)]
    assert hall.coordinator.story == ()


@pytest.mark.parametrize(
    "terms, said",
    [
        (Terms("other", 1, 3, 3), "run id 'other' came to the agents of run 'job': give all nodes the same --rdzv-id"),
        (Terms("job", 2, 3, 3), "--nnodes is 2:3 here and 1:3 in the job that runs: give all nodes the same"),
        (Terms("job", 1, 2, 3), "--nnodes is 1:2 here and 1:3 in the job that runs: give all nodes the same"),
        (Terms("job", 1, 3, 0), "--max-restarts is 0 here and 3 in the job that runs: give all nodes the same"),
    ],
)
def test_who_was_told_otherwise_than_the_others_is_refused_for_good(terms: Terms, said: str) -> None:
    hall = Hall()
    conn = hall.open("a")
    assert hall.tell(Received(conn, hello("a", terms=terms))) == [Say(1, Refused(said, True)), Drop(1)]
    assert hall.coordinator.story == ()


def test_the_terms_are_told_to_nobody_without_the_token() -> None:
    hall = Hall()
    conn = hall.open("a")
    (said, _) = hall.tell(Received(conn, hello("a", token="x", terms=Terms("other", 9, 9, 9))))
    assert said.message == Refused("this is the token of another reign", False)


def test_hello_is_said_once() -> None:
    hall = running()
    assert hall.say("a", hello("a", terms=hall.terms))[:2] == [Say(1, Refused("Hello was said already", True)), Drop(1)]


@pytest.mark.parametrize("message", [Ready(node("b")), Failed("b", 1, FAILURE), Succeeded("b", 1), Left("b", "x")])
def test_a_node_speaks_for_itself_only(message: Any) -> None:
    hall = running()
    assert hall.say("a", message)[:2] == [Say(1, Refused("a node speaks for itself only", True)), Drop(1)]
    assert hall.coordinator.phase is Phase.RUNNING


@pytest.mark.parametrize("is_other_protocol", [False, True])
def test_garbage_is_refused_for_good_if_it_is_another_version(is_other_protocol: bool) -> None:
    hall = Hall()
    conn = hall.open("a")
    garbage = Garbled(conn, "this is none of our words", is_other_protocol)
    assert hall.tell(garbage) == [Say(conn, Refused("this is none of our words", is_other_protocol)), Drop(conn)]
    assert hall.tell(garbage) == []
    assert hall.tell(Received(conn, Alive()), Closed(conn)) == []


def test_garbage_of_a_member_is_the_end_of_its_part() -> None:
    hall = running()
    hall.tell(Garbled(hall.conns["a"], "none of our words", False))
    assert hall.hears(hall.pass_deadline()) == {"b": [Interrupted(1, "node host-a was lost: its connection closed", 0)]}


def test_a_connection_that_says_nothing_is_dropped_after_a_lease() -> None:
    hall = Hall()
    conn = hall.open("a")
    assert Drop(conn) not in hall.live_until(START + LEASE_S - 0.01, "a")
    assert Drop(conn) in hall.live_until(START + LEASE_S, "a")
    assert hall.chair.is_empty


@pytest.mark.parametrize("message", [Alive(), Ready(node("n")), hello("n", 0)])
def test_who_is_kept_waiting_for_an_answer_has_nothing_to_say(message: Any) -> None:
    """Whether its rank is another's is to be found out, or the reign has yet to get a newer epoch."""
    hall = Hall()
    hall.come("a", 0)
    assert hall.come("n", 0) == [Say(1, Probe())]
    assert of_kind(hall.say("n", message), Refused)
    hall.tell(Closed(hall.conns["n"]))
    assert hall.live_until(hall.now + 1) is not None
    hall = Hall()
    assert hall.come("n", seen_epoch=9) == [Reclaim(9)]
    assert of_kind(hall.say("n", message), Refused)
    assert hall.tell(Reclaimed(10)) == []


# Addresses.


def test_a_node_is_where_its_connection_comes_from_unless_it_says_otherwise() -> None:
    hall = Hall((2, 2))
    hall.open("a", "::ffff:10.1.1.1")
    hall.say("a", hello("a", terms=hall.terms))
    hall.open("b", "fd00::2")
    assert {m.master_addr for m in of_kind(hall.say("b", hello("b", terms=hall.terms)), Assigned)} == {"10.1.1.1"}
    hall = Hall((2, 2))
    hall.come("a", address="node-a.example")
    assert {m.master_addr for m in of_kind(hall.come("b"), Assigned)} == {"node-a.example"}


def test_a_node_that_is_ready_again_is_where_its_connection_comes_from_too() -> None:
    hall = running("a", nodes=(1, 1))
    hall.say("a", Failed("a", 1, FAILURE))
    (assigned,) = of_kind(hall.say("a", Ready(node("a"))), Assigned)
    assert (assigned.round, assigned.master_addr) == (2, "10.0.0.1")


# Connections that break.


def test_a_broken_connection_is_a_lost_node_after_a_grace() -> None:
    hall = running()
    assert hall.close("a") == []
    assert hall.chair.deadline == pytest.approx(hall.now + GRACE_S)
    assert hall.hears(hall.pass_deadline()) == {"b": [Interrupted(1, "node host-a was lost: its connection closed", 0)]}
    assert hall.tell(DeadlinePassed()) == []


def test_who_comes_back_within_the_grace_was_never_away() -> None:
    hall = running()
    hall.close("a")
    hall.now += GRACE_S / 2
    actions = hall.come("a", past=Past(Standing.BUSY, 1, 0, 0, 2))
    assert actions == [Say(3, Welcome(4, LEASE_S))]
    assert of_kind(hall.live_until(hall.now + 1), Interrupted) == []
    assert hall.coordinator.phase is Phase.RUNNING


def test_who_comes_back_before_its_old_connection_is_seen_to_break_takes_its_place() -> None:
    hall = running()
    actions = hall.come("a", past=Past(Standing.BUSY, 1, 0, 0, 2))
    assert actions == [Drop(1), Say(3, Welcome(4, LEASE_S))]
    assert hall.tell(Received(1, Left("a", "what came late on the old one"))) == []
    assert hall.tell(Closed(1)) == []
    assert of_kind(hall.live_until(hall.now + 1), Interrupted) == []
    assert [conn for conn, _ in said_to(hall.say("b", Failed("b", 1, FAILURE)))] == [3, 2]


def said_to(actions: list[Any]) -> list[tuple[int, Any]]:
    return [(action.conn, action.message) for action in actions if isinstance(action, Say)]


def test_who_missed_a_decision_is_told_when_it_comes_back() -> None:
    hall = running()
    hall.close("a")
    assert hall.say("b", Ready(node("b"))) == [], "that b starts over is for a to know"
    actions = hall.come("a", past=Past(Standing.BUSY, 1, 0, 0, 2))
    assert actions == [Say(3, Welcome(4, LEASE_S)), Say(3, Interrupted(1, "round 1 has ended; rejoining", 0))]


REASON = "rank 0 failed on host-a; restart 1 of 3"


def test_a_node_that_leaves_is_not_lost_again_when_its_connection_closes() -> None:
    hall = running()
    assert hall.hears(hall.say("a", Left("a", "SIGTERM"))) == {"b": [Interrupted(1, "node host-a left: SIGTERM", 0)]}
    hall.close("a")
    hall.say("b", Ready(node("b")))
    assert of_kind(hall.live_until(hall.now + 1, "a"), Interrupted) == []


def test_a_failure_waits_until_it_is_known_who_is_lost() -> None:
    """Workers fail when their peers on a node that dies are gone, and the loss of a node costs no restart."""
    hall = running("abc")
    hall.close("a")
    assert hall.say("b", Failed("b", 1, FAILURE)) == []
    heard = hall.hears(hall.pass_deadline())
    lost = Interrupted(1, "node host-a was lost: its connection closed", 0)
    assert heard == {"b": [lost], "c": [lost]}
    assert hall.coordinator.restart_count == 0


def test_a_failure_that_waited_for_one_who_came_back_counts() -> None:
    hall = running("abc")
    hall.close("a")
    assert hall.say("b", Failed("b", 1, FAILURE)) == []
    told = Interrupted(1, REASON, 1)
    actions = hall.come("a", past=Past(Standing.BUSY, 1, 0, 0, 3))
    assert hall.hears(actions) == {"a": [Welcome(4, LEASE_S), told], "b": [told], "c": [told]}


# Leases.


def test_a_silent_node_is_lost_after_a_lease() -> None:
    hall = running()
    heard_at = hall.now
    hall.say("a", Alive())
    assert of_kind(hall.live_until(heard_at + LEASE_S - 0.001, "a"), Interrupted) == []
    actions = hall.live_until(heard_at + LEASE_S, "a")
    assert hall.hears(actions)["b"] == [Interrupted(1, "node host-a was lost: silent for 5 s", 0)]
    assert Drop(1) in actions
    assert hall.tell(Closed(1)) == [], "that it is lost is known"


def test_whatever_a_node_says_renews_its_lease() -> None:
    hall = running()
    hall.live_until(hall.now + LEASE_S - 0.1, "a")
    hall.say("a", Ready(node("a")))
    assert of_kind(hall.live_until(hall.now + LEASE_S - 0.1, "a"), Drop) == []


def test_if_we_slept_everybody_gets_another_lease() -> None:
    hall = running(beat=0)
    hall.now += 3600
    assert hall.tell(DeadlinePassed()) == [Keep()]
    hall.tell(KEPT)
    assert hall.coordinator.phase is Phase.RUNNING
    hall.now += LEASE_S / 2
    hall.say("a", Alive())
    actions = hall.live_until(hall.now + LEASE_S / 2 + 0.1, "a", "b")
    assert [m.reason for m in of_kind(actions, Interrupted)] == ["node host-b was lost: silent for 5 s"]


def test_if_we_slept_a_grace_begins_anew() -> None:
    hall = running()
    hall.close("a")
    hall.now += 3600
    hall.tell(DeadlinePassed(), KEPT)
    assert hall.come("a", past=Past(Standing.BUSY, 1, 0, 0, 2)) == [Say(3, Welcome(4, LEASE_S))]
    assert hall.coordinator.phase is Phase.RUNNING


def test_if_we_slept_who_was_asked_whether_it_lives_has_time_to_answer() -> None:
    hall = Hall()
    hall.come("a", 0)
    hall.come("n", 0)
    hall.now += 3600
    hall.tell(DeadlinePassed(), KEPT)
    assert of_kind(hall.say("a", Alive()), Waiting), "it has answered, and the answer was in our socket"


def test_a_deadline_that_fires_early_changes_nothing() -> None:
    hall = running()
    assert hall.chair.deadline is not None
    hall.now = hall.chair.deadline - 1e-6
    assert hall.tell(DeadlinePassed()) == []


# Tenure.


def test_the_reign_is_kept_three_times_a_lease_and_everybody_hears_a_beat() -> None:
    hall = running(beat=7)
    actions = hall.live_until(START + 10 * LEASE_S)
    assert 29 <= actions.count(Keep()) <= 30
    assert [m.beat for m in of_kind(actions, Beat)][::2] == [*range(8, 8 + actions.count(Keep()))]


def test_the_next_keep_is_asked_for_when_a_third_of_a_lease_is_over_however_late_the_answer() -> None:
    hall = Hall()
    asked_at = START + LEASE_S / 3
    assert hall.chair.deadline == asked_at
    assert hall.pass_deadline() == [Keep()]
    hall.now += LEASE_S / 3 - 0.1
    hall.tell(KEPT)
    assert hall.chair.deadline == pytest.approx(asked_at + LEASE_S / 3)
    assert hall.pass_deadline() == [Keep()]


def test_one_keep_at_a_time_is_asked_for_and_a_slow_board_does_not_silence_us() -> None:
    hall = running(beat=0)
    actions: list[Any] = []
    while Keep() not in actions:
        actions = hall.pass_deadline()
    late = hall.pass_deadline()
    assert hall.hears(late) == {"a": [Beat(0)], "b": [Beat(0)]}
    assert Keep() not in late
    assert hall.hears(hall.tell(KEPT)) == {"a": [Beat(1)], "b": [Beat(1)]}


def test_all_hear_at_once_when_a_node_begins_to_wait_for_a_place_and_when_none_does_any_more() -> None:
    hall = running("abc", beat=7)
    waiting = hall.hears(hall.come("d"))
    assert {name: said[-1] for name, said in waiting.items()} == dict.fromkeys("abcd", Beat(7, True))
    assert of_kind(hall.come("e"), Beat) == [], "told already"
    hall.close("d")
    assert of_kind(hall.live_until(hall.now + GRACE_S), Beat) == [], "one is left"
    hall.close("e")
    gone = hall.hears(hall.live_until(hall.now + GRACE_S))
    assert gone == {name: [Beat(7)] for name in "abc"}


def test_that_a_node_waits_is_not_unsaid_while_it_takes_its_place() -> None:
    hall = running("abc", beat=7)
    hall.come("d")
    hall.close("a")
    assert of_kind(hall.live_until(hall.now + GRACE_S), Beat) == []
    actions = [action for name in "bc" for action in hall.say(name, Ready(node(name)))]
    assert len(of_kind(actions, Assigned)) == 3
    assert of_kind(actions, Beat) == [Beat(7)] * 3


def test_the_count_of_renewals_is_that_of_the_board_also_after_an_answer_was_lost() -> None:
    hall = running(beat=3)
    while Keep() not in hall.pass_deadline():
        pass
    hall.tell(KeepFailed("no answer"))  # it took effect: the board has 4
    while Keep() not in hall.pass_deadline():
        pass
    heard = hall.hears(hall.tell(Kept(LeaderRecord(4, KEPT_BY, 5))))
    assert heard == {"a": [Beat(5)], "b": [Beat(5)]}


def test_a_board_that_is_away_does_not_silence_us_and_is_asked_again() -> None:
    hall = running(beat=3)
    actions = hall.live_until(START + 10 * LEASE_S, is_board_up=False)
    assert {m.beat for m in of_kind(actions, Beat)} == {3}
    assert 29 <= actions.count(Keep()) <= 30
    assert of_kind(actions, Vacate) == []


def test_decisions_wait_while_the_reign_is_uncertain() -> None:
    hall = running()
    hall.live_until(START + LEASE_S * TENURE, is_board_up=False)
    copied = copy.deepcopy(hall)
    assert of_kind(copied.say("a", Failed("a", 1, FAILURE)), Interrupted), "it is certain to the last moment"
    hall.now += 0.001
    assert hall.say("a", Failed("a", 1, FAILURE)) == []
    assert of_kind(hall.live_until(hall.now + 3600, is_board_up=False), Interrupted) == []
    while Keep() not in hall.pass_deadline():
        pass
    actions = hall.tell(KEPT)
    assert [m.reason for m in of_kind(actions, Interrupted)] == [REASON] * 2


def test_the_reign_is_certain_from_when_the_board_was_asked_not_from_when_it_answered() -> None:
    hall = running()
    while Keep() not in hall.pass_deadline():
        pass
    asked_at = hall.now
    hall.now += LEASE_S
    hall.tell(KEPT)
    assert asked_at + LEASE_S * TENURE < hall.now
    assert hall.say("a", Failed("a", 1, FAILURE)) == []


def test_in_an_uncertain_reign_no_deadline_of_the_job_counts() -> None:
    hall = Hall((2, 2), join_timeout_s=LEASE_S * 3)
    hall.come("a")
    actions = hall.live_until(START + LEASE_S * 4, is_board_up=False)
    assert of_kind(actions, Publish) == []
    while Keep() not in hall.pass_deadline():
        pass
    assert of_kind(hall.tell(KEPT), Publish), "now it is for us to say so"


def test_what_is_due_before_the_reign_becomes_uncertain_and_heard_of_later_waits() -> None:
    """The deadline of the coordinator passes while our process stands still: time must go on all the same."""
    hall = Hall((2, 2), join_timeout_s=LEASE_S * TENURE - 0.1)
    hall.come("a")
    hall.now = START + LEASE_S * TENURE + 0.1
    assert of_kind(hall.tell(DeadlinePassed()), Publish) == []
    assert hall.chair.deadline is not None and hall.chair.deadline > hall.now


@pytest.mark.parametrize("answer", [Kept(None), Published(False)])
def test_a_reign_that_is_anothers_is_over_at_once(answer: Event) -> None:
    hall = running()
    conn = hall.open("stranger")
    reason = "another agent coordinates by now"
    hall.say("a", Failed("a", 1, FAILURE))
    actions = hall.tell(answer)
    assert hall.hears(actions) == {name: [Goodbye(reason, False)] for name in "ab"}
    assert {action.conn for action in of_kind(actions, Drop)} == {1, 2, conn}
    assert actions[-1] == Vacate(reason)
    assert hall.chair.is_vacated and hall.chair.deadline is None and hall.chair.is_empty


def test_an_agent_that_leaves_says_so() -> None:
    hall = running()
    actions = hall.tell(Resigned())
    assert hall.hears(actions) == {name: [Goodbye("its agent leaves", True)] for name in "ab"}
    assert actions[-1] == Vacate("its agent leaves")


def every_event(hall: Hall) -> list[Event]:
    conn = hall.conns["a"]
    return [
        Opened(99, "10.0.0.9", "10.0.0.100"),
        *(Received(conn, message) for message in (Alive(), Ready(node("a")), Failed("a", 1, FAILURE), Left("a", "x"))),
        Received(conn, hello("a")),
        Garbled(conn, "x", False),
        Closed(conn),
        KEPT,
        Kept(None),
        KeepFailed("x"),
        Reclaimed(9),
        Reclaimed(None),
        Published(True),
        Published(False),
        Resigned(),
        DeadlinePassed(),
    ]


def test_every_event_has_an_example_here() -> None:
    assert {type(event) for event in every_event(running())} == set(get_args(chair_events.Event))


def test_after_the_chair_is_vacated_nothing_is_done() -> None:
    for end in (Kept(None), Published(False), Resigned(), Reclaimed(None)):
        hall = running()
        hall.tell(end)
        for event in every_event(hall):
            hall.now += 1000
            assert hall.tell(event) == []


def test_nothing_is_decided_in_the_moment_of_leaving() -> None:
    hall = Hall((2, 2), join_timeout_s=1.0)
    hall.come("a")
    hall.now += 1.0
    assert hall.tell(Resigned())[-1] == Vacate("its agent leaves")


# A board that has lost what it knew.


def test_who_knows_a_newer_reign_makes_us_claim_ours_anew() -> None:
    hall = running(beat=5)
    assert hall.come("c", seen_epoch=9) == [Reclaim(9)]
    actions = hall.tell(Reclaimed(10))
    assert hall.hears(actions) == {name: [Welcome(10, LEASE_S), Beat(0, True)] for name in "abc"}
    assert hall.come("d", seen_epoch=10) == [Say(4, Welcome(10, LEASE_S))]
    assert (hall.chair.tenure.epoch, hall.chair.tenure.beat) == (10, 0)


def test_who_comes_meanwhile_waits_with_it_and_nothing_is_decided() -> None:
    hall = running()
    assert hall.come("c", seen_epoch=9) == [Reclaim(9)]
    assert hall.come("d") == []
    assert hall.come("e", seen_epoch=8) == []
    assert hall.say("a", Failed("a", 1, FAILURE)) == []
    hall.close("d")
    actions = hall.tell(Reclaimed(10))
    assert hall.hears(actions) == {
        "a": [Welcome(10, LEASE_S), Interrupted(1, REASON, 1)],
        "b": [Welcome(10, LEASE_S), Interrupted(1, REASON, 1)],
        "c": [Welcome(10, LEASE_S)],
        "e": [Welcome(10, LEASE_S)],
    }


def test_a_reign_that_cannot_be_claimed_anew_is_over() -> None:
    hall = running()
    hall.come("c", seen_epoch=9)
    assert hall.tell(Reclaimed(None))[-1] == Vacate("its epoch was too old")


def test_while_the_reign_is_claimed_anew_the_old_one_is_not_kept() -> None:
    """It would be found to be another's: our own."""
    hall = running(beat=3)
    hall.come("c", seen_epoch=9)
    actions = hall.live_until(hall.now + LEASE_S)
    assert Keep() not in actions
    assert of_kind(actions, Beat), "but we live"
    hall.tell(Reclaimed(10))
    assert Keep() in hall.live_until(hall.now + LEASE_S)


def test_an_answer_about_the_reign_before_changes_nothing() -> None:
    for late in (KEPT, KeepFailed("no answer")):
        hall = running(beat=3)
        while Keep() not in hall.pass_deadline():
            pass
        assert hall.come("c", seen_epoch=9) == [Reclaim(9)]
        assert hall.tell(late) == []
        hall.tell(Reclaimed(10))
        assert (hall.chair.is_vacated, hall.chair.tenure.beat) == (False, 0)


def test_a_reign_claimed_anew_is_certain_from_when_it_was_asked_for() -> None:
    hall = running()
    hall.come("c", seen_epoch=9)
    hall.now += LEASE_S
    hall.tell(Reclaimed(10))
    assert hall.say("a", Failed("a", 1, FAILURE)) == []


def test_what_is_due_while_the_reign_is_claimed_anew_waits() -> None:
    hall = Hall((2, 2), join_timeout_s=1.0)
    hall.come("a")
    hall.come("b", seen_epoch=9)
    hall.now += 1.5
    assert hall.tell(DeadlinePassed()) == []
    assert hall.chair.deadline is not None and hall.chair.deadline > hall.now


# Two of one rank.


def test_a_node_whose_rank_is_taken_makes_us_ask_whether_the_other_lives() -> None:
    hall = Hall()
    hall.come("a", 0)
    assert hall.come("n", 0) == [Say(1, Probe())]
    assert hall.chair.deadline == pytest.approx(hall.now + PROBE_TIMEOUT_S)


def test_if_the_other_lives_the_newcomer_takes_part_without_the_rank() -> None:
    hall = Hall((3, 3))
    hall.come("a", 0)
    hall.come("n", 0)
    taken = "node rank 0 is that of another agent already, at 10.0.0.1: this one takes part without it"
    assert hall.say("a", Alive()) == [Say(2, Welcome(4, LEASE_S)), Say(2, Waiting(taken))]
    heard = hall.hears(hall.come("b", 1))
    assert {name: heard[name][-1].ranks.group_rank for name in heard} == {"a": 0, "b": 1, "n": 2}
    assert hall.come("x", 0) == [Say(1, Probe())], "the rank is still that of the first"
    assert hall.hears(hall.say("n", Ready(node("n", 0)))).keys() == {"a", "b"}, "nor is it taken by being ready again"


def test_under_fixed_ranks_the_newcomer_is_refused_for_good() -> None:
    hall = Hall(has_fixed_ranks=True)
    hall.come("a", 0)
    hall.come("n", 0)
    taken = "node rank 0 is that of another agent already, at 10.0.0.1: give each node its own --node-rank"
    assert hall.say("a", Alive()) == [Say(2, Refused(taken, True)), Drop(2)]


@pytest.mark.parametrize("how", ["silent", "closed"])
def test_if_the_other_is_dead_its_next_self_takes_its_place_at_once(how: str) -> None:
    hall = Hall((2, 2))
    hall.come("a", 0)
    hall.come("b", 1)
    hall.come("n", 0)
    actions = hall.close("a") if how == "closed" else hall.pass_deadline()
    reason = "node host-a was lost: another agent joined as node rank 0 (host-n)"
    heard = hall.hears(actions)
    assert heard["n"] == [Welcome(4, LEASE_S)]
    assert heard["b"] == [Interrupted(1, reason, 0)]
    assert hall.now - START <= PROBE_TIMEOUT_S
    if how == "silent":
        assert heard["a"] == [Ended(Outcome.REPLACED, "another agent joined as node rank 0 (host-n)")]
    assert of_kind(hall.live_until(hall.now + 1, "a"), Interrupted) == [], "the other is not lost once more"


def test_who_was_replaced_has_nothing_more_to_say() -> None:
    """It was suspended, and wakes up with a word on its lips: its next self must not pay for that."""
    hall = Hall((2, 2))
    hall.come("a", 0)
    hall.come("b", 1)
    hall.come("n", 0)
    assert Drop(1) in hall.pass_deadline()
    assert hall.say("a", Ready(node("a", 0))) == []
    heard = hall.hears(hall.say("b", Ready(node("b", 1))))
    assert [m.ranks.group_rank for m in (*heard["n"], *heard["b"])] == [0, 1]


def test_a_node_whose_connection_is_broken_is_replaced_without_a_question() -> None:
    hall = Hall((2, 2))
    hall.come("a", 0)
    hall.come("b", 1)
    hall.close("a")
    assert hall.hears(hall.come("n", 0)) == {
        "n": [Welcome(4, LEASE_S)],
        "b": [Interrupted(1, "node host-a was lost: another agent joined as node rank 0 (host-n)", 0)],
    }


def test_who_comes_back_itself_is_not_its_own_rival() -> None:
    hall = Hall((2, 2))
    hall.come("a", 0)
    hall.come("b", 1)
    assert hall.come("a", 0, past=Past(Standing.BUSY, 1, 0, 0, 2)) == [Drop(1), Say(3, Welcome(4, LEASE_S))]


def test_two_next_selves_are_not_each_others() -> None:
    hall = Hall((2, 3))
    hall.come("a", 0)
    hall.come("m", 0)
    hall.come("n", 0)
    actions = hall.pass_deadline()
    assert hall.hears(actions)["m"] == [Welcome(4, LEASE_S), Probe()]
    assert "n" not in hall.hears(actions)
    assert hall.hears(hall.say("m", Alive()))["n"][0] == Welcome(4, LEASE_S)
    assert of_kind(hall.live_until(hall.now + 1), Ended) == []


def test_who_comes_back_while_it_is_asked_whether_it_lives_does_live() -> None:
    hall = Hall((2, 2))
    hall.come("a", 0)
    hall.come("b", 1)
    hall.come("n", 0)
    actions = hall.come("a", 0, past=Past(Standing.BUSY, 1, 0, 0, 2))
    assert hall.hears(actions)["a"] == [Welcome(4, LEASE_S), Probe()]
    hall.tell(Closed(1))
    actions = hall.say("a", Alive())
    assert of_kind(actions, Ended) == [] and of_kind(actions, Waiting)
    assert hall.coordinator.phase is Phase.RUNNING


def test_who_goes_while_it_waits_for_word_of_another_is_not_admitted() -> None:
    for is_fixed in (False, True):
        hall = Hall(has_fixed_ranks=is_fixed)
        hall.come("a", 0)
        hall.come("n", 0)
        hall.close("n")
        assert hall.say("a", Alive()) == []
        assert len(hall.coordinator.story) == 1


# The verdict.


def closing(**others: Any) -> Hall:
    """The last worker has succeeded."""
    hall = running(**others)
    hall.say("a", Succeeded("a", 1))
    return hall


VERDICT = Ended(Outcome.SUCCEEDED, "every worker succeeded")


def test_the_verdict_is_on_the_board_before_anybody_hears_it() -> None:
    hall = closing()
    (publish,) = hall.say("b", Succeeded("b", 1))
    assert from_text(publish.verdict) == VERDICT
    assert hall.hears(hall.tell(Published(True))) == {name: [VERDICT] for name in "ab"}
    assert hall.tell(Published(True)) == []


def test_a_board_that_does_not_take_the_verdict_does_not_keep_everybody_from_it() -> None:
    hall = closing()
    hall.say("b", Succeeded("b", 1))
    decided_at = hall.now
    while not of_kind(actions := hall.pass_deadline(), Ended):
        pass
    assert hall.now - decided_at == pytest.approx(PUBLISH_TIMEOUT_S)
    assert hall.hears(actions) == {name: [VERDICT] for name in "ab"}
    assert hall.tell(Published(True)) == []


def test_who_comes_before_the_verdict_is_on_the_board_hears_it_with_the_others_and_who_comes_later_at_once() -> None:
    hall = closing()
    hall.say("b", Succeeded("b", 1))
    assert hall.come("c") == [Say(3, Welcome(4, LEASE_S))]
    hall.close("b")
    assert hall.hears(hall.tell(Published(True))) == {name: [VERDICT] for name in "ac"}
    assert hall.come("b", past=Past(Standing.FINISHED, 1, 0, 1, 2)) == [Say(4, Welcome(4, LEASE_S)), Say(4, VERDICT)]
    hall.live_until(hall.now + 1)
    assert of_kind(hall.come("d"), Publish) == []


def test_the_job_of_nobody_is_closed_when_somebody_comes() -> None:
    hall = Hall((1, 3), join_timeout_s=1.0, last_call_timeout_s=30.0)
    hall.come("a")
    hall.close("a")
    assert of_kind(hall.live_until(hall.now + 5), Publish) == []
    actions = hall.come("b")
    (publish,) = of_kind(actions, Publish)
    assert from_text(publish.verdict).outcome is Outcome.TIMED_OUT


def test_that_a_node_is_replaced_is_no_verdict() -> None:
    """Both are told at once: one node is replaced, and with it the job is over."""
    hall = Hall((1, 2), max_restarts=0)
    failed = Past(Standing.FAILED, 5, 0, 0, 2, -1, FAILURE)
    hall.come("a", 0, past=failed)
    hall.come("b", 1, past=Past(Standing.BUSY, 4, 0, 1, 2))
    hall.come("c", 1, past=Past(Standing.BUSY, 5, 0, 1, 2))
    actions = hall.pass_deadline()
    assert hall.coordinator.is_closed
    (publish,) = of_kind(actions, Publish)
    assert from_text(publish.verdict).outcome is Outcome.FAILED
    assert {m.outcome for m in of_kind(actions, Ended)} <= {Outcome.REPLACED}
    assert {m.outcome for m in of_kind(hall.tell(Published(True)), Ended)} == {Outcome.FAILED}


@pytest.mark.parametrize("letter", ["x", '"', "\n", "报", "💥", "\ud800"])
def test_a_verdict_always_fits_on_the_board(letter: str) -> None:
    failure = ProcessFailure.from_elsewhere("h" * 255, 0, 0, 77, 1, f"!{letter * (8 << 10)}", letter * (32 << 10), 1000)
    hall = running(max_restarts=0)
    (publish,) = of_kind(hall.say("a", Failed("a", 1, failure)), Publish)
    claim = Candidate("n" * 64, tuple("a" * 255 for _ in range(4)), 29400, "t" * 32)
    assert record_to_bytes(LeaderRecord(1, claim, 7, publish.verdict))
    told = from_text(publish.verdict)
    assert told.outcome is Outcome.FAILED and told.cause.message.startswith(failure.message[:100])
    heard = of_kind(hall.tell(Published(True)), Ended)
    assert [m.cause for m in heard] == [failure] * 2, "who is connected hears all of it"


# Who waits.


def test_who_waits_is_told_what_for_every_ten_seconds() -> None:
    hall = Hall((3, 3))
    hall.come("a")
    hall.come("b")
    actions = hall.live_until(START + 3 * ROLL_CALL_INTERVAL_S)
    texts = [m.text for m in of_kind(actions, Waiting)]
    assert texts == [
        f"rendezvous: 2 of 3 nodes joined after {seconds} s (host-a, host-b); waiting for 1 more"
        for seconds in (10, 10, 20, 20, 30, 30)
    ]


# Whatever happens, in whatever order.

NAMES = "abc"


@st.composite
def random_events(draw: st.DrawFn) -> Any:
    name = draw(st.sampled_from(NAMES))
    conn = draw(st.integers(1, 8))
    rank = draw(st.sampled_from([None, None, 0, 1]))
    round_ = draw(st.integers(0, 3))
    standing = draw(st.sampled_from(Standing))
    past = (
        Past(Standing.READY)
        if round_ == 0
        else Past(
            standing, round_, draw(st.integers(0, 2)), draw(st.integers(0, 2)), draw(st.integers(1, 3)),
            draw(st.integers(-1, 2)), FAILURE if standing is Standing.FAILED else None,
        )
    )  # fmt: skip
    greeting = hello(name, rank, past=past, seen_epoch=draw(st.sampled_from([0, 0, 0, 4, 5, 9])))
    return draw(
        st.sampled_from(
            [
                "come", "come", "come", "deadline", "deadline", "deadline", "deadline", "wait", "sleep",
                Received(conn, Alive()),
                Received(conn, greeting),
                Received(conn, Ready(node(name, rank))),
                Received(conn, Failed(name, round_, FAILURE)),
                Received(conn, Succeeded(name, round_)),
                Received(conn, Left(name, "x")),
                Garbled(conn, "x", False),
                Closed(conn), Closed(conn),
                KEPT, KEPT, KEPT, KeepFailed("x"),
                Reclaimed(draw(st.integers(10, 12))),
                Published(True),
                draw(st.sampled_from([KEPT, Kept(None), Published(False), Reclaimed(None), Resigned(), KeepFailed("x")])),
            ]
        ).map(lambda event: (event, greeting, name))
    )  # fmt: skip


class Witness:
    """Looks at what a chair does, with books of its own."""

    def __init__(self, hall: Hall) -> None:
        self.hall = hall
        self.open: set[int] = set()
        self.welcomed: set[int] = set()
        self.is_vacated = False
        self.is_verdict_out, self.publish_by = False, float("inf")
        self.owed: list[str] = []  # answers that the board owes

    def tell(self, event: Event) -> None:
        match event:
            case Opened(conn) if not self.is_vacated:
                self.open.add(conn)
            case Closed(conn):
                self.open.discard(conn)
                self.welcomed.discard(conn)
        actions = self.hall.tell(event)
        assert not (self.is_vacated and actions), "nothing after the end"
        for index, action in enumerate(actions):
            self.look_at(action)
            if isinstance(action, Vacate):
                assert index == len(actions) - 1, "nothing after the end"
        assert self.hall.chair.is_empty == (not self.open)

    def look_at(self, action: Any) -> None:
        match action:
            case Say(conn, message):
                assert conn in self.open, "nothing is said to who is gone"
                assert len(encode(message)) < 4096
                if isinstance(message, Welcome):
                    self.welcomed.add(conn)
                assert conn in self.welcomed or isinstance(message, Refused), "nothing is said before the welcome"
                if isinstance(message, Ended) and message.outcome is not Outcome.REPLACED:
                    assert "publish" not in self.owed, "the board first"
            case Drop(conn):
                assert conn in self.open, "dropped twice"
                self.open.discard(conn)
                self.welcomed.discard(conn)
            case Keep():
                assert not {"keep", "reclaim"} & set(self.owed), "one question at a time"
                self.owed.append("keep")
            case Reclaim():
                assert "reclaim" not in self.owed
                self.owed.append("reclaim")
            case Publish(verdict):
                assert not self.is_verdict_out, "one verdict"
                assert from_text(verdict).outcome is not Outcome.REPLACED
                self.is_verdict_out, self.publish_by = True, self.hall.now + PUBLISH_TIMEOUT_S
                self.owed.append("publish")
            case Vacate():
                self.is_vacated = True

    def answer(self, event: Event) -> None:
        """The board answers what it was asked, and nothing else."""
        name = {Kept: "keep", KeepFailed: "keep", Reclaimed: "reclaim", Published: "publish"}.get(type(event))
        if name is None:
            self.tell(event)
        elif name in self.owed and not (name == "reclaim" and "keep" in self.owed):  # one after the other
            self.owed.remove(name)
            self.tell(event)

    def pass_deadline(self) -> None:
        chair, hall = self.hall.chair, self.hall
        if chair.deadline is None:
            return
        hall.now = max(hall.now, chair.deadline)
        if hall.now >= self.publish_by:
            self.owed = [each for each in self.owed if each != "publish"]
        self.tell(DeadlinePassed())
        assert chair.is_vacated or chair.deadline > hall.now, "what is due is done at once"


@settings(max_examples=examples(400), deadline=None)
@given(
    st.lists(random_events(), max_size=60),
    st.booleans(),
    st.floats(0.05, 30.0),
    st.integers(0, 2),
)
def test_whatever_happens_a_chair_keeps_its_rules(
    events: list[Any], is_fixed: bool, timeout_s: float, max_restarts: int
) -> None:
    hall = Hall(
        (1, 3), has_fixed_ranks=is_fixed, max_restarts=max_restarts,
        last_call_timeout_s=timeout_s, join_timeout_s=timeout_s, takeover_timeout_s=LEASE_S,
    )  # fmt: skip
    witness = Witness(hall)
    for event, words, name in events:
        greeting = words.replace(terms=hall.terms)
        match event:
            case "come":
                hall.last_conn += 1
                hall.conns[name] = hall.last_conn
                witness.tell(Opened(hall.last_conn, "10.0.0.1", "10.0.0.2"))
                witness.tell(Received(hall.last_conn, greeting))
            case "deadline":
                witness.pass_deadline()
            case "wait":
                hall.now += 0.1
            case "sleep":
                hall.now += 100.0
            case Garbled(conn) | Closed(conn) if conn not in witness.open:
                pass
            case Received(conn) if conn not in witness.open:
                witness.tell(event)
            case Received(conn, Hello()):
                witness.tell(Received(conn, greeting))
            case _:
                witness.answer(event)
