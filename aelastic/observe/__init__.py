"""Run events, and their observers.

`run_events` defines the events; `aelastic.agent.run_event_source` makes most of them.  `run_state` folds them into the
state of the run, including how its time was spent (`time_spent`).  `stimuli` names what set off each event.
`observer` passes all of it on, and writes the log lines.
Other observers are `event_log` and `torch_events` (rules: `torch_events_core`), the `health` server, the status line
(`ui`), and what gives the state to other programs (`export`).  They show an `exposition` of `metrics` (text:
`prometheus`) and `status`, or, as a line, `status_text`.
"""

__all__ = [
    "event_log", "exposition", "metrics", "observer", "prometheus", "run_events", "run_state", "status",
    "status_text", "stimuli", "time_spent", "torch_events",
]  # fmt: skip
