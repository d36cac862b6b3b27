"""The event loop of a simulated process: asyncio's interface, on a world's time.

Ready callbacks run at once, in asyncio's order, and take no time.  Timers fire by the machine's clock, slightly late.
Nothing runs while the process is frozen or after it has ended.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from asyncio import AbstractEventLoop, Future, Handle, Task, TimerHandle
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any

from kit.simulated.numbered_sets import NumberedTask
from kit.simulated.sockets import ListeningSocket, Socket, Transport

if TYPE_CHECKING:
    from kit.simulated.process import SimulatedProcess

# This many callbacks in a row without any time passing are an endless loop.
CALLBACKS_MAX = 100_000
# How late a timer fires.
LATE_S = 1e-6, 0.003
# Ending the tasks of a process takes a few timers at most, those of farewells.
FAREWELLS_MAX = 1000
CANCELLED_MAX = 64


class RunawayError(AssertionError):
    """A process runs endlessly while no time passes."""


class EventLoop(AbstractEventLoop):
    """The loop of one process.

    Args:
        process: its process, which has the world and the clock.
    """

    def __init__(self, process: SimulatedProcess) -> None:
        self.process = process
        self._ready: deque[Handle] = deque()
        self._timers: list[tuple[float, int, TimerHandle]] = []
        self._cancelled = 0  # timers
        self._numbers = itertools.count()
        self._armed_for: float | None = None  # the timer for which the world wakes this loop
        self._readers: dict[int, Handle] = {}
        self._roots: list[Task[None]] = []
        self._afterlife: float | None = None  # the time of a process that has ended, while its tasks are ended

    # What happens to the process.

    def start(self, main: Coroutine[Any, Any, None], done: Callable[[Task[None]], None]) -> None:
        """Starts a program of the running process."""
        root: Task[None] = self.create_task(main, name="main")
        root.add_done_callback(done)
        self._roots.append(root)

    def run(self, call: Callable[[], object]) -> None:
        """Calls something that happens to the process, and runs its consequences."""
        assert asyncio._get_running_loop() is None, "one process runs at a time"
        assert self.process.world.is_passing, "processes run while time passes"
        asyncio._set_running_loop(self)
        try:
            call()
            self._run_ready()
        finally:
            asyncio._set_running_loop(None)
        if self.process.is_running:
            self.arm()

    def _run_ready(self) -> None:
        ready, process = self._ready, self.process
        for _ in range(CALLBACKS_MAX):
            if not ready or not (process.is_running or self._afterlife is not None):
                return
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()
        raise RunawayError(f"{process} runs on and on; next: {list(itertools.islice(ready, 5))}")

    def fire(self) -> None:
        """Makes due timers ready."""
        now, timers = self.time(), self._timers
        while timers and (timers[0][2]._cancelled or timers[0][0] <= now):
            _, _, timer = heapq.heappop(timers)
            if not timer._cancelled:
                timer._scheduled = False  # type: ignore[attr-defined]
                self._ready.append(timer)

    def arm(self, *, is_clock_new: bool = False) -> None:
        """Makes the world wake this loop for its next timer."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers:
            return
        due = timers[0][0]
        if self._armed_for is not None and due >= self._armed_for and not is_clock_new:
            return
        self._armed_for = due
        world = self.process.world
        late_s = world.random.uniform(*LATE_S)
        world.at(max(self.process.clock.true(due), world.now) + late_s, partial(self._wake_up, due))

    def _wake_up(self, due: float) -> None:
        if self._armed_for == due and self.process.is_running:
            self._armed_for = None
            self.run(self.fire)

    def bury(self) -> None:
        """Ends the tasks of a process that has ended; their actions have no effect on the world."""
        if self._afterlife is not None:
            return
        self._afterlife = self.time()
        self.run(lambda: [root.cancel() for root in self._roots])
        for _ in range(FAREWELLS_MAX):
            if all(root.done() for root in self._roots):
                return
            if self._timers:
                self._afterlife = max(self._afterlife, self._timers[0][0])
            self.run(self.fire)
        raise RunawayError(f"{self.process} has ended, and its tasks do not: {self._roots}")

    # What asyncio offers.

    def time(self) -> float:
        return self.process.now if self._afterlife is None else self._afterlife

    def call_soon(  # type: ignore[override]  # typeshed's is of the types of the arguments
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        handle = Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> TimerHandle:
        timer = TimerHandle(when, callback, args, self, context)
        timer._scheduled = True  # type: ignore[attr-defined]
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def _timer_handle_cancelled(self, handle: TimerHandle) -> None:
        self._cancelled += 1
        if self._cancelled > max(CANCELLED_MAX, len(self._timers) // 2):
            self._timers = [each for each in self._timers if not each[2]._cancelled]
            heapq.heapify(self._timers)
            self._cancelled = 0

    def create_future(self) -> Future[Any]:
        return Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> Task[Any]:
        return NumberedTask(coro, loop=self, **options)

    def get_task_factory(self) -> None:
        return None

    def is_running(self) -> bool:
        return asyncio._get_running_loop() is self

    def is_closed(self) -> bool:
        return False

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Reports an exception that nobody caught, which is a bug."""
        error = context.get("exception") or AssertionError(context["message"])
        if self._afterlife is None:
            self.process.world.fail(error)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Future[Any]:  # type: ignore[override]
        raise NotImplementedError("a simulated process has no threads")

    # Sockets.

    def add_reader(self, fd: int, callback: Callable[..., object], *args: Any) -> None:  # type: ignore[override]
        self._readers[fd] = Handle(callback, args, self)
        if self.process.has_connections(fd):
            self._ready.append(self._readers[fd])

    def remove_reader(self, fd: int) -> bool:  # type: ignore[override]
        if (handle := self._readers.pop(fd, None)) is not None:
            handle.cancel()
        return handle is not None

    def on_readable(self, listener: ListeningSocket) -> None:
        if (handle := self._readers.get(listener.fileno())) is not None:
            self._ready.append(handle)

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.Protocol], host: str, port: int
    ) -> tuple[Transport, asyncio.Protocol]:
        connected = self.create_future()
        attempt = self.process.connect(host, port, connected)
        try:
            sock: Socket = await connected
        except BaseException:
            attempt.give_up()
            raise
        return await self.connect_accepted_socket(protocol_factory, sock)

    async def connect_accepted_socket(  # type: ignore[override]
        self, protocol_factory: Callable[[], asyncio.Protocol], sock: Socket
    ) -> tuple[Transport, asyncio.Protocol]:
        protocol, begun = protocol_factory(), self.create_future()
        transport = Transport(self, sock, protocol, begun)
        try:
            await begun
        except BaseException:
            transport.close()
            raise
        return transport, protocol
