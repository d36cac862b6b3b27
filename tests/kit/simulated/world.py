"""A world for agents: virtual time, and a network like TCP; all of it obeys one seed.

- **Connections** carry messages in order, late at times.  Between two hosts the network may be cut, in one direction or
  both: what was sent waits (the kernel sends it again) and comes when the cut is over.  A middlebox may reset what one
  host sends to another, and refuse connections in its name.  A connection that breaks
  loses what was on its way; a writer to an end that is gone gets an error.  A host that is switched off says nothing.
- **Processes** hear nothing while they are frozen; the kernel accepts and keeps all for them.  When they go on, everything
  is there at once, in any order that keeps each connection's own.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

CONNECT_TIMEOUT_S = 2.5
DELAY_S = 0.002  # of a message that is not late, at most
# The kernel sends again what was not acknowledged, after longer and longer pauses.
RESEND_MAX_S = 3.0
# What a trace keeps; a seed that goes wrong is looked at from its end.
TRACE_MAX = 4000

FIN, RST = "FIN", "RST"


class Process(Protocol):
    """A process that can be frozen, and end."""

    host: str

    def post(self, source: object, call: Callable[[], None]) -> None:
        """Something happens to it; in order for each source."""


class World:
    def __init__(self, seed: int, *, slow: float = 0.0, slow_s: float = 0.0) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.slow, self.slow_s = slow, slow_s
        self.trace: deque[tuple[float, str, Any, Any]] = deque(maxlen=TRACE_MAX)
        self.ports: dict[tuple[str, int], Listener] = {}
        self.cut: set[tuple[str, str]] = set()  # from host, to host
        self.dark: set[str] = set()  # hosts that are switched off
        self.voters: dict[int, Any] = {}  # agents by the port at which they are asked for votes
        self.rejecting: set[tuple[str, str]] = set()  # from host, to host: a middlebox resets each connection
        self.behind_s: dict[str, float] = {}  # wall clocks of hosts
        self.step_s: tuple[float, float] | None = None  # how long a step of a worker takes; `None`: none take any
        self.trainings: dict[int, Any] = {}  # what the workers of a round do, by its fence
        self.refused_at: dict[tuple[str, str], float] = {}  # by it: the last time
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._held: dict[tuple[str, str], list[Callable[[], None]]] = {}

    # Time.

    def at(self, time: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (time, next(self._count), call))

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._count), call))

    def run(self, until: Callable[[], bool], limit: float) -> bool:
        """Lets time pass until something is so; `False` if it is not by then."""
        queue = self._queue
        while not until():
            if not queue or queue[0][0] > limit:
                self.now = limit
                return until()
            self.step()
        return True

    def step(self) -> bool:
        """The next event happens; `False` if there is none."""
        if not self._queue:
            return False
        self.now, _, call = heapq.heappop(self._queue)
        call()
        return True

    def note(self, actor: str, what: Any, then: Any = ()) -> None:
        self.trace.append((self.now, actor, what, then))

    # The network.

    def delay(self) -> float:
        if self.slow and self.random.random() < self.slow:
            return self.random.uniform(0, self.slow_s)
        return self.random.uniform(0.1, 1.0) * DELAY_S

    def is_cut(self, source: str, target: str) -> bool:
        return (source, target) in self.cut

    def carry(self, source: str, target: str, call: Callable[[], None]) -> None:
        """Calls once what was sent has arrived: at once, or when the cut is over."""
        if (source, target) in self.cut:
            self._held.setdefault((source, target), []).append(call)
        else:
            call()

    def heal(self, source: str, target: str) -> None:
        self.cut.discard((source, target))
        for call in self._held.pop((source, target), []):
            self.after(self.random.uniform(0, RESEND_MAX_S), call)

    def connect(
        self,
        process: Process,
        host: str,
        port: int,
        connected: Callable[[End], None],
        failed: Callable[[bool, str], None],
    ) -> None:
        """Calls one of the two; `failed` with whether that host refuses."""
        source = object()
        gives_up = self.now + CONNECT_TIMEOUT_S

        def attempt() -> None:
            listener = self.ports.get((host, port))
            is_cut = process.host != host and (self.is_cut(process.host, host) or self.is_cut(host, process.host))
            if is_cut or host in self.dark:
                if self.now + 1.0 < gives_up:
                    self.after(1.0, attempt)  # connect(2) sends its SYN again
                else:
                    self.at(gives_up, lambda: process.post(source, lambda: failed(False, "timed out")))
            elif listener is None or (process.host, host) in self.rejecting:
                if listener is not None:
                    self.refused_at[process.host, host] = self.now
                self.after(self.delay(), lambda: process.post(source, lambda: failed(True, "connection refused")))
            else:
                end = End(self, process)
                end.peer = End(self, listener.process)
                end.peer.peer = end
                listener.take(end.peer)
                self.after(self.delay(), lambda: process.post(source, lambda: connected(end)))

        self.after(self.delay(), attempt)


class Listener:
    """A listening socket."""

    def __init__(self, world: World, process: Process, port: int) -> None:
        self.process, self.port = process, port
        self.backlog: list[End] = []
        self._accept: Callable[[End], None] | None = None
        self._world = world
        world.ports[process.host, port] = self

    def serve(self, accept: Callable[[End], None]) -> None:
        self._accept = accept
        backlog, self.backlog = self.backlog, []
        for end in backlog:
            self.take(end)

    def take(self, end: End) -> None:
        accept = self._accept
        if accept is None:
            self.backlog.append(end)
            return

        def take() -> None:
            accept(end)
            end.hear_early()

        end.process.post(end, take)

    def close(self) -> None:
        self._world.ports.pop((self.process.host, self.port), None)
        for end in self.backlog:
            end.break_off()


class End:
    """One end of a connection."""

    peer: End

    def __init__(self, world: World, process: Process) -> None:
        self._world, self.process = world, process
        self.is_open = True  # for the kernel
        self.is_deaf = False  # its owner wants to hear no more
        self.is_told = False  # its owner knows of its end
        self.is_reset = False  # it was not closed in order
        self.is_broken = False  # nothing gets through, and a writer gets an error
        self.on_message: Callable[[Any], None] | None = None
        self.on_closed: Callable[[], None] | None = None
        self._early: list[Callable[[], None]] = []  # what came before there was a reader
        self._wire: deque[Any] = deque()  # what is on its way to the other end
        self._arrives = 0.0
        self._held = 0
        self._serial = 0

    @property
    def host(self) -> str:
        return self.process.host

    def send(self, item: Any) -> None:
        if self.is_open:
            self._transmit(item)

    def close(self) -> None:
        """Sends what is unsent, and closes."""
        self.is_deaf = True
        if self.is_open:
            self.is_open = False
            self._transmit(FIN)
            self._world.after(0.0, lambda: self.process.post(self, self._tell_closed))

    def end(self, how: str) -> None:
        """Its process ends, and nothing here hears of it."""
        self.is_deaf = self.is_told = True
        if how == "dark":
            self._drop_wire()
        elif self.is_open:
            if how == RST:
                self._drop_wire()
            self._transmit(how)
        self.is_open = False

    def break_off(self, *, is_heard: bool | None = None) -> bool:
        """Something on the way breaks the connection; either end may hear of it only when it writes.

        Gives whether one of them hears of it at once.

        Args:
            is_heard: whether this end hears of it now, and the other does not, or the other way round; by default, chance.
        """
        for end in (self, self.peer):
            end.is_broken = True
            end._drop_wire()
        is_noticed = False
        for end in (self, self.peer):
            is_told = self._world.random.random() < 0.8 if is_heard is None else (end.peer is self) is is_heard
            if is_told:
                end._transmit_reset()
                is_noticed = True
        return is_noticed

    def _drop_wire(self) -> None:
        self._wire.clear()
        self._serial += 1
        self._held = 0

    def _transmit_reset(self) -> None:
        self._drop_wire()
        self._transmit(RST)

    def _transmit(self, item: Any) -> None:
        self._wire.append(item)
        is_here = self.host == self.peer.host
        self._arrives = max(self._arrives, self._world.now + (1e-5 if is_here else self._world.delay()))
        serial = self._serial
        self._world.at(self._arrives, lambda: self._arrive(serial))

    def _arrive(self, serial: int) -> None:
        if serial != self._serial or self.host in self._world.dark:
            return
        if (self.host, self.peer.host) in self._world.rejecting:
            self._drop_wire()
            self.is_broken = True
            self._take(RST)
            return
        if self._held or (self.host, self.peer.host) in self._world.cut:
            self._held += 1
            if self._held == 1:
                self._world.carry(self.host, self.peer.host, lambda: self._release(serial))
            return
        self.peer._take(self._wire.popleft())

    def _release(self, serial: int) -> None:
        if serial != self._serial:
            return
        if (self.host, self.peer.host) in self._world.cut:
            self._world.carry(self.host, self.peer.host, lambda: self._release(serial))
            return
        held, self._held = self._held, 0
        for _ in range(held):
            if serial == self._serial:
                self.peer._take(self._wire.popleft())

    def _take(self, item: Any) -> None:
        if self.host in self._world.dark:
            return
        if item is FIN or item is RST:
            if self.is_open:
                self.is_open, self.is_reset = False, item is RST
                self._drop_wire()
                self.process.post(self, self._tell_closed)
        elif self.is_open and not self.is_broken:
            self.process.post(self, lambda: self._tell(item))
        elif self.peer.is_open:
            self._transmit_reset()

    def hear_early(self) -> None:
        early, self._early = self._early, []
        for call in early:
            call()

    def _tell(self, item: Any) -> None:
        if self.on_message is None:
            self._early.append(lambda: self._tell(item))
        elif not self.is_deaf:
            self.on_message(item)

    def _tell_closed(self) -> None:
        if self.on_closed is None:
            self._early.append(self._tell_closed)
        elif not self.is_told:
            self.is_told = self.is_deaf = True
            self.on_closed()
