"""An agent of the simulation: the real cores, and shells that do just what the real ones do.

The shells are those of `supervisor.py`, `rdzv/agent_link.py` and `rdzv/coordinator_server.py`, method by method, without a loop: a
mailbox for each core, read in any order: a change there needs one here.  The workers are made up.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from aelastic.errors import ProcessFailure
from aelastic.group import events as g
from aelastic.group.worker_group import WorkerGroup
from aelastic.rdzv.coordinator import session_events as c
from aelastic.rdzv.coordinator.coordinator import Coordinator
from aelastic.rdzv.coordinator.leader import Leader
from aelastic.rdzv.coordinator.roster import RoundRules
from aelastic.rdzv.leader_record import Candidate, LeaderRecord
from aelastic.rdzv.member import member_events as m
from aelastic.rdzv.member.election_news import election_news
from aelastic.rdzv.member.member import Member
from aelastic.rdzv.member.search import Search
from aelastic.rdzv.protocol.messages import (
    Assigned,
    CoordinatorMessage,
    Failed,
    HungUp,
    Left,
    Node,
    NodeMessage,
    Prepared,
    Ready,
    Settled,
    Starts,
    Succeeded,
    Terms,
    Vote,
    Waiting,
    Welcome,
)
from aelastic.rdzv.protocol.requests import Answer, Benched, Notice
from aelastic.rdzv.restart_policy import RestartPolicy
from aelastic.rdzv.settings import LEASE_S, RendezvousSettings
from aelastic.rdzv.survivors import election_events as e
from aelastic.rdzv.survivors.absent import RETURN_S
from aelastic.rdzv.survivors.election import Election
from aelastic.rdzv.term import begin_term
from aelastic.spec import WorkerSpec
from kit.simulated.board import Board
from kit.simulated.process import Clock, CoreShell, SimulatedProcess
from kit.simulated.training import Holds, Rank, Training
from kit.simulated.world import FIN, End, Listener, World

if TYPE_CHECKING:
    from kit.simulated.checks import Checks

FAREWELL_S = 1.0


@dataclass(frozen=True)
class Work:
    """What the workers of one generation do.  Times are from their start; `None`: never."""

    fails_after_s: float | None = None
    fails_of: str = "killed"  # a key of `WAYS_TO_FAIL`
    succeeds_after_s: float | None = None
    ignores_term: bool = False
    stops_within_s: float = 0.5
    leaves_something_s: float = 0.05


# To find out why a worker ended.
POSTMORTEM_S = 0.03

# Exit code and message.
WAYS_TO_FAIL = {
    "killed": (-9, "Signal 9 (SIGKILL) received by PID 77"),
    "raised": (1, "ValueError: batch is empty"),
    "lost its peer": (1, "RuntimeError: [gloo] Connection closed by peer"),
    "lost its peer, and says so in its own words": (1, "RuntimeError: step 17 failed"),
}
VICTIMS = ("lost its peer", "lost its peer", "lost its peer, and says so in its own words")


class Agent(SimulatedProcess):
    """One agent, from its start to its end.

    Args:
        world: where it lives.
        board: where it looks.
        watcher: sees what it does.
        settings: as the user gave them.
        max_restarts: of the job.
        host: its machine.
        number: tells it from the others on this machine.
        work: what the workers of its next generation will do.
        clock: its machine's.
        prepares_s: until its fork server has imported; 0: it has none.
        has_board: it serves the board.
        workers: how many its node has.
    """

    def __init__(
        self,
        world: World,
        board: Board,
        watcher: Checks,
        settings: RendezvousSettings,
        max_restarts: int,
        host: str,
        number: int,
        work: Callable[[Agent], Work],
        clock: Clock,
        prepares_s: float = 0.0,
        has_board: bool = False,
        workers: int = 1,
    ) -> None:
        super().__init__(world, host, clock)
        self.watcher, self.settings, self.has_board = watcher, settings, has_board
        self.node_id, self.work = f"{host}#{number}", work
        self.policy = RestartPolicy(max_restarts)
        terms = Terms("job", settings.min_nodes, settings.max_nodes, max_restarts, LEASE_S)
        spec = WorkerSpec(
            entrypoint="x", local_world_size=workers, shutdown_timeout_s=8.0, exit_barrier_timeout_s=100.0
        )
        self.group = WorkerGroup(spec)
        self.holds = Holds(self, self._tell)
        self.training: Training | None = None
        self.answers: list[Answer] = []
        self.told: list[str] = []  # what it waits for
        self.member = Member(self.node_id, terms, Search(settings.join_timeout_s))
        self.election = Election(self.node_id, self.member.leader.lease_s)
        self.ballot_port = number if settings.has_elections else 0
        world.voters[number] = self
        self._ballots = 0
        self._askers: dict[int, tuple[Agent, int]] = {}  # connection to the agent at its other end, and its epoch
        self.is_finishing = False
        self.welcomed_at = 1e9
        self.is_leaving = False  # as it was asked to
        self.end = ""  # how it ended
        self.starts = Starts.PREPARING if prepares_s else Starts.COLD
        self.alive = 0  # the generation of its worker, if that runs
        self.round_of_workers: Assigned | None = None
        self._spawned_at = 0.0  # of the world, the last
        self.server: Server | None = None
        self.stream: End | None = None
        self.listener: Listener | None = None
        self.campaigned_at = 0.0
        self.board, self.asking = board.reached_by(self)
        self._connecting: list[bool] = [True]  # whether it is cancelled
        self._ports = 1000 * number
        self._tokens = 0
        self._group_shell = self.open_shell("group", self.group, self._carry_out_for_group, g.DeadlinePassed())
        self._member_shell = self.open_shell("member", self.member, self._carry_out_for_member, m.DeadlinePassed())
        for_election = self._carry_out_for_election
        self._election_shell = self.open_shell("election", self.election, for_election, e.DeadlinePassed())
        self.mail(self._group_shell, g.Start())
        self.drain()
        if prepares_s:
            self.world.after(prepares_s, lambda: self.post("fork server", self._prepare))

    def __repr__(self) -> str:
        return self.node_id

    def after_handling(self, shell: CoreShell) -> None:
        if shell is self._group_shell and self.group.is_done and not self.is_finishing:
            self.is_finishing = True
            self.world.after(0.0, lambda: self.post("finish", self._finish))
            self.close_shell(shell)
        if shell is self._member_shell:
            for news in election_news(self.member, self.election, self._new_candidate):
                self.mail(self._election_shell, news)
        if shell is self._election_shell and self.election.chosen is not None:
            self.asking.fail("read", "campaign")
        for_server = getattr(shell.carry_out, "__self__", None)
        if isinstance(for_server, Server):
            for_server.changed()

    def crash(self, how: str) -> None:
        """SIGKILL, after which the kernel tidies up; or, `dark`, the machine is off."""
        self.world.note(self.node_id, f"crashes ({how})")
        self.watcher.ends(self, is_dark=how == "dark")
        if how == "dark":
            self.world.dark.add(self.host)
        self._end("crashed", how)

    def freeze(self) -> None:
        super().freeze()
        self.watcher.falls_silent(self)

    def suspend(self) -> None:
        super().suspend()
        self.watcher.falls_silent(self)

    def thaw(self) -> None:
        if self.suspended_at is not None:
            self.watcher.clock_differs(self)
        self.watcher.goes_on(self)
        super().thaw()

    def jump(self, ahead_s: float) -> None:
        self.watcher.clock_differs(self)
        super().jump(ahead_s)

    def _end(self, end: str, how: str) -> None:
        self.is_alive, self.end = False, end
        if self.alive and how != "dark":  # the kernel closes their connections
            self.watcher.workers_gone(self)
        self.alive = 0
        for stream in [*(self.server.streams.values() if self.server else ()), *filter(None, [self.stream])]:
            if how == FIN:
                stream.close()
            stream.end(how)
        for listener in (self.listener, self.server.listener if self.server else None):
            if listener is not None:
                listener.close()

    def ask_to_leave(self) -> None:
        self.is_leaving = True
        self.watcher.ends(self)
        self.post("signal", lambda: self.mail(self._group_shell, g.StopRequested()))

    # The supervisor.

    def _carry_out_for_group(self, action: g.Action) -> None:
        match action:
            case g.Join(round_):
                assert not self.alive, "ready, and workers run"
                self._tell(self._ready(round_))
            case g.Spawn(generation, assigned):
                assert assigned is not None, "no worker opts in to recovery in place, so none starts ahead"
                self._spawn(generation, assigned)
            case g.TellFailed(round_, failure, at):
                self._tell(Failed(self.node_id, round_, failure, self.now - at))
            case g.TellSucceeded(round_):
                self._tell(Succeeded(self.node_id, round_))
            case g.TellLeft(reason):
                self._tell(Left(self.node_id, reason))
            case g.Stop(generation, local_ranks, signum):
                if local_ranks and (signum == signal.SIGKILL or not self._work.ignores_term):
                    stops_in_s = self.world.random.uniform(0, self._work.stops_within_s)
                    self.world.after(stops_in_s, partial(self.worker_exits, generation))
            case g.Finish():
                pass

    def _ready(self, after: int) -> Ready:
        preferred, port, workers = self.settings.node_rank, self.ballot_port, self.group.spec.local_world_size
        node = Node(self.node_id, self.host, "", workers, "", 29500, preferred, ballot_port=port)
        is_late = self.starts is Starts.PREPARING and self.group.generation > 0
        return Ready(node.replace(starts=Starts.COLD if is_late else self.starts), after=after)

    def _prepare(self) -> None:
        self.starts = Starts.WARM
        self._tell(Prepared(self.node_id, self.starts))

    def _tell(self, message: NodeMessage) -> None:
        self.mail(self._member_shell, m.Submitted(message))

    def _deliver(self, message: CoordinatorMessage) -> None:
        self.watcher.heard(self, message)
        if isinstance(message, Settled):
            return
        if isinstance(message, Waiting):
            self.told.append(message.text)
        elif isinstance(message, Notice):
            self.holds.on_told(message)
        elif isinstance(message, Answer):
            self.answers.append(message)
        elif isinstance(message, Benched):  # it waits; for longer than any story here
            self.told.append(message.reason)
        else:
            self.mail(self._group_shell, message)

    def _finish(self) -> None:
        if self.server is not None:
            self.server.tell_all(self._finish_stream)
        else:
            self._finish_stream()

    def _finish_stream(self) -> None:
        if self.stream is not None:
            self.stream.close()
        self.world.after(0.001, lambda: self.post("finish", self._leave))

    def _leave(self) -> None:
        self.world.note(self.node_id, f"ends: {self.group.state.name}, {self.group.reason}")
        self._end(self.group.state.name, FIN)

    # Workers.

    def _spawn(self, generation: int, assigned: Assigned) -> None:
        assert not self.alive, "two generations alive at once"
        self.watcher.spawns(self, assigned)
        work = self._work = self.work(self)
        self.alive, self.round_of_workers = generation, assigned
        self._train(generation, assigned)
        spawning_s = self.world.random.uniform(0, 0.1)
        self._spawned_at = self.world.now + spawning_s
        self._mail_later(spawning_s, g.Spawned(generation, {0: 0}))
        if work.fails_after_s is not None:
            self.world.after(0.1 + work.fails_after_s, partial(self._fail, generation, work.fails_of))
        elif work.succeeds_after_s is not None:
            self.world.after(0.1 + work.succeeds_after_s, partial(self.worker_exits, generation, is_done=True))

    def _train(self, generation: int, assigned: Assigned) -> None:
        """Its worker takes steps together with those of the other nodes, where the simulation is about that."""
        self.holds.begin()
        if self.world.step_s is None:
            return
        ranks, step_s = assigned.ranks, self.world.random.uniform(*self.world.step_s)
        self.training = self.world.trainings.setdefault(assigned.fence, Training(self.world, ranks.world_size))
        self.training.join(ranks.first_rank, Rank(self, generation, step_s))

    @property
    def can_leave_in_place(self) -> bool:
        """Whether its workers can leave their round and keep their processes."""
        return self.group.in_place.can_leave

    def leaves_in_order(self) -> None:
        """It was drained."""
        self.is_leaving = True
        self.watcher.ends(self)
        self.mail(self._group_shell, g.StopRequested(reason="drained", is_drained=True))

    def tell_group(self, event: g.Event) -> None:
        self.mail(self._group_shell, event)

    def _mail_later(self, delay_s: float, event: g.Event) -> None:
        self.world.after(delay_s, lambda: self.post("workers", lambda: self.mail(self._group_shell, event)))

    def _failure(self, why: str) -> ProcessFailure:
        exitcode, message = WAYS_TO_FAIL[why]
        rank = self.group.workers[0].global_rank
        return ProcessFailure.from_elsewhere(self.host, rank, 0, 1, exitcode, message, "", 0)

    def _fail(self, generation: int, why: str) -> None:
        if self.alive == generation:
            self.watcher.worker_failed(self, self.group.workers[0].global_rank)
            self.worker_exits(generation, self._failure(why))

    def lose_peer(self, generation: int) -> None:
        """A worker of another node is gone that this one talks to."""
        self.worker_exits(generation, self._failure(self.world.random.choice(VICTIMS)))

    def worker_exits(self, generation: int, failure: ProcessFailure | None = None, *, is_done: bool = False) -> None:
        if self.alive != generation:
            return
        leftover_s = self._work.leaves_something_s
        if not is_done:
            self.watcher.workers_gone(self)
        self.alive = 0

        def notice() -> None:
            exited = g.Exited(generation, 0, failure, self.now)
            spawning_s = max(0.0, self._spawned_at - self.world.now)  # an end is looked for when all have begun
            self._mail_later(spawning_s + self.world.random.uniform(0, POSTMORTEM_S), exited)
            self._mail_later(spawning_s + POSTMORTEM_S + leftover_s, g.Cleared(generation, 0))

        self.post(object(), notice)  # an agent that is frozen looks when it goes on

    @property
    def has_spawned(self) -> bool:
        """Whether the worker of this generation has begun."""
        return self.world.now >= self._spawned_at

    def fail_now(self, why: str = "killed") -> None:
        """A worker fails."""
        assert self.alive and self.has_spawned, "a worker that has not begun knows no other, and has no victims"
        self._fail(self.alive, why)

    def succeed_now(self) -> None:
        if self.alive:
            self.worker_exits(self.alive, is_done=True)

    # The link.

    def _carry_out_for_member(self, action: m.Action) -> None:  # noqa: C901, PLR0912  one case for each action
        match action:
            case m.ReadBoard():
                if self.election.chosen is not None:
                    self.mail(self._member_shell, m.BoardRead(self.election.chosen))
                else:
                    self._ask_board("read", self.board.read)
            case m.Campaign(seen, above):
                chosen = self.election.chosen
                if chosen is not None and chosen == seen and chosen.candidate.node_id == self.node_id:
                    self.campaigned_at = self.now
                    self.mail(self._member_shell, m.BoardRead(chosen))
                else:
                    self._campaign(seen, above)
            case m.Lead(record, is_heir, before):
                self._lead(record, before, is_heir=is_heir)
            case m.Connect(conn, record):
                self._disconnect()
                self._connect(conn, record)
            case m.Disconnect():
                self.watcher.hangs_up(self)
                self._disconnect()
            case m.Send(message):
                if self.stream is not None:
                    self.stream.send(message)
            case m.Deliver(message):
                self._deliver(message)
            case m.GiveUp(reason):
                self.world.note(self.node_id, f"gives up: {reason}")
                self._end("gave up", FIN)

    def _ask_board(self, name: str, do: Callable[[], LeaderRecord | None], *, is_campaign: bool = False) -> None:
        tell = partial(self.mail, self._election_shell)
        tell(e.BoardSilent(self.now, False))

        def done(is_known: bool, value: Any) -> None:
            if is_known and not is_campaign and self.election.is_stale(value, self.now):
                is_known, value = False, "no agent has been elected leader yet"
            elif is_known:
                tell(e.BoardSaid())
            elif value == "it is down":
                tell(e.BoardSilent(self.now, True))
            if not is_known and self.election.chosen is not None:
                self.mail(self._member_shell, m.BoardRead(self.election.chosen))
            elif not is_known:
                self.mail(self._member_shell, m.BoardFailed(value))
            elif is_campaign and value is None:
                self.mail(self._member_shell, m.NotEligible())
            else:
                self.mail(self._member_shell, m.BoardRead(value))

        self.asking.ask(name, do, self.member.leader.lease_s, done)

    def _campaign(self, seen: LeaderRecord | None, above: int) -> None:
        self.campaigned_at = self.now
        past = self.member.state.past
        candidate = self._new_candidate().replace(fence=past.fence, group_rank=past.group_rank, made_ms=self._wall_ms())
        self._ask_board("campaign", lambda: self.board.campaign(candidate, seen, above), is_campaign=True)

    def _wall_ms(self) -> int:
        return 1 + int(1000 * max(0.0, self.now - self.world.behind_s.get(self.host, 0.0)))

    def _new_candidate(self) -> Candidate:
        if self.listener is None:
            self._ports += 1
            self.listener = Listener(self.world, self, self._ports)
        self._tokens += 1
        return Candidate(self.node_id, (self.host,), self.listener.port, f"{self.node_id}-{self._tokens}")

    def _carry_out_for_election(self, action: e.Action) -> None:
        match action:
            case e.Ask(seat, vote):
                voter = self.world.voters[seat.port]
                self._say(voter, lambda: voter.asked_by(self, vote))
            case e.Answer(conn, voted):
                asker, epoch = self._askers.pop(conn)
                answered = e.Answered(self.node_id, epoch, voted)
                self._say(asker, lambda: asker.mail(asker._election_shell, answered))

    def _say(self, to: Agent, call: Callable[[], None]) -> None:
        arrive = partial(to.post, object(), call)
        self.world.after(self.world.delay(), lambda: self.world.carry(self.host, to.host, arrive))

    def asked_by(self, asker: Agent, vote: Vote) -> None:
        if self.member.phase != "over":
            self._ballots += 1
            self._askers[self._ballots] = asker, vote.leader.epoch
            self.mail(self._election_shell, e.Asked(self._ballots, vote))

    def _lead(self, record: LeaderRecord, before: tuple[int, int], *, is_heir: bool) -> None:
        if self.listener is None or record.candidate.port != self.listener.port:
            self.mail(self._member_shell, m.LeadershipLost())
            return
        rules = RoundRules.of(self.settings)
        coordinator = Coordinator(rules, self.policy, self.node_id, seat_before=before if is_heir else None)
        has_elections = self.settings.has_elections
        leader = begin_term(
            coordinator, self.member.terms, record, self.campaigned_at,
            has_elections=has_elections, is_replaceable=not self.has_board,
        )  # fmt: skip
        listener, self.listener = self.listener, None
        assert self.server is None, "two leaders"
        self.server = Server(self, leader, record, listener)

    def stepped_down(self) -> None:
        self.server = None
        self.mail(self._member_shell, m.LeadershipLost())

    def _disconnect(self) -> None:
        self._connecting[0] = True
        if self.stream is not None:
            if self.member.phase != "over":
                self.stream.send(HungUp())
            self.stream.close()
            self.stream = None

    def _connect(self, conn: int, record: LeaderRecord) -> None:
        is_cancelled = self._connecting = [False]
        is_here = record.candidate.addresses[0] == self.host

        def heard(message: Any) -> None:
            if isinstance(message, Welcome):
                self.welcomed_at = min(self.welcomed_at, self.world.now)
            self.mail(self._member_shell, m.Received(conn, message))

        def connected(end: End) -> None:
            if is_cancelled[0]:
                end.is_told = True
                end.close()
                return
            self.stream = end
            end.on_message = heard
            end.on_closed = lambda: self.mail(self._member_shell, m.ConnectionLost(conn, "it is gone", end.is_reset))
            self.mail(self._member_shell, m.Connected(conn))

        def failed(is_refused: bool, reason: str) -> None:
            if not is_cancelled[0]:
                self.mail(self._member_shell, m.ConnectFailed(conn, is_refused, reason, is_here))

        self.world.connect(self, record.candidate.addresses[0], record.candidate.port, connected, failed)


class Server:
    """The coordinator on the wire (`rdzv/coordinator_server.py`)."""

    def __init__(self, agent: Agent, leader: Leader, record: LeaderRecord, listener: Listener) -> None:
        self.agent, self.leader, self.record, self.listener = agent, leader, record, listener
        self.streams: dict[int, End] = {}
        self._count = 0
        self._is_claiming = self._is_displaced = False
        self._rival: LeaderRecord | None = None
        self._finishing: Callable[[], None] | None = None  # what is to be done once all have heard the verdict
        self.shell = agent.open_shell("leader", leader, self.carry_out, c.DeadlinePassed())
        self._hung_up: set[int] = set()  # connections whose nodes have said so
        listener.serve(self._accept)
        agent.arm(self.shell)

    def _accept(self, end: End) -> None:
        self._count += 1
        conn = self._count
        mail = self.agent.mail
        is_here = end.peer.host == self.agent.host
        peer, way = ("127.0.0.1", "127.0.0.1") if is_here else (end.peer.host, self.agent.host)

        def closed() -> None:
            self.streams.pop(conn, None)
            mail(self.shell, c.Closed(conn, end.is_reset))

        def heard(message: Any) -> None:
            if isinstance(message, HungUp):
                self._hung_up.add(conn)
            mail(self.shell, c.Received(conn, message))

        self.streams[conn] = end
        end.on_message, end.on_closed = heard, closed
        mail(self.shell, c.Opened(conn, peer, way))

    def carry_out(self, action: c.Action) -> None:  # noqa: C901  one case for each action
        agent = self.agent
        match action:
            case c.Say(conn, message):
                if conn in self.streams:
                    node_id = getattr(self.streams[conn].peer.process, "node_id", "")
                    agent.watcher.said(agent, self.leader, node_id, message)
                    self.streams[conn].send(message)
            case c.Drop(conn):
                if conn in self.streams:
                    self.streams[conn].close()
            case c.Renew(seats):
                if self.record.is_elected:
                    record, rival_epoch = (
                        None if self._is_displaced else self.record,
                        self._rival.epoch if self._rival else 0,
                    )
                    agent.mail(self.shell, c.Renewed(record, is_assumed=True, rival_epoch=rival_epoch))
                if not self._is_claiming:
                    self._is_claiming = self.record.is_elected
                    limit_s = self.leader.lease.lease_s
                    ends = [end for conn, end in self.streams.items() if end.is_open and conn not in self._hung_up]
                    here = {getattr(end.peer.process, "node_id", "") for end in ends}
                    done = partial(self._renewed, here)
                    renew = lambda: agent.board.renew(self.record.replace(seats=seats))  # noqa: E731
                    agent.asking.ask("renew", renew, limit_s, done)
            case c.Reclaim(above, stand_back_s):
                self._reclaim(above, stand_back_s)
            case c.Publish(verdict):
                agent.asking.ask(
                    "publish",
                    lambda: agent.board.publish(self.record, verdict),
                    self.leader.lease.lease_s,
                    self._published,
                )
            case c.StepDown():
                agent.stepped_down()
                self._stop()

    def _stop(self) -> None:
        self.agent.close_shell(self.shell)
        self.listener.close()
        for stream in list(self.streams.values()):
            stream.close()

    def _renewed(self, connected: set[str], is_known: bool, value: Any) -> None:
        was_claiming, self._is_claiming = self._is_claiming, False
        self._rival = None
        if is_known and value is not None and value.candidate != self.record.candidate:
            self._rival = value
            return
        if is_known and value is not None:
            self.agent.watcher.renewed(self.record.candidate.token, connected)
        if is_known:
            self._is_displaced, self.record = value is None, value or self.record
        if not was_claiming:
            self.agent.mail(self.shell, c.Renewed(value) if is_known else c.RenewFailed(value))

    def _published(self, is_known: bool, value: Any) -> None:
        self.agent.mail(self.shell, c.Published(value) if is_known else c.PublishFailed())

    def _reclaim(self, above: int, stand_back_s: float) -> None:
        agent, record = self.agent, self.record
        seen, rival = None if stand_back_s else record, self._rival
        if stand_back_s:
            agent.asking.ask("resign", lambda: agent.board.resign(record), FAREWELL_S, lambda *_: None)

        def done(is_known: bool, value: Any) -> None:
            if not is_known or value is None or value.candidate != record.candidate:
                self.agent.mail(self.shell, c.Reclaimed(None))
            else:
                self.record = value
                self.agent.mail(self.shell, c.Reclaimed(value))

        def campaign() -> None:
            board = agent.board
            ask = lambda: board.campaign(record.candidate, board.read() if rival else seen, above)  # noqa: E731
            agent.asking.ask("reclaim", ask, self.leader.lease.lease_s, done)

        stood_back_at = agent.clock.true(agent.now + stand_back_s)
        agent.world.at(stood_back_at, lambda: agent.post("reclaim", campaign))

    def changed(self) -> None:
        if self._finishing is not None and (self.leader.sessions.is_empty or not self.leader.coordinator.is_closed):
            then, self._finishing = self._finishing, None
            then()

    def tell_all(self, then: Callable[[], None], began: float | None = None) -> None:
        agent, leader = self.agent, self.leader
        began = agent.now if began is None else began
        until = min(leader.sessions.awaited_until, began + 2 * leader.lease.lease_s + RETURN_S)
        if leader.sessions.is_over and not leader.has_stepped_down and agent.now < until:
            agent.world.after(0.01, lambda: agent.post("tell all", lambda: self.tell_all(then, began)))
        else:
            self.finish(then)

    def finish(self, then: Callable[[], None]) -> None:
        world, agent = self.agent.world, self.agent

        def timed_out() -> None:
            if self._finishing is not None:
                resign, self._finishing = self._finishing, None
                resign()

        def resign() -> None:
            leader = self.leader
            if leader.has_stepped_down or (leader.coordinator.is_closed and not leader.has_told_all):
                then()
            else:
                record = self.record.replace(seats=self.record.seats if leader.is_blocked else None)
                agent.mail(self.shell, c.Resigned())  # first: what the board has been told must not be decided here
                agent.asking.ask("resign", lambda: agent.board.resign(record), FAREWELL_S, lambda *_: then())

        self._finishing = resign
        world.after(FAREWELL_S, lambda: agent.post("finish", timed_out))
        self.changed()
