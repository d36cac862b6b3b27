"""Back ends with fake workers, and stand-ins for the other resources that a supervisor opens.

`FakeBackend` also proves that the extension point is small: start, wait, stop.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio

from aelastic import WorkerBackend, WorkerExit, WorkerStart
from aelastic.agent.watches.watch import Found
from aelastic.base.host.ports import listen, loopback_address
from aelastic.workers.tcpstore.host import _refusing

TERM, KILL = signal.SIGTERM, signal.SIGKILL


class RemoteBackend(WorkerBackend):
    """The smallest possible back end: three methods.  Workers end when stopped, or when a test ends them."""

    def __init__(self) -> None:
        self.exits: dict[int, asyncio.Future[WorkerExit]] = {}

    async def start(self, starts: Sequence[WorkerStart]) -> Mapping[int, str]:
        self.exits = {start.local_rank: asyncio.get_running_loop().create_future() for start in starts}
        return {start.local_rank: f"remote-{start.local_rank}" for start in starts}

    async def wait(self, local_rank: int) -> WorkerExit:
        return await asyncio.shield(self.exits[local_rank])

    def stop(self, local_rank: int, signum: int) -> bool:
        was_running = not self.exits[local_rank].done()
        if was_running:
            self.exits[local_rank].set_result(WorkerExit(-signum))
        return was_running


@dataclass
class Plan:
    """What one worker does in one generation."""

    after_s: float = 10.0
    exit: WorkerExit = field(default_factory=lambda: WorkerExit(0))
    ignores: frozenset[int] = frozenset()  # signals
    dies_after_s: float = 0.0  # after a signal
    leaves_behind_s: float = 0.0  # how long something that it leaves behind survives


FOREVER = Plan(after_s=1e6)
STUBBORN = Plan(after_s=1e6, ignores=frozenset({TERM}))
UNKILLABLE = Plan(after_s=1e6, ignores=frozenset({TERM, KILL}))
SUCCEEDS = Plan()
FAILS = Plan(exit=WorkerExit(3))


class FakeBackend(WorkerBackend):
    """Follows a plan for each worker and generation, and records the calls that it gets."""

    def __init__(self, *generations: Sequence[Plan], start_s: float = 0.0, shield: bool = False) -> None:
        self.generations = list(generations)
        self.start_s = start_s
        self.shield = shield
        self.starts: list[list[WorkerStart]] = []
        self.signals: list[tuple[float, int, int]] = []  # at, local rank, signal
        self.closed_at: list[float] = []
        self.running: set[int] = set()
        self.plans: Sequence[Plan] = ()
        self.deaths: dict[int, asyncio.Future[float]] = {}

    async def start(self, starts: Sequence[WorkerStart]) -> Mapping[int, int]:
        assert not self.running, "two generations alive at once"
        self.plans = self.generations[min(len(self.starts), len(self.generations) - 1)]
        self.starts.append(list(starts))
        self.deaths = {start.local_rank: asyncio.get_running_loop().create_future() for start in starts}
        with anyio.CancelScope(shield=self.shield):
            await anyio.sleep(self.start_s)
        self.running = {start.local_rank for start in starts}
        return {start.local_rank: 100 * len(self.starts) + start.local_rank for start in starts}

    async def wait(self, local_rank: int) -> WorkerExit:
        plan, death = self.plans[local_rank], self.deaths[local_rank]
        with anyio.move_on_after(plan.after_s) as life:
            await asyncio.shield(death)
        if not life.cancelled_caught:
            await anyio.sleep(plan.dies_after_s)
        self.running.discard(local_rank)
        return plan.exit if life.cancelled_caught else WorkerExit(-int(death.result()))

    async def clear(self, local_rank: int) -> None:
        await anyio.sleep(self.plans[local_rank].leaves_behind_s)

    def stop(self, local_rank: int, signum: int) -> bool:
        self.signals.append((anyio.current_time(), local_rank, signum))
        if signum not in self.plans[local_rank].ignores and not self.deaths[local_rank].done():
            self.deaths[local_rank].set_result(signum)
        return local_rank in self.running

    def describe(self, local_rank: int) -> str:
        return f"worker {local_rank} of nowhere"

    async def aclose(self) -> None:
        self.closed_at.append(anyio.current_time())


class Broken(FakeBackend):
    """Raises at the given place."""

    def __init__(self, where: str) -> None:
        super().__init__([Plan(after_s=3)])
        self.where = where

    def break_in(self, where: str) -> None:
        if where == self.where:
            raise ConnectionError(where)

    async def start(self, starts: Sequence[WorkerStart]) -> Mapping[int, int]:
        self.break_in("start")
        return await super().start(starts)

    async def wait(self, local_rank: int) -> WorkerExit:
        self.break_in("wait")
        return await super().wait(local_rank)

    async def clear(self, local_rank: int) -> None:
        self.break_in("clear")

    def stop(self, local_rank: int, signum: int) -> bool:
        self.break_in("stop")
        return True

    async def aclose(self) -> None:
        await super().aclose()
        self.break_in("aclose")


stores: list[StoreStandIn] = []


class StoreStandIn:
    """Holds a port without serving anything on it."""

    is_on_loopback = True

    def __init__(self, env: Mapping[str, str], *, is_bind_all: bool = False) -> None:
        self.listener: socket.socket | None = None
        self.served: list[int] = []
        stores.append(self)

    async def find_loopback(self) -> None:
        pass

    def open(self, port: int, loopback: str = "") -> int:
        if self.listener is None:
            self.listener = _refusing(lambda: listen(port, loopback_address(loopback) if loopback else ""), port)
        number: int = self.listener.getsockname()[1]
        return number

    def serve(self) -> None:
        self.served.append(self.open(0))

    async def run(self) -> None:
        await anyio.sleep_forever()

    async def aclose(self) -> None:
        if self.listener is not None:
            self.listener.close()


@dataclass
class WatchingStandIn:
    """Does not look at workers; the test decides what it finds."""

    on_found: Callable[[Found], Coroutine[Any, Any, None]]
    env: dict[str, str] = field(default_factory=lambda: {"WATCHED": "yes"})
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def open(self) -> None:
        self.calls.append(("open",))

    def started(self, generation: int, starts: Sequence[WorkerStart], ids: Mapping[int, Any]) -> None:
        self.calls.append(("started", generation, [start.local_rank for start in starts], dict(ids)))

    def ended(self, generation: int, local_rank: int) -> None:
        self.calls.append(("ended", generation, local_rank))

    async def run(self) -> None:
        await anyio.sleep_forever()

    def close(self) -> None:
        self.calls.append(("close",))
