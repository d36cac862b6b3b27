"""Elections without an endpoint: events in, actions out; and whether a coordinator may begin a round."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from aelastic.rdzv.leader_record import Candidate, LeaderRecord
from aelastic.rdzv.member.node_state import NodeState
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.ranks import NodeRanks
from aelastic.rdzv.survivors import election_events as ev
from aelastic.rdzv.survivors.election import CHOSEN_S, EPOCHS_APART, Election
from aelastic.rdzv.survivors.election_events import Phase
from aelastic.rdzv.survivors.electorate import Electorate

# Of the first election after a coordinator of the board, and of the one after.
ELECTED, NEXT = 2 * EPOCHS_APART, 3 * EPOCHS_APART
LEASE_S = 5.0
SECRET = "s3cret"
SEATS = m.Seats(1_002, 2, SECRET, tuple(m.Seat(each, f"host-{each}", f"10.0.0.{each}", 7) for each in "012"))


def candidate(node_id: str) -> Candidate:
    return Candidate(node_id, (f"host-{node_id}",), 4711, f"token of {node_id}")


LEADER = LeaderRecord(1, candidate("0"), 3)


def vote(node_id: str, epoch: int = ELECTED, *, fence: int = SEATS.fence, secret: str = SECRET) -> m.Vote:
    return m.Vote(fence, secret, m.Elected(epoch, node_id, (f"host-{node_id}",), 4711, f"token of {node_id}"))


def following(node_id: str = "1") -> Election:
    election = Election(node_id, LEASE_S)
    election.handle(ev.Followed(LEADER, 1), 0.0)
    election.handle(ev.Seated(SEATS), 0.0)
    return election


def alone(node_id: str = "1", *, is_dead: bool = True) -> Election:
    """It has lost the coordinator and the endpoint, whose processes have ended."""
    election = following(node_id)
    election.handle(ev.Lost(10.0, is_dead, candidate(node_id)), 10.0)
    election.handle(ev.BoardSilent(10.0, is_refused=is_dead), 10.0)
    return election


def asked(election: Election, vote: m.Vote, now: float = 10.0) -> m.Voted:
    (answer,) = election.handle(ev.Asked(1, vote), now)
    assert isinstance(answer, ev.Answer)
    return answer.voted


def asking(node_id: str = "1") -> Election:
    election = alone(node_id)
    assert election.deadline is not None
    asks = election.handle(ev.DeadlinePassed(), election.deadline)
    assert [ask.seat.node_id for ask in asks if isinstance(ask, ev.Ask)] == [each for each in "012" if each != node_id]
    return election


def test_most_votes_elect_a_node_which_nothing_but_the_round_knows() -> None:
    election = asking()
    election.handle(ev.Answered("2", ELECTED, m.Voted(True, ELECTED)), 10.2)
    assert election.chosen == LeaderRecord(ELECTED, candidate("1"), is_by_nodes=True)
    assert election.chosen.is_elected


def test_a_vote_is_an_answer_and_the_candidate_is_followed() -> None:
    election = alone("2")
    assert asked(election, vote("1")).is_granted
    assert election.chosen == LeaderRecord(ELECTED, candidate("1"), is_by_nodes=True)


def test_two_nodes_have_no_majority_without_each_other() -> None:
    election = following()
    election.handle(ev.Seated(m.Seats(SEATS.fence + 1, 3, SECRET, SEATS.seats[:2])), 0.0)
    election.handle(ev.Lost(10.0, True, candidate("1")), 10.0)
    election.handle(ev.BoardSilent(10.0, is_refused=True), 10.0)
    for _ in range(20):
        assert election.deadline is not None
        election.handle(ev.DeadlinePassed(), election.deadline)
        assert election.chosen is None


def test_a_node_votes_for_one_candidate_in_an_epoch() -> None:
    election = alone("2")
    assert asked(election, vote("1")).is_granted
    assert asked(election, vote("1")).is_granted, "the answer was lost, and it asks again"
    assert not asked(election, vote("0")).is_granted
    assert asked(election, vote("0", NEXT)).is_granted


@pytest.mark.parametrize(
    "election, asks, reason",
    [
        (following("2"), vote("1"), "has a leader"),
        (alone("2"), vote("1", secret="another"), "secret"),
        (alone("2"), vote("1", fence=SEATS.fence - 1), "newer round"),
        (alone("2", is_dead=False), vote("1"), "for long enough"),
        (alone("2"), vote("1", 1), "knows of epoch 1"),
        (Election("2", LEASE_S), vote("1"), "no part in a round"),
    ],
)
def test_a_vote_that_is_not_given_has_a_reason(election: Election, asks: m.Vote, reason: str) -> None:
    voted = asked(election, asks)
    assert not voted.is_granted and reason in voted.reason


def test_a_coordinator_and_an_endpoint_that_are_silent_are_lost_after_a_lease() -> None:
    election = alone("1", is_dead=False)
    assert election.deadline is not None and 10 + LEASE_S <= election.deadline <= 10 + LEASE_S + 0.2
    assert asked(election, vote("2"), 10 + LEASE_S).is_granted


def test_an_endpoint_that_answers_ends_an_election() -> None:
    election = asking()
    election.handle(ev.BoardSaid(), 10.2)
    assert election.deadline is not None
    assert election.handle(ev.DeadlinePassed(), election.deadline) == []
    assert election.phase is Phase.ALONE


def test_a_node_that_comes_late_hears_which_coordinator_was_elected() -> None:
    election, elected = asking(), m.Elected(ELECTED, "2", ("host-2",), 4711, "token of 2")
    election.handle(ev.Answered("2", ELECTED, m.Voted(False, ELECTED, "has a leader", elected)), 10.2)
    assert election.chosen == LeaderRecord(ELECTED, candidate("2"), is_by_nodes=True)


def test_two_that_ask_at_once_ask_in_a_newer_epoch_then() -> None:
    one, other = asking("1"), asking("2")
    for election, rival in ((one, "2"), (other, "1")):
        election.handle(ev.Answered(rival, ELECTED, asked(election, vote(rival))), 10.2)
    assert one.deadline is not None
    (_, to_other) = one.handle(ev.DeadlinePassed(), one.deadline)
    assert isinstance(to_other, ev.Ask) and to_other.vote.leader.epoch == NEXT
    assert asked(other, to_other.vote, one.deadline).is_granted


def test_one_that_was_elected_and_does_not_come_is_replaced() -> None:
    election = alone("2")
    asked(election, vote("1"))
    assert election.deadline is not None and election.deadline <= 10 + CHOSEN_S + 0.2
    asks = election.handle(ev.DeadlinePassed(), election.deadline)
    assert [ask.vote.leader.epoch for ask in asks if isinstance(ask, ev.Ask)] == [NEXT] * 2


def test_what_the_endpoint_knew_before_the_election_is_not_believed_for_a_lease() -> None:
    election, elected = following("2"), LeaderRecord(ELECTED, candidate("1"), is_by_nodes=True)
    election.handle(ev.Followed(elected, ELECTED), 10.0)
    assert not election.is_stale(LEADER, 11.0), "its coordinator is there to say so"
    election.handle(ev.Lost(12.0, False, candidate("2")), 12.0)
    assert election.is_stale(LEADER, 12.1) and election.is_stale(None, 12.1)
    assert not election.is_stale(elected.replace(renewals=1), 12.1)
    assert not election.is_stale(LEADER, 12.1 + LEASE_S)


# Whether a coordinator may begin a round.

RANKS = NodeRanks(0, 3, 0, 3, 0, 3, 1)


def nodes(names: str) -> list[m.Node]:
    return [m.Node(each, f"host-{each}", "", 1, f"10.0.0.{each}", 1, ballot_port=7) for each in names]


def begin(found: Electorate, round_: int, names: str) -> m.Seats:
    ranks = RANKS.replace(group_world_size=len(names))
    assigned = m.Assigned(round_, 0, ranks, "", 0, epoch=1)
    seats = found.begin(assigned, SECRET, nodes(names), set(names).__contains__)
    assert seats is not None
    return seats


def electorate(names: str = "012") -> tuple[Electorate, int]:
    found = Electorate(is_on=True)
    seats = begin(found, 2, names)
    for node in nodes(names):
        found.on_welcome(node, seats)
    return found, seats.fence


def blocked(found: Electorate, connected: Iterable[str], *, is_on_board: bool = True) -> str:
    return "".join(seat.node_id for seat in found.missing(set(connected).__contains__, is_on_board=is_on_board))


@pytest.mark.parametrize(
    "names, connected, on_board, on_its_own",
    [
        ("012", "01", "", ""),
        ("012", "0", "12", "12"),
        ("0123", "01", "", "23"),
        ("01", "0", "", "1"),
        ("0", "", "0", "0"),
    ],
)
def test_no_round_begins_while_a_majority_of_the_last_is_not_heard(
    names: str, connected: str, on_board: str, on_its_own: str
) -> None:
    found, _ = electorate(names)
    assert blocked(found, connected) == on_board
    assert blocked(found, connected, is_on_board=False) == on_its_own


@pytest.mark.parametrize("is_on_board, then", [(True, ""), (False, "12")])
def test_that_an_earlier_coordinator_has_ended_is_taken_from_a_node_where_the_endpoint_answers(
    is_on_board: bool, then: str
) -> None:
    """Two of four, and a third with the endpoint, could both go on, if neither side counted the fourth, which ended."""
    found, _ = electorate()
    found.on_ended(["1"])
    assert blocked(found, "0", is_on_board=is_on_board) == then
    found.on_welcome(nodes("1")[0], None)
    assert blocked(found, "0") == "12", "it was here after that"


def test_agents_in_the_places_of_others_count_if_each_that_is_missing_has_one() -> None:
    """The one before may have gone on with one that is missing still."""
    found, _ = electorate()
    elsewhere = nodes("1")[0].replace(node_id="e", master_addr="10.0.0.9")
    ones, twos = (node.replace(node_id=node.node_id + "'") for node in nodes("12"))
    for newcomer in (elsewhere, ones, twos):
        found.on_welcome(newcomer, None)
    assert blocked(found, "0") == blocked(found, "0e") == "12"
    assert blocked(found, ["0", "1'"]) == "2"
    assert blocked(found, ["0", "1'", "2'"]) == ""


def test_on_one_machine_a_new_agent_stands_for_the_one_before_it() -> None:
    """All met over the loopback interface: seats have its address, and a newcomer that is here has none."""
    found = Electorate(is_on=True)
    here = [node.replace(host="host", master_addr="127.0.0.1") for node in nodes("012")]
    assigned = m.Assigned(2, 0, RANKS.replace(group_world_size=3), "", 0, epoch=1)
    seats = found.begin(assigned, SECRET, here, set("012").__contains__)
    for node in here:
        found.on_welcome(node, seats)
    for each in "12":
        found.on_welcome(here[0].replace(node_id=each + "'"), None)
    assert blocked(found, ["0"]) == "12"
    assert blocked(found, ["0", "1'"]) == "2"
    assert blocked(found, ["0", "1'", "2'"]) == ""


def test_a_seat_that_is_known_by_a_name_has_the_address_of_its_connection_too() -> None:
    """Where no name server answers, the others ask for its vote there."""
    found = Electorate(is_on=True)
    located = [node.replace(peer_address=f"10.1.0.{node.node_id}") for node in nodes("012")]
    named = [located[0], *(node.replace(master_addr=f"node{node.node_id}") for node in located[1:])]
    assigned = m.Assigned(2, 0, RANKS.replace(group_world_size=3), "", 0, epoch=1)
    seats = found.begin(assigned, SECRET, named, set("012").__contains__)
    assert seats is not None
    told = [(seat.address, seat.peer_address) for seat in seats.seats]
    assert told == [("10.0.0.0", ""), ("node1", "10.1.0.1"), ("node2", "10.1.0.2")]


@pytest.mark.parametrize("is_on_board, with_one", [(True, ""), (False, "02")])
def test_a_node_that_ended_counts_as_one_in_contact(is_on_board: bool, with_one: str) -> None:
    found, _ = electorate("0123")
    found.on_dead("3")
    assert blocked(found, "12", is_on_board=is_on_board) == ""
    assert blocked(found, "1", is_on_board=is_on_board) == with_one


def test_half_of_a_round_can_go_on_with_the_endpoint_until_more_than_half_know_a_newer_one() -> None:
    found, fence = electorate("0123")
    assert begin(found, 3, "01").needs_endpoint, "so these nodes elect none"
    for each in "01":
        found.on_said(each, fence + 1)
    assert blocked(found, "01") == "" and blocked(found, "01", is_on_board=False) == "23"
    found.on_said("2", fence + 1)
    assert blocked(found, "01", is_on_board=False) == ""


def test_nodes_of_a_round_that_needs_the_endpoint_elect_none() -> None:
    election = alone()
    election.seats = SEATS.replace(needs_endpoint=True)
    assert not election.has_vote


def test_a_round_counts_until_most_of_its_nodes_know_a_newer_one() -> None:
    """The next round begins with newcomers, and two nodes of the last never hear of it: these elect another."""
    found, fence = electorate("012")
    begin(found, 3, "01234")
    for each in "034":
        found.on_said(each, fence + 1)
    assert blocked(found, "034") == "12"
    found.on_said("1", fence + 1)
    assert blocked(found, "034") == ""


@pytest.mark.parametrize("is_on, needs_endpoint, waits", [(True, False, "012"), (False, False, ""), (True, True, "")])
def test_a_round_that_the_board_knows_counts_unless_its_nodes_elect_none(
    is_on: bool, needs_endpoint: bool, waits: str
) -> None:
    seats = begin(Electorate(is_on=True), 2, "012").replace(needs_endpoint=needs_endpoint)
    found = Electorate(is_on=is_on)
    found.on_board_knows(seats)
    assert blocked(found, "34") == waits
    assert not found.has_any({"3", "4"}.__contains__)


def test_a_round_that_another_coordinator_has_begun_counts_when_a_node_tells_of_it() -> None:
    found, fence = electorate("012")
    (back,) = nodes("2")
    seats = m.Seats(m.fence_of(ELECTED, 3), 3, "other", (*SEATS.seats[1:], m.Seat("3", "h", "a", 7)))
    found.on_welcome(back, seats)
    assert blocked(found, "02") == "13"
    assert fence in found.rounds


def test_a_node_has_no_vote_by_its_own_round_any_more_once_it_follows_the_coordinator_of_another() -> None:
    """Both began as the first of their epoch, for the endpoint was lost in between: it would elect itself, alone."""
    found, fence = electorate("012")
    (late,) = nodes("9")
    own = m.Seats(fence, 2, "its own", (m.Seat("9", "h", "a", 7),))
    found.on_welcome(late, own)
    told = found.newer_than(own)
    assert told == found.rounds[fence] and found.newer_than(told) is None
    election, state = Election("9", LEASE_S), NodeState()
    for seats in (own, told):
        election.handle(ev.Seated(seats), 0.0)
        state.on_seats(seats)
        assert election.has_vote == (seats is own) and state.seats is seats


def test_a_round_of_too_many_nodes_or_of_nodes_without_a_port_has_no_elections() -> None:
    found = Electorate(is_on=True)
    many = [node.replace(node_id=str(i)) for i, node in enumerate(nodes("0") * (m.SEATS_MAX + 1))]
    ranks = RANKS.replace(group_world_size=len(many))
    assert found.begin(m.Assigned(2, 0, ranks, "", 0, epoch=1), SECRET, many, bool) is None
    portless = [node.replace(ballot_port=0) for node in nodes("012")]
    assert found.begin(m.Assigned(2, 0, RANKS, "", 0, epoch=1), SECRET, portless, bool) is None
    assert blocked(found, "") == ""


def test_the_first_epoch_on_a_board_that_knows_nothing_is_the_wall_clock_s() -> None:
    new = candidate("0").replace(made_ms=1_700_000_000_000)
    assert new.epoch_after(0, 0) == 1_700_000_000_001
    assert new.epoch_after(0, 7) == 8, "a board that knows an epoch counts on"
    assert new.epoch_after(1_800_000_000_000, 0) == 1_800_000_000_001, "so does an agent that does"
    first = LeaderRecord(new.epoch_after(0, 0), new, 0)
    assert first.is_first and not first.replace(epoch=8).is_first
    assert not first.replace(candidate=new.replace(fence=3)).is_first, "its node was in a round of the job"
