"""The replicated log: one example per rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from aelastic.rdzv.log import cell as cells
from aelastic.rdzv.log import leader as leading
from aelastic.rdzv.log import node as following
from aelastic.rdzv.log.cell import Cell
from aelastic.rdzv.log.entries import (
    CHARGED_MAX,
    Accepted,
    Configuration,
    Entry,
    EntryId,
    Payload,
    first_entry,
    next_entry,
    order,
)
from aelastic.rdzv.log.leader import Leader
from aelastic.rdzv.log.node import Close, EndedLeader, Node, Plan, Status, status_of
from aelastic.rdzv.log.votes import Mandate, Votes, choose_voters, is_more_than_half, is_within, mandate

FIRST = first_entry(1, "abc", "abc", ("w",))
ABC = FIRST.configuration
ALONE = Configuration((), ("w0", "w1", "w2"))


def after(parent: Entry, term: int = 2, voters: str = "abc", payload: str = "", *, is_verdict: bool = False) -> Entry:
    return next_entry(
        parent, term, voters, voters, parent.incarnations, payload=Payload(payload), is_verdict=is_verdict
    )


def votes(
    answered: str = "", ended_followers: str = "", ended_leaders: str = "", replaced: str = "", endpoints: int = 0
) -> Votes:
    return Votes(
        frozenset(answered), frozenset(ended_followers), frozenset(ended_leaders), frozenset(replaced), endpoints
    )


def member(name: str, term: int = 1, committed: Entry = FIRST, accepted: Accepted | None = None) -> Node:
    return Node(name, term, committed=committed, accepted=accepted)


def status(
    term: int = 2, committed: Entry | None = FIRST, accepted: Accepted | None = None, **others: object
) -> Status:
    return status_of(Node("x", term, committed=committed, accepted=accepted).replace(**others))


def campaigning(*followers: str, term: int = 2, node: Node | None = None, has_listened: bool = False) -> Leader:
    """A candidate that has answers from these nodes."""
    leader = leading.campaign(node or member("a"), term, 1, has_listened=has_listened)
    for name in followers:
        leader = leading.on_connected(leader, name, status(term))
    return leader


def must(leader: Leader | None) -> Leader:
    assert leader is not None
    return leader


def proposing(*followers: str, voters: Iterable[str] = "abc") -> Leader:
    """A leader that has proposed the second entry and sent nothing yet."""
    return leading.propose(must(leading.establish(campaigning(*followers))), voters, voters)


def sent(leader: Leader, *names: str) -> Leader:
    for name in names:
        leader = leading.on_plan_sent(leader, name)
    return leader


def accepted_by(leader: Leader, *names: str) -> Leader:
    assert leader.proposal
    mine = Accepted(leader.proposal, leader.node.term)
    for name in names:
        leader = leading.on_status(leader, name, status(accepted=mine))
    return leader


def cell_of(log: Entry | None = FIRST, incarnation: str = "w", term: int = 1, **fields: object) -> Cell:
    cell = Cell(incarnation, log.log if log else None, term, "z", 0, log)
    return cell.replace(**fields)


def locked(leader: Leader, cell: Cell, endpoint: int = 0) -> Leader:
    return leading.on_locked(leader, endpoint, cell.replace(term=leader.node.term, leader=leader.node.name))


# Entries.


def test_entries_are_ordered_by_term_and_then_by_number() -> None:
    second = after(FIRST)
    third = after(second)
    assert order(None) < order(FIRST) < order(second) < order(third) < order(after(second, 3))


def test_two_entries_at_one_position_have_different_ids_and_name_the_same_parent() -> None:
    one, other = after(FIRST, payload="1"), after(FIRST, payload="2")
    assert one != other
    assert one.parent == other.parent == FIRST.id


def test_a_failure_is_charged_by_the_first_entry_that_names_it() -> None:
    one = next_entry(FIRST, 2, "abc", "abc", ("w",), failures=["b1"])
    assert next_entry(one, 2, "abc", "abc", ("w",), failures=["b1", "c1"]).charged == ("b1", "c1")


def test_an_entry_remembers_a_limited_number_of_failures() -> None:
    failures = [f"b{number}" for number in range(CHARGED_MAX + 1)]
    assert next_entry(FIRST, 2, "abc", "abc", ("w",), failures=failures).charged == tuple(failures[1:])


# Votes.


@pytest.mark.parametrize(
    "configuration, answered, endpoints, is_enough",
    [
        (ABC, "ab", 0, True),
        (ABC, "a", 1, False),
        (Configuration(("a", "b"), ("w",)), "a", 1, True),
        (Configuration(("a", "b"), ("w",)), "a", 0, False),
        (ALONE, "abc", 1, False),
        (ALONE, "", 2, True),
    ],
)
def test_more_than_half_of_all_votes_decide_where_a_node_has_two_and_an_endpoint_one(
    configuration: Configuration, answered: str, endpoints: int, is_enough: bool
) -> None:
    assert is_more_than_half(configuration, frozenset(answered), endpoints) is is_enough


@pytest.mark.parametrize(
    "cast, expected",
    [
        (votes("a", ended_followers="b"), Mandate.QUORUM),  # 5a
        (votes("", ended_followers="ab"), Mandate.NONE),  # nobody is alive
        (votes("b", ended_leaders="a", endpoints=1), Mandate.QUORUM),  # 5b
        (votes("b", ended_leaders="a"), Mandate.NONE),  # 5b needs the endpoint
        (votes("b", ended_followers="c", ended_leaders="a"), Mandate.QUORUM),  # 5c
        (votes("", ended_leaders="abc", endpoints=1), Mandate.QUORUM),  # 5c, by the endpoint
        (votes("", ended_leaders="abc"), Mandate.NONE),
        (votes("b", replaced="ac", endpoints=1), Mandate.RECOVERY),
        (votes("b", replaced="ac"), Mandate.NONE),  # the endpoint must remember
        (votes("", replaced="abc", endpoints=1), Mandate.RECOVERY),
    ],
)
def test_ended_and_replaced_nodes_count_by_rules_5a_5b_5c_and_recovery(cast: Votes, expected: Mandate) -> None:
    assert mandate(ABC, cast) is expected


def test_no_ended_node_counts_where_the_endpoints_decide_alone() -> None:
    assert mandate(ALONE, votes("a", "b", "c", "d", endpoints=1)) is Mandate.NONE


def test_phase_2_cannot_fall_back_on_a_recovery() -> None:
    assert is_within(Mandate.QUORUM, Mandate.RECOVERY)
    assert not is_within(Mandate.RECOVERY, Mandate.QUORUM)


def test_all_members_of_a_small_round_vote() -> None:
    assert choose_voters({f"n{number:03}": "host" for number in range(128)}) == tuple(
        f"n{number:03}" for number in range(128)
    )


def test_seven_on_seven_hosts_vote_in_a_large_round_and_voters_stay_voters() -> None:
    hosts = {f"n{number:03}": f"h{number // 8}" for number in range(256)}
    voters = choose_voters(hosts, before=["n255", "n100"])
    assert len({hosts[name] for name in voters}) == len(voters) == 7
    assert {"n255", "n100"} <= set(voters)


def test_seven_vote_in_a_large_round_on_few_hosts() -> None:
    assert len(choose_voters({f"n{number:03}": f"h{number % 2}" for number in range(200)})) == 7


# Following.


def test_a_node_follows_one_leader_in_a_term() -> None:
    node = following.follow(member("b"), "a", 2)
    assert following.may_follow(node, "a", 2)
    assert not following.may_follow(node, "c", 2)
    assert following.may_follow(node, "c", 3)


def test_a_candidate_votes_for_itself() -> None:
    assert not following.may_follow(campaigning(term=2).node, "c", 2)


def test_a_node_hangs_up_and_says_goodbye_before_it_follows_another() -> None:
    assert following.farewells("a", ("b", "c")) == {"a": Close.HUNG_UP, "b": Close.GOODBYE, "c": Close.GOODBYE}
    assert following.farewells("", ()) == {}


def test_a_voter_accepts_what_follows_the_committed_entry_and_its_status_reports_it() -> None:
    second = after(FIRST)
    node = following.on_plan(following.follow(member("b"), "a", 2), Plan(2, True, FIRST.id, second, None))
    assert status_of(node).accepted == Accepted(second, 2)


def test_a_plan_may_be_repeated() -> None:
    plan = Plan(2, True, FIRST.id, after(FIRST), None)
    once = following.on_plan(following.follow(member("b"), "a", 2), plan)
    assert following.on_plan(once, plan) == once


def test_a_plan_of_a_lower_term_changes_nothing() -> None:
    node = following.follow(member("b"), "a", 3)
    assert following.on_plan(node, Plan(2, True, FIRST.id, after(FIRST), None)) == node


def test_what_was_accepted_for_an_earlier_position_is_dropped() -> None:
    second = after(FIRST)
    node = following.follow(member("b", accepted=Accepted(second, 1)), "a", 2)
    later = following.on_plan(node, Plan(2, True, after(second), None, None))
    assert later.accepted is None
    assert order(later.committed) == (2, 3)


def test_a_voter_finds_an_entry_by_its_id_if_it_has_accepted_it() -> None:
    second = after(FIRST)
    node = following.follow(member("b", accepted=Accepted(second, 2)), "a", 2)
    assert following.on_plan(node, Plan(2, True, second.id, None, None)).committed is second


def test_a_voter_does_not_accept_an_entry_that_it_never_saw_whole() -> None:
    node = following.on_plan(following.follow(member("b"), "a", 2), Plan(2, True, FIRST.id, after(FIRST).id, None))
    assert node.accepted is None


def test_a_node_that_has_no_vote_keeps_the_id() -> None:
    second = after(FIRST, voters="ab")
    assert following.on_plan(Node("s", 2), Plan(2, True, second.id, None, None)).committed == second.id


def test_a_node_reports_what_a_plan_changed_if_it_has_a_vote_or_an_entry_that_may_give_it_one() -> None:
    second = after(FIRST, voters="ab")
    voter, spare = following.follow(member("b"), "a", 2), following.follow(Node("s", 1, committed=FIRST.id), "a", 2)
    news = Plan(2, True, FIRST.id, second, None)
    assert following.must_report(voter, following.on_plan(voter, news))
    once = following.on_plan(voter, news)
    assert not following.must_report(once, following.on_plan(once, news)), "nothing has changed"
    assert not following.must_report(spare, following.on_plan(spare, Plan(2, True, second.id, None, None)))
    invited = following.on_plan(spare, Plan(2, True, FIRST.id, after(FIRST, voters="abs"), None))
    assert invited.accepted is not None and following.must_report(spare, invited)
    assert following.must_report(invited, following.on_plan(invited, Plan(3, True, second.id, None, None)))


@pytest.mark.parametrize("close, is_end", [(each, each is Close.ORDERLY) for each in Close])
def test_only_an_orderly_close_without_a_word_proves_that_a_leader_ended(close: Close, is_end: bool) -> None:
    mine = Accepted(after(FIRST), 2)
    node = following.on_plan(following.follow(member("b"), "a", 2), Plan(2, True, FIRST.id, None, mine))
    node = following.on_leader_closed(node, close)
    assert node.ended == ((EndedLeader("a", mine),) if is_end else ())
    assert not node.leader


def test_an_end_before_any_plan_says_nothing_about_what_the_leader_had_accepted() -> None:
    assert following.on_leader_closed(following.follow(member("b"), "a", 2), Close.ORDERLY).ended == ()


def test_a_first_plan_that_says_nothing_new_is_one_that_was_read() -> None:
    node = following.on_plan(following.follow(member("b"), "a", 2), Plan(2, True, FIRST, None, None))
    assert following.on_leader_closed(node, Close.ORDERLY).ended == (EndedLeader("a", None),)


def test_ended_leaders_are_kept_while_they_are_voters() -> None:
    node = member("b").replace(ended=(EndedLeader("a", None),), leader="c", term=2)
    assert following.on_plan(node, Plan(2, True, after(FIRST, voters="abc"), None, None)).ended
    assert not following.on_plan(node, Plan(2, True, after(FIRST, voters="bc"), None, None)).ended


def test_a_node_does_not_go_over_to_another_log_under_its_name() -> None:
    other = first_entry(1000, "st", "st", ("x",))
    node = following.follow(member("b"), "s", 1000)
    plan = Plan(1000, True, other.id, None, None)
    assert following.must_join_anew(node, plan)
    assert following.on_plan(node, plan) == node
    assert not following.must_join_anew(node, plan.replace(is_leading=False))


# Phase 1.


def test_a_candidate_leads_with_a_quorum_of_the_newest_configuration() -> None:
    assert leading.establish(campaigning()) is None
    assert must(leading.establish(campaigning("b"))).mandate is Mandate.QUORUM


def test_a_status_of_another_term_is_not_a_vote() -> None:
    leader = leading.on_connected(campaigning(), "b", status(term=1))
    assert leading.establish(leader) is None


def test_a_status_of_another_log_is_not_a_vote() -> None:
    other = first_entry(0, "bz", "bz", ("y",))
    leader = leading.on_connected(campaigning(), "b", status(committed=other))
    assert leading.establish(leader) is None


def test_a_leader_proposes_the_accepted_entry_of_the_highest_term_again() -> None:
    older, newer = after(FIRST, 2, payload="older"), after(FIRST, 3, payload="newer")
    leader = campaigning(term=4, node=member("a", accepted=Accepted(older, 2)))
    leader = leading.on_connected(leader, "b", status(4, accepted=Accepted(newer, 3)))
    assert must(leading.establish(leader)).proposal == newer


def test_the_last_status_of_a_follower_that_ended_counts() -> None:
    second = after(FIRST)
    leader = leading.on_connected(campaigning(term=3), "b", status(3, accepted=Accepted(second, 2)))
    leader = must(leading.establish(leading.on_follower_closed(leader, "b", Close.ORDERLY)))
    assert (leader.mandate, leader.proposal) == (Mandate.QUORUM, second)  # 5a


@pytest.mark.parametrize("close", [Close.HUNG_UP, Close.ABORTED])
def test_a_follower_that_did_not_end_is_a_vote_that_was_given(close: Close) -> None:
    leader = leading.on_follower_closed(campaigning("b"), "b", close)
    assert not leader.node.ended_followers
    assert leading.establish(leader)


def test_what_an_ended_leader_had_accepted_is_adopted() -> None:
    mine = Accepted(after(FIRST), 2)
    leader = campaigning("c", term=3, node=member("b").replace(ended=(EndedLeader("a", mine),)))
    assert must(leading.establish(leader)).proposal == mine.entry


def test_a_leader_that_reads_of_a_newer_entry_starts_phase_1_again_from_there() -> None:
    third = after(after(FIRST))
    leader = leading.on_status(proposing("b", "c"), "c", status(committed=third))
    assert (leader.node.committed, leader.mandate, leader.proposal) == (third, Mandate.NONE, None)


def test_a_leader_that_knows_the_newest_entry_by_its_id_alone_waits_for_one_that_has_it() -> None:
    second = after(FIRST, voters="ab")
    leader = leading.on_connected(campaigning("b", term=3), "s", status(3).replace(committed=second.id))
    assert leading.establish(leader) is None
    leader = leading.on_status(leader, "b", status(3, accepted=Accepted(second, 2)))
    assert must(leading.establish(leader)).node.committed == second


def test_nothing_follows_the_verdict() -> None:
    verdict = after(FIRST, is_verdict=True)
    assert leading.establish(leading.on_connected(campaigning("b"), "c", status(committed=verdict))) is None


def test_an_endpoint_that_lost_its_memory_has_no_vote_until_an_entry_names_it() -> None:
    two = first_entry(1, "ab", "ab", ("w",))
    leader = campaigning(node=member("a", committed=two))
    assert leading.establish(locked(leader, cell_of(two)))
    assert leading.establish(locked(leader, cell_of(two, "x"))) is None
    leader = leading.on_connected(locked(leader, cell_of(two, "x")), "b", status(committed=two))
    assert leading.propose(must(leading.establish(leader)), "ab", "ab").proposal.incarnations == ("x",)  # type: ignore[union-attr]


def test_a_leader_in_a_higher_term_keeps_its_followers_and_needs_their_votes_again() -> None:
    leader = leading.campaign_again(proposing("b", "c"), 5)
    assert set(leader.followers) == {"b", "c"}
    assert leading.establish(leader) is None
    assert leading.establish(leading.on_status(leader, "b", status(5)))


# Phase 2.


def test_an_entry_is_committed_with_a_quorum_in_one_round_trip() -> None:
    leader = proposing("b", "c")
    assert leading.commit(sent(leader, "b", "c")) is None
    committed = must(leading.commit(accepted_by(sent(leader, "b", "c"), "b")))
    assert committed.node.committed == leader.proposal
    assert leading.establish(committed)


def test_the_leaders_own_vote_waits_until_each_welcomed_follower_has_its_plan() -> None:
    leader = must(leading.establish(sent(campaigning("b", "c"), "b", "c")))
    leader = leading.propose(leader, "abc", "abc")
    leader = accepted_by(sent(leader, "b"), "b")
    assert leading.commit(leader) is None
    assert leading.commit(sent(leader, "c"))
    assert leading.commit(leading.on_follower_closed(leader, "c", Close.ABORTED))


def test_a_welcome_outlasts_the_term() -> None:
    leader = leading.campaign_again(sent(campaigning("b", "c"), "b", "c"), 3)
    leader = must(leading.establish(leading.on_status(leader, "b", status(3))))
    assert not leading.counts_itself(leading.on_plan_sent(leading.propose(leader, "abc", "abc"), "b"))


def test_a_voter_that_accepted_and_ended_counts() -> None:
    leader = accepted_by(sent(proposing("b", "c"), "b", "c"), "b")
    assert leading.commit(leading.on_follower_closed(leader, "b", Close.ORDERLY))


def test_each_plan_shows_what_the_leader_itself_accepted_to_those_that_vote() -> None:
    leader = leading.on_connected(proposing("b"), "s", status(committed=None))
    for_voter, for_spare = leading.plan_for(leader, "b"), leading.plan_for(leader, "s")
    assert for_voter is not None and for_spare is not None
    assert for_voter.accepted == leader.node.accepted
    assert (for_spare.accepted, for_spare.proposal) == (None, leader.proposal.id)  # type: ignore[union-attr]


def test_an_entry_goes_whole_to_a_voter_that_does_not_show_it_in_its_status() -> None:
    leader = sent(proposing("b"), "b")
    assert leading.plan_for(leader, "b") == Plan(2, True, FIRST.id, leader.proposal, leader.node.accepted)
    plan = leading.plan_for(accepted_by(leader, "b"), "b")
    assert plan is not None and plan.proposal == leader.proposal.id  # type: ignore[union-attr]


# New voters.


def test_a_new_voter_is_at_the_endpoint_before_any_node_learns_of_it() -> None:
    leader = locked(campaigning("b", "c"), cell_of())
    leader = leading.on_connected(leader, "s", status(committed=None))
    leader = leading.propose(must(leading.establish(leader)), "abcs", "abcs")
    assert leading.plan_for(leader, "b") is None
    leader = leading.on_cell_written(leader, 0, leading.cell_for(leader, cell_of(term=2, leader="a")))
    assert leading.plan_for(leader, "b")


def test_a_proposal_is_not_in_a_cell_that_was_written_before_it() -> None:
    leader = locked(campaigning("b", "c"), cell_of())
    leader = leading.on_connected(leader, "s", status(committed=None))
    leader = must(leading.establish(leader))
    older = leading.cell_for(leader, cell_of(term=2, leader="a"))
    leader = leading.on_cell_written(leading.propose(leader, "abcs", "abcs"), 0, older)
    assert leading.plan_for(leader, "b") is None, "withheld until the endpoint has it"


def test_a_newcomer_joins_without_a_vote_while_the_endpoint_is_silent() -> None:
    leader = must(leading.establish(campaigning("b", "c")))
    assert leading.plan_for(leading.propose(leader, "abcs", "abc"), "b")
    assert leading.plan_for(leading.propose(leader, "abcs", "abcs"), "b") is None


# The endpoint's cell.


@pytest.mark.parametrize(
    "term, is_leader_gone, has_quorum_without, expected",
    [(1, True, True, False), (2, False, False, False), (2, True, False, True), (2, False, True, True)],
)
def test_the_endpoint_votes_for_a_higher_term_and_not_against_a_leader_that_works(
    term: int, is_leader_gone: bool, has_quorum_without: bool, expected: bool
) -> None:
    facts = {"is_leader_gone": is_leader_gone, "has_quorum_without": has_quorum_without}
    assert cells.may_lock(cell_of(term=1), "a", term, **facts) is expected
    assert cells.may_lock(None, "a", term, is_leader_gone=False)
    assert cells.may_lock(cell_of(term=1, leader="a"), "a", 1, is_leader_gone=False)


def test_a_vote_keeps_what_the_endpoint_remembers_and_an_empty_one_begins_an_incarnation() -> None:
    second = Accepted(after(FIRST), 1)
    assert cells.lock(cell_of(accepted=second), "a", 2, None, "x") == cell_of(accepted=second, term=2, leader="a")
    assert cells.lock(None, "a", 2, FIRST.log, "x") == Cell("x", FIRST.log, 2, "a")


def test_a_renewal_keeps_an_entry_that_may_have_been_committed() -> None:
    second = Accepted(after(FIRST), 1)
    cell = cell_of(accepted=second, term=2, leader="a")
    assert leading.cell_for(locked(campaigning(), cell), cell).accepted == second
    later = campaigning(node=member("a", committed=second.entry))
    assert leading.cell_for(locked(later, cell), cell).accepted is None


def test_a_leader_writes_nothing_while_it_knows_the_committed_entry_by_its_id_alone() -> None:
    leader = locked(campaigning(node=member("a").replace(committed=after(FIRST).id)), cell_of())
    assert not leading.may_write(leader, 0)


# Recovery and founding.


def recovering(has_listened: bool, cell: Cell | None = None, committed: EntryId | None = None) -> Leader:
    """A new agent in b's slot, which also knows that a and c have ended."""
    node = Node("n", replaces=("a", "b", "c"), committed=committed)
    return locked(leading.campaign(node, 1000, 1, has_listened=has_listened), cell or cell_of())


