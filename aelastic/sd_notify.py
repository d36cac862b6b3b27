"""`SdNotify`, for programs that pass it to a `Supervisor`; defined in `aelastic.observe.export.systemd`."""

from aelastic.observe.export.systemd import SdNotify

__all__ = ["SdNotify"]
