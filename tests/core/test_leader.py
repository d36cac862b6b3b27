"""How a leader starts leading, gets entries committed, and steps down: cases that `stories/leader/` doesn't show."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from typing import Any, get_args

import pytest
from kit import decided
from kit.stories.leader_terms import (
    FAILURE,
    FIRST,
    LEASE_S,
    START,
    TERM,
    WORD,
    Term,
    busy,
    campaigning,
    failed,
    first_round,
    hello,
    leader_at,
    node,
    of_kind,
    part,
    participants,
    ready,
    running,
    voting,
)

from aelastic.errors import ProcessFailure
from aelastic.rdzv.decisions.cause import Cause, CauseKind
from aelastic.rdzv.decisions.decision import next_round
from aelastic.rdzv.leader import leader_events as ev
from aelastic.rdzv.leader.absent import RETURN_S
from aelastic.rdzv.leader.coordinator_events import Phase as CoordinatorPhase
from aelastic.rdzv.leader.job_state import JobState, payload_of, round_of, state_in
from aelastic.rdzv.leader.leader import CANDIDACY_S, SILENT_CELL_S, Phase
from aelastic.rdzv.leader.leader_cell import READ_AGAIN_S, LeaderCell
from aelastic.rdzv.log.cell import Cell
from aelastic.rdzv.log.entries import Accepted, Entry, EntryId, first_entry, id_of, next_entry
from aelastic.rdzv.log.node import Close, EndedFollower, Node, Status, must_join_anew, status_of
from aelastic.rdzv.log.votes import Mandate
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.protocol.codec import DOWNWARD, Decoder, encode, from_text, to_text

# Another agent that leads.
OTHER = leader_at("x", "token of x")


def committed(term: Term) -> Entry:
    """The last entry that the leader knows is committed."""
    found = term.leader.log.node.committed
    assert isinstance(found, Entry)
    return found


def known(term: Term) -> EntryId | None:
    """The id of the last entry, for an agent with the same log."""
    return id_of(committed(term))


def state(term: Term) -> JobState:
    """The job state in the log."""
    return state_in(committed(term))


def phase(term: Term) -> Phase:
    return term.leader.phase


def has_stepped_down(term: Term) -> bool:
    return term.leader.has_stepped_down


def is_over(term: Term) -> bool:
    return term.leader.is_over


def cell(term: Term) -> Cell:
    """The endpoint's record."""
    assert term.stored is not None
    return term.stored.cell


def proposal(term: Term) -> Entry | None:
    return term.leader.log.proposal


def mute(term: Term, names: str) -> None:
    """These nodes accept no entry any more, and the endpoint is silent."""
    term.mute, term.is_cell_silent = {*names}, True


def restarts(term: Term, names: str) -> list[Any]:
    """Fails a worker, and makes all nodes ready again: the coordinator begins the next round."""
    term.send(names[0], failed(names[0]))
    return [each for name in names for each in term.send(name, m.Ready(term.node(name)))]


# One entry at a time.


def test_a_round_is_sent_once_its_entry_is_committed() -> None:
    term = voting("abc")
    mute(term, "bc")
    assert of_kind(restarts(term, "abc"), m.Assigned) == []
    assert (proposal(term) is not None, committed(term).number, term.coordinator.round) == (True, 1, 2)
    actions = term.speak("b")
    assert {each.round for each in of_kind(actions, m.Assigned)} == {2} and len(of_kind(actions, m.Assigned)) == 3
    assert proposal(term) is None and committed(term).number == 2
    assert state(term).last_round is not None and state(term).restart_count == 1


def test_a_leader_with_more_to_read_decides_when_it_has_read_that() -> None:
    term = voting("abc")
    restarts(term, "ab")
    last = term.reports.status_after(m.Ready(term.node("c"))).replace(log=status_of(term.logs["c"]))
    assert term.handle(ev.Received(term.conns["c"], last, has_next=True)) == []
    assert proposal(term) is None, "the next message may be the first cause"
    assert len(of_kind(term.handle(ev.Received(term.conns["a"], m.Alive())), m.Assigned)) == 3


def test_no_second_entry_is_proposed_before_the_first_is_committed() -> None:
    term = voting("abc")
    mute(term, "bc")
    restarts(term, "abc")
    first = proposal(term)
    for name in "bc":
        term.send(name, m.Left(name, "SIGTERM"))
    term.send("a", r.Ask("a", "1", r.Verb.CORDON, "a", 0.0, ""))
    assert proposal(term) == first and term.coordinator.phase is CoordinatorPhase.RUNNING, "the messages are queued"
    actions = term.speak("b")
    assert committed(term).number == 3 and of_kind(actions, m.Interrupted), "and then processed"
    assert state(term).ledger.excluded, "the cordon is the next entry"


def test_what_follows_from_an_entry_is_sent_in_the_order_of_the_decisions() -> None:
    term = running("ab", nodes=(1, 3))
    term.is_cell_silent = True
    restarts(term, "ab")
    term.send("b", m.Left("b", "SIGTERM"))
    actions = [each for each in term.break_silence() if isinstance(each, ev.SendTo) and each.conn == term.conns["a"]]
    assert [type(each.message) for each in actions] == [m.Assigned, m.Interrupted]


def test_a_node_that_connects_while_an_entry_is_not_committed_reads_that_it_has_a_leader_and_no_more() -> None:
    term = running("ab", nodes=(2, 3))
    term.is_cell_silent = True
    restarts(term, "ab")
    assert term.join("c") == [part(term.conns["c"], f"welcome to term {TERM}")]
    assert of_kind(term.break_silence(), m.Assigned)


def test_a_node_that_reconnects_while_an_entry_is_not_committed_reads_its_round_with_the_others() -> None:
    term = running("ab", nodes=(2, 3))
    term.is_cell_silent = True
    restarts(term, "ab")
    term.close("b", Close.ABORTED)
    assert of_kind(term.join("b", past=term.reports.of["b"].past), m.Assigned) == []
    actions = term.received_by(term.break_silence())
    assert [type(each) for each in actions["b"]][:1] == [m.Assigned]


def test_a_node_that_reconnects_while_an_entry_is_not_committed_reads_the_rest_of_its_plan_once_its_report_is_handled() -> (
    None
):
    """It may have missed the end of its round."""
    term = running("ab", nodes=(2, 3))
    term.join("c")
    ended, _ = of_kind(term.live_until(term.now + 1.0), m.Interrupted)
    term.is_cell_silent = True
    term.send("a", r.Ask("a", "1", r.Verb.CORDON, "a", 0.0, ""))
    term.close("b", Close.ABORTED)
    assert term.join("b", past=busy()) == [part(term.conns["b"], f"welcome to term {TERM}")]
    assert part(term.conns["b"], ended) in term.break_silence()


def test_what_changes_nothing_in_the_log_is_sent_at_once() -> None:
    term = voting("abc")
    mute(term, "bc")
    assert of_kind(term.send("a", failed("a")), m.Interrupted) == [m.Interrupted(1, FIRST, 1)] * 3
    assert proposal(term) is None


def test_an_entry_names_its_voters_and_a_restart_keeps_them() -> None:
    term = voting("abc")
    restarts(term, "abc")
    assert committed(term).number == 2 and committed(term).voters == ("a", "b", "c")


def test_a_node_without_a_port_for_votes_has_no_vote() -> None:
    term = Term((3, 3), own="a", do_nodes_vote=True)
    for name in "abc":
        term.join(name, **({"vote_port": 0} if name == "b" else {}))
    assert term.coordinator.round == 1 and committed(term).voters == ("a", "c")


