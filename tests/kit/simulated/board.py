"""The board of the simulation: real semantics, and whatever may go wrong on the way to it.

It does one thing at a time.  Request and answer may be late or lost, each by itself: a campaign whose answer is lost has
been made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from aelastic.core.record import Record
from aelastic.rdzv.leader_record import Candidate, LeaderRecord
from aelastic.rdzv.protocol.messages import Seats
from kit.simulated.process import SimulatedProcess
from kit.simulated.world import World

BOARD = "board"  # its host


class BoardFaults(Record):
    """How often an operation on the board goes wrong."""

    request_lost: float = 0.0
    answer_lost: float = 0.0
    late: float = 0.0  # done seconds after the caller was told that it failed

    @property
    def any(self) -> bool:
        return bool(self.request_lost or self.answer_lost or self.late)


class BoardDownError(Exception): ...


class Board:
    """What the board says of the one run id there is.

    Args:
        world: where it stands.
        is_etcd: it keeps its text while it is away; else it is a TCPStore, and one that refuses is no more.
        hosts: with whose agents it comes and goes.
    """

    asks_again_s = 0.0  # a question whose answer a cut has swallowed is asked again so late, at most

    def __init__(self, world: World, *, is_etcd: bool = False, hosts: Sequence[str] = ()) -> None:
        self._world, self._is_etcd, self.hosts = world, is_etcd, hosts
        self.faults = BoardFaults()
        self.is_up = True
        self.is_silent = False  # and no caller gets an answer
        self.wiped_at = -1.0
        self.elections: list[tuple[float, LeaderRecord]] = []  # when each was made
        self.closed_at: float | None = None  # when it was told how the job ended
        self._closed_token = ""
        self.usurper = ""  # the agent that campaigned against a record that said so
        self.usurped_at = 0.0
        self._record: LeaderRecord | None = None
        self._epoch = 0
        self._seats: Seats | None = None
        self._is_new = True

    @property
    def record(self) -> LeaderRecord | None:
        return self._record

    @property
    def has_forgotten(self) -> bool:
        """Whether it was told how the job ended, and does not say so any more."""
        return self.closed_at is not None and (self.record is None or self.record.candidate.token != self._closed_token)

    @property
    def needed_hosts(self) -> Sequence[str]:
        """Without an agent on each of them the job cannot go on."""
        return self.hosts

    def reached_by(self, process: SimulatedProcess) -> tuple[Any, Asking]:
        """The operations, as a process has them done, and its way to them."""
        return self, Asking(self._world, self, process)

    def is_deaf(self, host: str) -> bool:
        """Whether a host may get no answer."""
        cut = self._world.cut
        is_cut = (host, BOARD) in cut or (BOARD, host) in cut
        return is_cut or not self.is_up or self.is_silent or self.faults.any

    def is_served_by(self, host: str) -> bool:
        return host in self.hosts and self.is_up

    def on_host_up(self, host: str) -> None:
        self.is_up |= host in self.hosts

    def on_host_gone(self, host: str) -> None:
        self._world.note(BOARD, f"is gone with {host}")
        self.is_up = False
        self.wipe()

    def on_host_frozen(self, host: str) -> None:
        self.is_silent |= host in self.hosts

    def go_down(self) -> None:
        """An etcd refuses and keeps what it knew; a TCPStore that refuses is no more, so this one is silent."""
        if self._is_etcd:
            self.is_up = False
        else:
            self.is_silent = True

    def come_up(self) -> None:
        self.is_silent = False
        self.is_up |= self._is_etcd

    def wipe(self) -> None:
        self._record, self._epoch, self._is_new, self.wiped_at = None, 0, True, self._world.now
        self._seats = None

    def read(self) -> LeaderRecord | None:
        self._reach()
        return self.record

    def campaign(self, candidate: Candidate, seen: LeaderRecord | None, above: int) -> LeaderRecord | None:
        self._reach()
        if self.record != seen:
            return self.record
        if seen is not None and seen.verdict:
            self.usurper, self.usurped_at = candidate.node_id, self._world.now
        self._epoch = candidate.epoch_after(above, self._epoch)
        self._write(LeaderRecord(self._epoch, candidate, renewals=0, seats=self._seats))
        assert self._record is not None
        self.elections.append((self._world.now, self._record))
        return self._record

    def renew(self, record: LeaderRecord) -> LeaderRecord | None:
        try:
            self._reach()
        except BoardDownError:
            if not self._is_etcd:
                return record.renewed()  # no agent can be elected on what does not exist
            raise
        now, held = self._mine(record), self._record
        if now is None and record.is_elected and held is not None and held.is_first and held.epoch > record.epoch:
            return held
        if now is None and record.is_elected and record.epoch > self._epoch:
            self.elections.append((self._world.now, record))  # it was elected by the nodes of its round
            now = record.replace(renewals=0)
        if now is not None:
            self._write(now.renewed().replace(seats=record.seats))
        return None if now is None else self._record

    def publish(self, record: LeaderRecord, verdict: str) -> bool:
        self._reach()
        now = self._mine(record)
        if now is None:
            return False
        if self.closed_at is None:
            self.closed_at, self._closed_token = self._world.now, now.candidate.token
        self._write(LeaderRecord(now.epoch, now.candidate, now.renewals, verdict))
        return True

    def resign(self, record: LeaderRecord) -> None:
        self._reach()
        if record.is_same_term(self.record):
            self._record, self._seats = None, record.seats

    def _mine(self, record: LeaderRecord) -> LeaderRecord | None:
        if self._is_new:
            return record.replace(
                renewals=record.renewals or 0
            )  # the store is a new one, so no agent was elected there: this leader goes on
        return self.record if record.is_same_term(self.record) else None

    def _reach(self) -> None:
        if not self.is_up:
            raise BoardDownError

    def _write(self, record: LeaderRecord) -> None:
        self._record, self._epoch, self._is_new = record, max(self._epoch, record.epoch), False
        self._seats = record.seats


class Asking:
    """One process's way to the board: one question at a time."""

    def __init__(self, world: World, board: Board, process: SimulatedProcess) -> None:
        self._world, self._board, self._process = world, board, process
        self._waiting: deque[Question] = deque()
        self._asked: Question | None = None

    def ask(self, name: str, do: Callable[[], Any], limit_s: float, done: Callable[[bool, Any], None]) -> None:
        """Has something done on the board; `done` is called with whether we know, and what it gave."""
        question = Question(name, do, done)
        self._waiting.append(question)
        self._world.after(limit_s, lambda: self._answer(question, False, "no answer in time"))
        self._next()

    def fail(self, *names: str) -> None:
        """Questions that are asked are of no use any more."""
        for question in [*([self._asked] if self._asked else []), *self._waiting]:
            if question.name in names:
                self._hear(question, False, "of no use any more")

    def _next(self) -> None:
        if self._asked is not None or not self._waiting:
            return
        self._asked = self._waiting.popleft()
        self._carry_out(self._asked)

    def _carry_out(self, question: Question) -> None:
        host, faults, chance = self._process.host, self._board.faults, self._world.random.random()
        if chance < faults.request_lost:
            self._fail_soon(question)
            return
        if chance < faults.request_lost + faults.late:
            self._fail_soon(question)
            self._world.after(self._world.random.uniform(0, 8), lambda: self._do(question))
            return
        self._world.after(self._world.delay(), lambda: self._world.carry(host, BOARD, lambda: self._do(question)))

    def _fail_soon(self, question: Question) -> None:
        delay_s = self._world.random.uniform(0, 0.5)
        self._world.after(delay_s, lambda: self._answer(question, False, "the connection to it broke"))

    def _do(self, question: Question) -> None:
        if self._board.is_silent:
            return
        try:
            is_known, value = True, question.do()
        except BoardDownError:
            is_known, value = False, "it is down"
        self._world.note(BOARD, f"{question.name} of {self._process}: {'' if is_known else 'not '}done", [value])
        if self._world.random.random() < self._board.faults.answer_lost:
            self._fail_soon(question)
            return
        host = self._process.host
        delay_s = self._world.delay()
        answer = lambda: self._answer(question, is_known, value)  # noqa: E731
        self._world.after(delay_s, lambda: self._world.carry(BOARD, host, answer))

    def _answer(self, question: Question, is_known: bool, value: Any) -> None:
        self._process.post(self, lambda: self._hear(question, is_known, value))

    def _hear(self, question: Question, is_known: bool, value: Any) -> None:
        if question.is_over:
            return
        question.is_over = True
        if self._asked is question:
            self._asked = None
        else:
            self._waiting.remove(question)
        question.done(is_known, value)
        self._next()


class Question:
    def __init__(self, name: str, do: Callable[[], Any], done: Callable[[bool, Any], None]) -> None:
        self.name, self.do, self.done, self.is_over = name, do, done, False
