"""Run events, and their observers.

`run_events` defines the events.  `run_state` makes them from the worker group's events, and folds them into the state
of the run, including how its time was spent (`time_spent`).  `observer` passes both on, and writes the log lines.
Other observers are `event_log` and `torch_events` (rules: `torch_events_core`); the health server, the status line and
exporters have their own folders.  They show an `exposition` of `metrics` (text: `prometheus`) and `status`, or, as a
line, `status_text`.
"""

__all__ = [
    "event_log", "exposition", "metrics", "observer", "prometheus", "run_events", "run_state", "status",
    "status_text", "time_spent", "torch_events",
]  # fmt: skip
