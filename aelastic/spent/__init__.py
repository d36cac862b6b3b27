"""`aelastic spent`: where the time of a job went, and what would get it back, by the event logs of its nodes.

`bill` makes it of the logs: values in, values out; `command` reads and says it.  What time is spent on is decided in
`observe.time_spent`, for a job that runs, too.
"""

__all__ = ["bill", "command"]
