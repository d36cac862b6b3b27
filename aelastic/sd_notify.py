"""`SdNotify`, for programs that pass it to a `Supervisor`; defined in `aelastic.export.systemd`."""

from aelastic.export.systemd import SdNotify

__all__ = ["SdNotify"]