def test_a_leader_votes_itself_once_its_plan_is_in_the_kernels_hands_for_all_that_it_has_welcomed() -> None:
    term = voting("abc")
    term.are_plans_flushed = False
    mute(term, "c")
    restarts(term, "abc")
    conns, serials = {term.conns[name]: name for name in "bc"}, term.leader.followers._sent
    assert proposal(term) is not None, "b has accepted it"
    for conn, name in conns.items():
        assert proposal(term) is not None
        term.handle(ev.Flushed(conn, serials[name] - 1))
        assert proposal(term) is not None, "that was for an earlier plan"
        actions = term.handle(ev.Flushed(conn, serials[name]))
    assert proposal(term) is None and of_kind(actions, m.Assigned)


# Requests: once reported as applied, they are in the log.

ASKS = [
    r.Ask("b", "1", r.Verb.CORDON, "c", 0.0, "fans"),
    r.Ask("b", "1", r.Verb.DRAIN, "", 60.0, "spot"),
    r.Ask("b", "1", r.Verb.STOP, "", 60.0, "maintenance", at_save=True),
    r.Ask("b", "1", r.Verb.RESTART, "", 60.0, "", at_save=True),
]


def keeps(kept: JobState, ask: r.Ask) -> bool:
    """Whether the log contains a request."""
    if ask.verb is r.Verb.CORDON:
        return [each.host for each in kept.ledger.excluded] == ["host-c"]
    return [each.verb for each in kept.asks] == [ask.verb]


@pytest.mark.parametrize("ask", ASKS, ids=lambda each: each.verb)
@pytest.mark.parametrize("make", [lambda: running("abc", nodes=(1, 3)), lambda: voting("abc", nodes=(1, 3))])
def test_a_request_is_answered_once_its_entry_is_committed(ask: r.Ask, make: Callable[[], Term]) -> None:
    term = make()
    mute(term, "bc")
    assert of_kind(term.send("b", ask), r.Answer) == []
    assert proposal(term) is not None and not keeps(state(term), ask)
    actions = term.speak("b") if term.leader.do_nodes_vote else term.break_silence()
    assert [each.is_applied for each in of_kind(actions, r.Answer)] == [True]
    assert keeps(state(term), ask)


def test_a_request_that_is_refused_is_answered_at_once() -> None:
    term = voting("abc")
    mute(term, "bc")
    actions = term.send("b", r.Ask("b", "1", r.Verb.DRAIN, "no-such-host", 60.0, ""))
    assert [each.is_applied for each in of_kind(actions, r.Answer)] == [False] and proposal(term) is None


@pytest.mark.parametrize("ask", ASKS, ids=lambda each: each.verb)
def test_a_request_to_a_leader_that_loses_its_quorum_is_not_answered_as_applied(ask: r.Ask) -> None:
    term = voting("abc", nodes=(1, 3))
    mute(term, "bc")
    actions = term.send("b", ask) + term.live_until(term.now + 3 * LEASE_S, "b", "c")
    assert has_stepped_down(term)
    assert of_kind(actions, r.Answer) == [] and not keeps(state(term), ask)
    assert term.break_silence() == [], "nor later"


@pytest.mark.parametrize("ask", ASKS, ids=lambda each: each.verb)
def test_a_request_to_a_leader_that_is_displaced_is_not_answered_as_applied(ask: r.Ask) -> None:
    term = running("abc", nodes=(1, 3))
    term.is_cell_silent = True
    term.send("b", ask)
    assert term.stored is not None
    term.stored = m.StoredCell(term.stored.cell.replace(leader=OTHER.token, term=TERM + 5), OTHER)
    actions = term.break_silence()
    assert has_stepped_down(term) and of_kind(actions, r.Answer) == []


def next_leader(term: Term, name: str = "b", **others: Any) -> Term:
    """After the leader has ended, another node's agent campaigns; all other nodes of the round are there."""
    before = term.logs[name].replace(leader="", ended=())
    kept = committed(term)
    other = campaigning("abc", kept=kept, by=name, term=term.leader.term + 1, **others)
    other.stored = other._read = term.stored
    other.leader.log = other.leader.log.replace(
        node=other.leader.log.node.replace(accepted=before.accepted, committed=before.committed)
    )
    other.leader.gone = frozenset({term.at.token})
    other.now = max(START, term.now)
    other.logs = {each: known for each, known in term.logs.items() if each != name}
    other.reports.of |= term.reports.of
    other.handle(ev.DeadlinePassed())
    for each in sorted(term.logs.keys() | {name}):
        other.join(each, past=term.reports.of[each].past)
    return other


@pytest.mark.parametrize("ask", ASKS, ids=lambda each: each.verb)
def test_a_request_that_was_answered_as_applied_survives_its_leader(ask: r.Ask) -> None:
    term = voting("abc", nodes=(1, 3))
    assert [each.is_applied for each in of_kind(term.send("b", ask), r.Answer)] == [True]
    other = next_leader(term)
    assert phase(other) is Phase.LEADING and keeps(state(other), ask)
    core = other.coordinator
    if ask.verb is r.Verb.CORDON:
        assert core.forming.cordons.ledger.absent(other.now).keys() == {"host-c"}
    elif ask.verb is r.Verb.DRAIN:
        assert core.drain.leaving.keys() == {"b"}
    elif ask.verb is r.Verb.STOP:
        assert core.drain.aim is not None and core.drain.aim.verb is ask.verb
    else:
        assert core.phase is CoordinatorPhase.FORMING, "the loss of the leader's node has restarted the workers"
    assert keeps(core.state(other.now), ask), "and the leader after this one"


def test_a_request_whose_entry_a_quorum_has_accepted_is_carried_on_though_nobody_was_answered() -> None:
    term = voting("abc", nodes=(1, 3))
    term.are_plans_flushed = False  # the leader does not count itself
    term.mute, term.is_cell_silent = {"c"}, True
    ask = ASKS[1]
    assert of_kind(term.send("b", ask), r.Answer) == []
    assert term.logs["b"].accepted is not None and term.logs["b"].accepted.entry == proposal(term)
    other = next_leader(term)
    assert keeps(state(other), ask) and committed(other) == proposal(term)
    assert other.coordinator.drain.leaving.keys() == {"b"}


# The cell.


def test_a_leader_reads_the_cell_first_and_then_locks_it_for_its_term() -> None:
    term = Term(is_begun=False)
    term.is_cell_silent = True
    term.begin()
    assert term.asked == [ev.ReadCell()] and phase(term) is Phase.CANDIDATE
    term.break_silence()
    assert [type(each) for each in term.asked] == [ev.ReadCell, ev.WriteCell], "its next write is a proposal"
    assert term.written[0] == m.StoredCell(Cell(WORD, None, TERM, term.at.token), term.at)
    assert phase(term) is Phase.LEADING and term.leader.is_cell_ours


def test_one_question_at_a_time_is_asked_of_the_endpoint() -> None:
    term = running("ab", nodes=(2, 3))
    term.is_cell_silent, before = True, len(term.asked)
    term.live_until(term.now + 2 * LEASE_S)
    restarts(term, "ab")
    term.live_until(term.now + 2 * LEASE_S)
    assert len(term.asked) == before + 1


def test_the_cell_is_renewed_three_times_a_lease() -> None:
    term = running("ab", nodes=(2, 3))
    before = len(term.written)
    renewals = term.stored.cell.renewals if term.stored else 0
    term.live_until(START + 10 * LEASE_S)
    assert 29 <= len(term.written) - before <= 30
    assert term.stored is not None and term.stored.cell.renewals - renewals == len(term.written) - before
    assert term.stored.cell.committed == committed(term) and term.stored.leader == term.at