def test_an_endpoint_that_remembers_decides_with_those_that_live_if_all_others_were_replaced() -> None:
    leader = recovering(True)
    assert must(leading.establish(leader)).mandate is Mandate.RECOVERY
    assert leading.establish(recovering(False)) is None


def test_a_recovery_continues_from_the_endpoints_entry_where_nobody_has_the_newest_one() -> None:
    lost = after(FIRST, voters="ab").id
    leader = recovering(True, committed=lost)
    followed = must(leading.establish(leader))
    assert followed.mandate is Mandate.RECOVERY and followed.node.committed == FIRST
    assert leading.takes_over(followed, lost) is False, "the lost entry is abandoned"
    assert leading.establish(recovering(False, committed=lost)) is None


@pytest.mark.parametrize("term, is_adopted", [(2, False), (4, True)])
def test_a_recovery_without_a_lost_entry_adopts_only_what_is_newer(*, term: int, is_adopted: bool) -> None:
    accepted = Accepted(after(FIRST, term), term)
    leader = must(leading.establish(recovering(True, cell_of(accepted=accepted), after(FIRST, 3, "ab").id)))
    assert leader.proposal == (accepted.entry if is_adopted else None)


def test_a_leader_that_has_put_nothing_instead_of_a_lost_entry_still_knows_of_it() -> None:
    lost = after(FIRST, voters="ab").id
    leader = must(leading.establish(recovering(True, committed=lost)))
    assert leading.step_down(leader).committed == lost
    assert leading.campaign_again(leader, 2000, has_listened=True).node.committed == lost
    leader = leading.propose(leader, "n", "n")
    cell = leading.cell_for(leader, cell_of(term=1000, leader="n"))
    assert leading.step_down(leading.on_cell_written(leader, 0, cell)).committed == FIRST


