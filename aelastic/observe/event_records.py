"""What the event log has in a line: a run event as a JSON object.

`docs/event-log.md` says what each means to a reader, `docs/event-log.schema.json` what each looks like.  Where the run
stands (run, node, round, generation, ranks) comes from earlier run events, so `Scribe` is to see all of them, in order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any, TypeAlias

from aelastic.core.record import Record
from aelastic.failures.failure import ProcessFailure
from aelastic.observe import run_events as ev

Json: TypeAlias = dict[str, Any]

# Goes up when a field changes its meaning or goes; not when one is added.
SCHEMA = 1


class Scribe:
    """Of one run."""

    def __init__(self) -> None:
        self._run: Json = {"run_id": "", "node": "", "host": ""}
        self._place: Json = {"round": None, "generation": None}
        self._first_rank = 0

    def record(self, event: ev.RunEvent, time: str, now: float) -> Json:
        """The record of a run event.

        Args:
            event: what happened.
            time: of day, as RFC 3339 has it.
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
                del fields["ids"]
                fields["workers"] = [self._worker(local_rank, ids[local_rank]) for local_rank in sorted(ids)]
            case ev.PhaseTook(local_rank=None):
                del fields["local_rank"]  # it concerns them all
            case ev.PhaseTook(local_rank=int(local_rank)):
                fields["rank"] = self._first_rank + local_rank
            case ev.JobEnded() | ev.RunEnded():
                fields["failure"] = fields.pop("cause")  # as it is called where a worker ends
                fields.pop("failures", None)
                fields.pop("traceback", None)
            case _:
                pass
        return {**self._frame(event_of(type(event).__name__), time, now), **fields}

    def lost(self, count: int, reason: str, time: str, now: float) -> Json:
        """The record that stands where others are missing."""
        return {**self._frame("records_lost", time, now), "count": count, "reason": reason}

    def alive(self, time: str, now: float) -> Json:
        """The record of an agent that has nothing to tell, and is there."""
        return self._frame("alive", time, now)

    def _frame(self, event: str, time: str, now: float) -> Json:
        said: Json = {"time": time, "monotonic_ns": round(now * 1e9), "schema": SCHEMA, "event": event}
        return {**said, **self._run, **self._place}

    def _worker(self, local_rank: int, worker_id: Any) -> Json:
        return {"local_rank": local_rank, "rank": self._first_rank + local_rank, "id": _plain(worker_id)}


@cache
def event_of(kind: str) -> str:
    """What a kind of run event is called in the log: `WorkerEnded` is `worker_ended`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind).lower()


def _fields(value: Record) -> Json:
    return {name: _plain(getattr(value, name)) for name in value.__match_args__}


def _plain(value: Any) -> Any:
    """As JSON has it."""
    match value:
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
            return str(value)  # what a back end calls its workers
