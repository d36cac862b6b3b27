"""A process of the simulation: cores with their mailboxes and timers, on a clock of its machine, that may be frozen."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kit.simulated.world import World


@dataclass
class Clock:
    """One machine's monotonic clock: it never goes back, but for ahead it may jump."""

    offset_s: float = 0.0
    rate: float = 1.0

    def local(self, true: float) -> float:
        return self.offset_s + true * self.rate

    def true(self, local: float) -> float:
        return (local - self.offset_s) / self.rate


@dataclass
class CoreShell:
    """A mailbox, and the core that reads it."""

    name: str
    core: Any
    carry_out: Callable[[Any], None]
    due: Any  # its `DeadlinePassed`
    items: deque[Any] = field(default_factory=deque)
    armed: float | None = None  # when its timer goes off, in true time
    is_closed: bool = False


class SimulatedProcess:
    """Runs cores, each in its shell.

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
        self.shells: list[CoreShell] = []
        self._kept: list[tuple[object, Callable[[], None]]] = []  # while frozen
        self._is_busy = False

    @property
    def now(self) -> float:
        return self.clock.local(self.world.now)

    def open_shell(self, name: str, core: Any, carry_out: Callable[[Any], None], due: Any) -> CoreShell:
        shell = CoreShell(name, core, carry_out, due)
        self.shells.append(shell)
        return shell

    def close_shell(self, shell: CoreShell) -> None:
        shell.is_closed = True
        shell.items.clear()
        self.shells.remove(shell)

    def mail(self, shell: CoreShell, event: Any) -> None:
        if not shell.is_closed:
            shell.items.append(event)

    def post(self, source: object, call: Callable[[], None]) -> None:
        if not self.is_alive:
            return
        if self.is_frozen:
            self._kept.append((source, call))
            return
        call()
        self.drain()

    def drain(self) -> None:
        """Reads the mailboxes until all are empty, in a random order."""
        if self._is_busy:
            return
        self._is_busy = True
        while self.is_alive and (full := [shell for shell in self.shells if shell.items]):
            shell = full[0] if len(full) == 1 else self.world.random.choice(full)
            self.handle(shell, shell.items.popleft())
        self._is_busy = False

    def handle(self, shell: CoreShell, event: Any) -> None:
        actions = shell.core.handle(event, self.now)
        self.world.note(f"{self} {shell.name}", event, actions)
        for action in actions:
            if self.is_alive:
                shell.carry_out(action)
        if self.is_alive:
            self.arm(shell)
            self.after_handling(shell)

    def after_handling(self, shell: CoreShell) -> None:
        """What the shell does after each event."""

    def arm(self, shell: CoreShell) -> None:
        deadline = shell.core.deadline
        if deadline is None:
            return
        true = max(self.clock.true(deadline), self.world.now) + self.world.random.uniform(1e-6, 0.003)
        if shell.armed is None or true < shell.armed:
            shell.armed = true
            self.world.at(true, lambda: self._wake(shell, true))

    def _wake(self, shell: CoreShell, armed: float) -> None:
        if shell.armed != armed or not self.is_alive or self.is_frozen or shell.is_closed:
            return
        self._look_at_clock(shell)

    def _look_at_clock(self, shell: CoreShell) -> None:
        shell.armed = None
        deadline = shell.core.deadline
        if deadline is not None and self.now >= deadline and not shell.items:  # what is in the mailbox comes first
            self.handle(shell, shell.due)
            left = shell.core.deadline
            assert left is None or left != deadline, f"{shell.name}: a deadline that has passed stays armed"
            self.drain()
        if not shell.is_closed:
            self.arm(shell)

    def freeze(self) -> None:
        self.world.note(repr(self), "is frozen")
        self.is_frozen = True

    def suspend(self) -> None:
        """The whole machine stands still, its clock too."""
        self.world.note(repr(self), "is suspended with its clock")
        self.is_frozen, self.suspended_at = True, self.world.now

    def thaw(self) -> None:
        """Everything that was kept happens at once, and so do the timers: in any order, but in each source's own."""
        if not self.is_alive or not self.is_frozen:
            return
        self.world.note(repr(self), "goes on")
        self.is_frozen = False
        if self.suspended_at is not None:
            self.clock.offset_s -= (self.world.now - self.suspended_at) * self.clock.rate
            self.suspended_at, self.suspended_until = None, self.world.now
        sources: dict[object, deque[Callable[[], None]]] = {}
        for source, call in self._kept:
            sources.setdefault(source, deque()).append(call)
        self._kept = []
        for shell in self.shells:
            sources[shell.name, "timer"] = deque([lambda shell=shell: self._look_at_clock(shell)])  # type: ignore[misc]
        waiting = list(sources.values())
        self._is_busy = True
        while waiting and self.is_alive:
            index = self.world.random.randrange(len(waiting))
            waiting[index].popleft()()
            if not waiting[index]:
                waiting.pop(index)
            if self.world.random.random() < 0.5:
                self._is_busy = False
                self.drain()
                self._is_busy = True
        self._is_busy = False
        self.drain()

    def jump(self, ahead_s: float) -> None:
        """The clock runs ahead at once."""
        self.world.note(repr(self), f"its clock jumps {ahead_s:.1f} s ahead")
        self.clock.offset_s += ahead_s
        self.jumped_at = self.world.now
        for shell in self.shells:
            shell.armed = None
            self.arm(shell)
