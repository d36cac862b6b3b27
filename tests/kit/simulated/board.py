"""What the checks of a simulated job know of its board: what is written there, and what may go wrong on the way to it.

Each agent has the real board, over simulated stores (`stores.py`).  Request and answer may be late or lost, each by itself: a
campaign whose answer is lost has been made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aelastic.core.record import Record
from aelastic.rdzv.board import Board as RealBoard
from aelastic.rdzv.leader_record import LeaderRecord
from aelastic.rdzv.record_text import state_of
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


class Board:
    """What the board says of the one run id there is.

    Args:
        world: where it stands.
        hosts: with whose agents it comes and goes.
    """

    is_up = True
    is_silent = False  # and no caller gets an answer
    asks_again_s = 0.0  # a question whose answer a cut has swallowed is asked again so late, at most

    def __init__(self, world: World, hosts: Sequence[str] = ()) -> None:
        self._world, self.hosts = world, hosts
        self.faults = BoardFaults()
        self.on_write: Callable[[SimulatedProcess], None] = lambda _: None  # called when one begins
        self.wiped_at = -1.0
        self.elections: list[tuple[float, LeaderRecord]] = []  # when each was made
        self.closed_at: float | None = None  # when it was told how the job ended
        self._closed_token = ""
        self.usurper = ""  # the agent that campaigned against a record that said so
        self.usurped_at = 0.0
        self.record: LeaderRecord | None = None

    @property
    def has_forgotten(self) -> bool:
        """Whether it was told how the job ended, and does not say so any more."""
        return self.closed_at is not None and (self.record is None or self.record.candidate.token != self._closed_token)

    @property
    def needed_hosts(self) -> Sequence[str]:
        """Without an agent on each of them the job cannot go on."""
        return self.hosts

    def reached_by(self, process: SimulatedProcess) -> RealBoard:
        """The board, as one process has it."""
        raise NotImplementedError

    def look(self) -> None:
        """Notes what is written."""
        raise NotImplementedError

    def note(self, text: bytes) -> None:
        before, record = self.record, state_of(text).record
        self.record = record
        if record is None:
            return
        if not record.is_same_term(before) and not (self.elections and record.is_same_term(self.elections[-1][1])):
            self.elections.append((self._world.now, record))
            if before is not None and before.verdict:
                self.usurper, self.usurped_at = record.candidate.node_id, self._world.now
        if record.verdict and self.closed_at is None:
            self.closed_at, self._closed_token = self._world.now, record.candidate.token

    def is_deaf(self, host: str) -> bool:
        """Whether a host may get no answer."""
        raise NotImplementedError

    def is_served_by(self, host: str) -> bool:
        raise NotImplementedError

    def on_host_up(self, host: str) -> None: ...
    def on_host_gone(self, host: str) -> None: ...
    def on_host_frozen(self, host: str) -> None: ...
    def go_down(self) -> None: ...
    def come_up(self) -> None: ...
    def wipe(self) -> None: ...


@dataclass
class Question:
    """What a process waits for, unless it has been cancelled."""

    name: str
    do: Callable[[], Any]
    answer: asyncio.Future[Any]

    def hear(self, result: Any) -> None:
        if self.answer.done():
            return
        if isinstance(result, Exception):
            self.answer.set_exception(result)
        else:
            self.answer.set_result(result)
