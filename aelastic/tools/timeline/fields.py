"""The types of the fields in an event log: a name has the same type in every record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Nanoseconds are kept in 64 bits.
WHOLE_MAX = 1 << 63
SECONDS_MAX = WHOLE_MAX / 1e9
# As in `docs/reference/event-log.schema.json`.
_INTEGERS = frozenset(
    ("absent", "count", "exitcode", "first_rank", "generation", "group_rank", "group_world_size", "late",
     "local_rank", "local_world_size", "max_nodes", "max_restarts", "min_nodes", "monotonic_ns", "most", "nodes",
     "number", "parked", "pid", "place", "pss_bytes", "rank", "restart_count", "round", "save_at", "seats", "signum",
     "source_rank", "step", "timestamp_s", "total", "workers_kept", "workers_replaced", "world_size")
)  # fmt: skip
_NUMBERS = frozenset(("delay_s", "duration_s", "for_s", "remaining_s", "silent_s", "steps_per_s", "within_s"))
_TEXTS = frozenset(
    ("before", "by", "cause", "cordoned", "detail", "endpoint", "entrypoint", "error", "event", "found_by", "host",
     "kept", "kind", "log_file", "message", "name", "node", "note", "oom", "otherwise", "outcome", "path", "phase",
     "rdzv_backend", "reason", "role", "rule", "run_id", "saved", "stack", "state", "stimulus", "text", "time",
     "traceback",
     "trouble", "verb", "what", "why")
)  # fmt: skip
_FLAGS = frozenset(
    ("in_place", "is_early", "is_final", "is_last", "is_loss", "is_signalled", "is_stopped", "is_usage_error")
)


def check(record: Mapping[str, Any]) -> None:
    """Checks the type of each known field; `null` is always allowed.

    Raises:
        ValueError: a field has another type than agents write.
    """
    for name, value in record.items():
        if name in {"failure", "decision", "cause"} and isinstance(value, dict):
            check(value)
        elif name == "workers" and isinstance(value, list) and all(isinstance(each, dict) for each in value):
            for each in value:
                check(each)
        elif value is not None and not _is_right(name, value):
            raise ValueError(f"{name} is {value!r:.80}")


def _is_right(name: str, value: Any) -> bool:
    if name in _INTEGERS:
        return type(value) is int and abs(value) <= WHOLE_MAX
    if name in _NUMBERS:
        return type(value) in {int, float} and -SECONDS_MAX < value < SECONDS_MAX
    if name in _TEXTS:
        return type(value) is str
    if name in _FLAGS:
        return type(value) is bool
    return name not in {"decision", "failure", "workers"}