def test_no_entry_is_lost_while_a_voter_that_may_have_it_lives() -> None:
    first = first_entry(1, "ab", "ab", ("w",))
    node = Node("b", 1, committed=after(first, voters="a").id)
    leader = locked(campaigning(node=node, has_listened=True), cell_of(first))
    assert leading.phase_1_mandate(leader, leading.phase_1_votes(leader)) is Mandate.QUORUM, "of the entry before"
    assert leading.establish(leader) is None


def test_a_node_without_a_vote_that_reads_its_leaders_end_is_a_witness_for_a_recovery() -> None:
    node = following.follow(Node("s", committed=FIRST.id), "a", 2)
    assert following.on_leader_closed(node, Close.ORDERLY).replaces == ("a",)
    for close in (Close.ABORTED, Close.GOODBYE):
        assert following.on_leader_closed(node, close).replaces == (), "it may be alive"
    voter = following.on_plan(following.follow(member("b"), "a", 2), Plan(2, True, FIRST.id, None, None))
    ended = following.on_leader_closed(voter, Close.ORDERLY)
    assert (ended.replaces, [each.name for each in ended.ended]) == ((), ["a"]), "it speaks for the leader"


def test_a_node_follows_a_leader_that_continues_without_an_entry_that_neither_has() -> None:
    node = following.follow(Node("c", 5, committed=after(FIRST, voters="ab").id), "n", 6)
    proposal = after(FIRST, 6)
    plan = Plan(6, is_leading=True, committed=FIRST.id, proposal=proposal, accepted=None)
    assert following.on_plan(node, plan).accepted == Accepted(proposal, 6)
    assert following.on_plan(node, plan.replace(is_leading=False)).committed == node.committed, (
        "it may still learn of it"
    )
    knowing = node.replace(committed=after(FIRST, voters="ab"))
    assert following.on_plan(knowing, plan).committed == knowing.committed, "the leader will adopt it"