def test_a_renewal_whose_answer_was_lost_renews_nothing_later() -> None:
    """The write may have taken effect when it was requested, and the endpoint's vote expires one lease after that."""
    term = running("ab", nodes=(2, 3))
    asked_before, term.has_cell = len(term.asked), False
    while len(term.asked) == asked_before:
        term.live_until(term.now + 0.1)
    lost, asked_at = term.asked[-1], term.now
    term.stored, term.has_cell = lost.stored, True
    term.live_until(term.now + 1.0)
    renewals = [each.cell.renewals for each in term.written]
    assert len({*renewals}) == len(renewals), "no two writes are equal"
    assert term.stored is not None and term.stored.cell.renewals > lost.stored.cell.renewals
    assert term.leader.cell.taken_at > asked_at


def test_the_endpoints_vote_ends_a_lease_after_it_was_requested_however_late_the_answer() -> None:
    term = running("ab", nodes=(2, 3))
    asked, term.is_cell_silent = len(term.asked), True
    while len(term.asked) == asked:
        term.live_until(term.now + 0.01)
    asked_at = term.now
    term.now += LEASE_S / 4
    term.break_silence()
    cell = term.leader.cell
    assert cell.has_taken(LEASE_S, asked_at + LEASE_S - 0.02) and not cell.has_taken(LEASE_S, asked_at + LEASE_S + 0.02)


def test_the_next_renewal_is_due_when_a_third_of_a_lease_is_over_however_late_the_answer() -> None:
    term = running("ab", nodes=(2, 3))
    term.is_cell_silent = True
    asked = len(term.asked)
    term.live_until(term.now + LEASE_S / 2)
    assert len(term.asked) == asked + 1
    assert term.leader.cell._asked is not None
    asked_at = term.leader.cell._asked.at
    term.break_silence()
    assert len(term.asked) == asked + 1, "the answer was in time"
    term.live_until(asked_at + LEASE_S / 3 - 0.01)
    assert len(term.asked) == asked + 1
    term.live_until(asked_at + LEASE_S / 3)
    assert len(term.asked) == asked + 2


def test_all_nodes_receive_three_heartbeats_a_lease_whatever_the_endpoint_does() -> None:
    for is_silent in (False, True):
        term = running("ab", nodes=(2, 3))
        term.is_cell_silent = is_silent
        beats = of_kind(term.live_until(START + 10 * LEASE_S), m.Heartbeat)
        assert 2 * 29 <= len(beats) <= 2 * 30


def test_a_cell_that_cannot_be_read_is_read_again_after_a_moment() -> None:
    term = Term(is_begun=False)
    term.has_cell = False
    term.begin()
    term.live_until(START + READ_AGAIN_S - 0.01)
    assert term.asked == [ev.ReadCell()]
    term.live_until(START + READ_AGAIN_S)
    assert term.asked == [ev.ReadCell()] * 2


def test_a_cell_that_cannot_be_written_is_written_again_after_a_moment() -> None:
    """An endpoint that refuses connections fails at once: without a pause, retries would never stop."""
    term = running("ab", nodes=(2, 3))
    term.send("a", failed("a"))
    term.send("a", ready("a"))
    term.has_cell, before = False, len(term.asked)
    term.send("b", ready("b"))
    assert proposal(term) is not None
    assert len(term.asked) == before + 1
    term.live_until(term.now + 4 * READ_AGAIN_S)
    assert len(term.asked) <= before + 6
    term.has_cell = True
    assert of_kind(term.live_until(term.now + 2 * READ_AGAIN_S), m.Assigned)


@pytest.mark.parametrize("make", [running, voting])
def test_an_endpoint_that_has_forgotten_all_gets_another_incarnation(make: Callable[..., Term]) -> None:
    """Otherwise its promises to others would still count, although it has forgotten them."""
    term = make("abc")
    before = committed(term).incarnations
    term.stored = None
    term.live_until(term.now + 2 * LEASE_S)
    assert (cell(term).incarnation,) != before
    assert committed(term).incarnations == (cell(term).incarnation,), "and an entry names it"


def founding() -> Term:
    """The first entry of a log is proposed, and the endpoint has not answered yet."""
    term = Term((1, 3), last_call_timeout_s=0.01)
    term.join("a")
    term.is_cell_silent = True
    term.live_until(START + 0.1)
    assert proposal(term) is not None
    return term


def test_a_first_entry_is_proposed_again_where_the_endpoint_has_forgotten_what_it_is_named_after() -> None:
    """The bug: a suspended founder committed its entry to a memory that belonged to another founder."""
    term = founding()
    term.stored = None
    term.break_silence()
    term.live_until(term.now + LEASE_S)
    assert committed(term).incarnations == (cell(term).incarnation,) and committed(term).log == cell(term).incarnation


def test_a_founder_that_learns_of_another_log_proposes_its_first_entry_again() -> None:
    """The bug: the endpoint's answer was lost, and meanwhile a node joined that knows an older log."""
    term = founding()
    older = first_entry(TERM - 1, [], [], ("1d",))
    term.logs["z"] = Node("z", TERM - 1, committed=older)
    term.join("z", past=busy(term=TERM - 1))
    actions = [*term.break_silence(), *term.live_until(term.now + LEASE_S)]
    assert of_kind(actions, m.Assigned) and committed(term).log == cell(term).incarnation


def test_a_founder_gives_no_vote_to_a_voter_of_the_log_that_it_gives_up() -> None:
    """It keeps its promises in that log until it joins under another name, once this agent leads."""
    kept = JobState(round_of(1, TERM, participants("ab"), "a"))
    older = first_entry(TERM, "ab", "ab", ("1d",), payload_of(kept))
    at = m.LeaderAt("x", "x", ("10.0.0.1",), 4000, "t")
    term = Term((2, 2), kept=Node("x", committed=older), at=at, own="x", do_nodes_vote=True, term=TERM + 9)
    term.leader.host = "host-a"  # replaces a
    term.logs["b"] = Node("b", TERM, "a", committed=older)
    term.join("b", past=busy())
    assert phase(term) is Phase.LEADING and committed(term).voters == ()
    plan = term.plans[term.conns["b"]].log
    assert plan is not None and must_join_anew(term.logs["b"], plan)


def test_a_leader_gives_no_vote_to_a_node_of_another_log_that_has_not_joined_again() -> None:
    """The bug: such a node got half of the votes, and could not use them."""
    term = voting("ab", nodes=(1, 3))
    older = first_entry(TERM - 1, "cd", "cd", ("1d",))
    term.logs["c"] = Node("c", TERM - 1, committed=older)
    term.join("c", past=m.Past(m.NodePhase.READY, 1, TERM - 1))
    term.live_until(term.now + 1.0)
    restarts(term, "ab")
    assert list(term.coordinator.roster.participants) == ["a", "b", "c"]
    assert committed(term).voters == ("a", "b")


def another_cell(term: Term, *, renewals: int = 0, number: int = TERM + 5) -> m.StoredCell:
    """Another agent has locked the cell."""
    assert term.stored is not None
    return m.StoredCell(term.stored.cell.replace(leader=OTHER.token, term=number, renewals=renewals), OTHER)


def test_where_the_store_decides_a_leader_that_finds_another_one_in_the_cell_steps_down() -> None:
    term = running("ab", nodes=(2, 3))
    term.stored = another_cell(term)
    actions = term.live_until(term.now + LEASE_S)
    assert [each.reason for each in of_kind(actions, m.Goodbye)] == ["another agent leads the job now"] * 2
    assert [each.stored for each in of_kind(actions, ev.StepDown)] == [term.stored], (
        "its own node connects to that leader"
    )
    assert of_kind(actions, m.Interrupted) == [], "its nodes stay in their round"


