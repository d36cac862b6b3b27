"""Run events, and their observers.

`run_events` are the words, `run_state` makes them from the worker group's events, and folds them into the state of the
run, with what its time went on (`time_spent`), `observer` passes both on, and has the log lines.  More observers:
`event_log`, `torch_events` (rules: `torch_events_core`); health server, status line and exporters have folders of their
own.  What they show: `exposition`, of `metrics` (text: `prometheus`) and `status`; `status_text`, as a line.
"""

__all__ = [
    "event_log", "exposition", "metrics", "observer", "prometheus", "run_events", "run_state", "status",
    "status_text", "time_spent", "torch_events",
]  # fmt: skip
