"""`aelastic spent`: where the time of a job went, and what would save it, from the event logs of its nodes.

`report` computes it from the logs: values in, values out; `cli/spent.py` reads the logs and prints it.
`observe.time_spent` assigns time to activities, also for a running job.
"""

__all__ = ["report"]
