"""A simulated process: an event loop on its machine's clock, which can be frozen and can end."""

from __future__ import annotations

import asyncio
import itertools
from asyncio import Future
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kit.simulated.event_loop import EventLoop
from kit.simulated.sockets import ListeningSocket, Socket
from kit.simulated.world import Attempt, End, World


@dataclass
class Clock:
    """One machine's monotonic clock: it never goes back, but it may jump ahead."""

    offset_s: float = 0.0
    rate: float = 1.0

    def local(self, true: float) -> float:
        return self.offset_s + true * self.rate

    def true(self, local: float) -> float:
        return (local - self.offset_s) / self.rate


class SimulatedProcess:
    """Runs a program on a loop of its own.

    Args:
        world: where it lives.
        host: its machine.
        clock: its machine's.
    """

    def __init__(self, world: World, host: str, clock: Clock) -> None:
        self.world, self.host, self.clock = world, host, clock
        self.is_alive, self.is_frozen = True, False
        self.jumped_at = -1e9  # its clock, the last time
        self.suspended_at: float | None = None  # its machine, and with that its clock
        self.suspended_until = -1e9
        self.loop = EventLoop(self)  # type: ignore[abstract]  # it has what a process here needs
        self.listening: dict[int, ListeningSocket] = {}  # by descriptor
        self.ends: dict[End, None] = {}  # of its connections
        self._descriptors = itertools.count(10)
        self._kept: list[tuple[object, Callable[[], object]]] = []  # while frozen
        world.add(self)

    @property
    def now(self) -> float:
        return self.clock.local(self.world.now)

    @property
    def is_running(self) -> bool:
        return self.is_alive and not self.is_frozen

    def post(self, source: object, call: Callable[[], object]) -> None:
        """Something happens to it; in order for each source."""
        if not self.is_alive:
            return
        if self.is_frozen:
            self._kept.append((source, call))
        elif self._may_run:
            self.loop.run(call)
        else:
            self.world.after(0.0, lambda: self.post(source, call))

    @property
    def _may_run(self) -> bool:
        """Whether time passes, and no process runs now, this one or another."""
        return self.world.is_passing and asyncio._get_running_loop() is None

    def do(self, call: Callable[[], object]) -> None:
        """Runs a call in this process: at once, if it is the running one."""
        if self.loop.is_running():
            call()
        else:
            self.post(self, call)

    def end(self, how: str) -> None:
        """Ends, and its kernel closes its connections (`End.end`)."""
        self.is_alive = False
        for end in list(self.ends):
            end.end(how)
        for listener in list(self.listening.values()):
            listener.close()
        self.world.after(0.0, self.loop.bury)

    # Its kernel.

    def new_descriptor(self) -> int:
        return next(self._descriptors)

    def has_connections(self, descriptor: int) -> bool:
        """Whether connections wait at a listening socket."""
        listener = self.listening.get(descriptor)
        return listener is not None and listener.has_connections

    def connect(self, address: str, port: int, connected: Future[Socket]) -> Attempt:
        """The future gets a socket, or an error."""

        def answer(result: End | OSError) -> None:
            if connected.done():
                return
            if isinstance(result, OSError):
                connected.set_exception(result)
            else:
                connected.set_result(Socket(result, self.new_descriptor()))

        return Attempt(self.world, self, address, port, answer)

    # Its machine.

    def freeze(self) -> None:
        self.world.note(repr(self), "is frozen")
        self.is_frozen = True

    def suspend(self) -> None:
        """The whole machine stands still, its clock too."""
        self.world.note(repr(self), "is suspended with its clock")
        self.is_frozen, self.suspended_at = True, self.world.now

    def thaw(self) -> None:
        """All events and timers that were held back happen at once: in any order, but in order for each source."""
        if not self.is_alive or not self.is_frozen:
            return
        if not self._may_run:
            self.world.after(0.0, self.thaw)
            return
        self.world.note(repr(self), "goes on")
        self.is_frozen = False
        if self.suspended_at is not None:
            self.clock.offset_s -= (self.world.now - self.suspended_at) * self.clock.rate
            self.suspended_at, self.suspended_until = None, self.world.now
        sources: dict[Any, deque[Callable[[], object]]] = {"timers": deque([self.loop.fire])}
        for source, call in self._kept:
            sources.setdefault(source, deque()).append(call)
        self._kept = []
        waiting, random = list(sources.values()), self.world.random
        while waiting and self.is_running:
            calls: list[Callable[[], object]] = []
            while waiting and (not calls or random.random() < 0.5):
                index = random.randrange(len(waiting))
                calls.append(waiting[index].popleft())
                if not waiting[index]:
                    waiting.pop(index)
            self.loop.run(lambda calls=calls: [call() for call in calls])  # type: ignore[misc]
        self.loop.arm(is_clock_new=True)

    def jump(self, ahead_s: float) -> None:
        """The clock jumps ahead."""
        self.world.note(repr(self), f"its clock jumps {ahead_s:.1f} s ahead")
        self.clock.offset_s += ahead_s
        self.jumped_at = self.world.now
        self.loop.arm(is_clock_new=True)