def test_where_the_store_decides_a_leader_that_finds_a_newer_round_in_the_cell_has_its_nodes_stop() -> None:
    """The bug: a leader that was suspended kept its workers for a lease after it had read of the next round."""
    term = running("ab", nodes=(1, 3))
    other = another_cell(term)
    kept = JobState(round_of(2, TERM + 5, participants("c"), "c"))
    newer = next_entry(committed(term), TERM + 5, "c", "", (cell(term).incarnation,), payload=payload_of(kept))
    term.stored = other.replace(cell=other.cell.replace(committed=newer))
    actions = term.live_until(term.now + LEASE_S)
    causes = [each.decision.cause for each in of_kind(actions, m.Interrupted)]
    assert causes == [Cause(CauseKind.CONTINUED_WITHOUT, round=1)] * 2


@pytest.mark.parametrize("term_of_other", [TERM - 5, TERM + 5])
def test_where_the_store_decides_a_leader_gives_up_its_log_once_the_leader_of_another_one_renews(
    term_of_other: int,
) -> None:
    """The endpoint has lost its data, and a new agent has founded another log there, in any term."""
    term = running("ab", nodes=(2, 3))
    other = first_entry(term_of_other, ["n"], [], ("2e",))
    for renewals in range(2):
        term.stored = m.StoredCell(Cell("2e", other.log, term_of_other, OTHER.token, renewals, other), OTHER)
        actions = term.live_until(term.now + LEASE_S)
        if has_stepped_down(term):
            break
    assert [each.reason for each in of_kind(actions, m.Goodbye)] == ["another agent leads the job now"] * 2
    assert of_kind(actions, m.Interrupted) == [], "its nodes learn it from the other leader"


def test_where_nodes_vote_a_leader_with_a_quorum_takes_the_cell_back_in_a_term_above() -> None:
    term = voting("abc")
    term.stored = another_cell(term)
    actions = term.live_until(term.now + LEASE_S)
    assert phase(term) is Phase.LEADING and term.leader.term > TERM + 5
    assert term.stored.cell.leader == term.at.token and term.stored.cell.term == term.leader.term
    assert of_kind(actions, m.Interrupted) == of_kind(actions, m.Goodbye) == []


def test_a_cell_whose_leader_renews_is_not_locked() -> None:
    first = first_round("ab")
    term = campaigning("abc", gone=frozenset(), is_replaceable=True)
    term.is_cell_silent = True
    term.begin()
    for count in range(3):
        term.stored = m.StoredCell(Cell(WORD, first.log, TERM, OTHER.token, count, first_round()), OTHER)
        term.break_silence()
        term.is_cell_silent = True
        term.live_until(term.now + READ_AGAIN_S)
    assert term.written == [] and len(term.asked) >= 3, "it keeps reading"


def test_a_cell_whose_leader_has_renewed_nothing_for_a_lease_is_locked() -> None:
    token = "token of a"
    for since, is_locked in ((START - LEASE_S - 0.1, True), (START - LEASE_S + 0.1, False)):
        term = campaigning("abc", gone=frozenset())
        assert cell(term).leader == token
        term.leader.cell.seen = term.leader.cell.seen.after(cell(term), since)
        term.begin()
        assert bool(term.written) == is_locked


# Terms.


def test_a_term_is_in_every_plan_and_begins_the_next_rounds() -> None:
    term = voting("abc")
    actions = term.handle(ev.Campaigned(9, m.Campaign(TERM + 3, known(term), OTHER)))
    (answer,) = of_kind(actions, ev.Answer)
    assert (answer.conn, answer.declined.term, answer.declined.leader) == (9, TERM + 4, term.at)
    assert term.leader.term == term.leader.connections.term == TERM + 4
    assert {each.term for each in term.plans.values()} == {TERM + 4}
    assert {known.term for known in term.logs.values()} == {TERM + 4}, "its followers have voted for it again"
    restarts(term, "abc")
    found = state(term).last_round
    assert found is not None and (found.number, found.term) == (2, TERM + 4)


@pytest.mark.parametrize("how", ["a status", "a campaign"])
def test_a_higher_term_that_a_leader_meets_while_it_has_a_quorum_costs_nobody_anything(how: str) -> None:
    term = voting("abc")
    if how == "a campaign":
        actions = term.handle(ev.Campaigned(9, m.Campaign(TERM + 3, known(term), OTHER)))
    else:
        term.logs["c"] = term.logs["c"].replace(term=TERM + 3, voted_for="c")
        actions = term.join("c", past=busy())
    assert phase(term) is Phase.LEADING and term.leader.log.mandate is Mandate.QUORUM
    assert term.leader.term == TERM + 4 and of_kind(actions, m.Goodbye) == of_kind(actions, m.Interrupted) == []
    assert term.coordinator.phase is CoordinatorPhase.RUNNING


def test_what_was_proposed_in_an_earlier_term_is_committed_in_the_next_and_told_once() -> None:
    term = voting("abc")
    mute(term, "bc")
    restarts(term, "abc")
    before = proposal(term)
    term.handle(ev.Campaigned(9, m.Campaign(TERM + 3, known(term), OTHER)))
    actions = term.speak("b") + term.speak("c")
    assert [each.round for each in of_kind(actions, m.Assigned)] == [2] * 3
    assert before is not None and before.id in {committed(term).id, committed(term).parent}
    assert term.coordinator.round == 2


def test_a_request_that_waits_is_answered_in_the_next_term_too() -> None:
    term = voting("abc", nodes=(1, 3))
    mute(term, "bc")
    assert of_kind(term.send("b", ASKS[1]), r.Answer) == []
    term.handle(ev.Campaigned(9, m.Campaign(TERM + 3, known(term), OTHER)))
    actions = term.speak("b") + term.speak("c")
    assert [each.is_applied for each in of_kind(actions, r.Answer)] == [True] and keeps(state(term), ASKS[1])


# The lease.


def test_nodes_read_that_the_next_round_waits_for_the_endpoint() -> None:
    term = running("abc")
    term.has_cell = False
    restarts(term, "abc")
    texts = of_kind(term.live_until(term.now + 11.0), m.Waiting)
    assert {each.text[:43] for each in texts} == {"rendezvous: no answer from the endpoint for"}
    assert all(each.text.endswith(" s: running workers continue, no new round can start") for each in texts)
    assert len(texts) == 3, "each of them"


def test_nodes_read_whose_votes_the_next_round_waits_for() -> None:
    term = voting("abc")
    mute(term, "bc")
    restarts(term, "abc")
    texts = of_kind(term.live_until(term.now + 11.0), m.Waiting)
    assert {each.text for each in texts} == {
        "rendezvous: no answer from host-b, host-c, which must vote: no new round can start"
    }


def test_a_leader_that_could_only_recover_by_now_steps_down() -> None:
    """The bug: it had a quorum at the start, and could never commit anything with the remaining nodes."""
    term = running("ab", do_nodes_vote=True)
    node = term.leader.log.node
    term.leader.log = term.leader.log.replace(node=node.replace(replaces=("b",)))
    term.close("b", Close.ABORTED)
    term.close("a")
    term.live_until(term.now + 2 * LEASE_S)
    assert has_stepped_down(term)


def test_a_candidate_that_needs_the_endpoint_alone_has_a_lease_and_lacks_no_quorum() -> None:
    """It knows no voters, so the agent reports that the endpoint is missing.

    On a lossy network, several stores often answer only after seconds.
    """
    term = Term(is_begun=False)
    term.has_cell = False
    actions = [*term.begin(), *term.live_until(START + LEASE_S - 0.1)]
    assert of_kind(actions, ev.StepDown) == [] and phase(term) is Phase.CANDIDATE
    (stepped_down,) = of_kind(term.live_until(START + LEASE_S), ev.StepDown)
    assert not stepped_down.lacks_quorum


