"""The coordinator: who takes part, what a failure costs, and when the job is over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from aelastic.errors import ProcessFailure
from aelastic.rdzv.coordinator.coordinator import Coordinator, Phase
from aelastic.rdzv.coordinator.coordinator_events import DeadlinePassed, Event, Lost, Send
from aelastic.rdzv.coordinator.forming import RoundRules
from aelastic.rdzv.coordinator.restart_policy import RestartPolicy
from aelastic.rdzv.protocol.messages import (
    Assigned,
    Departed,
    Ended,
    Failed,
    Interrupted,
    Left,
    Node,
    Outcome,
    Ready,
    Succeeded,
    Waiting,
)
from aelastic.rdzv.settings import JOIN_TIMEOUT_S, LAST_CALL_TIMEOUT_S, SETTLE_TIME_S


def node(name: str, *, role: str = "default", size: int = 2, preferred: int | None = None) -> Node:
    return Node(name, f"host-{name}", role, size, f"addr-{name}", 29500 + ord(name[0]), preferred)


def failure(name: str, rank: int = 0) -> ProcessFailure:
    return ProcessFailure.from_elsewhere(f"host-{name}", rank, 0, 77, 1, "ValueError: batch is empty", "", 1000)


class Job:
    """A coordinator, the clock it is told, and what it has sent since somebody looked."""

    def __init__(self, min_nodes: int, max_nodes: int, max_restarts: int = 3) -> None:
        self.core = Coordinator(RoundRules(min_nodes, max_nodes), RestartPolicy(max_restarts))
        self.now = 100.0

    def tell(self, *events: Event) -> dict[str, Any]:
        """What the last of the events makes the nodes hear."""
        heard: dict[str, Any] = {}
        for event in events:
            sends = self.core.handle(event, self.now)
            heard = {send.node_id: send.message for send in sends}
            assert len(heard) == len(sends), "one message for one node at a time"
        return heard

    def ready(self, names: Iterable[str]) -> dict[str, Any]:
        return self.tell(*(Ready(node(name)) for name in names))

    def fail(self, name: str, round_: int | None = None) -> dict[str, Any]:
        return self.tell(Failed(name, round_ or self.core.round, failure(name)))

    def succeed(self, *names: str) -> dict[str, Any]:
        return self.tell(*(Succeeded(name, self.core.round) for name in names))

    def pass_deadline(self) -> dict[str, Any]:
        assert self.core.deadline is not None
        self.now = self.core.deadline
        return self.tell(DeadlinePassed())

    @property
    def left_s(self) -> float | None:
        return None if self.core.deadline is None else self.core.deadline - self.now


def running(names: str, *, min_nodes: int = 1, max_nodes: int | None = None, max_restarts: int = 3) -> Job:
    """A job in its first round."""
    job = Job(min_nodes, max_nodes or len(names), max_restarts)
    job.ready(names)
    if job.core.phase is Phase.FORMING:
        job.pass_deadline()
    assert job.core.phase is Phase.RUNNING
    return job


def order(heard: dict[str, Assigned]) -> str:
    """The nodes of a round, by group rank."""
    return "".join(sorted(heard, key=lambda name: heard[name].ranks.group_rank))


# The first round.


def test_nothing_is_armed_before_somebody_comes() -> None:
    assert Job(1, 1).core.deadline is None


def test_the_first_round_closes_at_max_nodes_at_once() -> None:
    job = Job(1, 3)
    assert job.ready("ab") == {}
    heard = job.ready("c")
    assert order(heard) == "abc"
    assert (job.core.phase, job.core.round, job.core.deadline) == (Phase.RUNNING, 1, None)


def test_the_first_round_closes_at_min_nodes_after_the_last_call() -> None:
    job = Job(2, 4)
    job.ready("a")
    job.now += 5
    assert job.ready("b") == {}
    assert job.left_s == LAST_CALL_TIMEOUT_S
    assert order(job.pass_deadline()) == "ab"


def test_who_comes_during_the_last_call_takes_part_and_does_not_prolong_it() -> None:
    job = Job(2, 4)
    job.ready("ab")
    job.now += 20
    assert job.ready("c") == {}
    assert job.left_s == LAST_CALL_TIMEOUT_S - 20
    assert order(job.pass_deadline()) == "abc"


def test_a_node_that_leaves_during_the_last_call_takes_it_back() -> None:
    job = Job(2, 4)
    job.ready("ab")
    job.now += 20
    assert job.tell(Lost("a", "its connection closed")) == {}
    assert job.left_s == JOIN_TIMEOUT_S - 20
    job.ready("c")
    assert job.left_s == LAST_CALL_TIMEOUT_S
    assert order(job.pass_deadline()) == "bc"


def test_a_node_that_says_ready_twice_counts_once() -> None:
    job = Job(2, 4)
    assert job.ready("aa") == {}
    assert job.left_s == JOIN_TIMEOUT_S


def test_below_min_nodes_the_join_timeout_ends_the_job_and_names_who_came() -> None:
    job = Job(3, 4)
    job.ready("b")
    job.now += 100
    job.ready("a")
    assert job.left_s == JOIN_TIMEOUT_S - 100
    heard = job.pass_deadline()
    reason = "2 of at least 3 nodes joined within 600 s: host-a, host-b"
    assert heard == dict.fromkeys("ab", Ended(Outcome.TIMED_OUT, reason))


def test_a_timer_that_fires_early_changes_nothing() -> None:
    job = Job(1, 2)
    job.ready("a")
    job.now += LAST_CALL_TIMEOUT_S - 0.1
    assert job.tell(DeadlinePassed()) == {}
    assert job.core.phase is Phase.FORMING


# What a round tells.


def test_every_node_hears_its_own_ranks_and_the_same_round_and_master() -> None:
    job = Job(1, 3)
    heard = job.tell(
        Ready(node("c", role="reader", size=1)), Ready(node("b", role="trainer", size=4)), Ready(node("a", size=3))
    )
    assert order(heard) == "abc"
    assert {(m.round, m.restart_count, m.ranks.world_size) for m in heard.values()} == {(1, 0, 8)}
    assert {(m.master_addr, m.master_port) for m in heard.values()} == {("addr-a", 29500 + ord("a"))}
    assert [heard[name].ranks.first_rank for name in "abc"] == [0, 3, 7]
    assert [heard[name].ranks.first_role_rank for name in "abc"] == [0, 0, 0]


def test_preferred_ranks_decide_who_is_master() -> None:
    heard = Job(1, 2).tell(Ready(node("a", preferred=1)), Ready(node("b", preferred=0)))
    assert order(heard) == "ba"
    assert heard["a"].master_addr == "addr-b"


def test_a_node_that_comes_again_brings_its_new_port() -> None:
    job = running("ab")
    job.fail("a")
    moved = Node("a", "host-a", "default", 2, "addr-a", 4242)
    job.ready("b")
    assert {m.master_port for m in job.tell(Ready(moved)).values()} == {4242}


# Failures.


def test_a_failure_interrupts_every_node_of_the_round_and_pays_one_restart() -> None:
    job = running("abc")
    reason = "rank 0 failed on host-b; restart 1 of 3"
    assert job.fail("b") == dict.fromkeys("abc", Interrupted(1, reason, restart_count=1))
    assert (job.core.phase, job.core.restart_count) == (Phase.FORMING, 1)
    assert job.core.deadline is None


def test_the_restart_count_is_equal_on_every_node_of_the_next_round() -> None:
    job = running("abc")
    job.fail("b")
    heard = job.ready("abc")
    assert {(m.round, m.restart_count) for m in heard.values()} == {(2, 1)}
    assert len(heard) == 3


def test_one_failure_a_round_is_paid() -> None:
    job = running("ab")
    job.fail("a", 1)
    assert job.fail("b", 1) == {}
    assert job.fail("a", 1) == {}
    job.ready("ab")
    assert job.fail("a", 1) == {}
    assert (job.core.phase, job.core.restart_count) == (Phase.RUNNING, 1)


def test_a_failure_of_a_round_to_come_changes_nothing() -> None:
    job = running("ab")
    assert job.fail("a", 2) == {}
    assert job.core.restart_count == 0


def test_without_a_restart_left_a_failure_ends_the_job_with_its_cause() -> None:
    job = running("ab", max_restarts=1)
    job.fail("a")
    job.ready("ab")
    verdict = Ended(Outcome.FAILED, "rank 0 failed on host-b; all 1 restarts are used up", failure("b"))
    assert job.fail("b") == dict.fromkeys("ab", verdict)
    assert (job.core.phase, job.core.deadline) == (Phase.CLOSED, None)


def test_with_restarts_off_the_first_failure_ends_the_job() -> None:
    heard = running("a", max_restarts=0).fail("a")
    assert heard["a"].reason == "rank 0 failed on host-a; restarts are off (max_restarts is 0)"


def test_a_final_failure_ends_the_job_and_pays_no_restart() -> None:
    job = running("abc", max_restarts=3)
    final = failure("b").replace(is_final=True)
    heard = job.tell(Failed("b", 1, final))
    assert set(heard) == set("abc")
    assert heard["a"].outcome is Outcome.FAILED
    assert heard["a"].cause == final
    assert heard["a"].reason.startswith("rank 0 failed on host-b; the worker cannot be killed")
    assert (job.core.restart_count, job.core.is_closed) == (0, True)


def test_a_final_failure_of_a_round_that_is_over_ends_nothing() -> None:
    job = running("ab")
    job.fail("a")
    assert job.tell(Failed("b", 1, failure("b").replace(is_final=True))) == {}
    assert not job.core.is_closed


def test_a_failure_reported_by_somebody_else_is_not_paid() -> None:
    job = running("ab", max_nodes=2)
    job.ready("s")
    assert job.fail("s") == {}
    assert job.fail("nobody") == {}
    assert (job.core.phase, job.core.restart_count) == (Phase.RUNNING, 0)


# Later rounds.


def test_a_later_round_begins_when_the_last_living_member_is_ready() -> None:
    job = running("abc", max_nodes=4)
    job.fail("a")
    assert job.ready("ab") == {}
    assert job.core.deadline is None
    assert order(job.ready("c")) == "abc"


def test_a_later_round_does_not_wait_for_a_member_that_died_meanwhile() -> None:
    job = running("abc")
    job.fail("a")
    job.ready("ab")
    assert order(job.tell(Lost("c", "its lease ran out"))) == "ab"


def test_a_later_round_takes_in_whoever_waits_already() -> None:
    job = running("ab", max_nodes=3)
    job.fail("a")
    assert job.ready("n") == {}
    assert job.ready("a") == {}
    assert order(job.ready("b")) == "abn"


def test_survivors_keep_their_ranks_and_a_newcomer_fills_the_hole() -> None:
    job = running("abc")
    job.tell(Lost("b", "its connection closed"))
    job.ready("0")
    job.ready("c")
    assert order(job.ready("a")) == "a0c"


def test_below_min_nodes_a_later_round_waits_for_a_replacement() -> None:
    job = running("ab", min_nodes=2)
    job.tell(Lost("b", "its connection closed"))
    assert job.ready("a") == {}
    assert job.left_s == JOIN_TIMEOUT_S
    assert order(job.ready("n")) == "an"


def test_below_min_nodes_a_later_round_times_out_too() -> None:
    job = running("ab", min_nodes=2)
    job.tell(Lost("b", "its connection closed"))
    job.ready("a")
    heard = job.pass_deadline()
    assert heard == {"a": Ended(Outcome.TIMED_OUT, "1 of at least 2 nodes joined within 600 s: host-a")}


def test_when_every_node_is_lost_the_job_waits_for_others_and_then_ends() -> None:
    job = running("ab")
    job.tell(Lost("a", "x"), Lost("b", "x"))
    assert job.left_s == JOIN_TIMEOUT_S
    job.pass_deadline()
    assert job.ready("c")["c"].reason == "0 of at least 1 nodes joined within 600 s: none"


# Who goes.


@pytest.mark.parametrize(
    "gone, how", [(Lost("b", "its lease ran out"), "was lost"), (Left("b", "its lease ran out"), "left")]
)
def test_a_node_that_goes_interrupts_the_round_for_free(gone: Event, how: str) -> None:
    job = running("abc")
    assert job.tell(gone) == dict.fromkeys("ac", Interrupted(1, f"node host-b {how}: its lease ran out"))
    assert order(job.ready("ac")) == "ac"
    assert (job.core.round, job.core.restart_count) == (2, 0)


def test_a_node_that_is_told_lost_twice_or_was_never_seen_changes_nothing() -> None:
    job = running("abc")
    job.tell(Lost("b", "x"))
    job.ready("ac")
    assert job.tell(Lost("b", "x")) == {}
    assert job.tell(Left("z", "x")) == {}
    assert job.core.phase is Phase.RUNNING


def test_a_participant_that_starts_over_interrupts_the_round_for_free() -> None:
    job = running("ab")
    assert job.ready("a") == {"b": Interrupted(1, "the worker group of host-a restarted on its own")}
    assert order(job.ready("b")) == "ab"
    assert job.core.restart_count == 0


# Newcomers and spares.


def test_several_newcomers_within_the_settle_time_cost_one_interruption() -> None:
    job = running("ab", max_nodes=5)
    assert job.ready("c") == {}
    assert job.left_s == SETTLE_TIME_S
    job.now += SETTLE_TIME_S / 2
    assert job.ready("d") == {}
    assert job.left_s == SETTLE_TIME_S / 2
    assert job.pass_deadline() == dict.fromkeys("ab", Interrupted(1, "re-rendezvous: nodes host-c, host-d joined"))
    assert job.ready("a") == {}
    assert order(job.ready("b")) == "abcd"
    assert job.core.restart_count == 0


def test_a_newcomer_that_goes_within_the_settle_time_interrupts_nobody() -> None:
    job = running("ab", max_nodes=3)
    job.ready("c")
    job.tell(Left("c", "changed its mind"))
    assert job.pass_deadline() == {}
    assert (job.core.phase, job.core.deadline) == (Phase.RUNNING, None)


def test_a_newcomer_without_room_waits_as_a_spare() -> None:
    job = running("ab")
    text = "all 2 places are taken: this node is a spare, and replaces the next that is lost"
    assert job.ready("s") == {"s": Waiting(text)}
    assert job.core.deadline is None
    assert job.tell(Lost("s", "x")) == {}
    assert job.core.phase is Phase.RUNNING


def test_an_interruption_says_the_restart_count_of_the_round_to_come() -> None:
    job = running("abc")
    job.fail("b")
    job.ready("abc")
    heard = job.tell(Lost("c", "x"))
    assert {message.restart_count for message in heard.values()} == {1}
    assert {message.restart_count for message in job.ready("ab").values()} == {1}


def test_a_round_says_which_rank_has_the_coordinator() -> None:
    for own, rank in (("a", 0), ("b", 1), ("elsewhere", -1)):
        job = Job(1, 2)
        job.core.own_node_id = own
        assert {message.coordinator_rank for message in job.ready("ab").values()} == {rank}


def test_a_spare_replaces_a_lost_node_in_the_very_next_round() -> None:
    job = running("abc", min_nodes=3)
    job.ready("s")
    job.tell(Lost("b", "its connection closed"))
    job.ready("a")
    assert order(job.ready("c")) == "asc"
    assert job.core.round == 2


def test_a_spare_stays_a_spare_while_all_members_live() -> None:
    job = running("ab")
    job.ready("s")
    job.fail("a")
    heard = job.ready("ab")
    assert isinstance(heard.pop("s"), Waiting)
    assert order(heard) == "ab"
    assert job.core.deadline is None


def test_an_interruption_during_the_settle_time_takes_the_newcomers_in() -> None:
    job = running("ab", max_nodes=3)
    job.ready("c")
    assert set(job.fail("a")) == {"a", "b"}
    job.ready("a")
    assert order(job.ready("b")) == "abc"
    assert job.core.deadline is None


# All or nothing.


def test_the_job_succeeds_when_every_node_has() -> None:
    job = running("ab")
    assert job.succeed("a") == {}
    assert job.succeed("b") == dict.fromkeys("ab", Ended(Outcome.SUCCEEDED, "every worker succeeded"))


def test_a_finished_node_is_started_again_when_another_fails() -> None:
    job = running("ab")
    job.succeed("a")
    assert set(job.fail("b")) == {"a", "b"}
    assert job.ready("b") == {}
    assert order(job.ready("a")) == "ab"
    assert job.succeed("b") == {}, "the success of the last round is not one of this round"
    assert set(job.succeed("a")) == {"a", "b"}


def test_a_finished_node_that_is_lost_is_not_missed() -> None:
    job = running("abc")
    job.succeed("a")
    # The others keep it in mind for a coordinator that may come after this one.
    assert job.tell(Lost("a", "x")) == dict.fromkeys("bc", Departed(1, 0))
    job.succeed("b")
    assert set(job.succeed("c")) == {"b", "c"}
    assert job.core.phase is Phase.CLOSED


def test_the_last_node_that_runs_being_lost_interrupts_those_that_finished() -> None:
    job = running("ab")
    job.succeed("a")
    assert set(job.tell(Lost("b", "x"))) == {"a"}
    assert order(job.ready("a")) == "a"


def test_a_finished_node_that_is_lost_is_missed_once_the_job_restarts() -> None:
    job = running("ab", min_nodes=2)
    job.succeed("a")
    job.tell(Lost("a", "x"))
    assert set(job.fail("b")) == {"b"}
    assert job.ready("b") == {}
    assert job.left_s == JOIN_TIMEOUT_S


def test_a_success_of_an_earlier_round_counts_for_nothing() -> None:
    job = running("ab")
    job.fail("b")
    job.ready("ab")
    assert job.tell(Succeeded("a", 1), Succeeded("b", 2)) == {}
    assert job.core.phase is Phase.RUNNING


def test_a_spare_hears_how_the_job_ended() -> None:
    job = running("ab")
    job.ready("s")
    assert set(job.succeed("a", "b")) == {"a", "b", "s"}


def test_a_success_of_a_spare_counts_for_nothing() -> None:
    job = running("ab", max_nodes=2)
    job.ready("s")
    job.succeed("s")
    job.tell(Lost("b", "x"))
    assert order(job.ready("a")) == "as"


# Closed.


def test_closed_stays_closed_and_tells_whoever_comes_late() -> None:
    job = running("ab", max_restarts=0)
    verdict = job.fail("a")["a"]
    assert job.ready("z") == {"z": verdict}
    assert job.ready("a") == {"a": verdict}
    for event in (
        Failed("b", 1, failure("b")),
        Succeeded("a", 1),
        Succeeded("b", 1),
        Left("a", "x"),
        Lost("b", "x"),
        DeadlinePassed(),
    ):
        assert job.core.handle(event, job.now + 10_000) == []
    assert (job.core.phase, job.core.round, job.core.restart_count) == (Phase.CLOSED, 1, 0)


def test_the_story_is_bounded_and_tells_what_happened() -> None:
    job = running("ab")
    job.fail("a")
    assert "Failed" in job.core.story[-1] and "running" in job.core.story[-1] and "forming" in job.core.story[-1]
    for _ in range(500):
        job.tell(DeadlinePassed())
    assert len(job.core.story) == 64


def test_messages_for_one_node_come_in_the_order_of_the_decisions() -> None:
    job = running("a", max_restarts=1)
    sends = job.core.handle(Failed("a", 1, failure("a")), job.now) + job.core.handle(Ready(node("a")), job.now)
    assert [type(send.message) for send in sends if send == Send("a", send.message)] == [Interrupted, Assigned]
