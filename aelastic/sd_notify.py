"""`SdNotify`, for programs that give it to a `Supervisor`: `aelastic.export.systemd` has it."""

from aelastic.export.systemd import SdNotify

__all__ = ["SdNotify"]
