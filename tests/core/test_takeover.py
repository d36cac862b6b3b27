"""A new coordinator finds the round of the one before it; nodes that have been away come back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.effort import examples

from aelastic.errors import ProcessFailure
from aelastic.rdzv.coordinator.coordinator import Coordinator, Phase
from aelastic.rdzv.coordinator.coordinator_events import DeadlinePassed, Event, Lost, Registered
from aelastic.rdzv.coordinator.forming import SPARES_TIMEOUT_S, RoundRules
from aelastic.rdzv.coordinator.restart_policy import RestartPolicy
from aelastic.rdzv.coordinator.waiting_text import waiting_texts
from aelastic.rdzv.protocol.messages import (
    Assigned,
    Ended,
    Failed,
    Interrupted,
    Left,
    Node,
    Outcome,
    Past,
    Ready,
    Standing,
    Succeeded,
    Waiting,
)
from aelastic.rdzv.protocol.ranks import NodeRanks
from aelastic.rdzv.settings import JOIN_TIMEOUT_S, LEASE_S, SETTLE_TIME_S

BUSY, READY, STOPPING = Standing.BUSY, Standing.READY, Standing.STOPPING
FAILED, FINISHED = Standing.FAILED, Standing.FINISHED
SUCCEEDED = Ended(Outcome.SUCCEEDED, "every worker succeeded")
ROUND = 7
NAMES = "abcdef"


def node(name: str, rank: int | None = None) -> Node:
    return Node(name, f"host-{name}", "default", 1, f"addr-{name}", 29500, rank)


def failure(name: str) -> ProcessFailure:
    return ProcessFailure.from_elsewhere(f"host-{name}", 0, 0, 77, 1, "ValueError", "", 1000)


def past(
    name: str, standing: Standing = BUSY, *, round_: int = ROUND, size: int = 3, count: int = 0, boss: int = -1,
    rank: int | None = None, has_spares: bool = False,
) -> Past:  # fmt: skip
    """Where a node stands that had, in that round, the rank of its letter."""
    own_rank = NAMES.index(name) if rank is None else rank
    cause = failure(name) if standing is FAILED else None
    return Past(standing, round_, count, own_rank, size, boss, cause, has_spares=has_spares)


class Job:
    """A coordinator that is new, the clock it is told, and what the last event made the nodes hear."""

    def __init__(
        self, nodes: tuple[int, int] = (2, 3), *, max_restarts: int = 3, is_heir: bool = False, own: str = ""
    ) -> None:
        self.core = Coordinator(RoundRules(*nodes), RestartPolicy(max_restarts), is_heir=is_heir, own_node_id=own)
        self.now = 100.0

    def tell(self, *events: Event) -> dict[str, Any]:
        heard: dict[str, Any] = {}
        for event in events:
            sends = self.core.handle(event, self.now)
            heard = {send.node_id: send.message for send in sends}
            assert len(heard) == len(sends), "one message for one node at a time"
        return heard

    def come(self, names: str, standing: Standing = BUSY, **others: Any) -> dict[str, Any]:
        """Nodes register, from the round before; with what rank and failure they had."""
        heard: dict[str, Any] = {}
        for name in names:
            heard = self.tell(Registered(node(name), past(name, standing, **others)))
        return heard

    def join(self, name: str, rank: int | None = None) -> dict[str, Any]:
        """A node registers that has never been in a round."""
        return self.tell(Registered(node(name, rank), Past(READY)))

    def ready(self, names: str) -> dict[str, Any]:
        return self.tell(*(Ready(node(name)) for name in names))

    def pass_deadline(self) -> dict[str, Any]:
        assert self.core.deadline is not None
        self.now = self.core.deadline
        return self.tell(DeadlinePassed())

    def is_in(self, phase: Phase) -> bool:
        return self.core.phase is phase

    @property
    def left_s(self) -> float | None:
        return None if self.core.deadline is None else self.core.deadline - self.now


def recovered(names: str = "abc", **others: Any) -> Job:
    """A round goes on under a new coordinator."""
    job = Job(**others)
    assert job.come(names, size=len(names)) == {}
    assert (job.core.phase, job.core.round) == (Phase.RUNNING, ROUND)
    return job


def interrupted(names: str, reason: str, count: int = 0, round_: int = ROUND) -> dict[str, Any]:
    return dict.fromkeys(names, Interrupted(round_, reason, count))


def went_on(names: str, round_: int = ROUND) -> dict[str, Any]:
    return interrupted(names, f"round {round_} went on without this node; rejoining", round_=round_)


def order(heard: dict[str, Any]) -> str:
    """The nodes of a round, by group rank."""
    assert all(isinstance(message, Assigned) for message in heard.values())
    return "".join(sorted(heard, key=lambda name: heard[name].ranks.group_rank))


# A round that has lost nobody.


def test_a_round_that_lost_nobody_goes_on_untouched() -> None:
    job = Job()
    assert job.come("ba") == {}
    assert (job.core.phase, job.left_s) == (Phase.TAKING_OVER, LEASE_S)
    assert job.come("c") == {}
    assert (job.core.phase, job.core.round, job.core.restart_count, job.core.deadline) == (
        Phase.RUNNING,
        ROUND,
        0,
        None,
    )


def test_a_round_of_one_goes_on_at_once() -> None:
    assert recovered("a", nodes=(1, 1)).core.deadline is None


def test_a_recovered_round_is_a_round_like_any_other() -> None:
    job = recovered()
    reason = "rank 0 failed on host-b; restart 1 of 3"
    assert job.tell(Failed("b", ROUND, failure("b"))) == interrupted("abc", reason, 1)
    heard = job.ready("abc")
    assert order(heard) == "abc"
    assert {(m.round, m.restart_count) for m in heard.values()} == {(ROUND + 1, 1)}


def test_survivors_of_a_recovered_round_keep_their_ranks() -> None:
    job = recovered()
    job.tell(Lost("b", "silent"))
    job.ready("c")
    assert order(job.ready("a")) == "ac"


def test_the_restart_count_is_the_highest_that_anybody_has_heard_of() -> None:
    job = Job()
    job.come("a", count=1)
    job.come("b", count=2)
    job.come("c", count=2)
    assert job.core.restart_count == 2
    assert job.tell(Failed("a", ROUND, failure("a")))["b"].reason == "rank 0 failed on host-a; restart 3 of 3"


def test_a_message_of_the_recovered_round_that_overtakes_the_others_counts() -> None:
    job = Job()
    job.come("a")
    assert job.tell(Failed("a", ROUND, failure("a"))) == {}
    job.come("b")
    assert job.come("c") == interrupted("abc", "rank 0 failed on host-a; restart 1 of 3", 1)


def test_who_says_during_the_recovery_that_it_is_ready_ends_the_round() -> None:
    job = Job()
    job.come("ab")
    assert job.ready("a") == {}
    assert job.come("c") == interrupted("bc", f"round {ROUND} had ended when the coordinator was lost")
    job.ready("c")
    assert order(job.ready("b")) == "abc"


def test_who_reconnects_during_the_recovery_counts_once() -> None:
    job = Job()
    assert job.come("aab") == {}
    assert job.is_in(Phase.TAKING_OVER)
    job.come("c")
    assert job.is_in(Phase.RUNNING)


# A round that has lost somebody.


def test_who_does_not_come_within_the_timeout_is_given_up() -> None:
    job = Job()
    job.come("a")
    job.now += 1.0
    job.come("c")
    assert job.left_s == LEASE_S - 1.0
    assert job.pass_deadline() == interrupted("ac", "group rank 1 did not reconnect to the new coordinator")
    job.ready("c")
    assert order(job.ready("a")) == "ac"
    assert job.core.round == ROUND + 1


def test_the_coordinators_own_seat_is_not_waited_for_if_it_is_known_to_be_gone() -> None:
    job = Job(is_heir=True)
    job.come("b", boss=0)
    assert job.come("c", boss=0) == interrupted("bc", "the previous coordinator's node is gone (group rank 0)")


def test_the_coordinators_own_seat_is_waited_for_if_it_may_live() -> None:
    job = Job(is_heir=False)
    job.come("bc", boss=0)
    assert job.is_in(Phase.TAKING_OVER)
    assert job.come("a", boss=0) == {}
    assert job.is_in(Phase.RUNNING)


def test_a_coordinator_without_a_seat_is_not_missed() -> None:
    job = Job(is_heir=True)
    job.come("ab", boss=-1)
    assert job.is_in(Phase.TAKING_OVER)
    job.come("c", boss=-1)
    assert job.is_in(Phase.RUNNING)


def test_one_that_was_taken_for_gone_and_comes_first_has_its_seat() -> None:
    job = Job(is_heir=True)
    job.come("abc", boss=0)
    assert job.is_in(Phase.RUNNING)


def test_the_deadline_names_all_who_are_missing() -> None:
    job = Job((1, 4), is_heir=True)
    job.come("b", boss=0, size=4)
    assert job.pass_deadline() == interrupted("b", "group rank 0, 2, 3 did not reconnect to the new coordinator")


@pytest.mark.parametrize("gone", [Lost("b", "silent"), Left("b", "SIGTERM")])
def test_who_comes_and_goes_is_given_up(gone: Event) -> None:
    job = Job()
    job.come("ab")
    assert job.tell(gone) == {}
    assert job.is_in(Phase.TAKING_OVER)
    assert job.come("c") == interrupted("ac", "group rank 1 did not reconnect to the new coordinator")


def test_who_comes_goes_and_comes_back_has_its_seat_again() -> None:
    job = Job()
    job.come("ab")
    job.tell(Lost("b", "silent"))
    job.come("b")
    assert job.come("c") == {}
    assert job.is_in(Phase.RUNNING)


def test_who_comes_after_it_was_given_up_is_a_stray() -> None:
    job = Job()
    job.come("ac")
    job.pass_deadline()
    assert job.come("b") == went_on("b")
    job.ready("a")
    assert order(job.ready("c")) == "ac", "nobody waits for it"
    assert job.ready("b") == {}
    assert job.left_s == SETTLE_TIME_S
    assert job.pass_deadline() == interrupted("ac", "re-rendezvous: node host-b joined", round_=ROUND + 1)


def test_two_that_claim_one_seat_are_not_both_believed() -> None:
    job = Job()
    job.come("a")
    assert job.come("b", rank=0) == interrupted(
        "b", f"another node has the place of this one in round {ROUND}; rejoining"
    )
    assert job.come("d", rank=3) == interrupted(
        "d", f"another node has the place of this one in round {ROUND}; rejoining"
    )
    assert job.is_in(Phase.TAKING_OVER)
    job.come("c")
    assert job.pass_deadline() == interrupted("ac", "group rank 1 did not reconnect to the new coordinator")


# A round that was over.


@pytest.mark.parametrize("standing", [READY, STOPPING])
def test_a_round_that_was_over_for_one_is_over_for_all(standing: Standing) -> None:
    job = Job()
    job.come("a", standing, count=1)
    job.come("b")
    heard = job.come("c")
    told = {"a", "b", "c"} if standing is STOPPING else {"b", "c"}
    assert heard == interrupted("".join(sorted(told)), f"round {ROUND} had ended when the coordinator was lost", 1)
    job.ready("b")
    job.ready("c")
    assert (order(job.ready("a")) if standing is STOPPING else job.core.phase) in {"abc", Phase.RUNNING}
    assert (job.core.round, job.core.restart_count) == (ROUND + 1, 1)


def test_a_round_that_was_over_for_all_begins_anew_at_once() -> None:
    job = Job()
    job.come("ab", READY)
    assert order(job.come("c", READY)) == "abc"
    assert job.core.round == ROUND + 1


def test_nodes_that_are_ready_but_for_one_that_is_gone_do_not_wait_for_ever() -> None:
    job = Job()
    job.come("ab", READY)
    assert order(job.pass_deadline()) == "ab"


def test_a_failure_that_nobody_has_heard_of_is_paid_once() -> None:
    job = Job()
    job.come("a", FAILED, count=1)
    job.come("b", FAILED, count=1)
    reason = "rank 0 failed on host-a; restart 2 of 3"
    assert job.come("c", count=1) == interrupted("abc", reason, 2)
    assert job.tell(Failed("b", ROUND, failure("b")), Failed("c", ROUND, failure("c"))) == {}
    assert job.core.restart_count == 2


def test_a_failure_that_was_paid_for_is_not_paid_again() -> None:
    job = Job()
    job.come("a", FAILED, count=1)
    job.come("b", STOPPING, count=2)
    reason = f"round {ROUND} had ended when the coordinator was lost"
    assert job.come("c", count=1) == interrupted("abc", reason, 2)


def test_a_failure_without_a_restart_left_ends_the_job_under_the_new_coordinator_too() -> None:
    job = Job(max_restarts=1)
    job.come("ab", count=1)
    heard = job.come("c", FAILED, count=1)
    verdict = Ended(Outcome.FAILED, "rank 0 failed on host-c; all 1 restarts are used up", failure("c"))
    assert heard == dict.fromkeys("abc", verdict)


def test_a_failure_whose_partners_are_gone_is_paid_when_the_time_is_over() -> None:
    job = Job()
    job.come("a", FAILED)
    assert job.pass_deadline() == interrupted("a", "rank 0 failed on host-a; restart 1 of 3", 1)


# Work that was done.


def test_who_had_finished_waits_for_the_others() -> None:
    job = Job()
    job.come("a", FINISHED)
    job.come("bc")
    assert job.is_in(Phase.RUNNING)
    assert job.tell(Succeeded("b", ROUND)) == {}
    assert job.tell(Succeeded("c", ROUND)) == dict.fromkeys("abc", SUCCEEDED)


def test_if_all_had_finished_the_job_is_done() -> None:
    job = Job()
    job.come("ab", FINISHED)
    assert job.come("c", FINISHED) == dict.fromkeys("abc", SUCCEEDED)


def test_who_finishes_during_the_recovery_has_finished() -> None:
    job = Job()
    job.come("ab")
    assert job.tell(Succeeded("a", ROUND), Succeeded("b", ROUND)) == {}
    assert job.come("c", FINISHED) == dict.fromkeys("abc", SUCCEEDED)


def test_who_had_finished_is_started_again_if_the_round_has_lost_somebody() -> None:
    job = Job()
    job.come("ab", FINISHED)
    assert job.pass_deadline() == interrupted("ab", "group rank 2 did not reconnect to the new coordinator")


def test_a_spare_hears_that_the_job_is_done() -> None:
    job = Job()
    job.join("s")
    job.come("ab", FINISHED)
    assert job.come("c", FINISHED) == dict.fromkeys("abcs", SUCCEEDED)


# Newcomers and spares.


def test_who_is_new_waits_for_the_recovery() -> None:
    job = Job((1, 3))
    assert job.join("n") == {}
    job.come("ab", size=2)
    assert job.is_in(Phase.RUNNING)
    assert job.left_s == SETTLE_TIME_S
    assert job.pass_deadline() == interrupted("ab", "re-rendezvous: node host-n joined")
    job.ready("a")
    assert order(job.ready("b")) == "abn"


def test_who_comes_during_the_recovery_waits_for_it_too() -> None:
    job = Job((1, 4))
    job.come("a")
    assert job.join("n") == {}
    assert job.is_in(Phase.TAKING_OVER)
    job.come("bc")
    assert job.left_s == SETTLE_TIME_S


def test_a_spare_stays_one_if_nobody_is_lost_and_replaces_who_is() -> None:
    for is_lost in (False, True):
        job = Job((2, 3))
        job.come("ab")
        job.join("s")
        if not is_lost:
            job.come("c")
            assert (job.core.phase, job.core.deadline) == (Phase.RUNNING, None)
            continue
        job.pass_deadline()
        job.ready("a")
        assert order(job.ready("b")) == "abs"


def full_world_without_its_coordinator(**others: Any) -> Job:
    """Three of three nodes, of which `a` coordinated; the two others have stopped their workers."""
    job = Job((1, 3), is_heir=True)
    job.come("bc", boss=0, **others)
    assert job.ready("b") == {}
    return job


def test_where_nodes_waited_for_a_place_the_next_round_waits_for_them() -> None:
    job = full_world_without_its_coordinator(has_spares=True)
    assert job.ready("c") == {}
    assert job.left_s is not None and 0 < job.left_s <= SPARES_TIMEOUT_S
    assert order(job.join("s")) == "sbc"
    assert job.core.deadline is None


def test_nodes_that_waited_for_a_place_and_do_not_come_back_are_done_without() -> None:
    job = full_world_without_its_coordinator(has_spares=True)
    job.ready("c")
    assert order(job.pass_deadline()) == "cb"
    job.ready("b")
    assert order(job.ready("c")) == "cb", "that was for once"


def test_where_no_node_waited_for_a_place_the_next_round_waits_for_none() -> None:
    job = full_world_without_its_coordinator()
    assert order(job.ready("c")) == "cb"


def test_a_node_that_was_in_an_older_round_and_is_ready_is_a_newcomer() -> None:
    job = Job((1, 4))
    job.come("d", READY, round_=3, size=4)
    assert job.is_in(Phase.TAKING_OVER), "it is the newest that we know of"
    assert job.come("abc") == {}
    assert (job.core.phase, job.core.round) == (Phase.RUNNING, ROUND)
    assert job.pass_deadline() == interrupted("abc", "re-rendezvous: node host-d joined")


def test_a_round_that_began_without_the_old_one_has_a_number_above_it() -> None:
    job = Job((1, 1))
    job.join("n")
    assert job.core.round == 1
    assert job.come("a", size=1) == went_on("a")
    job.tell(Lost("n", "silent"))
    assert job.ready("a")["a"].round == ROUND + 1


def spare(name: str) -> Registered:
    """It has never been in a round, and was welcomed by the coordinator before."""
    return Registered(node(name), Past(READY), knew_another=True)


def test_where_spares_come_first_the_round_that_runs_gets_time_to_show_itself() -> None:
    job = Job((1, 2))
    assert job.tell(spare("s"), spare("t")) == {}
    assert job.left_s == LEASE_S
    job.now += 1.0
    assert job.come("a", size=2) == {}
    job.come("b", size=2)
    assert (job.core.phase, job.core.round, job.core.deadline) == (Phase.RUNNING, ROUND, None)


def test_where_no_round_shows_itself_the_first_one_begins() -> None:
    job = Job((1, 2))
    job.tell(spare("s"))
    job.now += 1.0
    assert job.tell(spare("t")) == {}
    assert job.left_s == LEASE_S - 1.0, "who comes later does not prolong it"
    assert order(job.pass_deadline()) == "st"
    assert job.core.round == 1


def test_who_knows_of_no_other_coordinator_waits_for_no_other_round() -> None:
    job = Job((2, 2))
    job.join("a")
    assert order(job.join("b")) == "ab"


# A newer round.


@pytest.mark.parametrize("older", [1, ROUND - 2, ROUND - 1])
def test_a_newer_round_that_appears_is_the_one_to_recover(older: int) -> None:
    job = Job((1, 3))
    assert job.come("c", round_=older) == {}
    job.now += 1.0
    assert job.come("a", size=2) == went_on("c", older)
    assert (job.core.round, job.left_s) == (ROUND, LEASE_S)
    job.come("b", size=2)
    assert job.is_in(Phase.RUNNING)
    assert job.come("c", round_=older) == went_on("c", older)


def test_a_newer_round_that_appears_makes_strays_of_all_the_others_but_who_is_ready() -> None:
    job = Job((1, 4))
    for name, standing in zip("abc", (FAILED, FINISHED, READY), strict=True):
        job.come(name, standing, round_=3, size=4)
    assert job.come("d", size=2, rank=0) == went_on("ab", 3)
    job.come("e", size=2, rank=1)
    assert job.is_in(Phase.RUNNING)
    assert job.core.restart_count == 0, "the failure of an older round costs nothing"
    assert job.pass_deadline() == interrupted("de", "re-rendezvous: node host-c joined")


def test_an_older_round_that_appears_is_that_of_a_stray() -> None:
    job = Job()
    job.come("ab")
    assert job.come("c", round_=ROUND - 1) == went_on("c", ROUND - 1)
    assert job.is_in(Phase.TAKING_OVER)


def test_a_round_that_is_newer_than_the_one_that_runs_is_that_of_a_stray_and_the_next_is_above_it() -> None:
    job = recovered(nodes=(1, 4))
    assert job.come("d", round_=ROUND + 5) == went_on("d", ROUND + 5)
    job.tell(Lost("c", "silent"))
    job.ready("a")
    assert {m.round for m in job.ready("b").values()} == {ROUND + 6}


# Who comes back to a coordinator that knows it.


def fresh(names: str = "abc", **others: Any) -> Job:
    """A round that this coordinator has begun, its first."""
    job = Job((len(names), others.pop("max_nodes", len(names))), **others)
    for name in names:
        job.join(name)
    if job.core.phase is Phase.FORMING:
        job.pass_deadline()
    assert (job.core.phase, job.core.round) == (Phase.RUNNING, 1)
    return job


def test_who_was_away_for_a_moment_goes_on() -> None:
    job = fresh()
    assert job.come("a", round_=1) == {}
    assert job.is_in(Phase.RUNNING)


def test_who_did_not_hear_of_its_assignment_is_told_again() -> None:
    job = fresh()
    (assigned,) = job.join("a").values()
    assert isinstance(assigned, Assigned) and (assigned.round, assigned.ranks.group_rank) == (1, 0)
    assert job.is_in(Phase.RUNNING)


def test_who_did_not_hear_of_the_interruption_is_told_again() -> None:
    job = fresh()
    job.tell(Failed("b", 1, failure("b")))
    assert job.come("a", round_=1) == interrupted("a", "round 1 has ended; rejoining", 1, round_=1)
    job.ready("bc")
    assert order(job.ready("a")) == "abc"


def test_who_was_not_heard_of_its_failure_says_so_when_it_comes_back() -> None:
    job = fresh()
    assert set(job.come("a", FAILED, round_=1)) == {"a", "b", "c"}
    assert job.core.restart_count == 1
    assert job.come("a", FAILED, round_=1) == interrupted("a", "round 1 has ended; rejoining", 1, round_=1)
    assert job.core.restart_count == 1


def test_who_was_not_heard_of_its_success_says_so_when_it_comes_back() -> None:
    job = fresh("ab")
    job.tell(Succeeded("b", 1))
    assert job.come("a", FINISHED, round_=1) == dict.fromkeys("ab", SUCCEEDED)


def test_who_comes_back_ready_has_lost_its_workers() -> None:
    job = fresh()
    assert job.come("a", READY, round_=1) == interrupted(
        "bc", "the worker group of host-a restarted on its own", round_=1
    )


def test_who_comes_back_after_it_was_missed_is_a_stray_and_then_a_newcomer() -> None:
    job = fresh("abc", max_nodes=3, max_restarts=3)
    job.tell(Lost("c", "silent"))
    assert job.come("c", round_=1) == went_on("c", 1)
    assert job.ready("ab") == {}
    assert order(job.ready("c")) == "abc"


def test_who_had_finished_and_was_lost_comes_back_and_disturbs_nobody() -> None:
    job = fresh()
    job.tell(Succeeded("a", 1), Lost("a", "silent"))
    assert job.come("a", FINISHED, round_=1) == {}
    job.tell(Succeeded("b", 1))
    assert job.tell(Succeeded("c", 1)) == dict.fromkeys("abc", SUCCEEDED)


def test_a_stray_that_fails_finishes_or_goes_changes_nothing() -> None:
    for event in (Failed("s", 1, failure("a")), Succeeded("s", 1), Left("s", "x"), Lost("s", "x")):
        job = fresh(max_nodes=4)
        job.come("s", round_=9, rank=0)
        assert job.tell(event) == {}
        assert (job.core.phase, job.core.deadline, job.core.restart_count) == (Phase.RUNNING, None, 0)


def test_after_the_end_whoever_comes_back_is_told() -> None:
    job = fresh("ab")
    job.tell(Succeeded("a", 1), Succeeded("b", 1))
    for name, standing in zip("abcde", Standing, strict=True):
        assert job.come(name, standing, round_=1) == {name: SUCCEEDED}
        assert job.come(name, standing, round_=99) == {name: SUCCEEDED}


# A next self.


def test_a_next_self_takes_the_place_of_the_old_one_at_once() -> None:
    job = Job((2, 2))
    job.join("a", 0)
    job.join("b", 1)
    told = job.join("n", 0)
    reason = "another agent joined as node rank 0 (host-n)"
    assert told == {"a": Ended(Outcome.REPLACED, reason), "b": Interrupted(1, f"node host-a was lost: {reason}")}
    assert order(job.ready("b")) == "nb"
    assert job.tell(Lost("a", "silent"), Ready(node("b"))) != {}, "the round of its next self is untouched by its loss"


def test_a_next_self_takes_the_place_in_a_round_that_is_recovered_too() -> None:
    job = Job()
    job.tell(Registered(node("a", 0), past("a")))
    job.come("b")
    assert job.join("n", 0) == {"a": Ended(Outcome.REPLACED, "another agent joined as node rank 0 (host-n)")}
    assert job.come("c") == interrupted("bc", "group rank 0 did not reconnect to the new coordinator")
    job.ready("b")
    assert order(job.ready("c")) == "nbc"


def test_a_next_self_of_one_that_is_gone_already_replaces_nobody() -> None:
    job = Job((2, 2))
    job.join("a", 0)
    job.join("b", 1)
    job.tell(Lost("a", "silent"))
    job.ready("b")
    assert order(job.join("n", 0)) == "nb"


# Told to people.


def test_people_are_told_who_is_missing() -> None:
    job = Job((3, 4))
    job.join("a")
    job.join("b")
    job.now += 10
    text = "rendezvous: 2 of 3-4 nodes joined after 10 s (host-a, host-b); waiting for 1 more"
    assert heard_by(job) == dict.fromkeys("ab", text)


def test_people_are_told_who_was_lost_and_why() -> None:
    job = Job((2, 2))
    job.join("a")
    job.join("b")
    job.tell(Lost("b", "silent for 5 s"))
    job.ready("a")
    job.now += 20
    assert heard_by(job) == {
        "a": "rendezvous: 1 of 2 nodes joined after 20 s (host-a); waiting for host-b (silent for 5 s)"
    }


def test_people_are_told_how_far_the_recovery_is() -> None:
    job = Job((3, 4))
    job.join("s")
    job.come("ab")
    job.now += 3
    (text,) = heard_by(job).values()
    assert "reconnected from round 7: 2 of 3" in text and "after 3 s" in text


def test_who_has_finished_is_told_whom_it_waits_for() -> None:
    job = fresh()
    job.tell(Succeeded("a", 1))
    assert heard_by(job) == {"a": "finished; waiting for the workers of host-b, host-c"}
    job.tell(Succeeded("b", 1), Succeeded("c", 1))
    assert heard_by(job) == {}


def test_a_stray_is_told_nothing_and_told_of_to_nobody() -> None:
    job = Job((3, 3))
    job.come("ab")
    job.pass_deadline()
    job.come("c")
    assert heard_by(job) == {}
    job.ready("a")
    assert heard_by(job).keys() == {"a"} and "stopping their workers: host-b;" in heard_by(job)["a"]


def heard_by(job: Job) -> dict[str, str]:
    sends = waiting_texts(job.core, job.now)
    assert all(isinstance(send.message, Waiting) for send in sends)
    return {send.node_id: send.message.text for send in sends if isinstance(send.message, Waiting)}


def test_a_timeout_names_a_few_who_came() -> None:
    job = Job((100, 200))
    for number in range(50):
        job.join(f"n{number}")
    (verdict,) = set(job.pass_deadline().values())
    assert job.core.is_closed and len(verdict.reason) < 400 and verdict.reason.endswith("and 34 more")
    assert job.now == 100.0 + JOIN_TIMEOUT_S


# A story that makes no sense is one of a hostile peer, or of a bug: it must not be ours.


@pytest.mark.parametrize("size", [0, -1, 4, 10**15])
def test_a_round_of_impossible_size_is_not_recovered(size: int) -> None:
    job = Job((1, 3))
    assert job.come("a", size=size) == went_on("a")
    assert job.ready("a") == {}
    assert {m.round for m in job.pass_deadline().values()} == {ROUND + 1}
    job = Job((1, 1))
    assert {m.round for m in job.come("a", READY, size=size).values()} == {ROUND + 1}


def test_a_failure_without_a_report_is_a_stop() -> None:
    job = fresh()
    broken = Past(FAILED, 1, 0, 0, 3)
    assert job.tell(Registered(node("a"), broken)) == interrupted(
        "abc", "the worker group of host-a restarted on its own", round_=1
    )
    job = Job()
    assert job.tell(Registered(node("a"), Past(FAILED, ROUND, 0, 0, 3))) == {}
    job.come("b")
    assert job.come("c") == interrupted("abc", f"round {ROUND} had ended when the coordinator was lost")


# Whatever happens, in whatever order.

PASTS = st.builds(
    lambda standing, round_, count, rank, size, boss, name: (
        Past(READY) if round_ == 0 else Past(standing, round_, count, rank, size, boss, failure(name) if standing is FAILED else None)
    ),
    st.sampled_from(Standing), st.integers(0, 3), st.integers(0, 3), st.integers(-1, 3), st.integers(-1, 5),
    st.integers(-1, 3), st.sampled_from(NAMES),
)  # fmt: skip
RANDOM_EVENTS = st.one_of(
    st.just(DeadlinePassed()),
    st.builds(lambda name, rank, *others: Registered(node(name, rank), *others), st.sampled_from(NAMES), st.sampled_from([None, None, 0, 1]), PASTS, st.booleans()),
    st.builds(lambda name: Ready(node(name)), st.sampled_from(NAMES)),
    st.builds(lambda name, round_: Failed(name, round_, failure(name)), st.sampled_from(NAMES), st.integers(0, 4)),
    st.builds(Succeeded, st.sampled_from(NAMES), st.integers(0, 4)),
    st.builds(Left, st.sampled_from(NAMES), st.just("x")),
    st.builds(Lost, st.sampled_from(NAMES), st.just("x")),
)  # fmt: skip


@settings(max_examples=examples(500), deadline=None)
@given(st.lists(RANDOM_EVENTS, max_size=50), st.booleans(), st.integers(0, 3))
def test_whatever_is_said_a_coordinator_keeps_its_rules(events: list[Any], is_heir: bool, max_restarts: int) -> None:
    job = Job((1, 3), is_heir=is_heir, max_restarts=max_restarts)
    verdict: Ended | None = None
    newest = 0
    for event in events:
        if isinstance(event, DeadlinePassed) and job.core.deadline is not None:
            job.now = max(job.now, job.core.deadline)
        sends = job.core.handle(event, job.now)
        if isinstance(event, DeadlinePassed):
            later = job.core.deadline
            assert later is None or later > job.now, "what is due is done at once"
        if isinstance(event, Registered):
            newest = max(newest, event.past.round)
        ranks: list[NodeRanks] = []
        for send in sends:
            match send.message:
                case Ended(Outcome.REPLACED):
                    pass
                case Ended() as ended:
                    assert verdict in {None, ended}, "two verdicts"
                    verdict = ended
                case Assigned(round_) as message if not isinstance(event, Registered):
                    assert round_ > newest, "the next round is above every one that anybody told of"
                    ranks.append(message.ranks)
                case _:
                    assert verdict is None, "closed stays closed"
        assert sorted(each.group_rank for each in ranks) in ([], list(range(len(ranks))))
        newest = max([newest, *(send.message.round for send in sends if isinstance(send.message, Assigned))])
        waiting_texts(job.core, job.now)


def test_who_is_ready_and_has_no_seat_is_a_newcomer() -> None:
    job = Job((1, 4))
    job.come("a")
    assert job.come("b", READY, rank=0) == {}
    job.come("d", READY, rank=3)
    assert job.pass_deadline() == interrupted("a", "group rank 1, 2 did not reconnect to the new coordinator")
    assert order(job.ready("a")) == "abd"
