"""The endpoint of a simulated job, as the checks see it: the content of the cell, and the faults on the path to it.

Each agent uses the real cell over simulated stores (`stores.py`).  A request and its answer may each be late or lost: a
write whose answer is lost has still been made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aelastic.base.record import Record
from aelastic.rdzv.protocol.codec import from_text
from aelastic.rdzv.protocol.messages import StoredCell
from aelastic.rdzv.stores.endpoint_cell import EndpointCell
from kit.simulated.process import SimulatedProcess
from kit.simulated.world import World

ENDPOINT = "endpoint"  # its host


class EndpointFaults(Record):
    """How often an operation on the endpoint goes wrong."""

    request_lost: float = 0.0
    answer_lost: float = 0.0
    late: float = 0.0  # done seconds after the caller saw it fail

    @property
    def any(self) -> bool:
        return bool(self.request_lost or self.answer_lost or self.late)


class Endpoint:
    """The state of the endpoint for the only run id.

    Args:
        world: where it lives.
        hosts: the hosts whose agents it comes and goes with.
    """

    is_up = True
    is_silent = False  # if true, no caller gets an answer
    asks_again_s = 0.0  # how late, at most, a question is repeated if a cut swallowed its answer

    def __init__(self, world: World, hosts: Sequence[str] = ()) -> None:
        self._world, self.hosts = world, hosts
        self.faults = EndpointFaults()
        self.on_write: Callable[[SimulatedProcess], None] = lambda _: None  # called when one begins
        self.wiped_at = -1.0
        self.elections: list[tuple[float, StoredCell]] = []  # the first cell of each leader, and when it was written
        self.closed_at: float | None = None  # when the verdict was written to it
        self._verdict: Any = None  # the entry with the verdict
        self.stored: StoredCell | None = None

    @property
    def has_forgotten(self) -> bool:
        """Whether it has lost the verdict that was written to it."""
        committed = None if self.stored is None else self.stored.cell.committed
        return self.closed_at is not None and committed != self._verdict

    @property
    def needed_hosts(self) -> Sequence[str]:
        """The job cannot continue without an agent on each of these."""
        return self.hosts

    def reached_by(self, process: SimulatedProcess) -> EndpointCell:
        """The endpoint, as one process reaches it."""
        raise NotImplementedError

    def look(self) -> None:
        """Records what was written."""
        raise NotImplementedError

    def note(self, text: bytes) -> None:
        self.stored = stored = from_text(text.decode()) if text else None
        if stored is None:
            return
        cell = stored.cell
        if cell.leader and cell.leader not in {each.cell.leader for _, each in self.elections}:
            self.elections.append((self._world.now, stored))
        if cell.committed is not None and cell.committed.is_verdict and self.closed_at is None:
            self.closed_at, self._verdict = self._world.now, cell.committed

    def is_deaf(self, host: str) -> bool:
        """Whether a host may not get an answer."""
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
    """An operation that a process waits for, unless it has been cancelled."""

    name: str
    do: Callable[[], Any]
    answer: asyncio.Future[Any]

    def on_answer(self, result: Any) -> None:
        if self.answer.done():
            return
        if isinstance(result, Exception):
            self.answer.set_exception(result)
        else:
            self.answer.set_result(result)