@pytest.mark.parametrize(
    "make, silent, kind", [(voting, "bc", CauseKind.NODES_SILENT), (running, "c", CauseKind.ENDPOINT_SILENT)]
)
def test_a_leader_steps_down_a_lease_after_it_had_a_quorum_and_has_its_side_stopped(
    make: Callable[..., Term], silent: str, kind: CauseKind
) -> None:
    term = make("abc", nodes=(1, 3))
    term.live_until(term.now + LEASE_S)
    for name in "abc":
        term.send(name, m.Alive())
    received_at, term.has_cell = term.now, False
    actions = term.live_until(received_at + LEASE_S - 0.01, *silent)
    assert phase(term) is Phase.LEADING and of_kind(actions, m.Interrupted) == []
    actions = term.live_until(received_at + LEASE_S, *silent)
    assert has_stepped_down(term)
    assert [each for each in actions if getattr(each, "conn", 0) == term.conns["a"]] == [
        part(term.conns["a"], m.Interrupted(1, next_round(Cause(kind)))),
        ev.SendTo(term.conns["a"], m.Goodbye("no contact with a quorum", False)),
        ev.Drop(term.conns["a"], in_order=True),
    ]


def test_a_write_whose_answer_was_lost_is_contact_with_the_endpoint_once_it_is_read() -> None:
    """The bug: a leader stepped down right after it began to lead, although its first write had taken effect."""
    cell = LeaderCell("1f", LEASE_S)
    cell.read(100.0)
    cell.on_answered(None, 100.1)
    written = cell.write(Cell("1f", None, TERM, OTHER.token, 0), OTHER, 100.2).stored
    cell.on_failed(101.0, must_read=True)
    cell.read(101.3)
    assert not cell.has_taken(LEASE_S, 101.3)
    cell.on_answered(written, 101.4)
    assert cell.has_taken(LEASE_S, 100.2 + LEASE_S) and not cell.has_taken(LEASE_S, 100.3 + LEASE_S)
    again = cell.write(Cell("1f", None, TERM, OTHER.token, 0), OTHER, 101.5).stored
    assert again != written, "a packet of the lost write may arrive late"


def test_a_leader_has_contact_to_a_quorum_through_whatever_its_nodes_send() -> None:
    term = voting("abc")
    term.has_cell = False
    for _ in range(10):
        term.live_until(term.now + 0.9 * LEASE_S, "b", "c")
        term.send("b", m.Status(term.node("b"), busy()))
    assert phase(term) is Phase.LEADING


def test_a_leader_of_two_that_receives_nothing_counts_the_endpoint_for_a_lease_after_it_was_asked() -> None:
    term = voting("ab", nodes=(1, 3))
    term.live_until(term.now + 3 * LEASE_S, "b")
    assert phase(term) is Phase.LEADING
    asked_at, term.has_cell = term.leader.cell.taken_at, False
    term.live_until(asked_at + LEASE_S - 0.05, "b")
    assert phase(term) is Phase.LEADING
    term.live_until(asked_at + 4 * LEASE_S / 3, "b")
    assert has_stepped_down(term)


def test_a_vote_of_an_ended_follower_still_counts_and_of_one_that_was_reset_does_not() -> None:
    for how, leads in ((Close.ORDERLY, True), (Close.ABORTED, False), (Close.HUNG_UP, False)):
        term = voting("abc")
        term.has_cell = False
        for name in "bc":
            term.close(name, how)
            del term.conns[name]
        term.live_until(term.now + 3 * LEASE_S)
        assert has_stepped_down(term) is not leads, how


def test_a_leader_of_a_job_without_a_round_needs_no_other() -> None:
    term = Term((2, 2))
    term.join("a")
    term.has_cell = False
    term.live_until(term.now + 5 * LEASE_S, "a")
    assert phase(term) is Phase.LEADING


def test_a_leader_of_two_that_receives_nothing_from_its_own_node_either_has_lost_one_and_not_all() -> None:
    term = running("ab", nodes=(2, 2), own="a", is_replaceable=True)
    term.live_until(term.now + LEASE_S + 0.1, "a", "b")
    assert phase(term) is Phase.LEADING


def test_that_a_leader_steps_down_shows_what_it_keeps_of_the_log() -> None:
    term = voting("abc")
    mute(term, "bc")
    restarts(term, "abc")
    (gone,) = of_kind(term.handle(ev.Resigned()), ev.StepDown)
    assert gone.node == term.leader.log.node
    assert gone.node.committed == committed(term) and gone.node.accepted == Accepted(proposal(term), TERM)  # type: ignore[arg-type]


# A round continues while the deciding store is silent.


def test_a_newcomer_interrupts_no_round_while_the_store_that_decides_is_silent() -> None:
    """The next round could not begin: workers would stand idle until the store is back."""
    term = running("ab", nodes=(2, 3))
    term.has_cell = False
    term.live_until(term.now + 2.0)
    actions = term.join("c") + term.live_until(term.now + LEASE_S)
    assert of_kind(actions, m.Interrupted) == []
    term.has_cell = True
    assert of_kind(term.live_until(term.now + LEASE_S), m.Interrupted)


def test_that_nodes_wait_is_unsaid_once_the_round_that_takes_them_in_is_committed() -> None:
    """The leader may be lost before that, and the next one must wait for them."""
    term = running("ab", nodes=(2, 3))
    assert m.Heartbeat(True) in [each.replace(renewals=0) for each in of_kind(term.join("c"), m.Heartbeat)]
    term.live_until(term.now + 1.0)
    assert term.coordinator.phase is CoordinatorPhase.FORMING
    term.is_cell_silent = True
    term.send("a", ready("a"))
    actions = term.send("b", ready("b"))
    assert proposal(term) is not None
    assert [each.has_spares for each in of_kind(actions, m.Heartbeat)] == []
    assert [each.has_spares for each in of_kind(term.break_silence(), m.Heartbeat)][-1:] == [False]


# Candidates.


def test_a_candidate_asks_each_voter_that_has_not_answered_for_its_vote() -> None:
    term = campaigning("abcde", nodes=(1, 5))
    term.has_cell = False
    (asked,) = of_kind(term.begin(), ev.AskVotes)
    assert asked.campaign == m.Campaign(TERM + 1, first_round("abcde").id, term.at)
    assert {"c", "d", "e"} <= {each.name for each in asked.participants} and "b" not in {
        each.name for each in asked.participants
    }
    term.join("c", past=busy())
    (again,) = of_kind(term.live_until(term.now + 0.1), ev.AskVotes)
    assert [each.name for each in again.participants if each.name in "cde"] == ["d", "e"]


def test_a_candidate_that_has_no_votes_steps_down_after_its_time() -> None:
    term = campaigning("abcd")
    term.has_cell = False
    began = term.leader.started
    term.begin()
    term.live_until(began + CANDIDACY_S - 0.01)
    assert phase(term) is Phase.CANDIDATE
    actions = term.live_until(began + CANDIDACY_S)
    assert has_stepped_down(term)
    (gone,) = of_kind(actions, ev.StepDown)
    assert gone.reason.startswith("there is no quorum: host-c, host-d cannot be reached") and gone.lacks_quorum


def test_votes_that_come_in_time_are_enough() -> None:
    term = campaigning("abcd")
    term.has_cell = False
    term.begin()
    term.live_until(term.leader.started + CANDIDACY_S - 0.1)
    term.join("c", past=busy())
    assert phase(term) is Phase.CANDIDATE, "the end of a leader counts only together with the endpoint"
    term.join("d", past=busy())
    assert phase(term) is Phase.LEADING
    term.live_until(term.now + CANDIDACY_S)
    assert phase(term) is Phase.LEADING


def reports_term(term: Term, name: str, above: int) -> None:
    """Connects a node that has campaigned in a higher term without success."""
    term.logs[name] = Node(name, term=term.leader.term + above, voted_for=name)
    term.join(name)


