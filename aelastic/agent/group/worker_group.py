"""The worker group: what this agent does next, given what just happened.

Events in, actions out.  Nothing here waits, spawns, signals, logs or reads a clock; the agent's run does all of that,
in the order of the actions.

- The phase is a fact; what to do once the workers are gone (`_wish`) is a wish.  Events of the rendezvous and requests
  to stop change the wish, exits change the fact.
- A failure is first reported to the rendezvous, then the workers are stopped, so that all nodes stop at the same time.
 Whether to restart is not decided here: the leader answers.
- Workers exist from `Spawned` to their `Cleared`; they can only be signalled during this time.  A stop that comes
 while they are being started cancels the start, and waits for the answer in its own phase.
- If all workers of the job have opted in to recovery in place, a round can end while their processes stay: they leave
 it, lost ones are replaced, and all enter the next round together.  In any doubt they are stopped, as without it
 (`in_place.py` has the stages of the workers).
- A node that waits for such a job starts its workers ahead, so that the other nodes do not wait for its imports.  If
 one of them ends, all start when a round includes the node, as without this.

Events from workers carry their generation, those from the rendezvous their round.  The story behind the fence:
generation 3 is killed, its last exit is still in the mailbox, generation 4 starts, and the old exit, taken for one of
generation 4, would stop a healthy group.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import assert_never

from aelastic.agent.group import events as ev
from aelastic.agent.group.in_place import GRACE_S, LIMIT_S, InPlace, WorkerStage
from aelastic.agent.group.phases import Await, End, Exits, Rejoin, Wish
from aelastic.base.machine import Machine, Trace
from aelastic.diagnose.failures.failure import ProcessFailure
from aelastic.rdzv.decisions.decision import Why
from aelastic.rdzv.protocol.messages import Assigned, Ended, Interrupted, StartAhead
from aelastic.spec import WorkerSpec
from aelastic.workers.states import KILL_WAIT_S, Phase, Worker, WorkerState


@dataclass(slots=True)
class WorkerGroup(Machine[ev.Event, ev.Action]):
    """State machine of one agent's workers (torch: `torch.distributed.elastic.agent.server.WorkerGroup`)."""

    spec: WorkerSpec
    phase: Phase = Phase.INIT
    state: WorkerState = WorkerState.INIT
    reason: Why = ""  # explains `state`
    deadline: float | None = None
    generation: int = 0
    assigned: Assigned | None = None  # the last round that included this node
    workers: tuple[Worker, ...] = ()  # of the current generation
    exits: Exits = field(default_factory=Exits)  # of the current generation
    in_place: InPlace = field(default_factory=InPlace)  # of the current generation
    verdict: Ended | None = None
    is_drained: bool = False  # its node has left because of a drain
    _missed_round: int = 0  # the newest round that was complete before all workers of this node were ready for it
    _wish: Wish = field(default_factory=Rejoin)
    _trace: Trace = field(default_factory=Trace)

    @property
    def is_done(self) -> bool:
        return self.phase is Phase.DONE

    @property
    def fence(self) -> int:
        """The fence of the last round that included this node; -1 without one."""
        return -1 if self.assigned is None else self.assigned.fence

    @property
    def is_leaving(self) -> bool:
        """Whether its workers will not start again."""
        return isinstance(self._wish, End) or self.is_done

    def validate(self) -> None:
        """Asserts the invariants of the core."""
        phase, exits, is_armed = self.phase, self.exits, self.deadline is not None
        self.exits.validate()
        self.in_place.validate()
        is_clean = phase in {Phase.SPAWNING, Phase.PREPARING, Phase.RUNNING, Phase.CANCELLING}
        is_in_round = self.generation > 0 and not self.in_place.is_ahead
        assert self.assigned is not None or not is_in_round, "workers belong to a round, or were started ahead of it"
        assert len(self.workers) == self.spec.local_world_size * bool(self.generation), "one worker per local rank"
        assert phase is Phase.DONE or bool(exits.left) == phase.has_workers, "workers exist from Spawned to Cleared"
        ends = exits.failed or exits.stopped or exits.is_killing
        assert not (is_clean and ends), "a failed or stopped worker ends these phases"
        assert phase is not Phase.AWAITING or isinstance(self._wish, Await), "only the wish to wait leads to waiting"
        has_asked = exits.failed or exits.is_draining
        assert has_asked or not isinstance(self._wish, Await), "the leader is asked after a failure, or in a drain"
        assert self.verdict is None or self.is_leaving, "a verdict ends the run"
        is_bounded = phase.is_bounded or (phase is Phase.RUNNING and exits.has_children)
        is_bounded |= phase is Phase.PREPARING and not self.in_place.are_all(WorkerStage.READY)
        assert is_armed == is_bounded, "a wait that may never end has a deadline, unless others limit it"

    def _dispatch(self, event: ev.Event, now: float) -> list[ev.Action]:  # noqa: C901, PLR0912  a case for each event
        match event:
            case ev.Start() if self.phase is Phase.INIT:
                return self._join()
            case ev.Start():
                raise self._impossible(event)
            case Assigned():
                return self._on_assigned(event)
            case Interrupted():
                return self._on_interrupted(event, now)
            case Ended():
                return self._on_ended(event, now)
            case StartAhead():
                return self._on_start_ahead(event)
            case ev.Spawned() | ev.SpawnCancelled() | ev.Drained() if event.generation != self.generation:
                return []  # an earlier generation's
            case ev.Spawned():
                return self._on_spawned(event, now)
            case ev.SpawnCancelled():
                return self._on_spawn_cancelled(event)
            case ev.Exited():
                return self._on_exited(event, now)
            case ev.Cleared():
                return self._on_cleared(event, now)
            case ev.FoundUnhealthy():
                return self._on_found_unhealthy(event, now)
            case ev.GraceOver():
                return self._on_grace_over(event, now)
            case ev.Ready() | ev.Shared() | ev.StateLost() | ev.Done():
                return self._on_message(event, now)
            case ev.Replaced():
                return self._on_replaced(event, now)
            case ev.Drained():
                return self._let_save(event) if self.phase is Phase.RUNNING else []  # its workers are already ending
            case ev.StopRequested():
                return self._on_stop_requested(event, now)
            case ev.DeadlinePassed():
                return self._on_deadline_passed(event, now)
            case _:
                assert_never(event)

    # Events of the rendezvous.

    def _on_assigned(self, event: Assigned) -> list[ev.Action]:  # noqa: C901  a case for each phase
        if self.assigned is not None and event.round <= self.assigned.round:
            return []  # of an earlier round, or a duplicate
        match self.phase:
            case Phase.JOINING:  # workers are started
                return self._spawn(event)
            case Phase.FORMING:  # workers enter the round
                return self._enter(event)
            case Phase.PREPARING if self.in_place.are_all(WorkerStage.READY):  # workers enter the round
                return self._enter(event)
            case Phase.LEAVING | Phase.PREPARING if self.in_place.has_joined:  # they will, once all are ready
                self.in_place.keep_next(event)
                self._missed_round = event.round
                return []
            case Phase.SPAWNING | Phase.CANCELLING | Phase.STOPPING if self.in_place.is_ahead:  # these, or others, will
                self.in_place.keep_next(event)
                self._missed_round = event.round
                return []
            case Phase.STOPPING if self.in_place.has_joined:
                self._missed_round = event.round
                return []  # the round completed, but our workers had to be stopped after all
            case Phase.DONE:
                return []  # the round completed while we were leaving
            case Phase.INIT | Phase.AWAITING | Phase.BARRIER:
                raise self._impossible(event)
            case Phase.SPAWNING | Phase.PREPARING | Phase.RUNNING | Phase.LEAVING | Phase.CANCELLING | Phase.STOPPING:
                raise self._impossible(event)
            case _:
                assert_never(self.phase)

    def _on_start_ahead(self, event: StartAhead) -> list[ev.Action]:
        match self.phase:
            case Phase.JOINING if self.in_place.is_ahead:  # tried before: workers start when a round includes them
                return [ev.ReportPrepared(are_ready=False)]
            case Phase.JOINING:  # workers are started
                return self._spawn(None)
            case Phase.PREPARING | Phase.FORMING if self.in_place.are_all(WorkerStage.READY):  # they wait already
                return [ev.ReportPrepared(are_ready=not self.in_place.is_worn_out)]
            case Phase.SPAWNING | Phase.PREPARING:
                return []  # already started
            case Phase.RUNNING | Phase.LEAVING | Phase.FORMING | Phase.AWAITING | Phase.BARRIER:
                return []  # a round includes this node
            case Phase.CANCELLING | Phase.STOPPING | Phase.DONE:
                return []  # the workers are about to end, or have ended
            case Phase.INIT:
                raise self._impossible(event)
            case _:
                assert_never(self.phase)

    def _on_interrupted(self, event: Interrupted, now: float) -> list[ev.Action]:  # noqa: C901  a case for each phase
        if self.in_place.is_next(event.round):
            self.in_place.drop_next()
            return []  # over before our workers were ready for it
        if self.assigned is None or event.round != self.assigned.round or self.in_place.is_ahead:
            return []  # of another round
        match self.phase:
            case Phase.SPAWNING:  # the start is cancelled, for another round
                return self._cancel(Rejoin(), WorkerState.STOPPED, event.decision, now)
            case Phase.RUNNING if event.in_place and self.in_place.can_leave:  # they leave, for another round
                return self._leave(Rejoin(), WorkerState.HEALTHY, event.decision, now)
            case Phase.RUNNING:  # workers are stopped, for another round
                return self._stop(Rejoin(), WorkerState.STOPPED, event.decision, now)
            case Phase.LEAVING if isinstance(self._wish, Await) and event.in_place:  # the answer to our failure
                self._wish, self.reason = Rejoin(), event.decision
                gone = [rank for rank in self.in_place.those(WorkerStage.LOST) if rank not in self.exits.left]
                return [action for rank in gone for action in self._replace(rank)]
            case Phase.LEAVING if isinstance(self._wish, Await):  # the answer: in new processes
                return self._stop(Rejoin(), WorkerState.STOPPED, event.decision, now)
            case Phase.STOPPING if isinstance(self._wish, Await):  # the answer to our failure: restart
                self._wish, self.reason = Rejoin(), event.decision
                return self._stop_rest(now)
            case Phase.CANCELLING | Phase.STOPPING | Phase.LEAVING | Phase.FORMING | Phase.JOINING | Phase.DONE:
                return []  # already on the way to the next round, or out
            case Phase.AWAITING | Phase.BARRIER:  # takes part in the next round
                self.state, self.reason = WorkerState.STOPPED, event.decision
                return self._join()
            case Phase.INIT | Phase.PREPARING:  # its workers are not in a round
                raise self._impossible(event)
            case _:
                assert_never(self.phase)

    def _on_ended(self, event: Ended, now: float) -> list[ev.Action]:
        if self.phase is Phase.DONE or isinstance(self._wish, End):
            return []  # already leaving
        self.verdict = event
        end = End.after(event)
        match self.phase:
            case Phase.SPAWNING:  # the start is cancelled, for good
                return self._cancel(end, WorkerState.UNHEALTHY, event.decision, now)
            case Phase.PREPARING | Phase.RUNNING | Phase.LEAVING | Phase.FORMING:  # workers are stopped, for good
                return self._stop(end, WorkerState.UNHEALTHY, event.decision, now)
            case Phase.CANCELLING | Phase.STOPPING:  # ends once the workers are gone
                self._wish = end
                return self._stop_rest(now)
            case Phase.INIT | Phase.JOINING | Phase.AWAITING | Phase.BARRIER:  # ends
                return self._finish(end)
            case _:
                assert_never(self.phase)

    # Events of the workers.

    def _on_spawned(self, event: ev.Spawned, now: float) -> list[ev.Action]:
        match self.phase:
            case Phase.SPAWNING if self.in_place.is_ahead:  # waits for the workers
                self._take_ids(event)
                self.phase, self.deadline = Phase.PREPARING, now + LIMIT_S
                return self._form()
            case Phase.SPAWNING:  # workers run
                self.phase = Phase.RUNNING
                self._take_ids(event)
                return self._begin(self.in_place.those(WorkerStage.READY))
            case Phase.CANCELLING:  # too late to cancel: workers are stopped
                self._take_ids(event)
                return self._stop(self._wish, self.state, self.reason, now)
            case Phase.PREPARING | Phase.RUNNING | Phase.LEAVING | Phase.FORMING | Phase.STOPPING:
                return []  # a duplicate
            case Phase.INIT | Phase.JOINING | Phase.AWAITING | Phase.BARRIER | Phase.DONE:
                return []  # a duplicate, or we gave up on it
            case _:
                assert_never(self.phase)

    def _on_spawn_cancelled(self, event: ev.SpawnCancelled) -> list[ev.Action]:
        match self.phase:
            case Phase.CANCELLING:  # nothing runs: the wish follows
                return self._stopped()
            case Phase.INIT | Phase.JOINING | Phase.AWAITING | Phase.BARRIER | Phase.DONE:
                return []  # a duplicate, or we gave up on it
            case Phase.SPAWNING | Phase.PREPARING | Phase.RUNNING | Phase.LEAVING | Phase.FORMING | Phase.STOPPING:
                raise self._impossible(event)
            case _:
                assert_never(self.phase)

    def _on_exited(self, event: ev.Exited, now: float) -> list[ev.Action]:
        if event.generation != self.generation or event.local_rank not in self.exits.alive:
            return []  # an earlier generation's, or a duplicate
        was_starting = self.in_place.stage[event.local_rank] is WorkerStage.STARTING
        can_recover = self.in_place.can_lose_one
        self.exits.on_exited(event.local_rank)
        self.in_place.on_lost(event.local_rank)
        match self.phase:
            case Phase.RUNNING if event.failure is not None:  # reports the failure, then the others are stopped
                at = now if event.gone_at is None else event.gone_at
                return self._fail(event.local_rank, event.failure, at, now, in_place=can_recover)
            case Phase.RUNNING:  # succeeded; processes that it left behind have a deadline
                self.deadline = now + KILL_WAIT_S
                return self._release()
            case Phase.PREPARING:  # all start when a round includes this node
                self.exits.on_stopping(event.local_rank, event.failure, event.raised)
                return self._stop(self._wish, WorkerState.STOPPED, "a worker ended before it was in a round", now)
            case Phase.LEAVING if was_starting:  # the replacement failed, so all start in new processes
                self.exits.on_stopping(event.local_rank, event.failure, event.raised)
                reason = "a replacement ended before it was ready"
                return self._stop(self._wish, WorkerState.STOPPED, reason, now)
            case Phase.LEAVING | Phase.FORMING:  # it is replaced as well, once none of its processes is left
                self.exits.on_stopping(event.local_rank, event.failure, event.raised)
                return self._on_survivor_lost(now)
            case Phase.STOPPING:  # a victim, unless it failed before it could be asked
                self.exits.on_stopping(event.local_rank, event.failure, event.raised)
                return []
            case Phase.DONE:
                return []  # we gave up on it
            case Phase.INIT | Phase.JOINING | Phase.SPAWNING | Phase.CANCELLING | Phase.AWAITING | Phase.BARRIER:
                raise self._impossible(event)
            case _:
                assert_never(self.phase)

    def _on_found_unhealthy(self, event: ev.FoundUnhealthy, now: float) -> list[ev.Action]:
        if event.generation != self.generation or event.local_rank not in self.exits.alive:
            return []  # an earlier generation's, or it ended by itself meanwhile
        stop = ev.Stop(self.generation, (event.local_rank,), event.signum)
        match self.phase:
            case Phase.RUNNING:  # reports the failure, stops it with its own signal, the others as always
                can_recover = self.in_place.can_lose_one
                self.in_place.on_lost(event.local_rank)
                report, *others = self._fail(event.local_rank, event.failure, now, now, in_place=can_recover)
                return [report, stop, *others]
            case Phase.STOPPING if isinstance(self._wish, Await) and event.local_rank not in self.exits.failed:
                self.exits.fail(event.local_rank, event.failure)  # all that hang were found while they ran
                return [stop]
            case Phase.PREPARING | Phase.LEAVING | Phase.FORMING:
                return []  # if it does not reach the safe point it is killed
            case Phase.STOPPING | Phase.DONE:
                return []  # it is already being stopped, or we gave up on it
            case Phase.INIT | Phase.JOINING | Phase.SPAWNING | Phase.CANCELLING | Phase.AWAITING | Phase.BARRIER:
                raise self._impossible(event)
            case _:
                assert_never(self.phase)

    def _on_cleared(self, event: ev.Cleared, now: float) -> list[ev.Action]:  # noqa: C901  as above
        if event.generation != self.generation or event.local_rank not in self.exits.left:
            return []  # an earlier generation's, or a duplicate
        if self.phase in {Phase.PREPARING, Phase.FORMING}:  # a worker ends before it is cleared, and so ends the phase
            raise self._impossible(event)
        self.exits.on_cleared(event.local_rank)
        match self.phase:
            case Phase.RUNNING | Phase.STOPPING if self.exits.left:  # waits for the others
                if self.phase is Phase.RUNNING and not self.exits.has_children:
                    self.deadline = None
                return []
            case Phase.LEAVING if isinstance(self._wish, Rejoin):  # no process of a lost worker is left
                return self._replace(event.local_rank)
            case Phase.LEAVING:
                return []  # it is replaced if the leader decides so
            case Phase.RUNNING:  # all have succeeded
                assert self.assigned is not None
                self.phase, self.deadline = Phase.BARRIER, now + self.spec.exit_barrier_timeout_s
                self.state, self.reason = WorkerState.SUCCEEDED, "every worker of this node succeeded"
                return [ev.ReportSucceeded(self.assigned.round)]
            case Phase.STOPPING:  # nothing is left: the wish follows
                return self._stopped()
            case Phase.DONE:
                return []  # we gave up on it
            case Phase.INIT | Phase.JOINING | Phase.SPAWNING | Phase.CANCELLING | Phase.AWAITING | Phase.BARRIER:
                raise self._impossible(event)
            case _:
                assert_never(self.phase)

    # Messages of workers that have opted in to recovery in place.

    def _on_message(self, event: ev.Ready | ev.Shared | ev.StateLost | ev.Done, now: float) -> list[ev.Action]:
        if event.generation != self.generation or not self.in_place.is_from(event.local_rank, event.process):
            return []  # an earlier generation's, or of a process that was replaced
        if isinstance(event, ev.Ready):
            return self._on_ready(event)
        if event.round != self.fence or self.phase not in {Phase.RUNNING, Phase.LEAVING}:
            return []  # of another round
        if self.phase is Phase.LEAVING and not isinstance(event, ev.StateLost):
            return []  # the round is over
        match event:
            case ev.Shared():
                could_leave = self.in_place.can_leave
                self.in_place.on_shared(event.local_rank)
                return [] if could_leave else self._opt_in()
            case ev.StateLost():  # the state in these processes belongs to no step
                self.in_place.on_state_lost()
                reason = "no rank has a whole state, and there is no checkpoint"
                return self._stop(self._wish, WorkerState.STOPPED, reason, now)
            case ev.Done():
                self.in_place.on_done(event.local_rank)
                return self._release()
            case _:
                assert_never(event)

    def _on_ready(self, event: ev.Ready) -> list[ev.Action]:
        stage = self.in_place.stage[event.local_rank]
        is_new = stage is WorkerStage.STARTING and event.round < 0
        has_left = stage is WorkerStage.LEAVING and event.round == self.fence
        if not is_new and not has_left:
            return []  # a duplicate, or of another round
        self.in_place.on_ready(event.local_rank)
        match self.phase:
            case Phase.RUNNING:  # it enters the round that it was started for
                return self._begin((event.local_rank,))
            case Phase.LEAVING | Phase.PREPARING:  # the last one makes this node join the next round
                return self._form()
            case Phase.SPAWNING | Phase.CANCELLING | Phase.STOPPING | Phase.DONE:
                return []  # it enters once all are started, or is stopped
            case Phase.INIT | Phase.JOINING | Phase.FORMING | Phase.AWAITING | Phase.BARRIER:
                raise self._impossible(event)
            case _:
                assert_never(self.phase)

    def _on_replaced(self, event: ev.Replaced, now: float) -> list[ev.Action]:
        rank = event.local_rank
        if event.generation != self.generation or rank not in self.exits.left or rank in self.exits.alive:
            return []  # an earlier generation's, or a duplicate
        self.exits.on_replaced(rank)
        self.in_place.on_started(frozenset({rank}), warm=frozenset({rank} if event.is_warm else ()))
        self.workers = tuple(each.replace(id=event.id) if each.local_rank == rank else each for each in self.workers)
        match self.phase:
            case Phase.LEAVING if not event.has_socket:
                return self._stop(self._wish, WorkerState.STOPPED, "a replacement has no in-place socket", now)
            case Phase.LEAVING:
                return []  # its `Ready` follows
            case Phase.STOPPING:  # it was being started when all were stopped
                signum = signal.SIGKILL if self.exits.is_killing else self._wish.signum
                self.exits.ask((rank,))
                return [ev.Stop(self.generation, (rank,), signum)]
            case Phase.DONE:
                return []  # we gave up on it
            case Phase.INIT | Phase.JOINING | Phase.SPAWNING | Phase.RUNNING | Phase.FORMING | Phase.CANCELLING:
                raise self._impossible(event)
            case Phase.PREPARING | Phase.AWAITING | Phase.BARRIER:
                raise self._impossible(event)
            case _:
                assert_never(self.phase)

    # Requests of users, and deadlines.

    def _on_grace_over(self, event: ev.GraceOver, now: float) -> list[ev.Action]:
        if event.generation != self.generation or self.exits.is_killing:
            return []  # an earlier generation's, or they are being killed
        match self.phase:
            case Phase.STOPPING if self.is_leaving and not event.is_final:
                return []  # now stopped for good: workers keep the shutdown timeout
            case Phase.STOPPING:  # kills: waiting longer cannot help
                return self._kill(now)
            case Phase.JOINING | Phase.AWAITING | Phase.BARRIER | Phase.DONE:
                return []  # the workers ended meanwhile
            case Phase.INIT | Phase.SPAWNING | Phase.RUNNING | Phase.LEAVING | Phase.FORMING | Phase.CANCELLING:
                return []  # no worker is being stopped
            case Phase.PREPARING:
                return []  # no worker is being stopped
            case _:
                assert_never(self.phase)

    def _on_stop_requested(self, event: ev.StopRequested, now: float) -> list[ev.Action]:
        end = End(WorkerState.STOPPED, reason := event.why, not event.is_drained, event.is_drained, event.signum)
        match self.phase:
            case Phase.SPAWNING:  # the start is cancelled, and the agent leaves
                return [ev.ReportLeft(reason), *self._cancel(end, WorkerState.STOPPED, reason, now)]
            case (
                Phase.PREPARING | Phase.RUNNING | Phase.LEAVING | Phase.FORMING
            ):  # workers are stopped, and the agent leaves
                return [ev.ReportLeft(reason), *self._stop(end, WorkerState.STOPPED, reason, now)]
            case Phase.CANCELLING if isinstance(self._wish, End) and self._wish.asked:  # stops waiting
                return self._finish(self._wish)
            case Phase.STOPPING if isinstance(self._wish, End) and self._wish.asked:  # kills
                return self._kill(now)
            case Phase.CANCELLING | Phase.STOPPING if isinstance(self._wish, End):  # keeps the end; the next kills
                self._wish = self._wish.replace(asked=True)
                return []
            case Phase.CANCELLING | Phase.STOPPING:  # leaves once the workers are gone
                self._wish, self.reason = end, reason
                return [ev.ReportLeft(reason), *self._stop_rest(now)]
            case Phase.INIT | Phase.JOINING | Phase.AWAITING | Phase.BARRIER:  # leaves
                return [ev.ReportLeft(reason), *self._finish(end)]
            case Phase.DONE:
                return []  # nothing is left to stop
            case _:
                assert_never(self.phase)

    def _on_deadline_passed(self, event: ev.DeadlinePassed, now: float) -> list[ev.Action]:  # noqa: C901  as above
        if self.deadline is None or now < self.deadline:
            return []  # disarmed or moved while the event was in the mailbox
        match self.phase:
            case Phase.CANCELLING if isinstance(self._wish, End):  # leaves without the back end's answer
                return self._finish(self._wish)
            case Phase.CANCELLING:  # leaves: its next workers could meet those of the cancelled start
                reason = f"a cancelled start of workers did not end within {self.spec.shutdown_timeout_s:g} s"
                return [ev.ReportLeft(reason), *self._finish(End(WorkerState.STOPPED, reason))]
            case Phase.LEAVING:  # kills those that do not leave; if that does not help, stops all
                return self._on_late(now)
            case Phase.PREPARING:  # stops all: they start when a round includes them
                reason = f"not all workers were ready {LIMIT_S:g} s after their start"
                return self._stop(self._wish, WorkerState.STOPPED, reason, now)
            case Phase.STOPPING if not self.exits.may_kill:  # gives up on its workers
                reason = "workers survived SIGKILL"
                return [ev.ReportLeft(reason), *self._finish(End(WorkerState.UNKNOWN, reason))]
            case Phase.STOPPING:  # kills
                return self._kill(now)
            case Phase.RUNNING:  # stops the other workers, then gives up
                reason = "child processes of a finished worker survived SIGKILL"
                end = End(WorkerState.UNKNOWN, reason)
                return [ev.ReportLeft(reason), *self._stop(end, WorkerState.UNHEALTHY, reason, now)]
            case Phase.BARRIER:  # ends as succeeded
                reason = f"exit barrier timed out after {self.spec.exit_barrier_timeout_s:g} s: other nodes still run"
                return [ev.ReportLeft(reason), *self._finish(End(WorkerState.SUCCEEDED, reason))]
            case Phase.INIT | Phase.JOINING | Phase.SPAWNING | Phase.FORMING | Phase.AWAITING | Phase.DONE:
                raise self._impossible(event)
            case _:
                assert_never(self.phase)

    # Moves in place.

    def _begin(self, local_ranks: tuple[int, ...]) -> list[ev.Action]:
        """Workers that were started for this round enter it; the last one completes the opt-in of this node."""
        if not local_ranks:
            return []
        assert self.assigned is not None
        for rank in local_ranks:
            self.in_place.begin(rank)
        return [ev.Begin(self.generation, local_ranks, self.assigned), *self._opt_in()]

    def _opt_in(self) -> list[ev.Action]:
        """Reports that all workers can leave the round.

        After several rounds without the state, they can leave only once they have it: one node must not restart its
        workers while the others keep theirs.
        """
        assert self.assigned is not None
        return [ev.ReportOptedIn(self.assigned.round)] if self.in_place.can_leave else []

    def _leave(self, wish: Rejoin | Await, state: WorkerState, reason: Why, now: float) -> list[ev.Action]:
        """Workers leave the round and keep their processes."""
        assert self.assigned is not None
        self.phase, self.state, self.reason, self._wish = Phase.LEAVING, state, reason, wish
        self.deadline = now + GRACE_S
        return [ev.Leave(self.generation, self.in_place.leave(now), self.assigned.fence, reason)]

    def _release(self) -> list[ev.Action]:
        """Lets workers whose functions have returned end, if they need not wait for another one."""
        if not self.in_place.may_be_released:
            return []
        self.in_place.release()
        return [ev.Release(self.generation)]

    def _replace(self, local_rank: int) -> list[ev.Action]:
        self.exits.replace(local_rank)
        return [ev.Replace(self.generation, local_rank, self.in_place.replace(local_rank))]

    def _on_survivor_lost(self, now: float) -> list[ev.Action]:
        if not self.in_place.kept:
            return self._stop(self._wish, WorkerState.STOPPED, "no worker of this node has survived", now)
        if self.phase is Phase.FORMING:
            self.in_place.await_replacement(now)
            self.phase, self.deadline = Phase.LEAVING, self.in_place.ready_by
        return []

    def _form(self) -> list[ev.Action]:
        """Joins the next round, or reports that this node can, if all workers are ready for it."""
        if not self.in_place.are_all(WorkerStage.READY) or isinstance(self._wish, Await):
            return []
        if self.in_place.next is not None:
            return self._enter(self.in_place.next)
        self.phase, self.deadline = Phase.PREPARING if self.in_place.is_ahead else Phase.FORMING, None
        if self.in_place.has_joined:
            return [ev.ReportPrepared(are_ready=not self.in_place.is_worn_out)]
        self.in_place.join()
        return [self._ready(are_ready=not self.in_place.is_worn_out)]

    def _enter(self, assigned: Assigned) -> list[ev.Action]:
        """Makes all workers enter a complete round."""
        self.assigned, self.phase, self.deadline = assigned, Phase.RUNNING, None
        self.state, self.reason, self._wish = WorkerState.HEALTHY, "", Rejoin()
        self.workers = tuple(ev.worker_of(assigned.ranks, each.local_rank).replace(id=each.id) for each in self.workers)
        self.in_place.begin_round()
        local_ranks = tuple(self.in_place.stage)
        return [ev.Begin(self.generation, local_ranks, assigned), *self._opt_in()]

    def _on_late(self, now: float) -> list[ev.Action]:
        """Handles workers that are not ready in time."""
        if now >= self.in_place.ready_by:
            reason = f"not all workers were ready {LIMIT_S:g} s after the end of the round"
            return self._stop(self._wish, WorkerState.STOPPED, reason, now)
        self.deadline = self.in_place.ready_by
        leaving = {*self.in_place.those(WorkerStage.LEAVING), *self.in_place.those(WorkerStage.LOST)}
        late = tuple(sorted(leaving & self.exits.alive))
        for rank in late:
            self.in_place.on_lost(rank)  # if it becomes ready after all, it is being killed, and must not begin a round
        return [ev.Stop(self.generation, late, signal.SIGKILL)] if late else []

    # Moves.

    def _join(self) -> list[ev.Action]:
        self.phase, self.deadline = Phase.JOINING, None
        return [self._ready()]

    def _ready(self, *, are_ready: bool = False) -> ev.Join:
        assigned = 0 if self.assigned is None else self.assigned.round
        return ev.Join(max(assigned, self._missed_round), are_ready=are_ready)

    def _spawn(self, assigned: Assigned | None) -> list[ev.Action]:
        """Starts the workers: for a round, or ahead of it."""
        local_ranks = range(self.spec.local_world_size)
        self.generation += 1
        self.phase, self.state, self.reason = Phase.SPAWNING, WorkerState.HEALTHY, ""
        self._wish, self.exits, self.deadline = Rejoin(), Exits(), None
        self.in_place.start(local_ranks, is_ahead=assigned is None)
        if assigned is None:
            self.workers = tuple(Worker(rank) for rank in local_ranks)
        else:
            self.assigned = assigned
            self.workers = tuple(ev.worker_of(assigned.ranks, rank) for rank in local_ranks)
        return [ev.Spawn(self.generation, assigned)]

    def _take_ids(self, event: ev.Spawned) -> None:
        self.exits.begin(range(self.spec.local_world_size))
        self.in_place.on_started(event.warm, warm=event.warm)
        self.workers = tuple(worker.replace(id=event.ids.get(worker.local_rank)) for worker in self.workers)

    def _cancel(self, wish: Wish, state: WorkerState, reason: Why, now: float) -> list[ev.Action]:
        self.phase, self.state, self.reason, self._wish = Phase.CANCELLING, state, reason, wish
        self.deadline = now + self.spec.shutdown_timeout_s
        return [ev.CancelSpawn(self.generation)]

    def _fail(
        self, local_rank: int, failure: ProcessFailure, at: float, now: float, *, in_place: bool
    ) -> list[ev.Action]:
        assert self.assigned is not None
        worker = self.workers[local_rank]
        if failure.rank != worker.global_rank:  # it ended just before it got this rank, with another rank or none
            failure = failure.replace(rank=worker.global_rank, world_size=worker.world_size)
        self.exits.fail(local_rank, failure)
        report = ev.ReportFailed(self.assigned.round, failure, at)
        move = self._leave if in_place else self._stop
        return [report, *move(Await(), WorkerState.UNHEALTHY, failure.short_message, now)]

    def _stop(self, wish: Wish, state: WorkerState, reason: Why, now: float) -> list[ev.Action]:
        self.phase, self.state, self.reason, self._wish = Phase.STOPPING, state, reason, wish
        self.deadline = now + self.spec.shutdown_timeout_s
        return self._stop_rest(now)

    def _let_save(self, drained: ev.Drained) -> list[ev.Action]:
        """Lets workers end once they have saved; those without a signal handler run until the leader ends all."""
        self.phase, self._wish, self.deadline = Phase.STOPPING, Await(), drained.until
        self.exits.drain(drained.local_ranks)
        return [ev.Stop(self.generation, ranks, self.spec.drain_signal)] if (ranks := drained.local_ranks) else []

    def _stop_rest(self, now: float) -> list[ev.Action]:
        """Asks all workers to end that were not asked yet, except unhealthy ones, which have their own signal."""
        local_ranks = tuple(sorted(self.exits.alive - self.exits.failed.keys() - self.exits.asked))
        if self.phase is not Phase.STOPPING or not local_ranks:
            return []
        self.exits.ask(local_ranks)
        self.deadline = now + self.spec.shutdown_timeout_s
        return [ev.Stop(self.generation, local_ranks, self._wish.signum)]

    def _kill(self, now: float) -> list[ev.Action]:
        if not self.exits.may_kill:
            return []  # requested again during the last wait
        self.exits.on_killed()
        self.deadline = now + KILL_WAIT_S
        return [ev.Stop(self.generation, self.exits.unended, signal.SIGKILL)]

    def _stopped(self) -> list[ev.Action]:
        match self._wish:
            case Rejoin() if self.in_place.is_ahead and self.in_place.next is not None:  # a round waits for this node
                return self._spawn(self.in_place.next)
            case Rejoin():
                self.state = WorkerState.STOPPED
                return self._join()
            case Await():
                self.phase, self.state, self.deadline = Phase.AWAITING, WorkerState.STOPPED, None
                return []
            case End() as end:
                return self._finish(end)
            case _:
                assert_never(self._wish)

    def _finish(self, end: End) -> list[ev.Action]:
        self.phase, self.deadline = Phase.DONE, None
        self.state, self.reason, self._wish, self.is_drained = end.state, end.reason, end, end.is_drained
        return [ev.Finish(end.reason)]
