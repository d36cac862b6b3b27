"""Rules that decide which timers of workers have expired.

A worker sets a timer before an operation that may hang, and clears it afterwards.  torch's `FileTimerClient` writes
lines to a FIFO: `{"version": 1, "pid": 7, "scope_id": "step", "expiration_time": 1700000000.5, "signal": 9}`, where a
negative time clears.  One pid may have several, distinguished by scope; setting one again replaces it.

- `handle(event, now)` is the only way to change anything; `deadline` is the next expiry.
- The client uses the wall clock.  Each time is converted to our clock when it is read, so that setting the clock later
 moves no timer.
- A timer belongs to a worker: the worker's own process set it, or one that the worker started.  The latter is looked
 up (`FindOwner`), and known from then on.  Timers of other processes are dropped.
- Timers of an ended worker, and of an earlier generation, are forgotten.  Events about workers carry their generation:
 the end of an old worker does not clear timers of the new one that has its local rank.

Whatever a writer sends, a line is read or dropped; the first dropped line of each kind is logged.
"""

from __future__ import annotations

import math
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from heapq import heapify, heappop, heappush
from json import JSONDecoder
from typing import TypeAlias, assert_never

from aelastic.base.machine import DeadlinePassed as DeadlinePassed  # noqa: PLC0414  also an event of this core
from aelastic.base.record import Record

# The client sends no line longer than Linux's PIPE_BUF (pipe(7)), and adds a newline.
LINE_BYTES_MAX = 4096
# One second of the 10,000 timers/s that the file timer is designed for, if none of them is cleared.
TIMERS_MAX = 10_000
# Processes that have set timers; above this limit, those without timers are forgotten, and looked up again.
OWNERS_MAX = 2 * TIMERS_MAX
# Timers without a signal are only reported, and a loop may set thousands of them.
REPORTED_MAX = 10
# PID_MAX_LIMIT of Linux (proc(5), /proc/sys/kernel/pid_max).
PID_MAX = 1 << 22
# Lines that clear a timer repeat, because only a few places in a program set one.
CLEARS_MAX = 1_000
# Timers that no longer run, but are still in the heap.
STALE_MAX = 1_000
# How much of a dropped line is quoted.
QUOTE_CHARS = 200


class Kind(StrEnum):
    """Why a line is dropped."""

    MALFORMED = "is not a timer"
    OVERSIZED = f"is longer than {LINE_BYTES_MAX} bytes"
    FOREIGN = "is from a process that no worker of this agent started"
    EXCESS = f"would be one of more than {TIMERS_MAX} timers at once"


# Events.


class Started(Record):
    """A generation of workers is started; no process of the previous one is alive."""

    generation: int
    owners: Mapping[int, int]  # pid to local rank


class Ended(Record):
    """A worker has ended."""

    generation: int
    local_rank: int


class DataReceived(Record):
    """Data from the FIFO, cut anywhere."""

    data: bytes
    wall: float  # the wall clock's time now


class Belongs(Record):
    """The answer to `FindOwner`."""

    generation: int
    pid: int
    local_rank: int | None  # None: it belongs to no worker
    is_gone: bool = False  # it has ended meanwhile, so it does not hang


Event: TypeAlias = Started | Ended | DataReceived | Belongs | DeadlinePassed

# Actions.


class FindOwner(Record):
    """Find out which worker a process belongs to.  Answered by `Belongs`, before the next `DataReceived`."""

    generation: int
    pid: int


class Expired(Record):
    """A timer was not cleared in time; it is forgotten now.  Not answered."""

    generation: int
    local_rank: int  # of the worker it belongs to
    pid: int  # of the process that set it
    scope: str
    set_for_s: float
    late_s: float
    signum: int | None  # the signal to stop its worker with; None: it is not stopped


class Complain(Record):
    """Log that a line is dropped; later ones of its kind are not logged.  Not answered."""

    kind: Kind
    quote: str


Action: TypeAlias = FindOwner | Expired | Complain


_NUMBERS = (float, int)  # and not subclasses, such as that of True
# When it expires, how long it was set for, and its signal.  A plain tuple: 10,000 are created per second.
_Timer: TypeAlias = tuple[float, float, int]


