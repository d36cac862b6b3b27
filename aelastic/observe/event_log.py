"""Writes the event log: run events as JSON Lines in the log folder.

`docs/reference/event-log.md` explains each record, and the schema beside it defines its fields.

A thread writes, so a disk that hangs does not block the loop, which only queues events with their times.  Each record
is in the file within milliseconds.  The file is opened and closed for each batch: a shared file system shows the end of
a file to other machines once it is closed, and a file that was removed or has come back is noticed.

The event log never ends a job.  Records that cannot be written are kept, up to a limit, and retried; records beyond the
limit are counted, in the log itself once there is room.  Every line is whole, except for the last one of an agent that
was killed.


While nothing happens, the thread writes an `alive` record from time to time: it shows how long an agent lived that was
killed during hours of training.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeAlias

from aelastic.base.loop import clock
from aelastic.base.loop.threads import run_sync
from aelastic.base.record import Record
from aelastic.base.renamed import with_old_names
from aelastic.diagnose.failures.failure import ProcessFailure
from aelastic.observe import run_events as ev
from aelastic.observe.observer import CLOSE_TIMEOUT_S, Observer
from aelastic.rdzv.decisions import wording
from aelastic.rdzv.decisions.as_json import to_json
from aelastic.rdzv.decisions.decision import Decision

_log = logging.getLogger(__name__)

Json: TypeAlias = dict[str, Any]

FILE_NAME = "events.jsonl"
# Incremented when a field changes its meaning or is removed; not when one is added.
SCHEMA = 1
# A generation of 512 workers is two thousand records: enough for a disk that hangs during a few restarts.
BACKLOG_MAX = 4096
# How often a full disk is retried.
RETRY_INTERVAL_S = 5.0
# Limits how much of a killed agent's end is unknown; costs a thread's wake-up and 200 bytes each time: 280 KiB a day.
ALIVE_INTERVAL_S = 60.0
# Progress events come twice a second, which would be 50 MiB a day.
PROGRESS_INTERVAL_S = 60.0
# A little less than an observer's time to close.
FINISH_TIMEOUT_S = CLOSE_TIMEOUT_S - 1


class _Entry(NamedTuple):
    what: ev.RunEvent | int  # a number: how many records are missing here
    wall_ns: int
    now: float


class EventLog(Observer):
    """The event log of one run.

    Args:
        path: the file; made when there is something to write, and appended to if it exists.
        backlog_max: how many records are kept while they cannot be written.
        retry_interval_s: how often they are retried.
        alive_interval_s: how long after the last event an `alive` record is written.
    """

    def __init__(
        self,
        path: Path,
        *,
        backlog_max: int = BACKLOG_MAX,
        retry_interval_s: float = RETRY_INTERVAL_S,
        alive_interval_s: float = ALIVE_INTERVAL_S,
    ) -> None:
        self._writer = _Writer(path, retry_interval_s, alive_interval_s)
        self._backlog_max = backlog_max
        self._put = 0
        self._lost = self._lost_since = 0  # in all, and since the last `records_lost`
        self._thread: threading.Thread | None = None
        self._progress_of, self._progress_at = 0, 0.0  # generation and time of the last progress record

    def tell(self, event: ev.RunEvent, now: float) -> None:
        wall_ns = time.time_ns()
        if isinstance(event, ev.Progressed):
            is_new = event.generation != self._progress_of or now - self._progress_at >= PROGRESS_INTERVAL_S
            if not (is_new or event.is_last):
                return
            self._progress_of, self._progress_at = event.generation, now
        if self._put - self._writer.settled >= self._backlog_max:
            self._lost += 1
            self._lost_since += 1
            return
        self._put_down_lost(wall_ns, now)
        self._put += 1
        self._writer.entries.put(_Entry(event, wall_ns, now))
        if self._thread is None:  # only once the first event is queued: nothing may come before it
            thread = threading.Thread(target=self._writer.run, name="event log", daemon=True)
            thread.start()
            self._thread = thread

    async def aclose(self) -> None:
        """Waits until everything is written, or the time is up."""
        if self._thread is None:
            return
        writer = self._writer
        self._put_down_lost(time.time_ns(), clock.now())
        writer.entries.put(None)
        try:
            await run_sync(writer.is_over.wait, FINISH_TIMEOUT_S)
        finally:
            writer.is_over.set()  # ends the thread that waits for it
        if lost := self._lost + self._put - writer.settled:
            level = logging.INFO if writer.has_warned else logging.WARNING  # one warning is enough
            _log.log(level, "the event log %s is missing %d records", writer.path, lost)

    def _put_down_lost(self, wall_ns: int, now: float) -> None:
        count, self._lost_since = self._lost_since, 0
        if count:
            self._writer.entries.put(_Entry(count, wall_ns, now))


class _Writer:
    """The thread's side of the log."""

    def __init__(self, path: Path, retry_interval_s: float, alive_interval_s: float) -> None:
        self.path = path
        self.entries: SimpleQueue[_Entry | None] = SimpleQueue()  # ends with None
        self.settled = 0  # how many events are written
        self.has_warned = False
        self.is_over = threading.Event()
        self._retry_interval_s = retry_interval_s
        self._alive_interval_s = alive_interval_s
        self._records = Records()
        self._unwritten: deque[tuple[bytes, int]] = deque()  # lines, and the number of events behind each
        self._trouble = "the disk did not take them in time"
        self._has_ended = False  # the run: its last event has been queued
        self._event_at = self._taken_at = 0.0  # the last run event, on the loop's clock (any clock) and on ours

    def run(self) -> None:
        try:
            is_open = True
            while is_open:
                is_open = self._take()
                self._write()
        finally:
            self.is_over.set()

    def _take(self) -> bool:
        """Waits for something to write, or for the time to retry; returns whether there may be more."""
        quiet_s = None if self._has_ended else self._alive_interval_s
        try:
            entry = self.entries.get(timeout=self._retry_interval_s if self._unwritten else quiet_s)
            while entry is not None:
                self._unwritten.append((self._line(entry), 0 if isinstance(entry.what, int) else 1))
                entry = self.entries.get_nowait()
        except Empty:
            if not self._unwritten:  # nothing was queued either
                now = self._event_at + (time.monotonic() - self._taken_at)
                self._unwritten.append((_encoded(self._records.alive(rfc3339(time.time_ns()), now)), 0))
            return True
        return False

    def _line(self, entry: _Entry) -> bytes:
        what, at = entry.what, rfc3339(entry.wall_ns)
        self._event_at, self._taken_at = entry.now, time.monotonic()
        self._has_ended = self._has_ended or isinstance(what, ev.RunEnded)
        if isinstance(what, int):
            return _encoded(self._records.lost(what, self._trouble, at, entry.now))
        return _encoded(self._records.record(what, at, entry.now))

    def _write(self) -> None:
        try:
            while self._unwritten:
                written = _append(self.path, b"".join(line for line, _ in self._unwritten))
                while written:
                    line, count = self._unwritten.popleft()
                    written -= len(line)
                    self.settled += count
        except OSError as error:
            self._trouble = error.strerror or str(error)
            if not self.has_warned:
                _log.warning("cannot write the event log %s (%s); the job continues", self.path, self._trouble)
            self.has_warned = True


