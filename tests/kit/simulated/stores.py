"""The board of several endpoints, simulated: the real `Board` and `Register` of each agent, over stores on the agents' hosts.

A store comes and goes with the agent of its host, and forgets then.  It may freeze, be cut off, answer late, twice or
never, and a request may reach it in a later life.  A majority of the stores is always up, and remembers.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any

from aelastic.errors import RendezvousConnectionError
from aelastic.rdzv.board import Board as RealBoard
from aelastic.rdzv.quorum import register_events as ev
from aelastic.rdzv.quorum.cells import Vote
from aelastic.rdzv.quorum.register import LIMIT_S, Register
from aelastic.rdzv.record_text import state_of
from aelastic.rdzv.settings import LEASE_S
from aelastic.rdzv.stores.store import Store as RealStore
from kit.simulated import quorum
from kit.simulated.board import Asking, Board, Question
from kit.simulated.process import SimulatedProcess
from kit.simulated.world import World


class Store(quorum.Store):
    def __init__(self, host: str) -> None:
        super().__init__()
        self.host, self.is_down = host, True
        self.held: list[Callable[[], None]] | None = None  # while it is frozen


class Stores(Board):
    """What a majority of the stores says.

    Args:
        world: where they stand.
        hosts: of the stores.
    """

    asks_again_s = LIMIT_S / 2  # the last step of an operation that waits in vain

    def __init__(self, world: World, hosts: Sequence[str]) -> None:
        super().__init__(world, hosts=hosts)
        self.stores = [Store(host) for host in hosts]
        self._clients = 0
        self._chosen: Vote | None = None  # the last that a majority had
        self._newest = b""

    @property
    def needed_hosts(self) -> Sequence[str]:
        """All, where the stores that are there may be too few.

        A candidate may have died with a first vote half made.  Or a store that had come back was just taken in, a second one
        forgot, and a try that had begun before took the first in anew, under a life that no vote names.
        """
        is_known = self._newest and quorum.remembering(self.stores, self._chosen) is not None
        return () if is_known else self.hosts

    def reached_by(self, process: SimulatedProcess) -> tuple[Any, Asking]:
        self._clients += 1
        return RealBoard(_Cell(), None, LEASE_S), _AskingStores(
            self._world, self, process, f"{process} {self._clients}"
        )

    def is_deaf(self, host: str) -> bool:
        answering = sum(self._is_heard(store, host) for store in self.stores)
        return answering <= len(self.stores) // 2 or self.faults.any

    def _is_heard(self, store: Store, host: str) -> bool:
        """Whether a store answers a host now; one that has forgotten counts for none that remembers."""
        is_cut = {(host, store.host), (store.host, host)} & self._world.cut
        remembers = store.cell is not None or not self._newest
        return not is_cut and not store.is_down and store.held is None and remembers

    # The stores.

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
        if (store := self._on(host)) and store.held is None:
            store.held = []

    def go_down(self) -> None:
        for store in self._world.random.sample(self.stores, self._world.random.choice((1, 1, 2))):
            self.on_host_frozen(store.host)

    def come_up(self) -> None:
        for store in self.stores:
            held, store.held = store.held or [], None
            for call in held:
                self._world.after(self._world.delay(), call)

    def wipe(self) -> None:
        self._forget(self._world.random.choice(self.stores))

    def _forget(self, store: Store) -> bool:
        """If a majority is up without it, and remembers."""
        up = [other for other in self.stores if other is not store and not other.is_down]
        is_majority_up = len(up) > len(self.stores) // 2
        may_forget = is_majority_up and quorum.may_forget(self.stores, self.stores.index(store), self._chosen)
        if may_forget:
            self._world.note(f"store of {store.host}", "forgets")
            store.cell = None
        return may_forget

    def do(self, action: ev.Look | ev.Write) -> ev.Event:
        store = self.stores[action.store]
        if store.is_down:
            return ev.Unanswered(action.step, action.store, "refused")
        if isinstance(action, ev.Look):
            return ev.Looked(action.step, action.store, store.cell)
        is_done = store.cell == action.expected
        if is_done:
            store.cell = action.cell
            self._look()
        return ev.Written(action.step, action.store, is_done)

    def _look(self) -> None:
        """Notes what a majority says, when it says something else than before."""
        chosen = quorum.chosen_by(self.stores)
        self._chosen = chosen or self._chosen
        if chosen is None or chosen.text == self._newest:
            return
        self._newest, before = chosen.text, self._record
        record = self._record = state_of(self._newest).record
        if record is None:
            return
        if not record.is_same_term(before):
            self.elections.append((self._world.now, record))
            if before is not None and before.verdict:
                self.usurper, self.usurped_at = record.candidate.node_id, self._world.now
        if record.verdict and self.closed_at is None:
            self.closed_at, self._closed_token = self._world.now, record.candidate.token


class _Ask:
    """An operation of the register, for the coroutine that waits for it."""

    def __init__(self, asked: ev.Asked) -> None:
        self._asked = asked

    def __await__(self) -> Generator[ev.Asked, bytes, bytes]:
        return (yield self._asked)


class _Cell(RealStore):
    name = "stores"

    async def get(self) -> bytes:
        return await _Ask(ev.Asked())

    async def compare_set(self, expected: bytes, new: bytes) -> bytes:
        return await _Ask(ev.Asked(expected, new))

    async def aclose(self) -> None: ...


class _AskingStores(Asking):
    """One process's way to the stores: a question is a coroutine, and each thing that it waits for goes to the register."""

    _board: Stores

    def __init__(self, world: World, board: Stores, process: SimulatedProcess, name: str) -> None:
        super().__init__(world, board, process)
        self._core = Register(len(board.stores), name, LIMIT_S)
        self._shell = process.open_shell("register", self._core, self._carry_out_for_register, ev.DeadlinePassed())
        self._running: Coroutine[ev.Asked, bytes, Any] | None = None

    def _carry_out(self, question: Question) -> None:
        self._running = question.do()
        self._go_on(lambda running: running.send(None))  # type: ignore[arg-type]

    def _go_on(self, resume: Callable[[Coroutine[ev.Asked, bytes, Any]], ev.Asked]) -> None:
        assert self._running is not None and self._asked is not None
        try:
            asked = resume(self._running)
        except StopIteration as end:
            self._world.note(repr(self._process), f"{self._asked.name}: done", [end.value])
            self._hear(self._asked, True, end.value)
        except RendezvousConnectionError as error:
            self._hear(self._asked, False, str(error))
        else:
            self._process.handle(self._shell, asked)

    def _hear(self, question: Question, is_known: bool, value: Any) -> None:
        if question is self._asked and self._running is not None:
            running, self._running = self._running, None
            running.close()
            self._core.handle(ev.Dropped(), self._process.now)
        super()._hear(question, is_known, value)

    def _carry_out_for_register(self, action: ev.Action) -> None:
        match action:
            case ev.Done(text):
                self._go_on(lambda running: running.send(text))
            case ev.NoMajority(missing):
                error = RendezvousConnectionError(f"no answer from {missing}")
                self._go_on(lambda running: running.throw(error))
            case ev.Look() | ev.Write():
                self._send(action)

    def _send(self, action: ev.Look | ev.Write) -> None:
        world, faults, store = self._world, self._board.faults, self._board.stores[action.store]
        chance, here = world.random.random(), self._process.host
        fails = ev.Unanswered(action.step, action.store, "the connection broke")

        def answer(event: ev.Event) -> None:
            mail = lambda: self._process.mail(self._shell, event)  # noqa: E731
            arrive = lambda: self._process.post(store, mail)  # noqa: E731
            world.after(world.delay(), lambda: world.carry(store.host, here, arrive))

        def do() -> None:
            if store.held is not None:
                store.held.append(do)
            elif store.host not in world.dark:
                event = self._board.do(action)
                is_lost = world.random.random() < faults.answer_lost
                for _ in range(1 + (world.random.random() < faults.late)):
                    answer(fails if is_lost else event)

        delay_s = world.delay()
        if chance < faults.request_lost + faults.late:
            world.after(world.random.uniform(0, 0.5), lambda: answer(fails))
            delay_s = world.random.uniform(0, 8)
        if chance >= faults.request_lost:
            world.after(delay_s, lambda: world.carry(here, store.host, do))
