"""Run events, and their observers.

`run_events` are the words, `run_event_source` makes them from the worker group's events, `observer` passes them on.
Observers: `log_lines`, `event_log`, `metrics` (text: `prometheus`), `status` (as a line: `status_text`), `systemd`,
`torch_events` (rules: `torch_events_core`); health server and status line have folders of their own.
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