def test_a_recovery_needs_the_endpoints_vote_for_its_proposal() -> None:
    leader = leading.propose(must(leading.establish(recovering(True))), "n", "n")
    assert leading.commit(leader) is None
    cell = leading.cell_for(leader, cell_of(term=1000, leader="n"))
    assert must(leading.commit(leading.on_cell_written(leader, 0, cell))).node.committed == leader.proposal


def test_a_term_from_the_clock_is_above_all_others() -> None:
    assert leading.term_from_clock(2_000, 7) == 2_000
    assert leading.term_from_clock(7, 2_000) == 3_000, "a wrong clock, and terms that only ended nodes knew"
    assert leading.term_from_clock(7, 2_000, 5) == 3_005, "and candidates that found logs at the same time"
    assert leading.next_term(7) == 8


def empty(word: str = "x") -> Cell:
    return Cell(word, None, 1000, "s")


def founding(**fields: object) -> Leader:
    return locked(leading.campaign(Node("s").replace(**fields), 1000, 1, has_listened=True), empty())


def test_an_empty_endpoint_is_the_beginning_of_a_log() -> None:
    leader = must(leading.establish(founding()))
    assert leader.mandate is Mandate.FOUNDING
    leader = leading.propose(leader, "st", "st")
    leader = must(leading.commit(leading.on_cell_written(leader, 0, leading.cell_for(leader, empty()))))
    assert order(leader.node.committed) == (1000, 1)


