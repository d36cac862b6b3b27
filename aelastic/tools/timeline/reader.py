"""Reads event logs from their lines: damaged lines are left out and counted.

Pure: lines go in, a `Log` comes out.  A log may be read while it is written, or may have been cut off: its last line
is then unfinished, which is not damage.  The offsets between the clocks of several nodes are also found here.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import median
from typing import Any

from aelastic.base.renamed import with_new_names
from aelastic.observe.run_events import Recovered
from aelastic.tools.timeline.fields import SECONDS_MAX, WHOLE_MAX, check

# Of `docs/reference/event-log.schema.json`.
SCHEMA_VERSION = 1
# A failure and its stack are cut to 8 KiB each, its traceback to 32 KiB; escaped as JSON, six times that at most.
LINE_BYTES_MAX = 1 << 20
# A new round takes about this long to reach all nodes on a busy machine: a smaller difference proves nothing.
AGREEING_CLOCKS_S = 0.05
# Agents of one host have one clock; if they differ by more, two hosts have the same name.
SAME_CLOCK_S = 1.0
YEAR_MAX = 2200  # with 2^63 ns after it, still a year that Python knows
_LONG_AGO = datetime.fromtimestamp(0, UTC)


class UnknownVersionError(ValueError):
    """The log has a schema version that this aelastic does not know."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a log."""

    wall: float  # seconds since the epoch, on that node; goes evenly, since it is counted on the monotonic clock
    kind: str
    fields: dict[str, Any]

    def text(self, name: str) -> str:
        value = self.fields.get(name)
        return "" if value is None else str(value)

    def number(self, name: str) -> int:
        """Returns a whole number.

        Raises:
            ValueError: it is missing, or not a whole number.
        """
        return _whole(self.fields.get(name), name)

    def seconds(self, name: str) -> float:
        """Returns a length of time.

        Raises:
            ValueError: it is missing, or not a length of time.
        """
        value = self.fields.get(name)
        # Compared, not converted: an integer may be too large for a float.
        if isinstance(value, bool) or not isinstance(value, int | float) or not -SECONDS_MAX < value < SECONDS_MAX:
            raise ValueError(f"{name} is not a length of time")
        return max(0.0, float(value))


def recovered_in(entry: Entry) -> Recovered:
    """Returns the recovery in place that an entry records.

    Raises:
        ValueError: a field is missing, or has another type.
    """
    number = entry.number
    return Recovered(
        round=number("round"),
        generation=number("generation"),
        workers_kept=number("workers_kept"),
        workers_replaced=number("workers_replaced"),
        step=number("step"),
        source_rank=number("source_rank"),
        duration_s=entry.seconds("duration_s"),
    )


@dataclass(slots=True)
class Log:
    """The records of one agent."""

    source: str
    run_id: str = ""
    host: str = ""
    began: datetime = _LONG_AGO
    first_ns: int = 0  # of its monotonic clock
    entries: list[Entry] = field(default_factory=list[Entry])
    damaged: int = 0  # lines that were left out
    alive_at: float | None = None  # when its agent was seen alive, as wall time
    is_dead: bool = False  # its agent was not found

    @property
    def first_wall(self) -> float:
        return self.entries[0].wall

    @property
    def last_wall(self) -> float:
        return max(self.entries[-1].wall, self.alive_at or 0.0)

    @property
    def is_ended(self) -> bool:
        """Whether its last record is the end of the run."""
        return self.entries[-1].kind == "run_ended"

    @property
    def pid(self) -> int:
        """The agent's; -1 if that line is damaged."""
        pid = next((entry.fields.get("pid") for entry in self.entries if entry.kind == "run_began"), None)
        return pid if isinstance(pid, int) else -1


def read_logs(source: str, lines: Iterable[bytes]) -> list[Log]:
    """Returns the logs in these lines, one for each agent; at least one, which may have no entries.

    Args:
        source: where they come from, for messages.
        lines: with their line ends.

    Raises:
        UnknownVersionError: they are of another schema version.
    """
    logs: dict[str, Log] = {}
    damaged = 0
    is_torn = False
    for line in lines:
        if not line.strip():
            continue
        is_torn = not line.endswith(b"\n")
        try:
            record = _record(line, source)
            monotonic_ns, node = _whole(record.get("monotonic_ns"), "monotonic_ns"), str(record.get("node", ""))
            log = logs.get(node)
            if log is None:
                run_id, host, began = str(record.get("run_id", "")), str(record.get("host", "")), _moment(record)
                log = logs[node] = Log(source, run_id, host, began, monotonic_ns)
        except UnknownVersionError:
            raise
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            damaged += not is_torn
            continue
        # An interval on the monotonic clock; in whole nanoseconds, since a float cannot hold as many.
        wall = log.began.timestamp() + max(monotonic_ns - log.first_ns, 0) / 1e9
        kind = str(record.get("event", ""))
        log.entries.append(Entry(wall, kind, with_new_names(kind, record)))
    found = list(logs.values()) or [Log(source)]
    found[0].damaged = damaged
    return found


