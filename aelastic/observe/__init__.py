"""Run events, and their observers.

`run_events` are the words, `run_event_source` makes them from the worker group's events, `observer` passes them on.
Observers: `log_lines`, `event_log`, `textfile`, `systemd`, `torch_events` (rules: `torch_events_core`); health server
and status line have folders of their own.  What they show: `exposition`, of `metrics` (text: `prometheus`) and
`status`; `status_text`, as a line.
"""

__all__ = [
    "event_log",
    "exposition",
    "log_lines",
    "metrics",
    "observer",
    "prometheus",
    "run_event_source",
    "run_events",
    "status",
    "status_text",
    "systemd",
    "textfile",
    "torch_events",
]