def test_a_founder_listens_for_a_lease() -> None:
    assert leading.establish(founding().replace(has_listened=False)) is None


def test_a_second_founder_adopts_the_entry_of_the_first() -> None:
    one = first_entry(900, "t", "t", ("x",))
    cell = empty().replace(log=one.log, accepted=Accepted(one, 900))
    leader = locked(leading.campaign(Node("s"), 1000, 1, has_listened=True), cell)
    assert must(leading.establish(leader)).proposal == one


@pytest.mark.parametrize(
    "known, expected",
    [
        ({}, None),
        ({"replaces": ("b",)}, None),
        ({"replaces": ("b", "c")}, Mandate.FOUNDING),
    ],
)
def test_nothing_begins_while_a_node_of_the_known_log_may_live(
    known: dict[str, object], expected: Mandate | None
) -> None:
    leader = leading.on_connected(founding(**known), "a", status(1000))
    found = leading.establish(leader)
    assert (found and found.mandate) == expected


def test_a_voter_that_led_tells_a_founder_which_of_its_followers_have_ended() -> None:
    led = leading.on_connected(campaigning(term=900), "b", status(900))
    voter = leading.step_down(leading.on_follower_closed(led, "b", Close.ORDERLY))
    voter = following.follow(voter, "s", 1000)
    leader = leading.on_connected(founding(replaces=("c",)), "a", status_of(voter))
    assert must(leading.establish(leader)).mandate is Mandate.FOUNDING


