"""`EventLog`, for programs that give it to a `Supervisor`: `aelastic.observe.event_log` has it."""

from aelastic.observe.event_log import EventLog

__all__ = ["EventLog"]
