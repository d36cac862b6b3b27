"""Run events, and what is made of them.

`run_event_source` makes `run_events` of what the worker group does, and an `observer` gets them: `log_lines`,
`event_log`, `metrics` (as `prometheus` text), `status` (as `status_text`), `systemd`, and `torch_events` around
`torch_events_core`.
"""

__all__ = [
    "event_log",
    "log_lines",
    "metrics",
    "observer",
    "prometheus",
    "run_event_source",
    "run_events",
    "status",
    "status_text",
    "systemd",
    "torch_events",
]