@pytest.mark.parametrize("has_entry", [False, True])
def test_a_log_of_which_only_the_id_is_known_is_forgotten_if_its_leader_wrote_no_entry_into_the_cell(
    *, has_entry: bool
) -> None:
    """Nobody who answers ever had a vote, and the endpoint was wiped; its last leader began an incarnation, and ended."""
    begun = cell_of(FIRST if has_entry else None, "x").replace(log=FIRST.log)
    leader = leading.campaign(Node("s", committed=after(FIRST).id), 1000, 1, has_listened=True)
    found = leading.establish(locked(leader, begun))
    assert (found is not None and found.given_up == after(FIRST).id) is not has_entry


def test_an_older_log_whose_quorum_answers_continues() -> None:
    leader = leading.on_connected(founding(), "a", status(1000))
    leader = must(leading.establish(leading.on_connected(leader, "b", status(1000))))
    assert (leader.mandate, leader.node.committed) == (Mandate.QUORUM, FIRST)


def test_a_voter_of_the_older_log_does_not_found_another() -> None:
    node = member("a").replace(replaces=("b", "c"))
    leader = locked(leading.campaign(node, 1000, 1, has_listened=True), empty())
    assert leading.establish(leader) is None


OTHER = first_entry(1000, "st", "st", ("x",))