def _encoded(record: Json) -> bytes:
    # ASCII: whatever a worker wrote, including lone surrogates, becomes a line that any reader can parse.
    return json.dumps(record, separators=(",", ":")).encode("ascii") + b"\n"


def _append(path: Path, lines: bytes) -> int:
    """Writes as many whole lines as there is room for; returns the number of bytes.

    Raises:
        OSError: there is no room, or another error occurred.
    """
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        written = os.write(fd, lines)
        whole = written if written == len(lines) else lines.rfind(b"\n", 0, written) + 1
        if whole < written:
            os.ftruncate(fd, os.fstat(fd).st_size - (written - whole))
        if not whole:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole
    finally:
        os.close(fd)


def rfc3339(wall_ns: int) -> str:
    """Formats a time in UTC, to the microsecond; the length is always the same, so that texts sort by time."""
    seconds, ns = divmod(wall_ns, 1_000_000_000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{ns // 1000:06d}Z"


# Records.


class Records:
    """Makes the records of one run.

    Run, node, round, generation and ranks come from earlier events, so `record` needs all events, in order.
    """

    def __init__(self) -> None:
        self._run: Json = {"run_id": "", "node": "", "host": ""}
        self._place: Json = {"round": None, "generation": None}
        self._first_rank = 0

    def record(self, event: ev.RunEvent, time: str, now: float) -> Json:
        """Returns the record of a run event.

        Args:
            event: what happened.
            time: the time of day, in the format of RFC 3339.
            now: the monotonic clock, in seconds.
        """
        fields = _fields(event)
        match event:
            case ev.RunBegan():
                self._run = {"run_id": fields.pop("run_id"), "node": fields.pop("node_id"), "host": fields.pop("host")}
            case ev.RoundFormed():
                del fields["workers"]  # they follow from the ranks
                self._place = {"round": event.round, "generation": event.generation}
                self._first_rank = event.first_rank
            case ev.WorkersStarted(_, ids):
                del fields["ids"], fields["warm"]
                fields["workers"] = [
                    {"local_rank": local_rank, "rank": self._first_rank + local_rank, "id": _plain(ids[local_rank]),
                     "kind": event.kind_of(local_rank)}
                    for local_rank in sorted(ids)
                ]  # fmt: skip
            case ev.PhaseTook(local_rank=None):
                del fields["local_rank"]  # the phase is of all workers
            case ev.PhaseTook(local_rank=int(local_rank)):
                fields["rank"] = self._first_rank + local_rank
            case ev.Waited():
                fields = {"text": event.full}
            case ev.Restarting():
                del fields["only_here"]  # the logs of the other nodes show it as `in_place`
                fields |= {"reason": event.reason, "otherwise": wording.instead_of(event.decision)}
            case ev.JobEnded() | ev.RunEnded():
                fields |= {"reason": event.reason, "otherwise": wording.instead_of(event.decision)}
                fields["failure"] = fields.pop("cause")  # the name that `worker_ended` uses
                fields.pop("failures", None)
                fields.pop("traceback", None)
            case _:
                pass
        name = ev.name_of(type(event).__name__)
        return {**self._frame(name, time, now), "stimulus": event.stimulus, **with_old_names(name, fields)}

    def lost(self, count: int, reason: str, time: str, now: float) -> Json:
        """Returns the record that marks missing ones."""
        return {**self._frame("records_lost", time, now), "count": count, "reason": reason}

    def alive(self, time: str, now: float) -> Json:
        """Returns the record that an agent is alive while nothing happens."""
        return self._frame("alive", time, now)

    def _frame(self, event: str, time: str, now: float) -> Json:
        frame: Json = {"time": time, "monotonic_ns": round(now * 1e9), "schema": SCHEMA, "event": event}
        return {**frame, **self._run, **self._place}


def _fields(value: Record) -> Json:
    return {name: _plain(getattr(value, name)) for name in value.__match_args__}


def _plain(value: Any) -> Any:
    """Converts a value for JSON."""
    match value:
        case Decision():
            return to_json(value)
        case ProcessFailure():
            fields = value.for_others().shared
            fields["timestamp_s"] = fields.pop("timestamp")
            return fields
        case Enum():
            return _plain(value.value)
        case Record():
            return _fields(value)
        case float():
            return round(value, 6)
        case None | bool() | int() | str():
            return value
        case Mapping():
            return {str(key): _plain(each) for key, each in value.items()}
        case tuple() | list():
            return [_plain(each) for each in value]
        case _:
            return str(value)  # a back end's name for a worker
