"""The life of a fork server: it imports module after module, is started again without those it trips over, and serves.

A core: the shell (`fork_server`) starts and ends the process, and tells what it says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias, assert_never

from aelastic.core.machine import Machine, Story
from aelastic.core.record import Record

# Each start leaves out what the one before it tripped over; modules that hide behind each other need one each.
STARTS_MAX = 8
# Something on this host kills it; to go on without end is of no use.
DEATHS_MAX = 3


class Phase(StrEnum):
    IMPORTING = "IMPORTING"  # the process is starting, or imports
    READY = "READY"  # it forks on request
    OFF = "OFF"  # there is none, and there will be none: workers start cold


class Importing(Record):
    """The process begins with a module."""

    module: str


class LeftOut(Record):
    """A module must not, or cannot, be preloaded."""

    module: str
    why: str


class Tripped(Record):
    """The process has told which modules must not be preloaded, and is of no use."""


class Ready(Record):
    """All is imported that can be."""


class Learned(Record):
    """What the first workers imported."""

    modules: tuple[str, ...]


class Refused(Record):
    """The process cannot fork on this machine."""

    why: str


class Ended(Record):
    """The process has ended.

    Args:
        exitcode: negative for a signal; `None`: it has closed its socket, and survives SIGKILL.
        said: the last line that it printed.
    """

    exitcode: int | None
    said: str = ""

    @property
    def how(self) -> str:
        said = f", {self.said}" if self.said else ""
        end = "it survives SIGKILL" if self.exitcode is None else f"exit code {self.exitcode}"
        return f"({end}{said})"


Event: TypeAlias = Importing | LeftOut | Tripped | Ready | Learned | Refused | Ended


class Start(Record):
    """A process is to be started."""

    modules: tuple[str, ...]


class Replace(Record):
    """The process is to be ended, and another one to be started that imports these."""

    modules: tuple[str, ...]


class Stop(Record):
    """The process is to be ended."""


class Warn(Record):
    """The log is to say this."""

    text: str


Action: TypeAlias = Start | Replace | Stop | Warn


@dataclass(slots=True)
class Preload(Machine[Event, Action]):
    """Decides what the fork server imports.

    Args:
        modules: what it is to preload, in order.
        is_learning: what that is is learned from the first workers, which are forked before anything is imported.
    """

    modules: tuple[str, ...]  # without those that were left out
    is_learning: bool = False
    phase: Phase = Phase.IMPORTING
    _importing: str = ""
    _has_tripped: bool = False  # and so ends, whatever its exit code
    _starts: int = 1
    _deaths: int = 0
    _story: Story = field(default_factory=Story)

    def validate(self) -> None:
        assert 0 < self._starts <= STARTS_MAX, "a fork server is started a bounded number of times"
        assert self.phase is not Phase.IMPORTING or not self._importing or self._importing in self.modules, (
            "what is being imported has not been left out"
        )

    def _dispatch(self, event: Event, now: float) -> list[Action]:  # noqa: ARG002, C901  one case for each event
        if self.phase is Phase.OFF:
            return []  # it was given up
        match event:
            case Importing() | LeftOut() | Tripped() | Ready() if self.phase is Phase.READY:
                raise self._impossible(event)
            case Importing():  # the culprit, should the process end
                self._importing = event.module
                return []
            case LeftOut():  # told once; the process says at its end whether it is of use
                self._leave_out(event.module)
                return [Warn(f"{event.module} {event.why}; it is not preloaded")]
            case Tripped():  # a process that a module has started may keep its socket open
                self._has_tripped = True
                return [Stop()]
            case Ready():  # workers are forked from now on
                self.phase, self._importing = Phase.READY, ""
                return []
            case Learned():  # from here on workers are forked warm
                self.is_learning, self.modules = False, event.modules
                self.phase, self._importing, self._has_tripped = Phase.IMPORTING, "", False
                return [Replace(event.modules)]
            case Refused():  # another one would be refused, too
                self.phase = Phase.OFF
                return [Stop(), Warn(f"the template cannot fork: {event.why}; workers start cold")]
            case Ended() if self.phase is Phase.READY:  # something killed it; what it has forked lives on
                self._deaths += 1
                return self._again(f"the template died {event.how}")
            case Ended():  # over a module, or to be started again without some
                return self._after_imports(event)
            case _:
                assert_never(event)

    def _after_imports(self, event: Ended) -> list[Action]:
        warnings: list[Action] = []
        if not self._has_tripped:  # then it would have gone on
            if not self._importing:
                return self._give_up(f"the template cannot start {event.how}")
            module = self._importing
            self._leave_out(module)
            warnings = [Warn(f"{module} ends the process {event.how}; it is not preloaded")]
        return [*warnings, *self._again("")]

    def _again(self, why: str) -> list[Action]:
        if not self.modules and not self.is_learning:
            return self._give_up("no module remains to preload")
        if self._starts == STARTS_MAX or self._deaths > DEATHS_MAX:
            return self._give_up(why or f"the template was started {STARTS_MAX} times")
        self._starts += 1
        self._importing, self._has_tripped = "", False
        self.phase = Phase.IMPORTING
        warning = [Warn(f"{why}; starting another")] if why else []
        return [*warning, Start(self.modules)]

    def _give_up(self, why: str) -> list[Action]:
        self.phase = Phase.OFF
        return [Warn(f"{why}; workers start cold")]

    def _leave_out(self, module: str) -> None:
        self.modules = tuple(name for name in self.modules if name != module)
        if self._importing == module:
            self._importing = ""