@pytest.mark.parametrize(
    "leader, has_other_quorum, expected",
    [
        (must(leading.establish(campaigning("b"))), False, False),
        (must(leading.establish(campaigning("b"))), True, True),  # both have one: the higher (term, number) wins
        (campaigning(), True, True),
        (campaigning(), False, True),
        (campaigning(node=member("a", committed=first_entry(2000, "a", "ab", ("y",))), term=2001), False, False),
    ],
)
def test_where_two_logs_meet_the_one_with_a_quorum_continues_else_the_higher(
    leader: Leader, has_other_quorum: bool, expected: bool
) -> None:
    assert leading.must_give_up_log(leader, OTHER, has_other_quorum=has_other_quorum) is expected


def test_a_leader_does_not_give_up_its_log_for_itself() -> None:
    assert not leading.must_give_up_log(campaigning(), after(FIRST), has_other_quorum=True)


def test_a_log_that_continues_begins_a_new_incarnation_where_another_log_is_remembered() -> None:
    leader = locked(must(leading.establish(campaigning("b"))), cell_of(OTHER, "x"))
    assert not leading.may_write(leader, 0)
    assert leader.views[0] is not None and leading.must_begin_again(leader, leader.views[0])
    assert leading.propose(leader, "abc", "abc").proposal.incarnations == ("w",)  # type: ignore[union-attr]
    leader = locked(leader, cells.begin_again(cell_of(OTHER, "x"), FIRST.log, "y"))
    assert leading.propose(leader, "abc", "abc").proposal.incarnations == ("y",)  # type: ignore[union-attr]


def test_a_candidate_without_a_quorum_leaves_the_memory_of_an_endpoint_alone() -> None:
    leader = locked(campaigning(), cell_of(OTHER, "x"))
    assert leader.views[0] is not None and not leading.must_begin_again(leader, leader.views[0])
    assert not leading.may_write(leader, 0)


# States are immutable values.


@pytest.mark.parametrize("make", [campaigning, proposing, founding])
def test_equal_states_have_equal_hashes(make: Callable[[], Leader]) -> None:
    if make is proposing:
        assert hash(proposing("b")) == hash(proposing("b"))
    else:
        assert hash(make()) == hash(make())
