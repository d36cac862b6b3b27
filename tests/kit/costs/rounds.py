"""What happens to a whole job, or to all workers of a node: events that may cost as much as they change, no more."""

from __future__ import annotations

from collections.abc import Iterator

from aelastic.group import events as g
from aelastic.group.restart_grace import Looked, RestartGrace, Sample
from aelastic.hangs import hang_rules, timer_rules
from aelastic.rdzv.coordinator import session_events as ev
from aelastic.rdzv.member import member_events as me
from aelastic.rdzv.protocol import messages as m
from kit.costs import terms as t
from kit.costs.terms import FIRST, MORE, NOW, SECOND, WALL, Job, first_says, last_says, names, once, then
from kit.stories.leader_terms import FAILURE, LEASE_S, RENEWED, node, reclaimed
from kit.visits import Act

RAISED = m.Failed(FIRST, 1, FAILURE.replace(exitcode=1))

the_first_round_begins = once(lambda count: t.greets(t.gathered(count - 1, room=1), names(1, count)[0]))
the_next_round_begins = last_says(t.over, lambda name: m.Ready(node(name)))
a_failure_ends_the_round = first_says(t.running, m.Failed(FIRST, 1, FAILURE))
all_nodes_are_asked_what_their_workers_do = first_says(t.running, t.HANGS)
what_all_workers_do_is_compared = last_says(t.asked, lambda name: m.Saw(name, 1, ()))
all_nodes_hold_their_ranks = first_says(t.running, t.DRAIN)
a_call_to_save_at_is_named = last_says(t.draining, t.frozen)
all_nodes_hear_why_the_round_is_over = once(lambda count: t.due(t.after([FIRST], t.running(count), lambda _: RAISED)))


def all_nodes_hear_that_the_end_costs_nothing(count: int) -> Iterator[Act]:
    term = t.after([FIRST], t.running(count), lambda _: RAISED)
    term.pass_deadline()
    yield t.said(term, SECOND, m.Left(SECOND, "SIGTERM", age_s=9.0))


def an_earlier_failure_is_heard_of_and_each_loss_weighed(count: int) -> Iterator[Act]:
    term = t.over(count)
    for name in names(count - 2, 2):
        term.tell(t.breaks(term, name).event)
    yield t.said(term, SECOND, m.Failed(SECOND, 1, FAILURE, age_s=99.0))