def _record(line: bytes, source: str) -> dict[str, Any]:
    if len(line) > LINE_BYTES_MAX:
        raise ValueError("too long")
    record = json.loads(line)
    if not isinstance(record, dict):
        raise TypeError("not an object")
    version = record.get("schema")
    if isinstance(version, int) and version != SCHEMA_VERSION:
        raise UnknownVersionError(f"{source}: schema version {version}; this aelastic reads version {SCHEMA_VERSION}")
    if version != SCHEMA_VERSION:
        raise ValueError(f"schema version {version!r}")
    check(record)
    return record


def _whole(value: object, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > WHOLE_MAX:
        raise ValueError(f"{name} is {value!r}")
    return value


def _moment(record: dict[str, Any]) -> datetime:
    moment = datetime.fromisoformat(record["time"])
    if moment.tzinfo is None:
        raise ValueError("a time without its zone")
    if not _LONG_AGO.year <= moment.year <= YEAR_MAX:
        raise ValueError(f"the year {moment.year}")
    return moment


# Runs and clocks.


def runs_of(logs: Sequence[Log]) -> list[list[Log]]:
    """Returns logs by run; the run that began last comes last.

    Logs belong together if they have the same run id and overlap in time: a run id may be used again tomorrow.
    """
    by_id: dict[str, list[Log]] = defaultdict(list)
    for log in logs:
        by_id[log.run_id].append(log)
    runs: list[list[Log]] = []
    for same_id in by_id.values():
        same_id.sort(key=lambda log: log.first_wall)
        end = -math.inf
        for log in same_id:
            if log.first_wall > end:
                runs.append([])
            runs[-1].append(log)
            end = max(end, log.last_wall)
    return sorted(runs, key=lambda run: run[0].first_wall)


def in_order(logs: Sequence[Log]) -> list[tuple[float, Entry]]:
    """Returns all records in order of time, corrected for the clocks of nodes that have met."""
    timed: list[tuple[float, Entry]] = []
    for run in runs_of([log for log in logs if log.entries]):
        for log, offset in zip(run, offsets_of(run)[0], strict=True):
            timed += [(entry.wall - offset, entry) for entry in log.entries]
    return sorted(timed, key=lambda each: each[0])


def offsets_of(logs: Sequence[Log]) -> tuple[list[float], list[str]]:
    """Returns how far each log's clock is ahead of that of the log with most rounds, and notes about it.

    All nodes of a round learn at the same moment that it is complete.  So a node's clock is ahead by the difference
    between its time of that and another node's: the median over all rounds that they share.  Agents of one host share
    its clock.
    """
    rounds = [_rounds(log) for log in logs]
    root = max(range(len(logs)), key=lambda place: len(rounds[place]), default=0)
    known: dict[int, float] = dict(rounds[root])  # when each round was complete, on the clock of the root
    offsets = {root: 0.0}
    of_host = {logs[root].host: 0.0}
    while placed := [place for place in range(len(logs)) if place not in offsets and rounds[place].keys() & known]:
        for place in placed:
            ahead = median(rounds[place][number] - known[number] for number in rounds[place].keys() & known)
            if abs(ahead) < AGREEING_CLOCKS_S:
                ahead = 0.0
            of_its_host = of_host.setdefault(logs[place].host, ahead)
            if logs[place].host and abs(of_its_host - ahead) < SAME_CLOCK_S:
                ahead = of_its_host
            offsets[place] = ahead
        for place in placed:
            for number, wall in rounds[place].items():
                known.setdefault(number, wall - offsets[place])
    notes = [_shifted(logs[place], ahead, logs[root]) for place, ahead in sorted(offsets.items()) if ahead]
    notes += [
        f"{log.host or 'A node'} (pid {log.pid}) shares no round with the others: it is placed by its own wall clock."
        for place, log in enumerate(logs)
        if place not in offsets
    ]
    return [offsets.get(place, 0.0) for place in range(len(logs))], notes


def _shifted(log: Log, ahead: float, root: Log) -> str:
    return (
        f"The clock of {log.host} (pid {log.pid}) is {abs(ahead):.3g} s {'ahead of' if ahead > 0 else 'behind'} that "
        f"of {root.host} (pid {root.pid}): its records are shifted, so "
        "that the rounds they share begin together."
    )


def _rounds(log: Log) -> dict[int, float]:
    """Returns when each round was complete."""
    formed: dict[int, float] = {}
    for entry in log.entries:
        number = entry.fields.get("round")
        if entry.kind == "round_formed" and isinstance(number, int):
            formed[number] = entry.wall
    return formed
