"""The types of the fields in an event log: a name has the same type in every record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Nanoseconds are kept in 64 bits.
WHOLE_MAX = 1 << 63
SECONDS_MAX = WHOLE_MAX / 1e9
# As `docs/reference/event-log.schema.json` has them.
_INTEGERS = frozenset(
    ("count", "exitcode", "first_rank", "generation", "group_rank", "group_world_size", "local_rank",
     "local_world_size", "max_nodes", "max_restarts", "min_nodes", "monotonic_ns", "parked", "pid", "pss_bytes", "rank",
     "restart_count", "round", "save_at", "signum", "step", "timestamp_s", "total", "world_size")
)  # fmt: skip
_NUMBERS = frozenset(("duration_s", "remaining_s", "steps_per_s"))
_TEXTS = frozenset(
    ("before", "by", "cause", "endpoint", "entrypoint", "event", "found_by", "host", "kind", "log_file", "message",
     "name", "node", "note", "oom", "otherwise", "outcome", "path", "phase", "rdzv_backend", "reason", "role",
     "run_id", "stack", "state", "text", "time", "traceback", "trouble", "verb", "what", "why")
)  # fmt: skip
_FLAGS = frozenset(("is_early", "is_final", "is_last", "is_signalled", "is_stopped"))


def check(record: Mapping[str, Any]) -> None:
    """Checks the type of each known field; `null` is always allowed.

    Raises:
        ValueError: a field has another type than agents write.
    """
    for name, value in record.items():
        if name == "failure" and isinstance(value, dict):
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
    return name not in {"failure", "workers"}
