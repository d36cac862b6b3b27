"""The life of a fork server: it imports modules one by one, is restarted without those that do not work, and serves.

A core: the shell (`fork_server`) starts and ends the process, and passes on its messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias, assert_never

from aelastic.base.machine import Machine, Trace
from aelastic.base.record import Record

# Each start leaves out the modules that failed in the previous one; one may hide the next, and each needs a start.
STARTS_MAX = 8
# Something on this host kills it; continuing forever is useless.
DEATHS_MAX = 3


class Phase(StrEnum):
    IMPORTING = "IMPORTING"  # the process is starting, or imports
    READY = "READY"  # it forks on request
    OFF = "OFF"  # there is no process, and there will be none: workers start cold


class Importing(Record):
    """The process begins to import a module."""

    module: str


class LeftOut(Record):
    """A module must not, or cannot, be preloaded."""

    module: str
    why: str


class Tripped(Record):
    """The process has named modules that must not be preloaded, and cannot be used."""


class Ready(Record):
    """Every module that can be imported is."""


class Learned(Record):
    """The modules that the first workers imported."""

    modules: tuple[str, ...]


class Refused(Record):
    """The process cannot fork on this machine."""

    why: str


class Ended(Record):
    """The process has ended.

    Args:
        exitcode: negative for a signal; `None`: it has closed its socket, but survives SIGKILL.
        printed: the last line that it printed.
    """

    exitcode: int | None
    printed: str = ""

    @property
    def how(self) -> str:
        printed = f", {self.printed}" if self.printed else ""
        end = "it survives SIGKILL" if self.exitcode is None else f"exit code {self.exitcode}"
        return f"({end}{printed})"


Event: TypeAlias = Importing | LeftOut | Tripped | Ready | Learned | Refused | Ended


class Start(Record):
    """Start a process."""

    modules: tuple[str, ...]


class Replace(Record):
    """End the process, and start another one that imports these modules."""

    modules: tuple[str, ...]


class Stop(Record):
    """End the process."""


class Warn(Record):
    """Log this warning."""

    text: str


Action: TypeAlias = Start | Replace | Stop | Warn


@dataclass(slots=True)
class Preload(Machine[Event, Action]):
    """Decides what the fork server imports.

    Args:
        modules: the modules to preload, in order.
        is_learning: learn these from the first workers, which are forked before anything is imported.
    """

    modules: tuple[str, ...]  # without those that were left out
    is_learning: bool = False
    phase: Phase = Phase.IMPORTING
    _importing: str = ""
    _has_tripped: bool = False  # so it ends, whatever its exit code
    _starts: int = 1
    _deaths: int = 0
    _trace: Trace = field(default_factory=Trace)

    def validate(self) -> None:
        assert 0 < self._starts <= STARTS_MAX, "a fork server is started a limited number of times"
        assert self.phase is not Phase.IMPORTING or not self._importing or self._importing in self.modules, (
            "a module that is being imported has not been left out"
        )

    def _dispatch(self, event: Event, now: float) -> list[Action]:  # noqa: ARG002, C901  one case for each event
        if self.phase is Phase.OFF:
            return []  # we gave up on it
        match event:
            case Importing() | LeftOut() | Tripped() | Ready() if self.phase is Phase.READY:
                raise self._impossible(event)
            case Importing():  # the culprit, if the process ends
                self._importing = event.module
                return []
            case LeftOut():  # reported once; at the end the process reports whether it can be used
                self._leave_out(event.module)
                return [Warn(f"{event.module} {event.why}; it is not preloaded")]
            case Tripped():  # a child process started by a module may keep its socket open
                self._has_tripped = True
                return [Stop()]
            case Ready():  # workers are forked from now on
                self.phase, self._importing = Phase.READY, ""
                return []
            case Learned():  # from here on workers are forked warm
                self.is_learning, self.modules = False, event.modules
                self.phase, self._importing, self._has_tripped = Phase.IMPORTING, "", False
                return [Replace(event.modules)]
            case Refused():  # another one would be refused as well
                self.phase = Phase.OFF
                return [Stop(), Warn(f"the template cannot fork: {event.why}; workers start cold")]
            case Ended() if self.phase is Phase.READY:  # something killed it; the processes that it has forked live on
                self._deaths += 1
                return self._again(f"the template died {event.how}")
            case Ended():  # because of a module, or to be started again without some
                return self._after_imports(event)
            case _:
                assert_never(event)

    def _after_imports(self, event: Ended) -> list[Action]:
        warnings: list[Action] = []
        if not self._has_tripped:  # otherwise it would have continued
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