def test_a_leader_knows_all_terms_of_its_nodes_before_the_first_round_begins() -> None:
    """If the store alone decides, a mandate given up during a round may never come back."""
    term = Term((2, 2), is_begun=False)
    term.begin()
    term.is_cell_silent = True
    reports_term(term, "a", above=5)
    assert term.leader.term == TERM + 6
    reports_term(term, "b", above=7)
    assert term.leader.term == TERM + 6, "it has no mandate to take over the next one"
    term.break_silence()
    assert term.leader.term == TERM + 14 and term.coordinator.round == 1
    term.is_cell_silent = True
    term.live_until(term.now + 3 * LEASE_S)
    assert phase(term) is Phase.LEADING and term.leader.log.mandate, "all nodes are there"


def test_a_leader_whose_store_is_silent_keeps_its_mandate_when_a_node_reports_a_higher_term() -> None:
    term = running("ab", nodes=(2, 2))
    term.is_cell_silent = True
    term.live_until(term.now + LEASE_S)
    reports_term(term, "b", above=5)
    term.live_until(term.now + 2 * LEASE_S)
    assert phase(term) is Phase.LEADING and term.leader.term == TERM
    term.break_silence()
    term.live_until(term.now + LEASE_S)
    assert phase(term) is Phase.LEADING and term.leader.term == TERM + 6


def test_a_candidate_in_a_higher_term_has_no_more_time() -> None:
    """The bug: two candidates outbid each other for minutes, and nobody led."""
    term = campaigning("abcd")
    term.has_cell = False
    began = term.now
    term.begin()
    for _ in range(3):
        term.live_until(term.now + CANDIDACY_S / 4)
        term.handle(ev.Declined(term.leader.term + 7))
    assert term.leader.term == TERM + 1 + 3 * 8 and phase(term) is Phase.CANDIDATE
    term.live_until(began + CANDIDACY_S + 0.1)
    assert has_stepped_down(term)


def test_a_candidate_meets_a_lower_term_without_a_change() -> None:
    term = campaigning("abcd")
    term.has_cell = False
    term.begin()
    term.handle(ev.Declined(TERM))
    assert term.leader.term == TERM + 1


def test_a_node_that_follows_a_leader_that_lives_ends_a_candidacy() -> None:
    for leader, ends in ((OTHER.token, True), ("token of a", False), ("it is silent", False), ("", False)):
        term = campaigning("abcd", silent="it is silent")
        term.has_cell = False
        term.begin()
        term.handle(ev.Declined(TERM, leader))
        assert has_stepped_down(term) is ends


def test_a_candidate_steps_down_for_another_of_a_higher_term_and_has_its_member_vote() -> None:
    term = campaigning("abc")
    term.has_cell = False
    term.begin()
    asked = m.Campaign(TERM + 2, known(term), OTHER)
    actions = term.handle(ev.Campaigned(7, asked))
    assert has_stepped_down(term) and actions[-1] == ev.PassOn(7, asked)
    assert actions[-2] == ev.StepDown("another agent leads the job now", term.leader.log.node)


@pytest.mark.parametrize("asked_for", [0, TERM, TERM + 1])
def test_a_candidate_declines_what_is_not_a_higher_term_and_says_that_nobody_leads(asked_for: int) -> None:
    term = campaigning("abc")
    term.has_cell = False
    term.begin()
    (answer,) = of_kind(term.handle(ev.Campaigned(7, m.Campaign(asked_for, known(term), OTHER))), ev.Answer)
    assert (answer.conn, answer.declined.term, answer.declined.leader) == (7, TERM + 1, None)


def test_a_candidate_decides_nothing_and_tells_nobody_of_a_round() -> None:
    term = campaigning("abcd")
    term.has_cell = False
    term.begin()
    actions = term.join("c", past=busy()) + term.join("x") + term.send("c", failed("c"))
    assert phase(term) is Phase.CANDIDATE
    assert [each for each in actions if not isinstance(getattr(each, "message", None), str)] == [], "they are welcome"


def test_a_candidate_that_reads_of_a_newer_entry_starts_from_there() -> None:
    term = campaigning("abc")
    term.has_cell = False
    term.begin()
    kept = JobState(round_of(2, TERM, participants("abc"), "a"), 1)
    newer = next_entry(first_round(), TERM, "abc", "abc", (WORD,), payload=payload_of(kept))
    term.logs["c"] = term.logs["c"].replace(committed=newer)
    term.join("c", past=busy(2))
    assert phase(term) is Phase.LEADING and committed(term) == newer
    assert (term.coordinator.round, term.coordinator.forming.restart_count) == (2, 1)


def test_a_leader_that_reads_of_a_newer_entry_steps_down() -> None:
    """The coordinator's state is not what was committed."""
    term = voting("abc")
    newer = next_entry(committed(term), TERM + 1, "abc", "abc", (WORD,), payload=payload_of(state(term)))
    term.logs["c"] = term.logs["c"].replace(committed=newer)
    actions = term.join("c", past=busy())
    assert has_stepped_down(term) and of_kind(actions, m.Interrupted) == []


# The verdict.

SUCCEEDED = m.Ended(m.Outcome.SUCCEEDED, decided.SUCCEEDED)


def with_verdict(before: Entry | None = None) -> Entry:
    parent = before or first_round()
    kept = JobState(round_of(1, TERM, participants("abc"), "a"), verdict=SUCCEEDED)
    return next_entry(parent, TERM, "abc", "abc", (WORD,), is_verdict=True, payload=payload_of(kept))


def test_the_verdict_is_sent_once_it_is_committed() -> None:
    term = voting("abc")
    mute(term, "bc")
    actions = [each for name in "abc" for each in term.send(name, m.Succeeded(name, 1))]
    assert of_kind(actions, m.Ended) == [] and not is_over(term)
    assert of_kind(term.speak("b"), m.Ended) == [SUCCEEDED] * 3
    assert is_over(term) and committed(term).is_verdict and state(term).verdict == SUCCEEDED


def test_the_verdict_is_in_the_cell_with_the_next_renewal() -> None:
    term = voting("abc")
    for name in "abc":
        term.send(name, m.Succeeded(name, 1))
    assert is_over(term)
    term.live_until(term.now + LEASE_S / 3)
    assert cell(term).committed == committed(term)


def test_the_verdict_is_written_into_a_cell_that_another_has_locked_meanwhile() -> None:
    """The bug: the leader stepped down, and the node that sought votes by then never learned the verdict."""
    term = voting("abc")
    for name in "abc":
        term.send(name, m.Succeeded(name, 1))
    for name in "bc":
        term.close(name, Close.ABORTED)
    assert is_over(term)
    term.stored = another_cell(term, number=TERM + 1)
    told = term.live_until(term.now + LEASE_S)
    assert of_kind(told, ev.StepDown) == [] and cell(term).committed == committed(term)


def test_a_candidate_that_reads_a_verdict_in_the_cell_steps_down() -> None:
    """Its member reads the verdict there."""
    term = campaigning("abc")
    assert term.stored is not None
    term.stored = term.stored.replace(cell=term.stored.cell.replace(committed=with_verdict()))
    actions = term.begin()
    assert has_stepped_down(term) and [each.reason for each in of_kind(actions, ev.StepDown)] == ["the job is over"]
    assert term.written == []


def test_a_candidate_that_learns_of_the_verdict_sends_it_to_all_that_come() -> None:
    term = campaigning("abcd")
    term.has_cell = False
    term.begin()
    kept = JobState(round_of(1, TERM, participants("abcd"), "a"), verdict=SUCCEEDED)
    verdict = next_entry(first_round("abcd"), TERM, "abcd", "abcd", (WORD,), is_verdict=True, payload=payload_of(kept))
    term.logs["c"] = term.logs["c"].replace(committed=verdict)
    assert of_kind(term.join("c", past=busy()), m.Ended) == [SUCCEEDED]
    assert phase(term) is Phase.LEADING and is_over(term)
    for name in ("d", "x"):
        assert of_kind(term.join(name, past=busy() if name == "d" else None), m.Ended) == [SUCCEEDED]
    actions = term.live_until(term.now + 3 * LEASE_S)
    assert of_kind(actions, ev.StepDown) == [] and term.coordinator.is_closed


