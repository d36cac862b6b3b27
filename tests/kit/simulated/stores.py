"""Simulated stores beneath each agent's real endpoint: one store, or several beneath its real `QuorumStore`.

A store on an agent's host comes and goes with that agent, and loses its data then.  It may freeze, be cut off, or answer
late or never, and a request may reach it in a later incarnation.  Of several stores, a majority is always up and has its data.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel

from aelastic.errors import RendezvousConnectionError
from aelastic.rdzv.settings import LEASE_S
from aelastic.rdzv.stores.endpoint_cell import EndpointCell
from aelastic.rdzv.stores.endpoints import REFUSED, RefusedError
from aelastic.rdzv.stores.quorum import QuorumStore
from aelastic.rdzv.stores.register import LIMIT_S
from aelastic.rdzv.stores.register_cells import MARK, Vote, cell_from_bytes
from aelastic.rdzv.stores.store import Store as RealStore
from aelastic.rdzv.stores.tcp_store import ANSWER_TIMEOUT_S, DEATH_S, LostError
from kit.simulated import quorum
from kit.simulated.endpoint import ENDPOINT, Endpoint, Question
from kit.simulated.process import SimulatedProcess
from kit.simulated.world import World, address_of


class Store(quorum.Store):
    def __init__(self, host: str) -> None:
        super().__init__()
        self.host, self.is_down = host, True
        self._text = b""
        self.held: list[Callable[[], None]] | None = None  # while it is frozen

    def freeze(self) -> None:
        if self.held is None:
            self.held = []

    def thaw(self, world: World) -> None:
        held, self.held = self.held or [], None
        for call in held:
            world.after(world.delay(), call)

    @property
    def text(self) -> bytes:
        return self._text

    @text.setter
    def text(self, text: bytes) -> None:
        is_cell = text.startswith(MARK)
        self._text, self.cell = text, cell_from_bytes(text)[0] if is_cell else None


class OneStore(Endpoint):
    """One store, on a host of agents or elsewhere.

    Args:
        world: where it lives.
        hosts: the host whose agent it comes and goes with; empty if it belongs to no agent.
        is_etcd: it keeps its data while it is away; a TCPStore that refuses connections has lost its data.
    """

    def __init__(self, world: World, hosts: Sequence[str] = (), *, is_etcd: bool = False) -> None:
        super().__init__(world, hosts)
        self.store, self._is_etcd = Store(hosts[0] if hosts else ENDPOINT), is_etcd
        self.store.is_down = bool(hosts)

    def reached_by(self, process: SimulatedProcess) -> EndpointCell:
        return EndpointCell(Part(self, self.store, process), None, LEASE_S)

    @property
    def is_up(self) -> bool:
        return not self.store.is_down

    @is_up.setter
    def is_up(self, is_up: bool) -> None:
        self.store.is_down = not is_up

    @property
    def is_silent(self) -> bool:
        return self.store.held is not None

    @is_silent.setter
    def is_silent(self, is_silent: bool) -> None:
        if is_silent:
            self.store.freeze()
        else:
            self.store.thaw(self._world)

    def is_deaf(self, host: str) -> bool:
        cut = self._world.cut
        is_cut = (host, self.store.host) in cut or (self.store.host, host) in cut
        return is_cut or not self.is_up or self.is_silent or self.faults.any

    def is_served_by(self, host: str) -> bool:
        return host in self.hosts and self.is_up

    def on_host_up(self, host: str) -> None:
        self.is_up |= host in self.hosts

    def on_host_gone(self, host: str) -> None:
        self._world.note(ENDPOINT, f"is gone with {host}")
        self.is_up = False
        self.wipe()

    def on_host_frozen(self, host: str) -> None:
        self.is_silent |= host in self.hosts

    def go_down(self) -> None:
        if self._is_etcd:
            self.is_up = False
        else:
            self.is_silent = True

    def come_up(self) -> None:
        self.is_silent = False
        self.is_up |= self._is_etcd

    def wipe(self) -> None:
        self.stored, self.wiped_at, self.store.text = None, self._world.now, b""

    def look(self) -> None:
        self.note(self.store.text)


class Stores(Endpoint):
    """Several stores, of which a majority decides.

    Args:
        world: where they live.
        hosts: of the stores.
    """

    asks_again_s = LIMIT_S / 2  # the last step of an operation that waits in vain

    def __init__(self, world: World, hosts: Sequence[str]) -> None:
        super().__init__(world, hosts)
        self.stores = [Store(host) for host in hosts]
        self._chosen: Vote | None = None  # the latest vote of a majority
        self._newest = b""

    @property
    def needed_hosts(self) -> Sequence[str]:
        """All hosts, if the stores that are up may be too few.

        A candidate may have died halfway through a first vote.  Or a store that had returned was just admitted, a second
        one lost its data, and an older attempt admitted the first again, under an incarnation that no vote names.
        """
        is_known = self._newest and quorum.remembering(self.stores, self._chosen) is not None
        return () if is_known else self.hosts

    def reached_by(self, process: SimulatedProcess) -> EndpointCell:
        return EndpointCell(SimulatedQuorum(process, self), None, LEASE_S)

    def is_deaf(self, host: str) -> bool:
        answering = sum(self._is_reached(store, host) for store in self.stores)
        return answering <= len(self.stores) // 2 or self.faults.any

    def _is_reached(self, store: Store, host: str) -> bool:
        """Whether a store answers a host now; a store without data does not count once the job has stored some."""
        is_cut = {(host, store.host), (store.host, host)} & self._world.cut
        remembers = store.cell is not None or not self._newest
        return not is_cut and not store.is_down and store.held is None and remembers

    # The stores.

    def on(self, host: str) -> Store:
        return next(store for store in self.stores if store.host == host)

    def _on(self, host: str) -> Store | None:
        return next((store for store in self.stores if store.host == host), None)

    def is_served_by(self, host: str) -> bool:
        store = self._on(host)
        return store is not None and not store.is_down

    def on_host_up(self, host: str) -> None:
        if store := self._on(host):
            store.is_down = False

    def on_host_gone(self, host: str) -> None:
        store = self._on(host)
        if store is not None and self._forget(store):
            store.is_down = True

    def on_host_frozen(self, host: str) -> None:
        if store := self._on(host):
            store.freeze()

    def go_down(self) -> None:
        for store in self._world.random.sample(self.stores, self._world.random.choice((1, 1, 2))):
            self.on_host_frozen(store.host)

    def come_up(self) -> None:
        for store in self.stores:
            store.thaw(self._world)

    def wipe(self) -> None:
        self._forget(self._world.random.choice(self.stores))

    def _forget(self, store: Store) -> bool:
        """Makes a store lose its data, if a majority without it is up and still has its data."""
        up = [other for other in self.stores if other is not store and not other.is_down]
        is_majority_up = len(up) > len(self.stores) // 2
        may_forget = is_majority_up and quorum.may_forget(self.stores, self.stores.index(store), self._chosen)
        if may_forget:
            self._world.note(f"store of {store.host}", "forgets")
            store.text = b""
        return may_forget

    def look(self) -> None:
        """Records the majority's vote when it changes."""
        chosen = quorum.chosen_by(self.stores)
        self._chosen = chosen or self._chosen
        if chosen is None or chosen.text == self._newest:
            return
        self._newest = chosen.text
        self.note(self._newest)