class Timers:
    """The timers of the workers of one agent."""

    def __init__(self) -> None:
        self._generation = 0
        self._owners: dict[int, int] = {}  # pid to local rank
        self._workers: Mapping[int, int] = {}  # those that are workers themselves
        self._asked: dict[int, dict[str, _Timer]] = {}  # pid to its timers, by scope, until `Belongs`
        self._timers: dict[tuple[int, str], _Timer] = {}  # by pid and scope
        # A heap of these, and of some that were set again or cleared since; the first one is running.
        self._due: list[tuple[_Timer, tuple[int, str]]] = []
        self._clears: dict[bytes, tuple[int, str]] = {}  # lines that clear, and the timer that each clears
        self._rest = b""  # the beginning of an incomplete line
        self._is_skipping = False  # until the end of a line that is too long
        self._reported: Counter[int] = Counter()  # timers without a signal, by local rank
        self._complained: set[Kind] = set()
        self._decode = JSONDecoder().raw_decode

    @property
    def deadline(self) -> float | None:
        """When the next timer expires."""
        return self._due[0][0][0] if self._due else None

    def __len__(self) -> int:
        """Returns how many timers run."""
        return len(self._timers)

    def handle(self, event: Event, now: float) -> list[Action]:
        match event:
            case DataReceived():
                return self._on_received(event, now)
            case Belongs():
                return self._on_belongs(event)
            case DeadlinePassed():
                return self._on_deadline_passed(now)
            case Started():
                return self._on_started(event)
            case Ended():
                return self._on_ended(event)
            case _:
                assert_never(event)

    def _on_started(self, event: Started) -> list[Action]:
        if event.generation <= self._generation:
            return []  # an earlier generation's
        self._generation = event.generation
        self._workers, self._owners = dict(event.owners), dict(event.owners)
        self._timers, self._asked, self._due = {}, {}, []
        self._reported.clear()
        return []

    def _on_ended(self, event: Ended) -> list[Action]:
        if event.generation != self._generation:
            return []  # an earlier generation's
        gone = {pid for pid, local_rank in self._owners.items() if local_rank == event.local_rank}
        for pid in gone:
            del self._owners[pid]
        self._timers = {key: timer for key, timer in self._timers.items() if key[0] not in gone}
        self._drop_stale()
        return []

    def _on_belongs(self, event: Belongs) -> list[Action]:
        timers = self._asked.pop(event.pid, None) if event.generation == self._generation else None
        if timers is None or event.is_gone:
            return []  # an earlier generation's, or not requested; or its process has ended
        if event.local_rank is None:
            return [*self._complain(Kind.FOREIGN, f"pid {event.pid}")]
        if len(self._owners) >= OWNERS_MAX:
            pids = {pid for pid, _ in self._timers} | self._workers.keys()
            self._owners = {pid: local_rank for pid, local_rank in self._owners.items() if pid in pids}
        self._owners[event.pid] = event.local_rank
        return [action for scope, timer in timers.items() for action in self._set(event.pid, scope, timer)]

    def _on_deadline_passed(self, now: float) -> list[Action]:
        actions: list[Action] = []
        while self._due and self._due[0][0][0] <= now:
            timer, (pid, scope) = self._due[0]
            del self._timers[pid, scope]
            local_rank = self._owners[pid]
            expires_at, set_for_s, signum = timer
            if signum <= 0:
                self._reported[local_rank] += 1
            if signum > 0 or self._reported[local_rank] <= REPORTED_MAX:
                late_s, stopped_with = now - expires_at, signum if signum > 0 else None
                actions.append(Expired(self._generation, local_rank, pid, scope, set_for_s, late_s, stopped_with))
            self._drop_stale()
        return actions

    def _drop_stale(self) -> None:
        """Removes timers that no longer run from the heap, if they are its first, or are most of it."""
        due, timers = self._due, self._timers
        while due and timers.get(due[0][1]) is not due[0][0]:
            heappop(due)
        if len(due) > 2 * len(timers) + STALE_MAX:
            due[:] = [(timer, key) for key, timer in timers.items()]
            heapify(due)

    # Lines.

    def _on_received(self, event: DataReceived, now: float) -> list[Action]:
        *lines, rest = (self._rest + event.data).split(b"\n")
        actions: list[Action] = []
        if lines and self._is_skipping:
            self._is_skipping = False
            del lines[0]
        if len(rest) > LINE_BYTES_MAX and not self._is_skipping:
            self._is_skipping = True
            actions += self._complain(Kind.OVERSIZED, rest)
        self._rest = b"" if self._is_skipping else rest
        to_ours = now - event.wall
        for line in lines:
            actions += self._on_line(line, now, to_ours)
        return actions

    def _on_line(self, line: bytes, now: float, to_ours: float) -> Sequence[Action]:
        # Takes microseconds, 20,000 times per second: so it is one function, which creates as few objects as possible.
        if line in self._clears:
            self._clear(*self._clears[line])
            return ()
        if len(line) > LINE_BYTES_MAX:
            return self._complain(Kind.OVERSIZED, line)
        try:
            text = line.decode()
            request, end = self._decode(text)
            pid, scope, at, signum = request["pid"], request["scope_id"], request["expiration_time"], request["signal"]
            is_typed = type(pid) is type(signum) is int and type(scope) is str and type(at) in _NUMBERS
            is_timer = is_typed and 0 < pid <= PID_MAX and signum < signal.NSIG
            expires_at = at + to_ours
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
            return self._complain(Kind.MALFORMED, line)
        if not is_timer or math.isnan(expires_at) or text[end:].strip():
            return self._complain(Kind.MALFORMED, line)
        if at < 0:
            if len(self._clears) >= CLEARS_MAX:
                self._clears.clear()
            self._clears[line] = pid, scope
            self._clear(pid, scope)
            return ()
        timer = expires_at, max(0.0, expires_at - now), signum
        if pid in self._owners:
            return self._set(pid, scope, timer)
        is_asked = pid in self._asked
        self._asked.setdefault(pid, {})[scope] = timer
        return () if is_asked else (FindOwner(self._generation, pid),)

    def _clear(self, pid: int, scope: str) -> None:
        if self._timers.pop((pid, scope), None) is not None:
            self._drop_stale()
        if pid in self._asked:
            self._asked[pid].pop(scope, None)

    def _set(self, pid: int, scope: str, timer: _Timer) -> Sequence[Action]:
        if len(self._timers) >= TIMERS_MAX and (pid, scope) not in self._timers:
            return self._complain(Kind.EXCESS, repr(scope))
        key = pid, scope
        self._timers[key] = timer
        heappush(self._due, (timer, key))
        self._drop_stale()
        return ()

    def _complain(self, kind: Kind, what: bytes | str) -> Sequence[Action]:
        if kind in self._complained:
            return ()
        self._complained.add(kind)
        quote = what if isinstance(what, str) else repr(what[:QUOTE_CHARS])[1:]
        return (Complain(kind, quote[:QUOTE_CHARS]),)
