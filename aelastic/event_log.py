"""`EventLog`, for programs that pass it to a `Supervisor`; defined in `aelastic.observe.event_log`."""

from aelastic.observe.event_log import EventLog

__all__ = ["EventLog"]