def test_a_leader_that_has_adopted_the_verdict_and_learns_that_it_is_committed_sends_it() -> None:
    """The bug: such a leader had not resumed the job, so its nodes never learned how that had ended."""
    term, verdict = campaigning("abc"), with_verdict(first_round("abc"))
    term.leader.log = term.leader.log.replace(node=term.leader.log.node.replace(accepted=Accepted(verdict, TERM)))
    term.has_cell, term.mute = False, {"c"}
    term.begin()
    term.join("c", past=busy())
    assert phase(term) is Phase.LEADING and proposal(term) == verdict and not is_over(term)
    learned = status_of(term.logs["c"].replace(committed=verdict))
    actions = term.handle(ev.Received(term.conns["c"], term.reports.of["c"].replace(log=learned)))
    assert of_kind(actions, m.Ended) == [SUCCEEDED] and term.coordinator.is_closed


def test_a_candidate_that_knows_the_verdict_itself_tells_it_without_any_vote() -> None:
    term = campaigning("abc", kept=with_verdict())
    term.has_cell = False
    term.begin()
    assert of_kind(term.join("c", past=busy()), m.Ended) == [SUCCEEDED]
    assert is_over(term)


def test_a_verdict_that_a_job_before_has_left_in_the_cell_is_ignored() -> None:
    over = with_verdict()
    cell = Cell(WORD, over.log, TERM - 1, OTHER.token, 3, over)
    term = Term(stored=m.StoredCell(cell, OTHER), job_before=over.log, gone=frozenset({OTHER.token}), is_begun=False)
    term.begin()
    assert not has_stepped_down(term)
    term = Term(stored=m.StoredCell(cell, OTHER), gone=frozenset({OTHER.token}), is_begun=False)
    term.begin()
    assert has_stepped_down(term), "and this would end the job"


def test_a_verdict_that_was_accepted_and_not_told_is_adopted_by_the_next_leader() -> None:
    term = voting("abc")
    term.are_plans_flushed = False
    term.mute, term.is_cell_silent = {"c"}, True
    for name in "abc":
        term.send(name, m.Succeeded(name, 1))
    assert not is_over(term) and term.logs["b"].accepted is not None
    other = next_leader(term)
    assert other.leader.is_over and state(other).verdict == SUCCEEDED
    assert {type(each) for each in other.plans[other.conns["c"]].replace(log=None).__dict__.values()} >= {m.Ended}


def test_a_leader_with_a_verdict_awaits_the_nodes_of_the_round_that_have_never_come() -> None:
    """A node that was cut off may come back late, and only this leader can tell it; an ended node is not awaited."""
    term = voting("abcd", nodes=(4, 4))
    term.are_plans_flushed = False
    term.mute, term.is_cell_silent = {"c"}, True
    for name in "abcd":
        term.send(name, m.Succeeded(name, 1))
    assert not is_over(term) and term.logs["b"].accepted is not None
    other = campaigning("abcd", kept=committed(term))
    other.leader.log = other.leader.log.replace(node=other.leader.log.node.replace(accepted=term.logs["b"].accepted))
    other.begin()
    other.logs["d"] = term.logs["d"]
    for name in "bd":
        other.join(name, past=busy())
    assert other.leader.is_over and not other.leader.is_known_to_all
    for name in "bd":
        other.close(name)
    connections = other.leader.connections
    assert connections.is_over and connections.awaited_hosts == "host-c"
    assert connections.awaited_until == pytest.approx(other.now + LEASE_S + RETURN_S, abs=0.01), (
        "counted from when it began to lead"
    )
    assert of_kind(other.join("c", past=busy()), m.Ended) == [SUCCEEDED]
    other.close("c")
    assert connections.awaited_until == 0.0 and other.leader.is_known_to_all


def test_what_the_log_keeps_of_a_large_job_with_the_longest_failure_fits_into_a_message_and_the_cell() -> None:
    rng = random.Random(1)

    def text(size: int) -> str:
        return "".join(chr(rng.randrange(33, 0x4000)) for _ in range(size))

    def member() -> m.Node:
        host = f"ip-{rng.getrandbits(32)}.cluster.internal"
        address, ports = f"10.0.{rng.getrandbits(8)}.{rng.getrandbits(8)}", rng.sample(range(30_000, 60_000), 2)
        name = uuid.UUID(int=rng.getrandbits(128)).hex
        return m.Node(name, host, "default", 8, address, ports[0], vote_port=ports[1])

    nodes = [member() for _ in range(4000)]
    failure = ProcessFailure.from_elsewhere("h" * 255, 0, 0, 77, 1, text(8 << 10), text(32 << 10), 1000)
    verdict = m.Ended(m.Outcome.FAILED, decided.refused(), failure)
    kept = JobState(round_of(1, TERM, nodes, ""))
    voters = [each.node_id for each in nodes[:7]]
    before = first_entry(TERM, voters, voters, (WORD,), payload_of(kept))
    last = next_entry(
        before, TERM, voters, voters, (WORD,), is_verdict=True, payload=payload_of(kept.replace(verdict=verdict))
    )
    cell = Cell(WORD, before.log, TERM, "t" * 32, 7, before, Accepted(last, TERM))
    addresses = tuple(f"{number}" * 255 for number in range(4))
    stored = m.StoredCell(cell, m.LeaderAt("n" * 64, "n" * 64, addresses, 29400, "t" * 32))
    assert from_text(to_text(stored)) == stored and len(to_text(stored)) < 1_500_000, "etcd's limit"
    assert state_in(last).verdict == verdict


# New voters, and lost voters.


def test_a_round_with_new_voters_is_sent_to_no_node_before_the_endpoint_has_it() -> None:
    term = voting("ab", nodes=(1, 3))
    term.join("c")
    term.live_until(term.now + 1.0)
    term.is_cell_silent = True
    restarts(term, "ab")
    found = proposal(term)
    assert found is not None and found.voters == ("a", "b", "c")
    assert term.logs["b"].accepted is None and term.leader.log.node.accepted is None
    actions = term.break_silence()
    assert len(of_kind(actions, m.Assigned)) == 3 and committed(term) == found
    assert {known.committed for known in term.logs.values()} == {found}


def test_while_the_cell_is_silent_the_round_is_proposed_again_without_new_voters() -> None:
    term = voting("ab", nodes=(1, 3))
    term.join("c")
    term.live_until(term.now + 1.0)
    term.is_cell_silent = True
    restarts(term, "ab")
    asked_at, before = term.now, proposal(term)
    actions = term.live_until(asked_at + SILENT_CELL_S - 0.01)
    assert of_kind(actions, m.Assigned) == [] and proposal(term) == before
    actions = term.live_until(asked_at + SILENT_CELL_S)
    assert len(of_kind(actions, m.Assigned)) == 3, "c takes part"
    assert committed(term).voters == ("a", "b") and term.leader.term == TERM + 1
    assert before is not None and before.id != committed(term).id


def test_a_newcomer_has_a_vote_with_the_next_round_once_the_endpoint_is_back() -> None:
    term = voting("ab", nodes=(1, 3))
    term.join("c")
    term.live_until(term.now + 1.0)
    term.is_cell_silent = True
    restarts(term, "ab")
    term.live_until(term.now + SILENT_CELL_S)
    term.break_silence()
    term.live_until(term.now + LEASE_S)
    term.send("c", m.Failed("c", 2, FAILURE))
    for name in "abc":
        term.send(name, m.Ready(term.node(name)))
    assert term.coordinator.round == 3 and committed(term).voters == ("a", "b", "c")