def a_node_that_does_not_stop_its_workers_is_given_up(count: int) -> Iterator[Act]:
    term = t.after(names(count // 2), t.over(count, join_timeout_s=3.0), lambda name: m.Ready(node(name)))
    while term.coordinator.deadline is None or term.now < term.coordinator.deadline:
        deadline = t.due(t.after(names(count), term))
        if term.coordinator.is_due(term.now):
            yield deadline
            return
        if ev.Renew() in term.tell(deadline.event):
            term.tell(RENEWED)


newcomers_end_the_round = once(lambda count: t.due(t.join(t.running(count, room=count), names(count - 1, count))))


def _leaves(name: str) -> m.Left:
    return m.Left(name, "SIGTERM")


def _succeeds(name: str) -> m.Succeeded:
    return m.Succeeded(name, 1)


a_node_that_has_finished_leaves_and_all_hear_so = once(
    lambda count: t.said(t.after([FIRST], t.running(count), _succeeds), FIRST, _leaves(FIRST))
)


def a_node_is_back_that_has_missed_who_departed(count: int) -> Iterator[Act]:
    term = t.after(names(count), t.running(count + 2), _succeeds)
    t.after(names(count), term, _leaves)
    last = names(1, count + 1)[0]
    term.close(last)
    yield t.greets(term, last, past=m.Past(m.Standing.BUSY, 1, 0, count + 1, count + 2))


def _due_to_be_read(term: Job, count: int) -> Act:
    return t.due(t.pass_until(term, lambda: term.leader.deadline == term.leader._waiting_text_at, *names(count)))


all_nodes_read_what_is_waited_for = once(lambda count: _due_to_be_read(t.gathered(count), count))
nodes_that_have_finished_read_what_is_waited_for = once(
    lambda count: _due_to_be_read(t.after(names(count // 2), t.running(count), _succeeds), count)
)
a_renewal_is_a_heartbeat_for_all = then(t.at_renewal, RENEWED)
a_failed_renewal_is_one_too = then(t.at_renewal, ev.RenewFailed("no answer"))
all_hear_of_a_new_epoch = then(lambda count: t.join(t.gathered(count), names(1, count), seen_epoch=9), reclaimed(10))
agents_that_waited_for_an_epoch_are_welcomed = then(t.knowing_of_another_epoch, reclaimed(10))
the_coordinator_leaves = then(t.gathered, ev.Resigned())


def an_agent_that_has_slept_gives_all_another_lease(count: int) -> Iterator[Act]:
    term = t.gathered(count)
    term.now += 60.0
    yield t.act(term, ev.DeadlinePassed())


def all_are_silent_at_once(count: int) -> Iterator[Act]:
    term = t.gathered(count)
    yield t.due(t.pass_until(term, lambda: (term.leader.sessions.deadline or 0.0) <= (term.leader.deadline or 0.0)))


def an_agent_that_hears_no_other_stands_back(count: int) -> Iterator[Act]:
    term = t.running(count)
    term.coordinator.own_node_id, term.leader.is_replaceable = FIRST, True
    silent_at = term.now + LEASE_S
    while (term.leader.deadline or 0.0) < silent_at:
        if ev.Renew() in term.pass_deadline():
            term.tell(RENEWED)
        term.say(FIRST, m.Alive())
    yield t.due(term)


def what_has_waited_for_the_board_is_decided(count: int) -> Iterator[Act]:
    term = t.after(names(count - 1), t.doubtful(count), _succeeds)
    term.pass_time_until_renewal()
    yield t.act(term, RENEWED)


the_verdict_is_held = once(
    lambda count: t.due(t.after([FIRST], t.running(count, max_restarts=0), lambda name: m.Failed(name, 1, FAILURE)))
)
all_hear_the_verdict = then(t.decided, ev.Published(True))
all_succeed = last_says(t.running, _succeeds)


def a_round_is_taken_over(count: int) -> Iterator[Act]:
    term = t.taking_over(count)
    *others, last = names(MORE + 1, count)
    for name in others:
        term.tell(t.takes_its_seat(term, name).event)
    yield t.takes_its_seat(term, last)


def a_takeover_ends_without_some(count: int) -> Iterator[Act]:
    term = t.taking_over(count)
    yield t.due(t.pass_until(term, lambda: term.coordinator.deadline in {None, term.leader.deadline}, *names(count)))


a_newer_round_than_that_of_all_others_shows_itself = once(
    lambda count: t.greets(t.taking_over(count), names(1, count)[0], past=t.past(0, 2).replace(round=8))
)
nodes_with_one_node_rank_are_told_apart = first_says(t.with_one_rank, m.Alive())

# All workers of a node.

LATE = NOW + 1000.0

a_run_begins = then(t.group_of, g.Start())
workers_are_to_be_started = once(lambda count: t.act(t.group_of(count, g.Start()), t.assigned(count)))
workers_are_started = once(
    lambda count: t.act(t.group_of(count, g.Start(), t.assigned(count)), g.Spawned(1, dict.fromkeys(range(count), 7)))
)
no_worker_is_started = then(
    lambda count: t.group_of(count, g.Start(), t.assigned(count), t.STOPPED), g.SpawnCancelled(1)
)
workers_are_stopped_for_another_round = then(t.working, t.STOPPED)
workers_are_stopped_for_good = then(t.working, m.Ended(m.Outcome.FAILED, "rank 4 failed"))
workers_are_stopped_since_the_agent_leaves = then(t.working, g.StopRequested())
workers_are_stopped_since_one_has_failed = then(t.working, g.Exited(1, 0, t.FAILURE))
workers_are_killed_since_to_wait_cannot_help = then(lambda count: t.working(count, t.STOPPED), g.GraceOver(1, "idle"))
workers_are_killed_in_the_end = once(lambda count: Act(t.working(count, t.STOPPED).core, g.DeadlinePassed(), LATE))


def workers_that_are_stopped_are_looked_at(count: int) -> Iterator[Act]:
    grace = RestartGrace({rank: rank for rank in range(count)}, NOW)
    yield Act(grace, g.DeadlinePassed(), LATE)
    yield Act(grace, Looked({rank: Sample(0) for rank in range(count)}), LATE)


workers_are_watched = once(lambda count: t.act(t.unwatched(count), hang_rules.Began(tuple(range(count)))))


def workers_that_are_watched_are_looked_at(count: int) -> Iterator[Act]:
    samples = {rank: hang_rules.Sample(sleep=1) for rank in range(count)}
    yield Act(t.watched(count).core, hang_rules.Looked(samples, LATE), LATE)


timers_are_for_a_new_generation = once(
    lambda count: t.act(t.timed(count), timer_rules.Started(2, {pid: pid for pid in range(count)}))
)
all_timers_expire = once(lambda count: Act(t.timed(count).core, timer_rules.DeadlinePassed(), LATE + WALL))
a_worker_ends_and_each_timer_is_looked_at = then(t.timed, timer_rules.Ended(1, 0))
a_node_says_which_others_have_departed = once(
    lambda count: t.act(t.member_of(count, me.ConnectionLost(1, "connection closed")), me.Connected(2))
)