class Part(RealStore):
    """A store as one process reaches it (like `C10dStore`, or that of an etcd)."""

    name = "the store"

    def __init__(self, endpoint: Endpoint, where: Store, process: SimulatedProcess) -> None:
        self._endpoint, self._store, self._process, self._world = endpoint, where, process, process.world

    async def open(self) -> None:
        await anyio.lowlevel.checkpoint()

    async def get(self) -> bytes:
        return await self._insist(self.get_once)

    async def compare_set(self, expected: bytes, new: bytes) -> bytes:
        return await self._insist(partial(self.compare_set_once, expected, new))

    async def _insist(self, do: Callable[[], Awaitable[bytes]]) -> bytes:
        """As `TcpStore.insist`."""
        try:
            return await do()
        except LostError:
            await anyio.sleep(DEATH_S)
            return await do()

    async def get_once(self) -> bytes:
        return await self._ask("read", lambda: self._store.text)

    async def compare_set_once(self, expected: bytes, new: bytes) -> bytes:
        self._endpoint.on_write(self._process)

        def do() -> bytes:
            if self._store.text == expected:
                self._store.text = new
                self._endpoint.look()
            return self._store.text

        return await self._ask("write", do)

    async def aclose(self) -> None:
        await anyio.lowlevel.checkpoint()

    @property
    def own_address(self) -> str:
        return address_of(self._process.host)

    @property
    def endpoint_host(self) -> str:
        return self.own_address if self.is_served_here else ""

    @property
    def is_served_here(self) -> bool:
        return self._store.host == self._process.host

    async def _ask(self, name: str, do: Callable[[], bytes]) -> bytes:
        question = Question(name, do, asyncio.get_running_loop().create_future())
        self._send(question)
        try:
            with anyio.fail_after(ANSWER_TIMEOUT_S):
                text: bytes = await question.answer
        except TimeoutError:
            raise RendezvousConnectionError("no answer in time", reason="no answer in time") from None
        return text

    def _send(self, question: Question) -> None:
        world, faults = self._world, self._endpoint.faults
        chance, delay_s = world.random.random(), world.delay()
        if chance < faults.request_lost + faults.late:
            world.after(world.random.uniform(0, 0.5), partial(self._answer, question, _broken()))
            delay_s = world.random.uniform(0, 8)
        if chance >= faults.request_lost:
            do = partial(self._do, question)
            world.after(delay_s, lambda: world.carry(self._process.host, self._store.host, do))

    def _do(self, question: Question) -> None:
        store, world = self._store, self._world
        if store.held is not None:
            store.held.append(partial(self._do, question))
        elif store.host not in world.dark:
            refused = RefusedError("the store is down", reason=REFUSED)
            result: Any = refused if store.is_down else question.do()
            is_lost = world.random.random() < self._endpoint.faults.answer_lost
            self._answer(question, _broken() if is_lost else result)

    def _answer(self, question: Question, result: Any) -> None:
        arrive = partial(self._process.post, self._store, lambda: question.on_answer(result))
        world = self._world
        world.after(world.delay(), lambda: world.carry(self._store.host, self._process.host, arrive))


def _broken() -> RendezvousConnectionError:
    return LostError("the connection broke", reason="the connection broke")


class SimulatedQuorum(QuorumStore):
    """The stores of one agent; the code that queries them is real."""

    def __init__(self, process: Any, stores: Stores) -> None:
        super().__init__(process.settings, "job", {})
        hosts = [endpoint.partition(":")[0] for endpoint in self._endpoints]
        parts: list[Any] = [Part(stores, stores.on(host), process) for host in hosts]
        self._parts = parts
