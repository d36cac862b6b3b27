# ruff: noqa: T201  a program prints its results
"""A simulated quorum of stores: the real core in several clients that write when they can, among faults from one seed.

`PYTHONPATH=tests python -m kit.simulated.quorum SEED` replays a seed and prints what happened.  Stores freeze, lose all
data, answer late, twice or never, and are cut off from clients, one way or both; a request may reach a store in a later
life.  The promise: the register's history is linearizable for as long as a majority of the stores has its data, and all
clients get answers once the faults stop.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from aelastic.rdzv.stores import register_events as ev
from aelastic.rdzv.stores.register import Register
from aelastic.rdzv.stores.register_cells import StoreCell, Vote
from kit.simulated import world
from kit.simulated.linearizability import Op, is_linearizable

FAULTS_UNTIL_S = 20.0
CALM_S = 12.0  # once faults stop, each client has an answer within this time
SOON_S = 0.1  # once faults have stopped, a majority answers a new question within this time
BUSY_SHARE = 0.1  # of the time, when everything is faster


class BrokenPromiseError(AssertionError): ...


class Store:
    def __init__(self) -> None:
        self.cell: StoreCell | None = None
        self.frozen_until = 0.0
        self.is_down = False


def chosen_by(stores: Sequence[Store]) -> Vote | None:
    """The vote that a majority holds."""
    votes = [store.cell.vote for store in stores if store.cell and store.cell.vote]
    return next((vote for vote in votes if votes.count(vote) > len(stores) // 2), None)


def remembering(stores: Sequence[Store], chosen: Vote | None) -> set[int] | None:
    """The stores that know the chosen vote; `None` if nothing was chosen or too few know it.

    Older votes are ignored then: one may have been late and exist only in a store that it admitted.

    Args:
        stores: all of them.
        chosen: the last vote that a majority held.
    """
    votes = {cell.vote.ballot: cell.vote for store in stores if (cell := store.cell) and cell.vote}
    newest = [vote for _, vote in sorted(votes.items(), reverse=True)]
    for vote in newest:
        if chosen is not None and vote.ballot < chosen.ballot:
            return None
        members = {i for i, store in enumerate(stores) if store.cell and store.cell.incarnation == vote.members[i]}
        if len(members) > len(stores) // 2:
            return members
    return None


def may_forget(stores: Sequence[Store], index: int, chosen: Vote | None) -> bool:
    """Whether a majority still knows the vote if this store loses its data: a vote that only it holds is ignored."""
    if remembering(stores, chosen) is None:
        return stores[index].cell is None
    without = [Store() if i == index else store for i, store in enumerate(stores)]
    return remembering(without, chosen) is not None


class World(world.World):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        roll = self.random.random
        self.size = self.random.choice((3, 3, 3, 4, 5))
        self.stores = [Store() for _ in range(self.size)]
        self.unheard: set[tuple[int, int]] = set()  # client, store
        self.unanswered: set[tuple[int, int]] = set()
        self.chosen: Vote | None = None  # the last vote that a majority held
        self.history: list[Op] = []
        self.log: list[str] = []
        self.calm_at = math.inf
        self.is_lost = False  # a majority lost its data: the history has no guarantees
        # How hostile this world is.
        self.late, self.twice, self.never = roll() * 0.1, roll() * 0.1, roll() * 0.05
        self.may_lose = roll() < 0.1
        self.share = self.random.choice((1.0, BUSY_SHARE))
        self.clients = [Client(self, index) for index in range(self.random.choice((2, 3, 5)))]

    @property
    def is_calm(self) -> bool:
        return self.now >= self.calm_at

    def note(self, *words: Any) -> None:
        self.log.append(f"{self.now:7.3f} {' '.join(str(word) for word in words)}")

    # The way to a store.

    def delay(self) -> float:
        if not self.is_calm and self.random.random() < self.late:
            return self.random.choice((0.02, 0.3, 3.0)) * self.random.random() * 2 * self.share
        return self.random.uniform(0.0002, 0.002)

    def send(self, client: Client, action: ev.Look | ev.Write) -> None:
        times = 2 if not self.is_calm and self.random.random() < self.twice else 1
        life = client.life
        for _ in range(times):
            self.after(self.delay(), lambda: self.arrive(client, life, action))

    def arrive(self, client: Client, life: int, action: ev.Look | ev.Write) -> None:
        store, way = self.stores[action.store], (client.index, action.store)
        if way in self.unheard or (not self.is_calm and self.random.random() < self.never):
            return
        if store.is_down:
            self.after(self.delay(), lambda: client.receive(life, ev.Unanswered(action.step, action.store, "refused")))
            return
        if store.frozen_until > self.now:
            self.at(store.frozen_until + self.delay(), lambda: self.arrive(client, life, action))
            return
        match action:
            case ev.Look():
                answer: ev.Event = ev.Looked(action.step, action.store, store.cell)
            case ev.Write(step, index, expected, cell):
                is_done = store.cell == expected
                if is_done:
                    store.cell = cell
                    self.chosen = chosen_by(self.stores) or self.chosen
                answer = ev.Written(step, index, is_done)
        if way not in self.unanswered:
            for _ in range(2 if not self.is_calm and self.random.random() < self.twice else 1):
                self.after(self.delay(), lambda: client.receive(life, answer))

    # Faults.

    def plan(self) -> None:
        kinds = (self.freeze, self.forget, self.freeze_and_forget, self.cut_one, self.isolate, self.restart_client)
        for _ in range(self.random.choice((0, 3, 8, 20, 40))):
            self.at(self.random.uniform(0, FAULTS_UNTIL_S * self.share), self.random.choice(kinds))
        for index, store in enumerate(self.stores):  # hosts start one after the other
            store.is_down = True
            delay_s = self.random.choice((0, 0, 0.5, 4.0)) * self.random.random() * self.share
            self.at(delay_s, partial(self.come_up, index))
        self.at(FAULTS_UNTIL_S * self.share, self.calm_down)

    def come_up(self, index: int) -> None:
        self.stores[index].is_down = False
        self.note("store", index, "is up")

    def a_while(self) -> float:
        return self.random.choice((0.05, 0.5, 2.0, 6.0)) * self.random.uniform(0.5, 1.5) * self.share

    def freeze(self) -> None:
        index = self.random.randrange(self.size)
        self.stores[index].frozen_until = self.now + self.a_while()
        self.note("store", index, "freezes until", round(self.stores[index].frozen_until, 3))

    def forget(self) -> None:
        if self.is_calm:
            return
        index = self.random.randrange(self.size)
        store, is_safe = self.stores[index], may_forget(self.stores, index, self.chosen)
        if not is_safe:
            if not self.may_lose:
                return
            self.is_lost = True
        self.note("store", index, "forgets", "and so a majority has" if not is_safe else "")
        store.cell, store.is_down, store.frozen_until = None, True, 0.0
        self.after(self.random.choice((0, 0.3, 4.0)) * self.random.random() * self.share, partial(self.come_up, index))

    def freeze_and_forget(self) -> None:
        """Leaves fewer than a majority of stores with data and able to answer, until one is back."""
        self.freeze()
        self.after(self.random.choice((0, 0.1, 1.0)) * self.share, self.forget)

    def cut_one(self) -> None:
        ways = {(self.random.randrange(len(self.clients)), self.random.randrange(self.size))}
        self._cut(self.random.choice((self.unheard, self.unanswered)), ways)

    def isolate(self) -> None:
        host = self.random.randrange(len(self.clients))
        self._cut(self.random.choice((self.unheard, self.unanswered)), {(host, store) for store in range(self.size)})

    def _cut(self, kind: set[tuple[int, int]], ways: set[tuple[int, int]]) -> None:
        self.note("cut", sorted(ways))
        kind |= ways
        self.after(self.a_while(), lambda: kind.difference_update(ways))

    def restart_client(self) -> None:
        self.random.choice(self.clients).restart()

    def calm_down(self) -> None:
        self.note("calm")
        self.calm_at = self.now
        self.unheard.clear()
        self.unanswered.clear()
        for store in self.stores:
            store.frozen_until, store.is_down = 0.0, False

    # The run.

    def play(self) -> None:
        self.plan()
        for client in self.clients:
            client.start()
        self.run(lambda: False, FAULTS_UNTIL_S * self.share + max(CALM_S * self.share, 2.5))
        for client in self.clients:
            client.forget_op()
        if not all(client.answered_at > FAULTS_UNTIL_S * self.share for client in self.clients):
            raise BrokenPromiseError("a client has no answer when all has been calm")
        if not self.is_lost and not is_linearizable(self.history):
            raise BrokenPromiseError("the history is not linearizable")


class Client:
    """Reads the register and replaces its value, whenever it can."""

    def __init__(self, world: World, index: int) -> None:
        self.world, self.index = world, index
        self.life = 0
        self.core = Register(world.size, f"c{index}.0")
        self.rings_at: float | None = None
        self.writes = 0
        self.answered_at = 0.0
        self.op: tuple[float, ev.Requested, Callable[[bytes | None], None]] | None = None
        self.may_have_written = False

    def __repr__(self) -> str:
        return f"c{self.index}.{self.life}"

    def start(self) -> None:
        self.world.after(self.world.random.random(), partial(self.look, self.life))

    def restart(self) -> None:
        self.world.note(self, "restarts")
        self.forget_op()
        self.life += 1
        self.core = Register(self.world.size, f"c{self.index}.{self.life}")
        self.rings_at = None
        self.start()

    # The register.

    def ask(self, asked: ev.Requested, then: Callable[[bytes | None], None]) -> None:
        assert self.op is None
        self.op, self.may_have_written = (self.world.now, asked, then), False
        self.feed(asked)

    def receive(self, life: int, event: ev.Event) -> None:
        if life == self.life:
            self.feed(event)

    def feed(self, event: ev.Event) -> None:
        for action in self.core.handle(event, self.world.now):
            match action:
                case ev.Look() | ev.Write():
                    if isinstance(action, ev.Write) and action.cell.vote and self.op:
                        vote = action.cell.vote
                        self.may_have_written |= vote.text == self.op[1].new
                    self.world.send(self, action)
                case ev.Done(text):
                    self.end_op(text)
                case ev.NoMajority():
                    self.end_op(None)
        if self.core.deadline not in (None, self.rings_at):
            self.rings_at = self.core.deadline
            self.world.at(self.rings_at, partial(self.ring, self.core, self.rings_at))

    def ring(self, core: Register, deadline: float) -> None:
        if core is self.core and deadline == self.rings_at:
            self.rings_at = None
            if core.deadline == deadline:
                self.feed(ev.DeadlinePassed())

    def forget_op(self) -> None:
        if self.op is not None:
            self.record(None)
            self.op = None

    def record(self, text: bytes | None) -> None:
        assert self.op is not None
        called, asked, _ = self.op
        now, history = self.world.now, self.world.history
        if asked.new is not None and text == asked.new:
            history.append(Op(called, now, text, asked.expected, asked.new))
            return
        if text is not None:
            history.append(Op(called, now, text))
        if self.may_have_written:  # it took effect, and was overtaken; or it may yet
            history.append(Op(called, math.inf, None, asked.expected, asked.new))

    def end_op(self, text: bytes | None) -> None:
        assert self.op is not None
        self.world.note(self, self.op[1], "->", text)
        self.record(text)
        (called, _, then), self.op = self.op, None
        if text is not None:
            self.answered_at = self.world.now
        elif called > self.world.calm_at + SOON_S:
            raise BrokenPromiseError(f"{self} has no majority when all has been calm")
        then(text)

    def look(self, life: int) -> None:
        if life == self.life:
            self.ask(ev.Requested(), self.on_read)

    def on_read(self, text: bytes | None) -> None:
        if text is None or self.world.random.random() < 0.5:
            self.again(0.1)
            return
        self.writes += 1
        new = f"{self} {self.writes}".encode()
        self.ask(ev.Requested(text, new), lambda _: self.again(self.world.random.choice((0.01, 0.1, 1.0))))

    def again(self, delay_s: float) -> None:
        delay_s *= self.world.random.uniform(0.7, 1.3) * self.world.share
        self.world.after(delay_s, partial(self.look, self.life))


def simulate(seed: int) -> World:
    world = World(seed)
    try:
        world.play()
    except Exception as error:
        error.add_note(
            f"replay: PYTHONPATH=tests python -m kit.simulated.quorum {seed}\n" + "\n".join(world.log[-200:])
        )
        raise
    return world


if __name__ == "__main__":
    print("\n".join(simulate(int(sys.argv[1])).log))