@pytest.mark.parametrize(
    "host, address, is_replaced",
    [("host-a", "10.0.0.1", True), ("host-z", "10.0.0.1", False), ("host-a", "10.9.9.9", False)],
    ids=["its place", "another host", "another address"],
)
def test_a_voter_whose_place_another_agent_has_taken_is_gone(host: str, address: str, is_replaced: bool) -> None:
    """`10.0.0.1` and `host-a` belong to voter a, and each agent has a single place."""
    term = campaigning("abcd", by="b", has_listened=True)
    term.leader.log = term.leader.log.replace(node=term.leader.log.node.replace(ended=()))
    term.begin()
    for name in "cd":  # cut off, and not replaced
        term.logs.pop(name)
    conn = term.open("n", "10.5.5.5")
    given = m.Node("n", host, "default", 1, address, 29500, vote_port=7)
    greeting = hello("n", terms=term.terms, token=term.at.token)
    status = m.Status(given, m.Past(m.NodePhase.READY), log=Status(0, None, None, (), (), ()))
    term.handle(ev.Received(conn, greeting.replace(status=status)))
    assert term.leader.log.node.replaces == (("a",) if is_replaced else ())


def test_a_voter_that_answers_lives_even_if_another_has_its_seat() -> None:
    term = campaigning("abcd", by="b")
    term.leader.log = term.leader.log.replace(node=term.leader.log.node.replace(ended=()))
    term.has_cell = False
    term.begin()
    term.join("a", past=busy())
    conn = term.open("n", "10.0.0.1")
    given = m.Node("n", "host-a", "default", 1, "10.0.0.1", 29500, vote_port=7)
    status = m.Status(given, m.Past(m.NodePhase.READY), log=Status(0, None, None, (), (), ()))
    term.handle(ev.Received(conn, hello("n", terms=term.terms, token=term.at.token).replace(status=status)))
    assert term.leader.log.node.replaces == ()


def test_two_voters_in_one_place_are_not_both_replaced_by_one_agent() -> None:
    nodes = [node(name, vote_port=7, address="10.0.0.1").replace(host="host") for name in "abc"]
    kept = JobState(round_of(1, TERM, nodes, "a"))
    entry = first_entry(TERM, "abc", "abc", (WORD,), payload_of(kept))
    term = campaigning("abc", kept=entry, by="c")
    term.leader.log = term.leader.log.replace(node=term.leader.log.node.replace(ended=()))
    term.has_cell = False
    term.begin()
    for number, name in enumerate("mn", start=1):
        conn = term.open(name, "10.0.0.1")
        given = m.Node(name, "host", "default", 1, "10.0.0.1", 29500, vote_port=7)
        status = m.Status(given, m.Past(m.NodePhase.READY), log=Status(0, None, None, (), (), ()))
        term.handle(ev.Received(conn, hello(name, terms=term.terms, token=term.at.token).replace(status=status)))
        assert len(term.leader.log.node.replaces) == number


def test_all_agents_are_replaced_and_the_endpoint_remembers_the_job() -> None:
    """Each host gets a new agent: the job continues from the log, with the same round numbers."""
    entry = first_round("ab")
    cell = Cell(WORD, entry.log, TERM, "token of a", 3, entry)
    stored = m.StoredCell(cell, leader_at("a", cell.leader))
    others: dict[str, Any] = {"own": "x", "do_nodes_vote": True, "term": TERM + 9, "gone": frozenset({cell.leader})}
    term = Term((2, 2), stored=stored, kept=Node("x"), at=m.LeaderAt("x", "x", ("10.0.0.1",), 4000, "t"), **others)
    term.leader.host = "host-a"
    assert phase(term) is Phase.CANDIDATE, "b may be alive"
    conn = term.open("y", "10.0.0.2")
    given = m.Node("y", "host-b", "default", 1, "10.0.0.2", 29500, vote_port=7)
    term.reports.connects(given, m.Past(m.NodePhase.READY))
    status = m.Status(given, m.Past(m.NodePhase.READY), log=Status(TERM + 9, None, None, (), (), ()))
    term.logs["y"] = Node("y", TERM + 9, "x")
    term.handle(ev.Received(conn, hello("y", terms=term.terms, token="t").replace(status=status)))
    assert phase(term) is Phase.LEADING and term.leader.log.mandate is Mandate.RECOVERY
    term.join("x")
    term.live_until(term.now + 1.0)
    assert term.coordinator.round == 2 and committed(term).voters == ("x", "y")
    assert committed(term).parent == entry.id


# After it stops leading.


def every_event(term: Term) -> list[ev.Event]:
    conn, past = term.conns["a"], busy().replace(phase=m.NodePhase.FAILED, failure=FAILURE)
    waiting = m.Status(node("a"), m.Past(m.NodePhase.READY))
    statuses = waiting, waiting.replace(past=past), waiting.replace(left=m.Left("a", "x"))
    return [
        ev.Opened(99, "10.0.0.9", "10.0.0.100"),
        *(ev.Received(conn, message) for message in (m.Alive(), m.HungUp(), *statuses, hello("a"))),
        ev.Garbled(conn, "x", False),
        ev.Closed(conn, Close.ORDERLY),
        ev.Flushed(conn, 1),
        ev.CellAnswered(term.stored),
        ev.CellAnswered(None),
        ev.CellFailed("x"),
        ev.Campaigned(9, m.Campaign(TERM + 9, known(term), OTHER)),
        ev.Declined(TERM + 9),
        ev.Resigned(),
        ev.DeadlinePassed(),
    ]


def test_every_event_has_an_example_here() -> None:
    assert {type(event) for event in every_event(running())} == set(get_args(ev.Event))


def displaced(term: Term) -> None:
    term.stored = another_cell(term)
    term.live_until(term.now + LEASE_S)


@pytest.mark.parametrize("end", [displaced, lambda term: term.handle(ev.Resigned())], ids=["displaced", "resigned"])
def test_a_leader_that_has_stepped_down_does_nothing(end: Callable[[Term], Any]) -> None:
    term = running(max_restarts=0)
    end(term)
    assert has_stepped_down(term) and term.leader.deadline is None
    for event in every_event(term):
        term.now += 1000
        assert term.handle(event) == []


def test_a_node_that_names_a_term_that_no_log_has_counted_to_is_refused() -> None:
    term = voting("abc")
    past = m.Past(m.NodePhase.READY)
    far = m.Status(term.node("b"), past, log=status_of(term.logs["b"].replace(term=TERM + m.TERMS_AHEAD_MAX + 1)))
    (refused,) = of_kind(term.handle(ev.Received(term.conns["b"], far)), m.Refused)
    assert refused.reason == "protocol error: a term that no log has counted to" and term.leader.term == TERM


@pytest.mark.parametrize("make", [running, voting])
def test_what_the_endpoint_says_unasked_changes_nothing(make: Callable[..., Term]) -> None:
    """The answer belongs to a question of an earlier term."""
    for event in (ev.CellAnswered(None), ev.CellFailed("x")):
        term = make("abc")
        before = committed(term), term.leader.phase, term.leader.term
        term.handle(event)
        term.live_until(term.now + LEASE_S)
        assert (committed(term), term.leader.phase, term.leader.term) == before
        assert of_kind(restarts(term, "abc"), m.Assigned)


def test_whatever_a_leader_sends_can_be_read() -> None:
    term = voting("abc")
    for conn in term.conns.values():
        (again,) = Decoder(DOWNWARD).feed(encode(term.plans[conn]))
        assert again == term.plans[conn]


def test_ended_followers_are_in_what_the_leader_keeps() -> None:
    term = voting("abc")
    term.close("c")
    kept = term.leader.log.node.ended_followers
    assert [each.name for each in kept] == ["c"] and isinstance(kept[0], EndedFollower)
