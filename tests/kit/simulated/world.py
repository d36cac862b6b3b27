"""A world for processes: virtual time, and a network like TCP; all of it obeys one seed.

- **Connections** carry bytes in order, sometimes late.  The network between two hosts may be cut, in one direction or
  both: data sent meanwhile waits (the kernel retransmits it) and arrives when the cut is over.  A middlebox may reset
  connections from one host to another, and refuse new ones in its name.  A connection that breaks loses the data in
  transit; a writer to an end that is gone gets an error.  A host that is switched off sends nothing.
- **Processes** receive nothing while they are frozen; the kernel accepts and buffers everything for them.  When they
  thaw, everything arrives at once, in any order that preserves the order within each connection.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeAlias

from kit.simulated import numbered_sets

CONNECT_TIMEOUT_S = 2.5
DELAY_S = 0.002  # the longest delay of data that is not late
HERE_S = 1e-5  # the same, within one machine
# How much the kernel buffers for a connection on which nothing gets through.
KERNEL_BUFFER = 200_000
# The longest pause before the kernel retransmits unacknowledged data; pauses grow.
RESEND_MAX_S = 3.0
# How many entries a trace keeps; a failing seed is read from its end.
TRACE_MAX = 4000

FIN, RST = "FIN", "RST"
LOOPBACK = "127.0.0.1"


class Process(Protocol):
    """A process that can be frozen and can end."""

    host: str
    ends: dict[End, None]

    def post(self, source: object, call: Callable[[], object]) -> None:
        """Something happens to it; in order for each source."""


class Reader(Protocol):
    """The consumer of the data that arrives on a connection."""

    def is_reading(self) -> bool: ...

    def on_item(self, item: Any) -> None:
        """Bytes, `FIN` or `RST`."""

    def on_sent(self) -> None:
        """Everything written has been sent."""


_open: dict[int, World] = {}  # worlds with processes, until they are closed


def close_all() -> None:
    """Closes all worlds."""
    for world in list(_open.values()):
        world.close()


Kernel: TypeAlias = Callable[["World"], AbstractContextManager[None]]


class World:
    """Hosts, processes, the network and time.

    Args:
        seed: decides everything.
        slow: chance that a message is late.
        slow_s: how late it is, at most.
        kernel: replaces what processes ask of the test machine, while time passes.
    """

    def __init__(
        self, seed: int, *, slow: float = 0.0, slow_s: float = 0.0, kernel: Kernel = lambda _: nullcontext()
    ) -> None:
        self.kernel = kernel
        self.is_passing = False  # time passes: processes run only then
        numbered_sets.begin()
        self.random = random.Random(seed)
        self.now = 0.0
        self.slow, self.slow_s = slow, slow_s
        self.trace: deque[tuple[float, str, Any, Any]] = deque(maxlen=TRACE_MAX)
        self.ports: dict[tuple[str, int], Listener] = {}
        self.cut: set[tuple[str, str]] = set()  # from host, to host
        self.dark: set[str] = set()  # hosts that are switched off
        self._processes: list[Any] = []
        self.rejecting: set[tuple[str, str]] = set()  # from host, to host: a middlebox resets each connection
        self.behind_s: dict[str, float] = {}  # wall clocks of hosts
        self.step_s: tuple[float, float] | None = None  # how long a worker's step takes; `None`: workers take no steps
        self.trainings: dict[int, Any] = {}  # what the workers of a round do, by its fence
        self.refused_at: dict[tuple[str, str], float] = {}  # by it: the last time
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._held: dict[tuple[str, str], list[Callable[[], None]]] = {}
        self._ports = itertools.count(20_000)
        self._bytes = random.Random(f"bytes {seed}")  # of `os.urandom`
        self._error: BaseException | None = None

    # Time.

    def at(self, time: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (time, next(self._count), call))

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._count), call))

    def run(self, until: Callable[[], bool], limit: float) -> bool:
        """Lets time pass until a condition holds; `False` if it does not by the limit."""
        queue = self._queue
        with self._passing():
            while not until():
                if not queue or queue[0][0] > limit:
                    self.now = limit
                    return until()
                self._step()
        return True

    def step(self) -> bool:
        """Lets the next event happen; `False` if none is left."""
        if not self._queue:
            return False
        with self._passing():
            self._step()
        return True

    @contextmanager
    def _passing(self) -> Iterator[None]:
        if self.is_passing:  # a condition that is waited for lets time pass itself
            yield
            return
        self.is_passing = True
        try:
            with self.kernel(self):
                yield
        finally:
            self.is_passing = False

    def _step(self) -> None:
        self.now, _, call = heapq.heappop(self._queue)
        call()
        if self._error is not None:
            raise self._error

    def fail(self, error: BaseException) -> None:
        """Reports an error: the caller that lets time pass gets the first one."""
        self._error = self._error or error

    def close(self) -> None:
        """Ends all processes: their tasks would be collected at any moment."""
        _open.pop(id(self), None)
        with self._passing():
            for process in self._processes:
                process.is_alive = False
                process.loop.bury()

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
        """Calls when the data arrives: at once, or when the cut is over."""
        if (source, target) in self.cut:
            self._held.setdefault((source, target), []).append(call)
        else:
            call()

    def heal(self, source: str, target: str) -> None:
        self.cut.discard((source, target))
        for call in self._held.pop((source, target), []):
            self.after(self.random.uniform(0, RESEND_MAX_S), call)

    # Machines.

    def add(self, process: Any) -> None:
        """A process begins."""
        self._processes.append(process)
        _open[id(self)] = self

    def new_port(self) -> int:
        return next(self._ports)

    def urandom(self, size: int) -> bytes:
        return self._bytes.randbytes(size)


def address_of(host: str) -> str:
    """The address of a host whose name ends in its number."""
    number = int("".join(letter for letter in host if letter.isdigit()) or 0)
    return f"10.0.{number // 250}.{number % 250 + 1}"


def host_at(address: str) -> str:
    """The host of an address, but for those of loopback."""
    _, _, high, low = map(int, address.split("."))
    return f"node{250 * high + low - 1}"


class Attempt:
    """An attempt to connect.

    Args:
        world: where.
        process: that connects.
        address: of the host that it connects to.
        port: there.
        answer: called with the connection or the error, unless the attempt is given up before.
    """

    def __init__(
        self, world: World, process: Process, address: str, port: int, answer: Callable[[End | OSError], None]
    ) -> None:
        self._world, self._process, self._address, self._port, self._answer = world, process, address, port, answer
        self._is_local = address in {LOOPBACK, "::1"}
        self._host = process.host if self._is_local else host_at(address)
        self._is_over = False
        self._end: End | None = None
        world.after(HERE_S if self._host == process.host else world.delay(), self._try)

    def give_up(self) -> None:
        self._is_over = True
        if self._end is not None:
            self._end.reset()

    def _try(self) -> None:
        world, here, there = self._world, self._process.host, self._host
        if self._is_over:
            return
        if here != there and (world.is_cut(here, there) or world.is_cut(there, here) or there in world.dark):
            world.after(1.0, self._try)  # connect(2) sends its SYN again
            return
        listener = world.ports.get((there, self._port))
        if listener is not None and (here, there) not in world.rejecting:
            own = self._address if self._is_local else address_of(here)
            self._end = end = End(world, self._process, (own, world.new_port()), (self._address, self._port))
            end.peer = End(world, listener.process, end.peer_address, end.own_address)
            end.peer.peer = end
            listener.take(end.peer)
            self._report(end)
            return
        if listener is not None:
            world.refused_at[here, there] = world.now
        self._report(ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"))

    def _report(self, result: End | OSError) -> None:
        def report() -> None:
            if not self._is_over:
                self._is_over = True
                self._answer(result)

        delay_s = HERE_S if self._host == self._process.host else self._world.delay()
        self._world.after(delay_s, lambda: self._process.post(self, report))


class Listener:
    """A port that listens.

    Args:
        world: where.
        process: whose.
        port: its number.
        on_connection: called when one has come in.
    """

    def __init__(self, world: World, process: Process, port: int, on_connection: Callable[[], None]) -> None:
        self.process, self.port = process, port
        self.backlog: deque[End] = deque()
        self._on_connection = on_connection
        self._world = world
        world.ports[process.host, port] = self

    def take(self, end: End) -> None:
        self.backlog.append(end)
        self._on_connection()

    def close(self) -> None:
        self._world.ports.pop((self.process.host, self.port), None)
        for end in self.backlog:
            end.reset()


class End:
    """The kernel's view of one end of a connection.

    Args:
        world: where.
        process: whose.
        own_address: of this end, with its port.
        peer_address: of the other one.
    """

    peer: End

    def __init__(
        self, world: World, process: Process, own_address: tuple[str, int], peer_address: tuple[str, int]
    ) -> None:
        self._world, self.process = world, process
        self.own_address, self.peer_address = own_address, peer_address
        self.is_open = True  # its owner has not closed it, and nothing has reset it
        self.has_sent_fin = False  # its owner sends no more
        self.has_fin = False  # nor does the other end
        self.is_reset = False
        self.is_broken = False  # nothing gets through, and a writer gets an error
        self.reader: Reader | None = None
        self._inbox: deque[Any] = deque()  # what the process has not read
        self._unread_bytes = 0
        self._wire: deque[Any] = deque()  # what is on its way to the other end
        self._arrives = 0.0
        self._held = 0
        self._serial = 0
        process.ends[self] = None

    @property
    def host(self) -> str:
        return self.process.host

    @property
    def unsent_bytes(self) -> int:
        held = sum(len(item) for item in self._wire) if self._held else 0
        return max(0, held - KERNEL_BUFFER)

    # What its owner does.

    def send(self, data: bytes) -> None:
        if self.is_open and not self.has_sent_fin:
            self._transmit(data)

    def shut_down(self) -> None:
        """Sends the unsent data, then FIN."""
        if self.is_open and not self.has_sent_fin:
            self.has_sent_fin = True
            self._transmit(FIN)

    def close(self) -> None:
        """Sends the unsent data and closes; if anything is unread, the other end gets a reset."""
        if not self.is_open:
            return
        if self._unread_bytes:
            self.reset()
        else:
            self.shut_down()
            self._close()

    def reset(self) -> None:
        if self.is_open:
            self._close()
            self._transmit_reset()

    def end(self, how: str) -> None:
        """Its process ends; with `dark` its whole machine does, without sending anything."""
        if how == "dark":
            self._drop_wire()
            self._close()
        elif how == RST:
            self.reset()
        else:
            self.shut_down()
            self._close()

    def _close(self) -> None:
        self.is_open = False
        self.process.ends.pop(self, None)

    def pump(self) -> None:
        """Hands out the data that arrived, for as long as the reader takes it."""
        while self._inbox and self.reader is not None and self.reader.is_reading():
            item = self._inbox.popleft()
            if isinstance(item, bytes):
                self._unread_bytes -= len(item)
            self.reader.on_item(item)

    # What happens on the way.

    def break_off(self, *, is_noticed_here: bool | None = None) -> bool:
        """Something on the path breaks the connection; either end may notice only when it writes.

        Returns whether one of them notices at once.

        Args:
            is_noticed_here: whether this end notices now and the other does not, or the other way round; by default, chance.
        """
        for end in (self, self.peer):
            end.is_broken = True
            end._drop_wire()
        is_noticed = False
        for end in (self, self.peer):
            notices = (
                self._world.random.random() < 0.8 if is_noticed_here is None else (end.peer is self) is is_noticed_here
            )
            if notices:
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
        self._arrives = max(self._arrives, self._world.now + (HERE_S if is_here else self._world.delay()))
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
        if self.reader is not None:
            self.process.post(self, self.reader.on_sent)

    def _take(self, item: Any) -> None:
        if self.host in self._world.dark:
            return
        if item is RST:
            if self.is_open:
                self.is_reset = True
                self._close()
                self._drop_wire()
                self.process.post(self, lambda: self._arrived(RST))
        elif self.is_open and not self.is_broken and not self.has_fin:
            self.has_fin = item is FIN
            if item is not FIN:
                self._unread_bytes += len(item)
            self.process.post(self, lambda: self._arrived(item))
        elif item is not FIN and self.peer.is_open:
            self._transmit_reset()

    def _arrived(self, item: Any) -> None:
        self._inbox.append(item)
        self.pump()
